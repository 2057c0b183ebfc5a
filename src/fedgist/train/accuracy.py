"""How often predictions are right, and how often those of two classifiers are the same."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from scipy.stats import binomtest
from torch import Tensor

from fedgist.types import Images

__all__ = ["accuracies", "agreement"]


def accuracies(scores: Tensor, images: Images) -> dict[str, Any]:
    """Return what share of ``images`` is predicted right.

    Args:
        scores: float ``[n, C]``, the largest is the prediction.
        images: n > 0 of them.

    Returns:
        ``accuracy``, its 95 % ``interval`` (Wilson, Journal of the American Statistical
        Association 22, 1927), ``balanced_accuracy`` (mean over the classes that have images) and
        ``per_class`` (None for the others).
    """
    right = scores.argmax(1) == images.labels
    held = images.counts()
    hits = torch.bincount(images.labels[right], minlength=len(held))
    per_class = [h / n if n else None for h, n in zip(hits.tolist(), held.tolist(), strict=True)]
    seen = [a for a in per_class if a is not None]
    span = binomtest(int(right.sum()), len(right)).proportion_ci(method="wilson")
    return {
        "accuracy": float(right.double().mean()),
        "interval": [float(span.low), float(span.high)],
        "balanced_accuracy": sum(seen) / len(seen),
        "per_class": per_class,
    }


def agreement(guesses: Sequence[Tensor], own: Tensor, truth: Tensor) -> dict[str, float | None]:
    """Compare predictions with those of the outcome's own classifier, image by image.

    Args:
        guesses: one or more int64 ``[n]``; figures are averaged over them.
        own: int64 ``[n]``, what the own classifier says.
        truth: int64 ``[n]``.

    Returns:
        ``same``: share of images with equal predictions; ``kappa``: Cohen's, that share corrected
        for chance (Educational and Psychological Measurement 20(1), 1960), None where chance alone
        would be 1; ``both_wrong``: share that both miss; ``only_own_right`` and ``only_it_right``:
        shares that one of them misses.
    """
    rows = []
    for guess in guesses:
        same = float((guess == own).double().mean())
        classes = int(torch.cat([guess, own]).max()) + 1
        one, other = (torch.bincount(g, minlength=classes) / len(g) for g in (guess, own))
        chance = float(one.double() @ other.double())
        hit, ours = guess == truth, own == truth
        kappa = (same - chance) / (1 - chance) if chance < 1 - 1e-9 else math.nan
        shares = [(~hit & ~ours), (~hit & ours), (hit & ~ours)]
        rows.append([same, kappa, *(float(s.double().mean()) for s in shares)])
    means = torch.tensor(rows, dtype=torch.float64).mean(0).tolist()
    names = ("same", "kappa", "both_wrong", "only_own_right", "only_it_right")
    return {k: None if math.isnan(v) else v for k, v in zip(names, means, strict=True)}
