"""What is promised: the terms that sites agree on, and the claim that follows from a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, Literal, get_args

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy.accounting import (
    Law,
    check_budget,
    epsilon_of,
    group_size,
    is_sampled,
    odds,
    plan_multiplier,
    sampled_epsilon,
    sampled_sigma,
    sigma_for,
    sigma_gaussian,
)
from fedgist.privacy.client import Contribution
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Adjacency, Round, Trust, Unit

__all__ = ["Claim", "Privacy", "calibrate", "claim_of", "summed_sigma"]

LAW: Law = "discrete-gaussian"
Source = Literal["system", "seeded"]
_CHOICES = (("adjacency", Adjacency), ("unit", Unit), ("trust", Trust), ("noise", Source))


@dataclass(frozen=True)
class Privacy:
    """The privacy terms of a task.

    Attributes:
        epsilon: ε > 0; ``inf`` releases without noise.
        delta: δ in (0, 1).
        adjacency: ``add-remove`` (one unit more or less), ``replace-one`` (its images and labels
            may change), ``replace-same-class`` (labels and counts are public).
        unit: whose presence is hidden: one ``image``, one ``person`` or one ``client``.
        records: most images of one unit that are used.
        trust: who adds noise: each client all of it (``local``), each a share under a secure sum
            (``distributed``), or the server once (``central``).
        missing: under ``distributed``, how many clients may drop out or collude.
        noise: ``system`` for a real release; ``seeded`` for simulations, which protects nobody.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    epsilon: float = 10.0
    delta: float = 1e-5
    adjacency: Adjacency = "add-remove"
    unit: Unit = "image"
    records: int = 1
    trust: Trust = "central"
    missing: int = 0
    noise: Source = "seeded"

    def __post_init__(self) -> None:
        check_budget(self.epsilon, self.delta)
        for name, kind in _CHOICES:
            if getattr(self, name) not in get_args(kind):
                raise ConfigError(
                    f"privacy.{name} must be one of {', '.join(get_args(kind))}. "
                    f"Got '{getattr(self, name)}'"
                )
        if self.records < 1:
            raise ConfigError(f"privacy.records must be at least 1. Got {self.records}")
        if self.unit == "image" and self.records != 1:
            raise ConfigError(
                f"privacy.records must be 1 for unit 'image'. Got {self.records}: set unit to "
                "'person' or 'client'"
            )
        if self.missing < 0:
            raise ConfigError(f"privacy.missing must not be negative. Got {self.missing}")

    @property
    def contribution(self) -> Contribution:
        """How much one unit may contribute."""
        return Contribution(self.unit, self.records)


@dataclass(frozen=True)
class Claim:
    """One (ε, δ) statement with everything that it depends on.

    Attributes:
        epsilon: what holds under ``adjacency``; ``inf`` when nothing does.
        nominal: the ε that was asked for.
        sigma: noise multiplier on the joint add/remove sensitivity of one record.
        sensitivity: the plan's joint sensitivity in the same unit.
        sampling: which records enter a query.
        readings: ε of the same noise under every adjacency.
        notes: what the reader must know besides.
    """

    epsilon: float
    nominal: float
    delta: float
    unit: Unit
    records: int
    adjacency: Adjacency
    trust: Trust
    noise_by: str
    mechanism: str
    law: Law
    accountant: str
    sigma: float
    sensitivity: float
    sampling: str
    readings: dict[str, float]
    track: str
    seeded: bool
    notes: tuple[str, ...] = ()

    def line(self) -> str:
        """State the claim on one line."""
        eps = "∞" if math.isinf(self.epsilon) else f"{self.epsilon:.4g}"
        unit = self.unit if self.unit == "image" else f"{self.unit} (at most {self.records} images)"
        return (
            f"ε = {eps}, δ = {self.delta:g} for one {unit}, {self.adjacency}; noise by "
            f"{self.noise_by}; track: {self.track}"
        )

    def record(self) -> dict[str, Any]:
        """Return plain JSON values, with the odds statement."""
        return asdict(self) | {"odds": odds(self.epsilon), "line": self.line()}


def calibrate(plan: Sequence[Round], privacy: Privacy) -> float:
    """Return σ, the noise multiplier that makes ``plan`` meet ``privacy``; 0 without noise.

    Raises:
        PrivacyError: no noise can make the plan private, or a query cannot be accounted.
    """
    queries = [q for r in plan for q in r.queries]
    if math.isinf(privacy.epsilon):
        return 0.0
    if any(isinstance(q, MomentsQuery) and q.basic for q in queries):
        return sigma_gaussian(privacy.epsilon / 2, privacy.delta / 2) * math.sqrt(0.5)
    joint = plan_multiplier(plan, privacy.adjacency, privacy.records, unit=privacy.unit)
    if math.isinf(joint):
        raise PrivacyError(
            f"the plan must be private under {privacy.adjacency} for epsilon = "
            f"{privacy.epsilon:g}. Got one that releases something without noise: use epsilon = "
            "inf, or a method whose plan is private"
        )
    if is_sampled(plan):
        group = group_size(privacy.adjacency, privacy.records)
        return sampled_sigma(plan, privacy.epsilon, privacy.delta, group)
    return sigma_for(privacy.epsilon, privacy.delta, LAW) * joint


def claim_of(
    plan: Sequence[Round],
    privacy: Privacy,
    sigma: float,
    *,
    track: str,
    secure: bool = False,
    notes: Sequence[str] = (),
) -> Claim:
    """Work out what ``sigma`` really promises for ``plan``; ``secure``: under a secure sum."""
    queries = [q for r in plan for q in r.queries]
    basic = any(isinstance(q, MomentsQuery) and q.basic for q in queries)
    sampled = is_sampled(plan)
    law: Law = "gaussian" if basic or sampled else LAW
    readings = {a: _reading(plan, privacy, sigma, a, law) for a in get_args(Adjacency)}
    notes = list(notes)
    accountant = "zCDP, tight conversion over all real orders"
    if sampled:
        accountant = "privacy loss distribution of the Poisson-sampled Gaussian"
        group = group_size(privacy.adjacency, privacy.records)
        rdp = sampled_epsilon(plan, sigma, privacy.delta, group, "rdp")
        notes.append(f"Rényi accounting of the same noise reads ε = {rdp:.4g}")
    if basic:
        accountant = "analytic Gaussian"
        public = epsilon_of(sigma / privacy.records, privacy.delta, law)
        notes.append(
            f"published mechanism, nominal ε = {privacy.epsilon:g}: exact counts are sent, so no ε "
            f"holds under add-remove or replace-one; if counts and labels are public anyway, "
            f"add-remove reads {public:.2f}. The curve is that of continuous noise, as published"
        )
    if privacy.unit == "person":
        notes.append(
            "a person is taken to have images at one client only: each client bounds its own"
        )
    if privacy.trust == "distributed" and sigma > 0 and not secure and not _pooled(plan):
        notes.append(
            "a noise share protects only inside a secure sum; the local exchange adds in the clear"
        )
    if privacy.noise == "seeded" and sigma > 0:
        notes.append("noise comes from a seed: a simulation, not fit for release")
    return Claim(
        epsilon=readings[privacy.adjacency],
        nominal=privacy.epsilon,
        delta=privacy.delta,
        unit=privacy.unit,
        records=privacy.records,
        adjacency=privacy.adjacency,
        trust="local" if _pooled(plan) else privacy.trust,
        noise_by=_noise_by(plan, privacy, sigma, secure),
        mechanism=_mechanism(plan, basic),
        law=law,
        accountant=accountant,
        sigma=sigma,
        sensitivity=float(group_size(privacy.adjacency, privacy.records))
        if sampled
        else plan_multiplier(plan, privacy.adjacency, privacy.records, unit=privacy.unit),
        sampling=_sampling(plan),
        readings=readings,
        track=track,
        seeded=privacy.noise == "seeded",
        notes=tuple(notes),
    )


def summed_sigma(privacy: Privacy, sigma: float, parties: int, present: int | None = None) -> float:
    """Return the multiplier of the noise in a sum over clients.

    Args:
        privacy: the terms.
        sigma: the calibrated multiplier.
        parties: clients that were invited.
        present: those that are in the sum; None for all.

    Raises:
        ConfigError: more clients may be missing than there are.
        PrivacyError: more are missing than the noise shares allow for.
    """
    present = parties if present is None else present
    if privacy.trust == "local":
        return sigma * math.sqrt(present)
    if privacy.trust == "distributed" and parties > 1:
        if privacy.missing >= parties:
            raise ConfigError(
                f"privacy.missing must be below the number of clients, {parties}. "
                f"Got {privacy.missing}"
            )
        if present < parties - privacy.missing:
            raise PrivacyError(
                f"the sum must hold at least {parties - privacy.missing} of {parties} noise "
                f"shares. Got {present}: its noise would be too small, so it is thrown away"
            )
        return sigma * math.sqrt(present / (parties - privacy.missing))
    return sigma


def _reading(
    plan: Sequence[Round], privacy: Privacy, sigma: float, adjacency: Adjacency, law: Law
) -> float:
    joint = plan_multiplier(plan, adjacency, privacy.records, unit=privacy.unit)
    if joint == 0:
        return 0.0
    if is_sampled(plan):
        group = group_size(adjacency, privacy.records)
        return sampled_epsilon(plan, sigma, privacy.delta, group)
    return epsilon_of(sigma / joint, privacy.delta, law)


def _pooled(plan: Sequence[Round]) -> bool:
    """Whether clients release to themselves all that the plan asks for."""
    asked = [r for r in plan if r.queries]
    return bool(asked) and all(r.reduce == "pool" for r in asked)


def _sampling(plan: Sequence[Round]) -> str:
    queries = [q for r in plan for q in r.queries if isinstance(q, SumQuery) and q.rate < 1]
    if not queries:
        return "none: every record is in every query"
    rates = ", ".join(f"{rate:.4g}" for rate in sorted({q.rate for q in queries}))
    return f"Poisson, each record with probability {rates}, {sum(q.times for q in queries)} times"


def _noise_by(plan: Sequence[Round], privacy: Privacy, sigma: float, secure: bool) -> str:
    if sigma <= 0:
        return "nobody"
    if _pooled(plan):
        return "each client, in full"
    inside = ", inside a secure sum" if secure else ""
    return {
        "local": "each client, in full",
        "central": f"the server, which sees the exact {'total' if secure else 'sums'}",
        "distributed": f"each client, a share (up to {privacy.missing} may be missing){inside}",
    }[privacy.trust]


def _mechanism(plan: Sequence[Round], basic: bool) -> str:
    rounds = sum(bool(r.queries) for r in plan)
    if not rounds:
        return "none"
    if is_sampled(plan):
        asked = sum(q.times for r in plan for q in r.queries)
        return f"{asked} Gaussian releases of clipped sums, rounded to a grid of integers"
    if basic:
        return "Gaussian mechanisms on mean and second moment, at (ε/2, δ/2) each, exact counts"
    if rounds > 1:
        return f"discrete Gaussian releases of clipped, quantised integer sums in {rounds} rounds"
    return "one joint discrete Gaussian release of clipped, quantised integer sums"
