"""Membership inference with shadow classifiers, offline: LiRA and RMIA, for methods of one sum.

A shadow of an additive method costs no encoding: the integers of each attacked record are taken out
of the exact sums, or put into them, and noise and training follow as in the run. Each shadow holds
a random half of the records that are attacked, used and unused ones alike, so that shadows are as
large as the run and treat both kinds alike. They come in pairs of opposite halves: every record is
outside half of them. An attack that knows all other images is stronger than one with images of its
own.

* LiRA, offline (Carlini et al., "Membership Inference Attacks From First Principles", S&P 2022):
  how far the logit of the true class, log p/(1-p), lies above its mean over shadows without the
  record, in deviations pooled over records.
* RMIA, offline (Zarifzadeh, Liu, Shokri, "Low-Cost High-Power Membership Inference Attacks", ICML
  2024, eq. 2 and 10): the share of population images z with (p_x/P(x)) / (p_z/P(z)) >= γ = 1, where
  P = ((1+a) mean over shadows without it + 1-a)/2, a = 0.3.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.errors import ConfigError, DataError
from fedgist.privacy.statistics import MomentSums
from fedgist.queries import MomentsQuery, Query, SumQuery, prefixed
from fedgist.types import Tensors

__all__ = ["Records", "check_shadows", "confidence", "lira", "rmia", "shadow_sums", "sums_of"]

LEAST = 2  # shadows without a record that its mean needs
MIX = 0.3  # a of RMIA's stand-in for classifiers that saw the record


@dataclass(frozen=True)
class Records:
    """What is attacked, as it enters the sums.

    Attributes:
        released: each query with float64 integer rows ``[n, d]`` (`statistics.clip_to_grid`).
        labels: int64 ``[n]``.
        used: bool ``[n]``: whether the record is in the sums.
    """

    released: Sequence[tuple[Query, Tensor]]
    labels: Tensor
    used: Tensor


def check_shadows(count: int) -> None:
    """Raise `ConfigError` for too few shadows: each record is outside half of them."""
    if 0 < count < 2 * LEAST:
        raise ConfigError(
            f"--shadows must be 0, for none, or at least {2 * LEAST}: {LEAST} must lack each "
            f"record. Got {count}"
        )


def sums_of(records: Records, rows: Tensor, classes: int) -> Tensors:
    """Return exact sums over some of the records, int64, by block, as a client's answer."""
    out: Tensors = {}
    labels = records.labels[rows]
    for query, u in records.released:
        if isinstance(query, MomentsQuery):
            sums = MomentSums(query)
            sums.add(u[rows], labels)
            out |= prefixed(query, sums.tensors())
        else:
            out |= prefixed(query, {"rows": _rows(query, u[rows], labels, classes)})
    return out


def _rows(query: SumQuery, u: Tensor, labels: Tensor, classes: int) -> Tensor:
    total = torch.zeros(classes if query.per_class else 1, u.shape[1], dtype=torch.float64)
    total.index_add_(0, labels if query.per_class else torch.zeros_like(labels), u)
    return total.to(torch.int64).reshape(query.shape)


def shadow_sums(
    exact: Tensors, records: Records, classes: int, shadows: int, rng: torch.Generator
) -> Iterator[tuple[Tensors, Tensor]]:
    """Yield the exact sums of each shadow and which records are in it, bool ``[n]``.

    Args:
        exact: sums of the run; they hold the used records and no unused one.
        records: what is attacked.
        classes: of the task.
        shadows: how many.
        rng: of the halves.
    """
    n = len(records.used)
    inside = torch.zeros(n, dtype=torch.bool)
    for i in range(shadows):
        if i % 2:
            inside = ~inside
        else:
            inside = torch.zeros(n, dtype=torch.bool)
            inside[torch.randperm(n, generator=rng)[: n // 2]] = True
        out = sums_of(records, (records.used & ~inside).nonzero()[:, 0], classes)
        into = sums_of(records, (~records.used & inside).nonzero()[:, 0], classes)
        yield {k: v - out[k] + into[k] for k, v in exact.items()}, inside


def confidence(scores: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Return log p/(1-p) and p of the true class, float64 ``[n]``, from scores ``[n, C]``."""
    s = scores.to(torch.float64)
    mine = s.gather(1, labels[:, None])[:, 0]
    others = s.scatter(1, labels[:, None], -torch.inf).logsumexp(1)
    logit = (mine - others).clamp(-700, 700)  # classes that are absent have score -inf
    return logit, torch.sigmoid(logit)


def lira(target: Tensor, shadows: Tensor, inside: Tensor) -> Tensor:
    """Return scores ``[n]``, higher for "used".

    Args:
        target: float64 ``[n]``: logits of the attacked classifier.
        shadows: float64 ``[S, n]``: of the shadows.
        inside: bool ``[S, n]``: which shadows hold which record.

    Raises:
        DataError: a record is outside fewer than two shadows.
    """
    mean = _outside(shadows, inside)
    spread = torch.where(inside, 0.0, (shadows - mean).square()).sum() / (~inside).sum()
    score: Tensor = (target - mean) / spread.sqrt().clamp(min=1e-12)
    return score


def rmia(
    target: Tensor, shadows: Tensor, inside: Tensor, population: Tensor, others: Tensor
) -> Tensor:
    """Return scores ``[n]`` in [0, 1], higher for "used".

    Args:
        target: float64 ``[n]``: the attacked classifier's probabilities of the true class.
        shadows: float64 ``[S, n]``: of the shadows.
        inside: bool ``[S, n]``.
        population: float64 ``[z]``: the attacked classifier's on images that nobody used.
        others: float64 ``[S, z]``: the shadows' on those.
    """
    ratio = _ratio(target, _outside(shadows, inside))
    common = _ratio(population, others.mean(0)).sort().values
    return torch.searchsorted(common, ratio, right=True).double() / len(common)


def _ratio(p: Tensor, outside: Tensor) -> Tensor:
    return p / (((1 + MIX) * outside + 1 - MIX) / 2)


def _outside(shadows: Tensor, inside: Tensor) -> Tensor:
    """Return the mean over the shadows that a record is not in, ``[n]``."""
    n = (~inside).sum(0)
    if int(n.min()) < LEAST:
        raise DataError(
            f"every record must be outside {LEAST} shadows. Got {int(n.min())}: make more shadows"
        )
    mean: Tensor = torch.where(inside, 0.0, shadows).sum(0) / n
    return mean
