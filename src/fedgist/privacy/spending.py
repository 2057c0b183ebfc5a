"""What releases of the same images add up to. Plain arithmetic; the ledger keeps the facts.

Every release is ρ-zCDP, and ρ adds up, whatever the later releases were made to depend on. What ρ
is depends on the *reading*: whose presence is hidden (the unit) and which data sets are neighbours
(the adjacency). A release keeps its ρ under every adjacency, and each reading is totalled apart:

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

from fedgist.privacy.accounting import Law, epsilon_of, plan_multiplier
from fedgist.privacy.claim import Claim
from fedgist.types import Adjacency, Round, Task, Unit

__all__ = ["Cell", "Reading", "Release", "epsilon_total", "release_of", "rho_of", "totals"]

Reading = tuple[Unit, Adjacency]
RANK: Mapping[Unit, int] = {"image": 0, "person": 1, "client": 2}


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
        rho: zCDP of this round under each adjacency.
        epsilon: of this round alone, under the claim's adjacency.
        delta: the claim's.
        form: what images were brought to, such as ``64x64x3 crop``.
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

    @property
    def reading(self) -> Reading:
        """What it promises."""
        return self.unit, self.adjacency

    def under(self, reading: Reading) -> float:
        """Return what it spends, as ρ, of another release's promise."""
        unit, adjacency = reading
        if RANK[self.unit] < RANK[unit]:
            return math.inf
        coarser = RANK[self.unit] > RANK[unit]
        return self.rho["replace-one" if coarser and adjacency == "add-remove" else adjacency]


@dataclass(frozen=True)
class Cell:
    """Images of one form that exactly the same releases have covered."""

    form: str
    releases: tuple[Release, ...]


def rho_of(rounds: Sequence[Round], sigma: float, adjacency: Adjacency, records: int = 1) -> float:
    """Return ρ (zCDP) of some rounds of a plan: ½ (joint sensitivity / σ)²; inf without noise.

    Continuous and discrete Gaussian noise obey it alike. The plan's is the sum over its rounds.
    """
    joint = plan_multiplier(rounds, adjacency, records)
    if joint == 0:
        return 0.0
    return 0.5 * (joint / sigma) ** 2 if sigma > 0 else math.inf


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
    rho: dict[Adjacency, float] = {
        a: rho_of(part, sigma, a, claim.records) for a in get_args(Adjacency)
    }
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
        sensitivity=plan_multiplier(part, claim.adjacency, claim.records),
        rho=rho,
        epsilon=epsilon_total(rho[claim.adjacency], claim.delta, claim.law),
        delta=claim.delta,
        form=f"{task.size}x{task.size}x{task.channels} {task.fit}",
    )


def epsilon_total(rho: float, delta: float, law: Law = "discrete-gaussian") -> float:
    """Return ε of a total; law ``gaussian`` only where all parts of it are continuous Gaussian."""
    return epsilon_of(math.sqrt(0.5 / rho), delta, law) if rho > 0 else 0.0


def totals(cells: Sequence[Cell], every: Sequence[Release]) -> dict[Reading, float]:
    """Return, for every reading that is promised, the total ρ of the record that spent the most.

    Args:
        cells: those that the record may lie in. In every form it lies in one cell at most.
        every: all releases of the holder.
    """
    out: dict[Reading, float] = {}
    for reading in sorted({r.reading for r in every}):
        if reading[0] == "image":
            worst = _worst_image(cells, reading)
            if worst is not None:
                out[reading] = worst
        else:
            out[reading] = math.fsum(r.under(reading) for r in every)
    return out


def _worst_image(cells: Iterable[Cell], reading: Reading) -> float | None:
    """Return the most that one image has spent of a promise; None if no image was promised it."""
    most: dict[str, float] = {}
    promised: dict[str, float] = {}
    for cell in cells:
        spent = math.fsum(r.under(reading) for r in cell.releases)
        most[cell.form] = max(spent, most.get(cell.form, 0.0))
        if any(r.reading == reading for r in cell.releases):
            promised[cell.form] = max(spent, promised.get(cell.form, 0.0))
    # The promise may stem from any one form; in all others the same person is in the worst cell.
    return max(
        (
            math.fsum([spent, *(m for other, m in most.items() if other != form)])
            for form, spent in promised.items()
        ),
        default=None,
    )
