"""What a method may ask of a client's records: clipped sums and moments, and what to call them.

Everything here is data, as in `types`: a query says what would be summed, not how.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar

from fedgist.errors import ConfigError

__all__ = ["MomentsQuery", "Query", "SumQuery", "blocks_of", "prefixed"]

V = TypeVar("V")


@dataclass(frozen=True)
class SumQuery:
    """A sum over records of rows clipped to an L2 norm, then noised.

    Attributes:
        clip: L2 bound of one record's row, all its tensors joined.
        levels: integer radius: a row becomes integers of norm at most ``levels``.
        scale: noise multiplier of this query relative to the one calibrated for the whole plan.
        times: how often the query is asked.
        per_class: one block per class; a record touches its own only: the sensitivity of one.
        name: tells the queries of one round apart; put before the names of their blocks.
        shape: of what one record adds, its classes included, when the plan knows it (the bytes of
            a gist are then known in advance); empty otherwise.
        rates: Poisson sampling: each record is in with this public probability, one for all classes
            or one each, drawn anew whenever the query is asked. The noise is a rounded Gaussian,
            whose amplification by sampling is proved. Empty: every record, discrete Gaussian
            noise. (1.0,): every record, rounded noise, to stand beside sampled queries.
        whole: one row for the whole client, made from all of its images.
    """

    clip: float
    levels: int = 1024
    scale: float = 1.0
    times: int = 1
    per_class: bool = False
    name: str = ""
    shape: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    whole: bool = False

    def __post_init__(self) -> None:
        _positive(clip=self.clip, scale=self.scale, levels=self.levels, times=self.times)
        if not all(0 < r <= 1 for r in self.rates):
            raise ConfigError(f"sampling rates must lie in (0, 1]. Got {list(self.rates)}")
        if self.whole and (self.rates or self.per_class):
            raise ConfigError("a whole client's row must be neither sampled nor per class")

    @property
    def rate(self) -> float:
        """The highest sampling rate: of the class that is protected least."""
        return max(self.rates, default=1.0)

    @property
    def row(self) -> int:
        """How many numbers one record adds; 0 when the plan does not know it."""
        return math.prod(self.shape[1:] if self.per_class else self.shape) if self.shape else 0

    def shapes(self, *, noised: bool) -> dict[str, tuple[int, ...]]:
        """Return the shape of the one block ``rows``; nothing when the plan does not know it."""
        return {"rows": self.shape} if self.shape else {}


@dataclass(frozen=True)
class MomentsQuery:
    """Per-class counts, sums and second moments of clipped codes: one joint Gaussian release.

    A record z of norm at most ``clip`` becomes an integer vector u of norm at most ``levels``. The
    release is (Σu, Σuuᵀ per class, Σuuᵀ over all classes, n); a block with share 0 is not sent.
    The shares divide the squared Gaussian-DP budget and sum to one: block k gets noise with
    standard deviation σ · (its largest norm) / √share (`reference`: joint sensitivity 1 under
    add/remove, attained at the clip radius).

    Attributes:
        clip: public radius R in code units.
        dim: code dimension d.
        classes: number of classes C; all are always sent, empty ones too.
        mean, second, pooled, count: budget shares of Σz, class Σzzᵀ, pooled Σzzᵀ and n.
        levels: integer radius.
        count_weight: integer that each record adds to the count, so that thin shares of
            distributed noise stay above three grid units.
        exact_counts: send n without noise. Sound only when labels are public
            (``replace-same-class``); under any other adjacency the claim is ε = inf.
        basic: calibrate mean and second moment apart, each at (ε/2, δ/2), as FedKT-CSD was
            published. For comparison only: the joint release needs less noise.
        times: how often the query is asked.
        scale: noise multiplier of this query relative to the one calibrated for the whole plan.
        name: tells the queries of one round apart; put before the names of their blocks.
    """

    clip: float
    dim: int
    classes: int
    mean: float = 0.5
    second: float = 0.3
    pooled: float = 0.18
    count: float = 0.02
    levels: int = 128
    count_weight: int = 1
    exact_counts: bool = False
    basic: bool = False
    times: int = 1
    scale: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        _positive(clip=self.clip, dim=self.dim, classes=self.classes, levels=self.levels)
        _positive(count_weight=self.count_weight, times=self.times, scale=self.scale)
        shares = self.shares
        if not (min(shares.values()) >= 0 and abs(sum(shares.values()) - 1) <= 1e-9):
            raise ConfigError(f"budget shares must be >= 0 and sum to 1. Got {shares}")
        if self.mean == 0:
            raise ConfigError("the mean's budget share must be positive. Got 0")
        if self.exact_counts != (self.count == 0):
            raise ConfigError(
                "the count's budget share must be 0 exactly when counts are exact. "
                f"Got count = {self.count}, exact_counts = {self.exact_counts}"
            )

    @property
    def shares(self) -> dict[str, float]:
        """Budget share of each block."""
        return {
            "mean": self.mean,
            "second": self.second,
            "pooled": self.pooled,
            "count": self.count,
        }

    @property
    def triangle(self) -> int:
        """Numbers in the upper triangle of one second moment, diagonal included."""
        return self.dim * (self.dim + 1) // 2

    def shapes(self, *, noised: bool) -> dict[str, tuple[int, ...]]:
        """Return the shape of every block that is sent, the same for every client.

        The exact pooled block is the sum of the exact class blocks, so it travels only where there
        are none, or where it already carries noise of its own.
        """
        out: dict[str, tuple[int, ...]] = {
            "count": (self.classes,),
            "mean": (self.classes, self.dim),
        }
        if self.second:
            out["second"] = (self.classes, self.triangle)
        if self.pooled and (noised or not self.second):
            out["pooled"] = (self.triangle,)
        return out


Query = SumQuery | MomentsQuery


def prefixed(query: Query, blocks: Mapping[str, V]) -> dict[str, V]:
    """Return a query's blocks under the names they travel by."""
    return {f"{query.name}.{k}" if query.name else k: v for k, v in blocks.items()}


def blocks_of(query: Query, blocks: Mapping[str, V]) -> dict[str, V]:
    """Undo `prefixed`: return this query's blocks out of a gist that may hold several."""
    if not query.name:
        return dict(blocks)
    head = f"{query.name}."
    return {k.removeprefix(head): v for k, v in blocks.items() if k.startswith(head)}


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be positive and finite. Got {value}")
