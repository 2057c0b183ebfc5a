"""Closed forms of the Gaussian mechanism and of zCDP, and the searches that invert them."""

from __future__ import annotations

import math
from collections.abc import Callable

from fedgist.errors import ConfigError

__all__ = [
    "MOST",
    "bisect",
    "check_budget",
    "delta_gaussian",
    "epsilon_gaussian",
    "epsilon_zcdp",
    "sigma_gaussian",
]

MOST = 1e6  # the largest σ and the largest finite ε that are told apart


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
    return bisect(lambda s: delta_gaussian(s, epsilon) <= delta, 1e-3, MOST)


def epsilon_gaussian(sigma: float, delta: float) -> float:
    """Return the least ε of a Gaussian mechanism with multiplier ``sigma`` at ``delta``."""
    if not sigma > 0 or delta_gaussian(sigma, MOST) > delta:
        return math.inf
    if delta_gaussian(sigma, 0.0) <= delta:
        return 0.0
    return bisect(lambda e: delta_gaussian(sigma, e) <= delta, 1e-12, MOST)


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


def check_budget(epsilon: float, delta: float) -> None:
    """Raise `ConfigError` unless ε > 0 and 0 < δ < 1."""
    if not epsilon > 0:
        raise ConfigError(f"epsilon must be positive (inf for no privacy). Got {epsilon}")
    if not 0 < delta < 1:
        raise ConfigError(f"delta must lie strictly between 0 and 1. Got {delta}")


def bisect(enough: Callable[[float], bool], low: float, high: float, steps: int = 200) -> float:
    """Return the least x in [low, high] for which the monotone ``enough`` holds, rounded up.

    Raises:
        ConfigError: not even ``high`` is enough.
    """
    if not enough(high):
        raise ConfigError(
            f"the budget must be met by a multiplier up to {high:g}. Got a tighter one"
        )
    for _ in range(steps):
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
