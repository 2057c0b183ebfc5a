"""Exact draws of the rounded Gaussian on integers, and exact Poisson sampling.

K = round(N(0, s²)). Added to an integer f it is round(f + N(0, s²)): post-processing of the
continuous Gaussian mechanism, so its analytic, PLD and subsampled guarantees hold as they are.

A draw inverts a table of P(|K| ≤ k) that is exact to 2^-124, with 124 random bits and a sign.
One draw is within `Table.distance` = (K_max + 2)·2^-125 of the law in total variation: 2^-115 at
s = 50, 2^-106 at s = 20,000. If the exact law gives (ε, δ), then ``draws`` of these add

    (1 + e^ε) · draws · distance

to δ: 10⁷ draws at s = 20,000 and ε = 10 add less than 10⁻²⁰.

Randomness comes from ``words(n)``, which returns n bytes: `os.urandom` in every release. Anything
reproducible protects nobody.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from fedgist.errors import ConfigError, PrivacyError

__all__ = ["MAX_SCALE", "MIN_SCALE", "Table", "chosen", "rounded_gaussian", "simulated", "table"]

Words: TypeAlias = Callable[[int], bytes]

MIN_SCALE = 2.0**-4  # grid units: below it rounding leaves no noise (P(K ≠ 0) < 1e-14)
MAX_SCALE = 2.0**16  # grid units: a table of 867,000 entries, 14 MB
_HALF = 62  # bits in one half of a table entry
_ONE = 2 ** (2 * _HALF)  # probability 1
_DIGITS = 64  # decimal: 212 bits, 88 more than an entry keeps
_CUT = Decimal("1e-45")  # relative size of the terms left out of a series: 2^-149
_CHUNK = 2**16  # draws at a time
_PI = Decimal("3.1415926535897932384626433832795028841971693993751058209749445923078164062862")


@dataclass(frozen=True, eq=False)
class Table:
    """P(|K| ≤ k)·2^124 for k = 0..K_max, rounded down, the last one 2^124.

    Attributes:
        high: uint64 ``[K_max + 1]``, the entries' top halves, in 0..2^62.
        low: uint64 ``[K_max + 1]``, their lower 62 bits.
    """

    high: NDArray[np.uint64]
    low: NDArray[np.uint64]

    @property
    def distance(self) -> float:
        """Upper bound on the total variation between one draw and the rounded Gaussian.

        Half of 2^-124 for each of the K_max + 1 probabilities, and more than what lies beyond.
        """
        return math.ldexp(len(self.high) + 1, -125)

    def invert(self, high: NDArray[np.uint64], low: NDArray[np.uint64]) -> NDArray[np.int64]:
        """Return the least k whose entry exceeds high·2^62 + low.

        Args:
            high: uint64 ``[n]`` in 0..2^62 - 1.
            low: uint64 ``[n]`` in 0..2^62 - 1.

        Returns:
            int64 ``[n]`` in 0..K_max.
        """
        k = np.searchsorted(self.high, high, side="left")
        for i in np.flatnonzero(self.high[k] == high):  # about K_max·2^-62 of all draws
            end = np.searchsorted(self.high, high[i], side="right")
            k[i] += np.searchsorted(self.low[k[i] : end], low[i], side="right")
        return k.astype(np.int64, copy=False)


@lru_cache(maxsize=16)
def table(scale: float) -> Table:
    """Return the table of |K|, K = round(N(0, ``scale``²)).

    The entries are erf((k + 1/2)/(s√2)), k = 0..K_max = ⌈s·√(2·126·ln 2)⌉ + 1; less than 2^-129
    lies beyond. About 13.2 s entries, under 10 µs each.

    Args:
        scale: s in grid units, `MIN_SCALE`..`MAX_SCALE`.

    Raises:
        ConfigError: the scale is outside that range or not a number.
        PrivacyError: the probabilities do not add up to 1 (a fault of the arithmetic).
    """
    _check_scale(scale)
    last = math.ceil(scale * math.sqrt(2 * 126 * math.log(2))) + 1
    entries = _cumulative(Decimal(float(scale)), last)
    if not _ONE - 1 <= entries[-1] <= _ONE:
        raise PrivacyError(f"probabilities must add up to 1. Got {entries[-1] / _ONE!r}")
    entries[-1] = _ONE
    high = np.array([e >> _HALF for e in entries], dtype=np.uint64)
    low = np.array([e & (2**_HALF - 1) for e in entries], dtype=np.uint64)
    for half in (high, low):
        half.setflags(write=False)  # the cache hands them out again
    return Table(high, low)


def _cumulative(s: Decimal, last: int) -> list[int]:
    """Return ⌊P(|K| ≤ k)·2^124⌋, k = 0..``last``.

    With a = 1/(8s²), z = 4ak and x = k + u/2 in the integral of the density over k ± 1/2:

        P(K = k) = e^(-4ak²)/(s√2π) · ∫₀¹ cosh(zu)·e^(-au²) du
                 = e^(-4ak²)/(s√2π) · Σ_m z^(2m)/(2m)! · J_m,   J_m = ∫₀¹ u^(2m)·e^(-au²) du.

    Nothing is ever subtracted, so an operation adds at most 10^-63 to the relative error of its
    result. The worst is e^(-4ak²), made of k² factors: below 2^41·10^-63, or 2^-168. The terms
    left out add 2^-148. Against the 2^-124 of an entry that is nothing.
    """
    context = Context(_DIGITS, ROUND_HALF_EVEN, Emin=-999_999, Emax=999_999, traps=[])
    with localcontext(context):
        a = 1 / (8 * s * s)
        coefficients = _coefficients(a, last)[::-1]
        unit, step, ratio = (4 * a) ** 2, (-8 * a).exp(), (-4 * a).exp()  # ratio: e^(-4a(2k+1))
        weight = _ONE / (s * (2 * _PI).sqrt())  # 2^124·e^(-4ak²)/(s√2π), twice that from k = 1
        total, entries = Decimal(0), []
        for k in range(last + 1):
            y, series = unit * (k * k), Decimal(0)
            for c in coefficients:
                series = series * y + c
            total += weight * series
            entries.append(int(total))
            weight *= ratio if k else 2 * ratio
            ratio *= step
    return entries


def _coefficients(a: Decimal, last: int) -> list[Decimal]:
    """Return J_m/(2m)!, m = 0..M, M such that what is left out is below 2·`_CUT` for k ≤ ``last``.

    By parts, J_m = (e^-a + 2a·J_(m+1))/(2m + 1). Started 50 terms late with J = 0: at m ≥ M each
    step divides the relative error by more than 10, as 2M > ez and z ≥ 8a.
    """
    y = (4 * a * last) ** 2
    terms, size = 0, Decimal(1)  # size = z^(2m)/(2m)!, the bound on a term over J_0
    while size > _CUT or 2 * y > (2 * terms + 1) * (2 * terms + 2):
        size *= y / ((2 * terms + 1) * (2 * terms + 2))
        terms += 1
    j, integrals = Decimal(0), []
    for m in range(terms + 50, -1, -1):
        j = ((-a).exp() + 2 * a * j) / (2 * m + 1)
        integrals.append(j)
    return [j / math.factorial(2 * m) for m, j in enumerate(integrals[:49:-1])]


def rounded_gaussian(scale: float, size: int, words: Words) -> NDArray[np.int64]:
    """Draw K = round(N(0, ``scale``²)), each within `Table.distance` of the law.

    A draw takes 16 bytes, two little-endian words: 62 + 62 bits for |K|, from the tops of both, and
    the lowest bit of the first for the sign. Zero has no sign, so the sign cannot change its share.

    Args:
        scale: standard deviation before rounding, in grid units, `MIN_SCALE`..`MAX_SCALE`. The
            variance after rounding is about scale² + 1/12.
        size: how many.
        words: the source of randomness; `os.urandom` in a release.

    Returns:
        int64 ``[size]`` in -K_max..K_max.

    Raises:
        ConfigError: the scale or the size is out of range.
        PrivacyError: ``words`` did not return as many bytes as asked.
    """
    _check_size(size)
    law = table(scale)
    out = np.empty(size, dtype=np.int64)
    for start in range(0, size, _CHUNK):
        part = out[start : start + _CHUNK]
        pairs = _read(words, 2 * len(part)).reshape(-1, 2)
        magnitude = law.invert(pairs[:, 0] >> np.uint64(2), pairs[:, 1] >> np.uint64(2))
        negative = (pairs[:, 0] & np.uint64(1)).astype(np.int64)
        part[:] = magnitude * (1 - 2 * negative)
    return out


def simulated(scale: float, size: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw the same law fast from a seed, by rounding double-precision Gaussians.

    For simulations only: whoever knows the seed can take the noise off, and doubles do not reach
    every integer with its exact probability.

    Returns:
        int64 ``[size]``.

    Raises:
        ConfigError: the scale or the size is out of range, as in `rounded_gaussian`.
    """
    _check_size(size)
    _check_scale(scale)
    return np.rint(rng.normal(0.0, scale, size)).astype(np.int64)


def chosen(rates: NDArray[np.float64], words: Words) -> NDArray[np.bool_]:
    """Draw one independent Bernoulli per rate: who takes part under Poisson sampling.

    P(True) = ⌊rate·2^64⌋/2^64: never above the rate, below it by less than 2^-64, and exact for 0,
    1 and every rate from 2^-12 on. A draw takes 8 bytes.

    Args:
        rates: float64 ``[n]`` in [0, 1].
        words: the source of randomness; `os.urandom` in a release.

    Returns:
        bool ``[n]``.

    Raises:
        ConfigError: a rate is outside [0, 1] or not a number, or rates are not one-dimensional.
        PrivacyError: ``words`` did not return as many bytes as asked.
    """
    rates = np.asarray(rates, dtype=np.float64)
    if rates.ndim != 1:
        raise ConfigError(f"rates must be one-dimensional. Got {rates.ndim} dimensions")
    wrong = rates[~((rates >= 0) & (rates <= 1))]
    if len(wrong):
        raise ConfigError(f"rates must be between 0 and 1. Got {float(wrong[0])!r}")
    always = rates == 1  # 2^64 does not fit a word
    # Scaling by a power of two is exact in float64.
    thresholds = np.floor(np.ldexp(np.where(always, 0.0, rates), 64)).astype(np.uint64)
    return np.asarray(always | (_read(words, len(rates)) < thresholds), dtype=np.bool_)


def _read(words: Words, count: int) -> NDArray[np.uint64]:
    """Return ``count`` words of 64 random bits."""
    raw = words(8 * count)
    if len(raw) != 8 * count:
        raise PrivacyError(f"the random source must return {8 * count} bytes. Got {len(raw)}")
    return np.frombuffer(raw, dtype="<u8").astype(np.uint64, copy=False)


def _check_scale(scale: float) -> None:
    if not MIN_SCALE <= scale <= MAX_SCALE:  # nan fails too
        raise ConfigError(
            f"the scale of rounded Gaussian noise must be {MIN_SCALE} to {MAX_SCALE:g} grid units. "
            f"Got {scale}: change the grid's levels"
        )


def _check_size(size: int) -> None:
    if size < 0:
        raise ConfigError(f"the number of draws must be at least 0. Got {size}")
