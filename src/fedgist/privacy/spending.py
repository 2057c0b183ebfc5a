"""What releases of the same images add up to. Plain arithmetic; the ledger keeps the facts.

Every release is ρ-zCDP, and ρ adds up, whatever the later releases were made to depend on. Releases
of Poisson samples give away less than their ρ says. How much less has no single number, so they
keep a Rényi curve beside it, which adds up order by order (`Spent`).

What ρ is depends on the *reading*: whose presence is hidden (the unit) and which data sets are
neighbours (the adjacency). A release keeps its ρ under every adjacency, and each reading is
totalled apart:

* the reading that a release was stated in is a promise about the records that it covered. All
  releases of those records, however they were stated themselves, must keep it together;
* a release stated for a coarser unit (image < person < client) counts for a finer one with what it
  gives away when the unit's images change: one image more or less may move others in or out of the
  number that is used, so its add-remove part is its ρ under replace-one;
* a release stated for a finer unit bounds nothing for a coarser one: infinite;
* persons cannot be recognised in another data set, and a client is the holder itself: for these
  units all releases count;
* images that were brought to another form (size, channels, fit) cannot be compared. Every two sets
  of different form are taken to show the same people.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import accumulate
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from fedgist.errors import ConfigError
from fedgist.privacy.accounting import (
    ORDERS,
    Law,
    epsilon_of,
    group_size,
    is_sampled,
    plan_multiplier,
    sampled_rdp,
)
from fedgist.privacy.claim import Claim
from fedgist.queries import SumQuery
from fedgist.types import Adjacency, Round, Task, Unit

__all__ = [
    "Cell",
    "Reading",
    "Release",
    "Spent",
    "curve_of",
    "epsilon_total",
    "release_of",
    "resampled",
    "rho_of",
    "totals",
]

Curve = tuple[float, ...]
Floats = NDArray[np.float64]
Reading = tuple[Unit, Adjacency]
RANK: Mapping[Unit, int] = {"image": 0, "person": 1, "client": 2}


@dataclass(frozen=True)
class Spent:
    """What releases give away: two bounds on the Rényi divergence of neighbours. Both hold.

    Attributes:
        rho: at every order α > 1 it is at most ρα (zCDP).
        curve: at ``ORDERS[i]`` it is at most ``curve[i]``; empty for no more than ρα.

    Raises:
        ConfigError: a bound is negative or not a number, or there is not one for each order.
    """

    rho: float = 0.0
    curve: Curve = ()

    def __post_init__(self) -> None:
        if not all(v >= 0 for v in (self.rho, *self.curve)):
            raise ConfigError(f"what was spent must not be negative. Got {self}")
        if self.curve and len(self.curve) != len(ORDERS):
            raise ConfigError(
                f"a Rényi curve must have {len(ORDERS)} orders. Got {len(self.curve)}"
            )

    @classmethod
    def total(cls, parts: Iterable[Spent]) -> Spent:
        """Return the sum, each of its numbers rounded once."""
        parts = list(parts)
        rho = math.fsum(p.rho for p in parts)
        if not (curves := [p.curve for p in parts if p.curve]):
            return cls(rho)
        plain = math.fsum(p.rho for p in parts if not p.curve)
        return cls(
            rho, tuple(map(math.fsum, zip((plain * a for a in ORDERS), *curves, strict=True)))
        )

    def __add__(self, other: Spent) -> Spent:
        return Spent.total((self, other))

    @property
    def divergence(self) -> Curve:
        """The bound at `ORDERS`."""
        return self.curve or tuple(self.rho * a for a in ORDERS)

    def upper(self, other: Spent) -> Spent:
        """Return the least that bounds both."""
        either = self.curve or other.curve
        curve = tuple(map(max, self.divergence, other.divergence)) if either else ()
        return Spent(max(self.rho, other.rho), curve)

    def epsilon(self, delta: float, law: Law = "discrete-gaussian") -> float:
        """Return ε: of ρ, see `epsilon_total`, or of the best order of the curve, if less.

        Conversion: Canonne, Kamath, Steinke 2020, Proposition 12.
        """
        whole = epsilon_total(self.rho, delta, law)
        if not self.curve:
            return whole
        read = min(c + p for c, p in zip(self.curve, _prices(delta), strict=True))
        return min(whole, max(0.0, read))


@dataclass(frozen=True)
class Release:
    """One round of one task, as a holder's data are about to answer it.

    Attributes:
        task: hash of the task file.
        name: of the task, for people.
        method: of the task.
        round: number of the round.
        unit, records, adjacency: what the task's claim is about.
        mechanism, law: how it is noised.
        sigma: noise multiplier on the add/remove sensitivity of one record; 0 for no noise.
        sensitivity: of this round, in the same unit and the claim's adjacency.
        rho: zCDP of this round under each adjacency, without what sampling gains.
        epsilon: of this round alone, under the claim's adjacency, as a ledger reads it.
        delta: the claim's.
        form: what images were brought to, such as ``64x64x3 crop``.
        curve: what sampling gains: Rényi divergences at `ORDERS` under each adjacency, never above
            ρα; an adjacency is missing where they are not below it.
    """

    task: str
    name: str
    method: str
    round: int
    unit: Unit
    records: int
    adjacency: Adjacency
    mechanism: str
    law: Law
    sigma: float
    sensitivity: float
    rho: Mapping[Adjacency, float]
    epsilon: float
    delta: float
    form: str
    curve: Mapping[Adjacency, Curve] = field(default_factory=dict)

    @property
    def reading(self) -> Reading:
        """What it promises."""
        return self.unit, self.adjacency

    def under(self, reading: Reading) -> Spent:
        """Return what it spends of another release's promise."""
        unit, adjacency = reading
        if RANK[self.unit] < RANK[unit]:
            return Spent(math.inf)
        if RANK[self.unit] > RANK[unit] and adjacency == "add-remove":
            adjacency = "replace-one"
        return Spent(self.rho[adjacency], self.curve.get(adjacency, ()))


@dataclass(frozen=True)
class Cell:
    """Images of one form that exactly the same releases have covered."""

    form: str
    releases: tuple[Release, ...]


def rho_of(
    rounds: Sequence[Round],
    sigma: float,
    adjacency: Adjacency,
    records: int = 1,
    unit: Unit = "image",
) -> float:
    """Return ρ (zCDP) of some rounds of a plan: ½ (joint sensitivity / σ)²; inf without noise.

    Continuous and discrete Gaussian noise obey it alike. The plan's is the sum over its rounds.
    What sampling gains is left out, see `curve_of`.
    """
    joint = plan_multiplier(rounds, adjacency, records, unit=unit)
    if joint == 0:
        return 0.0
    return 0.5 * (joint / sigma) ** 2 if sigma > 0 else math.inf


def curve_of(
    rounds: Sequence[Round],
    sigma: float,
    adjacency: Adjacency,
    records: int = 1,
    unit: Unit = "image",
) -> Curve:
    """Return the Rényi divergence of some rounds of a sampled plan at `ORDERS`.

    Neighbours differ in up to ``records`` records added or removed, a replacement counting two. At
    every order it is the less of what one record gives, made to hold for a group, and of ρα.

    Returns:
        Empty where sampling gains nothing.
    """
    rho = rho_of(rounds, sigma, adjacency, records, unit)
    queries = [q for r in rounds for q in r.queries if isinstance(q, SumQuery)]
    if not is_sampled(rounds) or not math.isfinite(rho) or min(q.rate for q in queries) == 1:
        return ()
    many = _grouped(_one_record(tuple(rounds), sigma), group_size(adjacency, records))
    curve = tuple(min(v, rho * a) for v, a in zip(many, ORDERS, strict=True))
    return curve if any(v < rho * a for v, a in zip(curve, ORDERS, strict=True)) else ()


@lru_cache(maxsize=256)
def _one_record(rounds: tuple[Round, ...], sigma: float) -> Curve:
    found = (max(v, 0.0) for v in reversed(sampled_rdp(rounds, sigma)))  # logs may sum to -1e-16
    # It rises in α, which mends the fractional orders that dp_accounting leaves out (inf).
    return tuple(accumulate(found, min))[::-1]


@lru_cache(maxsize=256)
def _grouped(one: Curve, group: int) -> Curve:
    """Return the Rényi divergence of neighbours that are ``group`` steps apart, from one step's.

    Halfway lies a third data set. Mironov 2017, Proposition 11, is the triangle inequality; with
    p = (αg - l) / (αm) it is an equality for the Gaussian mechanism, m and l steps on either side.
    """
    if group == 1:
        return one
    less = group // 2
    more = group - less
    a = np.asarray(ORDERS) * group
    far = _between(ORDERS, _grouped(one, more), (a - less) / more)
    near = _between(ORDERS, _grouped(one, less), a / less)
    return tuple((a / (a - less) * far + near).tolist())


def resampled(orders: Sequence[float], curve: Sequence[float]) -> Curve:
    """Return a curve that was kept at other, rising ``orders`` at `ORDERS`: still a bound."""
    if tuple(orders) == ORDERS:
        return tuple(curve)
    return tuple(_between(orders, curve, np.asarray(ORDERS)).tolist())


def _between(orders: Sequence[float], curve: Sequence[float], at: Floats) -> Floats:
    """Bound a curve at other orders: (α-1)D is a cumulant function, convex, and 0 at α = 1."""
    x, y = np.asarray([1.0, *orders]), np.asarray([0.0, *curve])
    x, y = x[np.isfinite(y)], y[np.isfinite(y)]
    chord: Floats = np.interp(at, x, (x - 1) * y, right=np.inf) / (at - 1)
    return chord


def release_of(
    digest: str, task: Task, method: str, claim: Claim, rounds: Sequence[Round], r: int
) -> Release:
    """Describe round ``r`` of a task.

    Noise that comes from a seed protects nobody who knows it: its ρ is infinite.

    Args:
        digest: hash of the task file.
        task: its public facts.
        method: its method's name.
        claim: of the whole plan.
        rounds: the whole plan.
        r: which round.
    """
    part, sigma = rounds[r : r + 1], 0.0 if claim.seeded else claim.sigma
    all_of: tuple[Adjacency, ...] = get_args(Adjacency)
    rho = {a: rho_of(part, sigma, a, claim.records, claim.unit) for a in all_of}
    curve = {a: curve_of(part, sigma, a, claim.records, claim.unit) for a in all_of}
    alone = Spent(rho[claim.adjacency], curve[claim.adjacency])
    return Release(
        task=digest,
        name=task.name,
        method=method,
        round=r,
        unit=claim.unit,
        records=claim.records,
        adjacency=claim.adjacency,
        mechanism=claim.mechanism,
        law=claim.law,
        sigma=sigma,
        sensitivity=plan_multiplier(part, claim.adjacency, claim.records, unit=claim.unit),
        rho=rho,
        epsilon=alone.epsilon(claim.delta, claim.law),
        delta=claim.delta,
        form=f"{task.size}x{task.size}x{task.channels} {task.fit}",
        curve={a: c for a, c in curve.items() if c},
    )


def epsilon_total(rho: float, delta: float, law: Law = "discrete-gaussian") -> float:
    """Return ε of a total; law ``gaussian`` only where all parts of it are continuous Gaussian."""
    return epsilon_of(math.sqrt(0.5 / rho), delta, law) if rho > 0 else 0.0


@lru_cache(maxsize=16)
def _prices(delta: float) -> Curve:
    """What ε has on top of the divergence at each of `ORDERS`."""
    return tuple(
        (-math.log(delta) + (a - 1) * math.log1p(-1 / a) - math.log(a)) / (a - 1) for a in ORDERS
    )


def totals(
    cells: Sequence[Cell], every: Sequence[Release], read: Callable[[Spent], float]
) -> dict[Reading, Spent]:
    """Return, for every reading that is promised, the total of the record that spent the most.

    Args:
        cells: those that the record may lie in. In every form it lies in one cell at most.
        every: all releases of the holder.
        read: the ε of a total.
    """
    out: dict[Reading, Spent] = {}
    for reading in sorted({r.reading for r in every}):
        if reading[0] == "image":
            worst = _worst_image(cells, reading, read)
            if worst is not None:
                out[reading] = worst
        else:
            out[reading] = Spent.total(r.under(reading) for r in every)
    return out


def _worst_image(
    cells: Iterable[Cell], reading: Reading, read: Callable[[Spent], float]
) -> Spent | None:
    """Return the most that one image has spent of a promise; None if no image was promised it."""
    most: dict[str, Spent] = {}
    promised: dict[tuple[str, Spent], None] = {}
    for cell in cells:
        spent = Spent.total(r.under(reading) for r in cell.releases)
        most[cell.form] = spent.upper(most.get(cell.form, Spent()))
        if any(r.reading == reading for r in cell.releases):
            promised[cell.form, spent] = None
    # The promise may stem from any one form; in all others the same person is in the worst cell.
    found = [
        Spent.total([spent, *(m for other, m in most.items() if other != form)])
        for form, spent in promised
    ]
    if any(s.curve for s in found):
        return max(found, key=lambda s: (read(s), s.rho))
    return max(found, key=lambda s: s.rho, default=None)
