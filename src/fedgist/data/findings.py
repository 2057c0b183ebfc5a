"""Multi-label sets as sets of one label for each image.

Labels ``[n, k]`` of 0 and 1 say which of k findings an image has. Two reductions:

- ``any``: two classes, ``no finding`` and ``any finding``.
- ``single``: ``no finding`` and one class for each finding; images with two or more findings are
  left out, so that this is an easier task than the whole set.
"""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np

from fedgist.data.images import Array
from fedgist.errors import DataError, did_you_mean

__all__ = ["REDUCTIONS", "Reduction", "reduced", "reduced_classes", "reduction_of"]

Reduction = Literal["any", "single"]
REDUCTIONS: tuple[Reduction, ...] = get_args(Reduction)
NONE = "no finding"


def reduction_of(word: str) -> Reduction:
    """Return the reduction of that name.

    Raises:
        DataError: there is none.
    """
    for known in REDUCTIONS:
        if word == known:
            return known
    raise DataError(
        f"a reduction of a multi-label set must be one of {', '.join(REDUCTIONS)}. Got '{word}'."
        + did_you_mean(word, REDUCTIONS)
    )


def reduced_classes(how: Reduction, findings: tuple[str, ...]) -> tuple[str, ...]:
    """Return the class names of a reduction of a set with these findings."""
    return (NONE, "any finding") if how == "any" else (NONE, *findings)


def reduced(how: Reduction, table: Array, where: str, findings: int) -> tuple[Array, Array]:
    """Return one label for each image that is kept.

    Args:
        how: the reduction.
        table: integers ``[n, k]`` of 0 and 1.
        where: for messages.
        findings: k, at least 2.

    Returns:
        Labels, int64 ``[m]``, and which rows they belong to, bool ``[n]`` with m ones.

    Raises:
        DataError: another shape, or other numbers than 0 and 1.
    """
    shape = list(table.shape)
    if len(shape) != 2 or shape[1] < 2 or table.dtype.kind not in "biu":
        raise DataError(
            f"{where} must be integers [n, k], k > 1, for '#{how}'. Got {table.dtype} {shape}: "
            f"without '#{how}' a set of one label per image is opened"
        )
    if shape[1] != findings:
        raise DataError(f"{where} must be of the {findings} named findings. Got {shape}")
    if table.size and not (table.min() >= 0 and table.max() <= 1):
        raise DataError(f"{where} must be 0 or 1. Got {int(table.min())}..{int(table.max())}")
    found = table.sum(1, dtype=np.int64)
    if how == "any":
        return (found > 0).astype(np.int64), np.ones(len(table), bool)
    keep = found <= 1
    return np.where(found == 0, 0, 1 + table.argmax(1)).astype(np.int64)[keep], keep
