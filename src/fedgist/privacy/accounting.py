"""Privacy accounting: from a plan to σ, from σ to ε. The only module that imports dp_accounting.

Two curves are used, each for the noise law it is exact or proved for:

* the analytic Gaussian (Balle & Wang 2018, Theorem 8) for continuous noise, and as the reference;
* zCDP with the tight conversion (Canonne, Kamath, Steinke 2020, Proposition 12) for the discrete
  Gaussian that FedGist releases: any vector of independent discrete Gaussians with scales s_j is
  ρ-zCDP with ρ = max Σ_j D_j² / (2 s_j²) over the integer differences D of neighbours.

All multipliers σ here are noise standard deviation / L2 sensitivity. The adjacency enters through
`sensitivity`, never through an accountant: dp_accounting 0.6 ignores REPLACE_ONE for RDP Gaussians.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

from fedgist.errors import ConfigError
from fedgist.types import Adjacency, MomentsQuery, Query, Round

__all__ = [
    "Law",
    "check_budget",
    "delta_gaussian",
    "dp_event",
    "epsilon_event",
    "epsilon_gaussian",
    "epsilon_of",
    "epsilon_zcdp",
    "odds",
    "plan_multiplier",
    "sensitivity",
    "sigma_for",
    "sigma_gaussian",
]

Law = Literal["gaussian", "discrete-gaussian"]

_MOST = 1e6  # the largest σ and the largest finite ε that are told apart


def delta_gaussian(sigma: float, epsilon: float) -> float:
    """Return the least δ of a Gaussian mechanism with multiplier ``sigma`` at ``epsilon``."""
    from scipy.special import log_ndtr

    if not sigma > 0:  # NaN as well: what is unknown promises nothing
        return 1.0
    if math.isinf(sigma):
        return 0.0
    mu = 1 / sigma
    a = float(log_ndtr(mu / 2 - epsilon / mu))
    b = epsilon + float(log_ndtr(-mu / 2 - epsilon / mu))
    return math.exp(a) * -math.expm1(b - a) if b < a else 0.0


def sigma_gaussian(epsilon: float, delta: float) -> float:
    """Return the least multiplier for (``epsilon``, ``delta``); exact to 1e-12 relative."""
    check_budget(epsilon, delta)
    if math.isinf(epsilon):
        return 0.0
    return _bisect(lambda s: delta_gaussian(s, epsilon) <= delta, 1e-3, _MOST)


def epsilon_gaussian(sigma: float, delta: float) -> float:
    """Return the least ε of a Gaussian mechanism with multiplier ``sigma`` at ``delta``."""
    if not sigma > 0 or delta_gaussian(sigma, _MOST) > delta:
        return math.inf
    if delta_gaussian(sigma, 0.0) <= delta:
        return 0.0
    return _bisect(lambda e: delta_gaussian(sigma, e) <= delta, 1e-12, _MOST)


def epsilon_zcdp(rho: float, delta: float) -> float:
    """Return the ε that ``rho``-zCDP gives at ``delta``: the infimum over all real orders α > 1.

    ε = ρα + (log(1/δ) + (α-1) log(1-1/α) - log α) / (α-1), minimised over α.
    """
    if not rho >= 0:
        raise ConfigError(f"rho must not be negative. Got {rho}")
    if rho == 0:
        return 0.0

    def at(log_gap: float) -> float:
        gap = math.exp(log_gap)  # α - 1
        alpha = 1 + gap
        # (α-1) log(1-1/α) - log α = (α-1) log(α-1) - α log α
        bound = (gap * log_gap - alpha * math.log(alpha) - math.log(delta)) / gap
        return rho * alpha + bound

    return max(0.0, at(_argmin(at, -12.0, 25.0)))


def sigma_for(epsilon: float, delta: float, law: Law) -> float:
    """Return the least multiplier for (``epsilon``, ``delta``) under a noise law."""
    if law == "gaussian":
        return sigma_gaussian(epsilon, delta)
    check_budget(epsilon, delta)
    if math.isinf(epsilon):
        return 0.0
    return _bisect(lambda s: epsilon_zcdp(0.5 / s**2, delta) <= epsilon, 1e-3, _MOST)


def epsilon_of(sigma: float, delta: float, law: Law) -> float:
    """Return ε of one mechanism with multiplier ``sigma`` under a noise law."""
    if not sigma > 0:
        return math.inf
    if law == "gaussian":
        return epsilon_gaussian(sigma, delta)
    return epsilon_zcdp(0.5 / sigma**2, delta)


def sensitivity(query: Query, adjacency: Adjacency, records: int = 1) -> float:
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

    Returns:
        A number >= 1; ``inf`` when the query releases something without noise.
    """
    if records < 1:
        raise ConfigError(f"records per unit must be at least 1. Got {records}")
    if not isinstance(query, MomentsQuery):
        return records * (1.0 if adjacency == "add-remove" else 2.0)
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


def plan_multiplier(
    plan: Sequence[Round], adjacency: Adjacency, records: int = 1, *, weak: float = 1.0
) -> float:
    """Return the joint sensitivity of a whole plan: σ / this is its effective multiplier.

    Gaussian (and zCDP) queries compose exactly: 1/σ_eff² = Σ times·(Δ/(scale·σ))². ``weak`` < 1
    describes noise that is too small by that factor (for audits).
    """
    if any(r.raw for r in plan):
        return math.inf
    total = 0.0
    for query in (q for r in plan for q in r.queries):
        scale = getattr(query, "scale", 1.0) * weak
        total += query.times * (sensitivity(query, adjacency, records) / scale) ** 2
    return math.sqrt(total)


def dp_event(plan: Sequence[Round], sigma: float, adjacency: Adjacency, records: int = 1) -> Any:
    """Describe a plan as a dp_accounting ``DpEvent`` (zCDP per query; non-private when raw)."""
    import dp_accounting as dpa

    if math.isinf(plan_multiplier(plan, adjacency, records)):
        return dpa.NonPrivateDpEvent()
    events = []
    for query in (q for r in plan for q in r.queries):
        z = sigma * getattr(query, "scale", 1.0) / sensitivity(query, adjacency, records)
        event: Any = dpa.ZCDpEvent(rho=0.5 / z**2) if z > 0 else dpa.NonPrivateDpEvent()
        events.append(dpa.SelfComposedDpEvent(event, query.times))
    return dpa.ComposedDpEvent(events) if events else dpa.NoOpDpEvent()


def epsilon_event(event: Any, delta: float, accountant: Literal["rdp", "pld"] = "rdp") -> float:
    """Let dp_accounting read an event; ``pld`` for (subsampled) continuous Gaussians only."""
    from dp_accounting import pld, rdp

    reader = pld.PLDAccountant() if accountant == "pld" else rdp.RdpAccountant()
    return float(reader.compose(event).get_epsilon(delta))


def odds(epsilon: float) -> str:
    """Say in plain words what ε allows, as odds (outside an event of probability δ)."""
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


def check_budget(epsilon: float, delta: float) -> None:
    """Raise `ConfigError` unless ε > 0 and 0 < δ < 1."""
    if not epsilon > 0:
        raise ConfigError(f"epsilon must be positive (inf for no privacy). Got {epsilon}")
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie strictly between 0 and 1. Got {delta}")


def _bisect(enough: Callable[[float], bool], low: float, high: float) -> float:
    """Return the least x in [low, high] for which the monotone ``enough`` holds, rounded up.

    Raises:
        ConfigError: not even ``high`` is enough.
    """
    if not enough(high):
        raise ConfigError(
            f"the budget must be met by a multiplier up to {high:g}. Got a tighter one"
        )
    for _ in range(200):
        middle = math.sqrt(low * high)
        if middle in (low, high):
            break
        if enough(middle):
            high = middle
        else:
            low = middle
    return high


def _argmin(f: Callable[[float], float], low: float, high: float) -> float:
    """Golden-section minimum of a unimodal function."""
    ratio = (math.sqrt(5) - 1) / 2
    a, b = high - ratio * (high - low), low + ratio * (high - low)
    fa, fb = f(a), f(b)
    for _ in range(100):
        if fa < fb:
            high, b, fb = b, a, fa
            a = high - ratio * (high - low)
            fa = f(a)
        else:
            low, a, fa = a, b, fb
            b = low + ratio * (high - low)
            fb = f(b)
    return (low + high) / 2
