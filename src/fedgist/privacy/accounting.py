"""Privacy accounting: from a plan to σ, from σ to ε. The only module that imports dp_accounting.

Two curves are used, each for the noise law it is exact or proved for:

* the analytic Gaussian (Balle & Wang 2018, Theorem 8) for continuous noise, and as the reference;
* zCDP with the tight conversion (Canonne, Kamath, Steinke 2020, Proposition 12) for the discrete
  Gaussian that FedGist releases: any vector of independent discrete Gaussians with scales s_j is
  ρ-zCDP with ρ = max Σ_j D_j² / (2 s_j²) over the integer differences D of neighbours.

Queries that are asked of Poisson samples are read by the privacy loss distribution of the sampled
Gaussian (dp_accounting, pessimistic estimate), Rényi accounting beside it (`sampled_epsilon`).

All multipliers σ here are noise standard deviation / L2 sensitivity. The adjacency enters through
`sensitivity`, never through an accountant: dp_accounting 0.6 ignores REPLACE_ONE for RDP Gaussians.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any, Literal

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy.curves import (
    MOST,
    bisect,
    check_budget,
    delta_gaussian,
    epsilon_gaussian,
    epsilon_zcdp,
    sigma_gaussian,
)
from fedgist.queries import MomentsQuery, Query, SumQuery
from fedgist.types import Adjacency, Round, Unit

__all__ = [
    "ORDERS",
    "Law",
    "check_budget",
    "delta_gaussian",
    "dp_event",
    "epsilon_event",
    "epsilon_gaussian",
    "epsilon_of",
    "epsilon_zcdp",
    "group_size",
    "is_sampled",
    "odds",
    "plan_multiplier",
    "sampled_epsilon",
    "sampled_rdp",
    "sampled_sigma",
    "sensitivity",
    "sigma_for",
    "sigma_gaussian",
]

Law = Literal["gaussian", "discrete-gaussian"]
Parts = tuple[tuple[float, float, int], ...]  # multiplier, sampling rate, times

GRID = 1e-3  # of loss distributions, which are upper ends: within 0.03 % of a grid of 1e-4
# Rényi orders of sampled plans: quarters where large ε have their best one
ORDERS: tuple[float, ...] = (
    1.5,
    1.75,
    *(i / 4 for i in range(8, 25)),
    *map(float, range(7, 64)),
    128.0,
    256.0,
    512.0,
)


def sigma_for(epsilon: float, delta: float, law: Law) -> float:
    """Return the least multiplier for (``epsilon``, ``delta``) under a noise law."""
    if law == "gaussian":
        return sigma_gaussian(epsilon, delta)
    check_budget(epsilon, delta)
    if math.isinf(epsilon):
        return 0.0
    return bisect(lambda s: epsilon_zcdp(0.5 / s**2, delta) <= epsilon, 1e-3, MOST)


def epsilon_of(sigma: float, delta: float, law: Law) -> float:
    """Return ε of one mechanism with multiplier ``sigma`` under a noise law."""
    if not sigma > 0:
        return math.inf
    if law == "gaussian":
        return epsilon_gaussian(sigma, delta)
    return epsilon_zcdp(0.5 / sigma**2, delta)


def sensitivity(
    query: Query, adjacency: Adjacency, records: int = 1, unit: Unit = "image"
) -> float:
    """Return the query's L2 sensitivity in units of its own noise scale.

    For a `MomentsQuery` every block is divided by (its largest norm / √share), so that one record
    added or removed moves the joint vector by at most 1. Under replacement:

    * another class: a removal and an addition in orthogonal blocks, √2;
    * the same class: max over t = z·z' of 2(R²-t)/a² + 2(R⁴-t²)/b². With R = 1 that is
      (√2/b + b/(√2a²))² at t = -b²/2a² when b² <= 2a², else (2/a)² at t = -1.

    Args:
        query: what is asked.
        adjacency: which data sets are neighbours.
        records: how many records one unit (person, client) holds at most; each counts in full.
        unit: whose presence is hidden. It matters to a row of a whole client: with the client the
            row goes (1); when one image changes it may move anywhere within its clip (2).

    Returns:
        A number >= 1; ``inf`` when the query releases something without noise.
    """
    if records < 1:
        raise ConfigError(f"records per unit must be at least 1. Got {records}")
    if isinstance(query, SumQuery) and query.whole:
        return 1.0 if (unit, adjacency) == ("client", "add-remove") else 2.0
    if not isinstance(query, MomentsQuery):
        return float(group_size(adjacency, records))
    if query.exact_counts and adjacency != "replace-same-class":
        return math.inf
    if adjacency == "add-remove":
        return float(records)
    inv_a2, inv_b2 = query.mean, query.second + query.pooled
    if inv_b2 > 0 and 1 / inv_b2 <= 2 / inv_a2:
        same = math.sqrt(2 * inv_b2) + inv_a2 / math.sqrt(2 * inv_b2)
    else:
        same = 2 * math.sqrt(inv_a2)
    return records * (same if adjacency == "replace-same-class" else max(same, math.sqrt(2)))


def group_size(adjacency: Adjacency, records: int) -> int:
    """Return how many records neighbours differ in, each added or removed by itself."""
    return records * (1 if adjacency == "add-remove" else 2)


def plan_multiplier(
    plan: Sequence[Round],
    adjacency: Adjacency,
    records: int = 1,
    *,
    unit: Unit = "image",
    weak: float = 1.0,
) -> float:
    """Return the joint sensitivity of a whole plan: σ / this is its effective multiplier.

    Gaussian (and zCDP) queries compose exactly: 1/σ_eff² = Σ times·(Δ/(scale·σ))². ``weak`` < 1
    describes noise that is too small by that factor (for audits). What sampling gains is left out.
    """
    if any(r.raw for r in plan):
        return math.inf
    total = 0.0
    for query in (q for r in plan for q in r.queries):
        scale = getattr(query, "scale", 1.0) * weak
        total += query.times * (sensitivity(query, adjacency, records, unit) / scale) ** 2
    return math.sqrt(total)


def is_sampled(plan: Sequence[Round]) -> bool:
    """Say whether a plan's queries are asked of Poisson samples.

    Raises:
        PrivacyError: only some of its queries have rates: their noise laws have no common curve.
    """
    queries = [q for r in plan for q in r.queries]
    rated = [isinstance(q, SumQuery) and bool(q.rates) for q in queries]
    if any(rated) and not all(rated):
        raise PrivacyError(
            "queries of one plan must all have sampling rates or none. Got both: give (1.0,) to "
            "those that use every record"
        )
    return any(rated)


def sampled_epsilon(
    plan: Sequence[Round],
    sigma: float,
    delta: float,
    group: int = 1,
    accountant: Literal["pld", "rdp"] = "pld",
) -> float:
    """Return ε of a sampled plan with multiplier ``sigma``; the worst class where rates differ.

    ``group``: how many records two neighbours differ in, each added or removed (a replacement
    counts two). (e, d)-DP for one record is (g e, d (e^(g e) - 1) / (e^e - 1))-DP for g of them.
    """
    if any(r.raw for r in plan) or not sigma > 0:
        return math.inf
    reader = _sampled_reader(_parts(plan, sigma), accountant)

    def at(delta: float) -> float:
        return float(reader.get_epsilon(delta))

    if group == 1:
        return at(delta)

    def needed(e: float) -> float:
        """The ε that one record must have for a group to keep δ, if it has ``e``."""
        if group * e > 500:
            return math.inf
        return at(delta * math.expm1(e) / math.expm1(group * e))

    e = max(at(delta), 1e-9)
    while math.isfinite(e) and (more := needed(e)) > e:  # rises to the least that is enough
        e = more * (1 + 1e-6)
    plain = sigma / (group * plan_multiplier(plan, "add-remove"))  # what sampling gains left out
    return min(group * e, epsilon_gaussian(plain, delta))


def sampled_rdp(plan: Sequence[Round], sigma: float) -> tuple[float, ...]:
    """Return the Rényi divergence of a sampled plan for one record added or removed, at `ORDERS`.

    It adds up over releases, order by order, whatever the later ones were made to depend on.
    """
    if any(r.raw for r in plan) or not sigma > 0:
        return (math.inf,) * len(ORDERS)
    return tuple(float(v) for v in _sampled_reader(_parts(plan, sigma), "rdp")._rdp)


def sampled_sigma(plan: Sequence[Round], epsilon: float, delta: float, group: int = 1) -> float:
    """Return a multiplier with which a sampled plan is (ε, δ)-DP, of ε within 1 in 1,000."""
    check_budget(epsilon, delta)
    return _sampled_sigma(_parts(plan), epsilon, delta, group)


@lru_cache(maxsize=64)
def _sampled_sigma(parts: Parts, epsilon: float, delta: float, group: int) -> float:
    queries = tuple(SumQuery(1.0, scale=s, times=t, rates=(q,)) for s, q, t in parts)
    plan = [Round("pool", queries)]

    def over(log_sigma: float, accountant: Literal["pld", "rdp"] = "pld") -> float:
        got = sampled_epsilon(plan, math.exp(log_sigma), delta, group, accountant)
        return min(math.log(max(got, 1e-9) / (epsilon * 0.9995)), 10.0)

    # Rényi accounting takes milliseconds and is never below the loss distribution's: an upper end
    high = math.log(bisect(lambda s: over(math.log(s), "rdp") <= 0, 0.05, MOST, steps=20))
    low, above = high - 0.1, over(high)
    while (below := over(low)) <= 0:
        high, above, low = low, below, low - 0.1
    for _ in range(30):  # false position: a loss distribution takes a second
        if above > -5e-4:  # ε in 0.9990 .. 0.9995 of what is asked
            break
        middle = low + (high - low) * min(max((below + 2e-4) / (below - above), 0.02), 0.98)
        if (at := over(middle)) <= 0:
            high, above = middle, at
        else:
            low, below = middle, at
    return math.ceil(math.exp(high) * 1e5) / 1e5


def _parts(plan: Sequence[Round], sigma: float = 1.0) -> Parts:
    queries = (q for r in plan for q in r.queries if isinstance(q, SumQuery))
    return tuple((q.scale * sigma, q.rate, q.times) for q in queries)


def _sampled_event(parts: Parts) -> Any:
    import dp_accounting as dpa

    return dpa.ComposedDpEvent(
        [
            dpa.SelfComposedDpEvent(dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(z)), t)
            for z, q, t in parts
        ]
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep dp_accounting from saying which fractional orders it leaves out, to the safe side."""
    log = logging.getLogger("absl")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


@lru_cache(maxsize=256)
def _sampled_reader(parts: Parts, accountant: Literal["pld", "rdp"]) -> Any:
    from dp_accounting import pld, rdp

    pessimistic = pld.PLDAccountant(value_discretization_interval=GRID)
    reader = pessimistic if accountant == "pld" else rdp.RdpAccountant(ORDERS)
    with _quiet():
        return reader.compose(_sampled_event(parts))


def dp_event(
    plan: Sequence[Round],
    sigma: float,
    adjacency: Adjacency,
    records: int = 1,
    unit: Unit = "image",
) -> Any:
    """Describe a plan as a dp_accounting ``DpEvent`` (zCDP per query; non-private when raw)."""
    import dp_accounting as dpa

    if math.isinf(plan_multiplier(plan, adjacency, records, unit=unit)):
        return dpa.NonPrivateDpEvent()
    events: list[Any] = []
    if is_sampled(plan):
        return _sampled_event(_parts(plan, sigma))
    for query in (q for r in plan for q in r.queries):
        z = sigma * getattr(query, "scale", 1.0) / sensitivity(query, adjacency, records, unit)
        event: Any = dpa.ZCDpEvent(rho=0.5 / z**2) if z > 0 else dpa.NonPrivateDpEvent()
        events.append(dpa.SelfComposedDpEvent(event, query.times))
    return dpa.ComposedDpEvent(events) if events else dpa.NoOpDpEvent()


def epsilon_event(event: Any, delta: float, accountant: Literal["rdp", "pld"] = "rdp") -> float:
    """Let dp_accounting read an event; ``pld`` for (subsampled) continuous Gaussians only."""
    from dp_accounting import pld, rdp

    reader = pld.PLDAccountant() if accountant == "pld" else rdp.RdpAccountant()
    return float(reader.compose(event).get_epsilon(delta))


def odds(epsilon: float) -> str:
    """Say in plain words what ε allows, as odds.

    They hold for pure ε-DP. Under (ε, δ) a rare event goes beyond them: for one Gaussian release
    with a probability that is a small multiple of δ (`docs/privacy.md`).
    """
    if math.isinf(epsilon):
        return "no bound: whoever sees the release may learn everything about a record"
    if epsilon < math.log(1000):
        size = f"{math.exp(epsilon):.3g}"
    elif epsilon < 30:
        factor = math.exp(epsilon)
        size = f"{round(factor, -int(math.log10(factor)) + 1):,.0f}"
    else:
        size = f"10^{epsilon / math.log(10):.0f}"
    return (
        "whoever already thinks it as likely as not that a record was used could, in the worst "
        f"case, come to odds of {size} to 1 for it"
    )
