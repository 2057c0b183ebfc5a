"""Integer Gaussian noise. The only module that imports opendp.

One law everywhere: the discrete Gaussian N_Z(0, s²), P(k) ∝ exp(-k²/2s²), on integers that are
added to exact integer sums. Floating-point noise is never used on a release: the set of reachable
floats depends on the sum and gives neighbours away.

* `SystemNoise`: OpenDP's exact sampler, randomness from the operating system. Real releases.
* `SeededNoise`: the same law by inversion from a seeded generator. Simulations only; every report
  and gist says so.

Sampled queries (`SumQuery.rates`) take a rounded Gaussian (`privacy.rounded`) instead: a sum of
integers plus round(N(0, s²)) is round(sum + N(0, s²)), so whatever holds for continuous noise and
Poisson samples holds for it. A sum of shares of it is no such thing: it is never shared.
"""

from __future__ import annotations

import math
import os
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy import rounded
from fedgist.queries import MomentsQuery, Query, SumQuery
from fedgist.types import Tensors

__all__ = [
    "MIN_SHARE_SCALE",
    "Noise",
    "SeededNoise",
    "SystemNoise",
    "noise_scales",
    "noise_tensors",
    "share_scale",
]

MIN_SHARE_SCALE = 3.0  # grid units: below it a sum of discrete Gaussians is no longer one (τ > 0)
_TAILS = 12.0  # standard deviations that the simulation's table holds: mass outside < 1e-32
_TABLE = 2.0**15  # scales above it are simulated by rounding: total variation 1/(48 s²) < 2e-11


class Noise(Protocol):
    """A source of discrete Gaussian noise."""

    @property
    def seeded(self) -> bool:
        """Whether the noise can be reproduced, and so removed, by whoever knows the seed."""

    def sample(self, scale: float, size: int) -> Tensor:
        """Return int64 ``[size]`` drawn from N_Z(0, ``scale``²)."""

    def rounded(self, scale: float, size: int) -> Tensor:
        """Return int64 ``[size]`` drawn from round(N(0, ``scale``²))."""

    def chosen(self, rates: Tensor) -> Tensor:
        """Return bool ``[n]``, each true with its own probability, float64 ``rates``."""


class SystemNoise:
    """OpenDP's discrete Gaussian with the operating system's randomness."""

    seeded = False

    def sample(self, scale: float, size: int) -> Tensor:
        """Return int64 ``[size]``; about 12 µs each."""
        if size == 0 or scale == 0:
            return torch.zeros(size, dtype=torch.int64)
        return torch.tensor(_opendp_gaussian(scale, size)([0] * size), dtype=torch.int64)

    def rounded(self, scale: float, size: int) -> Tensor:
        """Return int64 ``[size]``, by exact inversion."""
        if size == 0 or scale == 0:
            return torch.zeros(size, dtype=torch.int64)
        return torch.from_numpy(rounded.rounded_gaussian(scale, size, os.urandom))

    def chosen(self, rates: Tensor) -> Tensor:
        """Return bool ``[n]``."""
        return torch.from_numpy(rounded.chosen(rates.numpy(), os.urandom))


@lru_cache(maxsize=64)
def _opendp_gaussian(scale: float, size: int) -> Any:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    # T="i64" matters: a Python int means i32 to OpenDP, which saturates at 2^31.
    space = dp.vector_domain(dp.atom_domain(T="i64"), size), dp.l2_distance(T=float)
    return dp.m.make_gaussian(*space, scale=float(scale))


class SeededNoise:
    """The same law from a seed, fast. For simulations: it protects nobody."""

    seeded = True

    def __init__(self, seed: int | list[int]) -> None:
        self._rng = np.random.default_rng(seed)

    def sample(self, scale: float, size: int) -> Tensor:
        """Return int64 ``[size]`` by inversion, or by rounding where a table would be huge."""
        if size == 0 or scale == 0:
            return torch.zeros(size, dtype=torch.int64)
        if scale > _TABLE:
            return torch.from_numpy(np.rint(self._rng.normal(0, scale, size)).astype(np.int64))
        values, cumulative = _table(scale)
        drawn = values[np.searchsorted(cumulative, self._rng.random(size), side="right")]
        return torch.from_numpy(drawn)

    def rounded(self, scale: float, size: int) -> Tensor:
        """Return int64 ``[size]``."""
        return torch.from_numpy(rounded.simulated(scale, size, self._rng))

    def chosen(self, rates: Tensor) -> Tensor:
        """Return bool ``[n]``."""
        return torch.from_numpy(self._rng.random(len(rates))) < rates


@lru_cache(maxsize=16)
def _table(scale: float) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    reach = math.ceil(_TAILS * scale) + 1
    values = np.arange(-reach, reach + 1, dtype=np.int64)
    weights = np.exp(-0.5 * (values / scale) ** 2)
    cumulative = np.cumsum(weights / weights.sum())
    cumulative[-1] = 1.0
    return values, cumulative


def noise_scales(query: Query, sigma: float) -> dict[str, tuple[float, float]]:
    """Return the noise's standard deviation per block, in grid units.

    Each value is (scale of the diagonal or of every plain number, scale of the off-diagonal). Off
    the diagonal it is 1/√2 of the diagonal's: a record moves the pair (i, j), (j, i) of its outer
    product at once, so svec gives that coordinate the weight √2.

    Args:
        query: what is asked.
        sigma: multiplier on the joint sensitivity of 1 (unit and adjacency counted in).
    """
    if isinstance(query, SumQuery):
        s = sigma * query.scale * query.levels
        return {"rows": (s, s)}
    r, sigma = query.levels, sigma * query.scale
    out: dict[str, tuple[float, float]] = {}
    if not query.exact_counts:
        s = sigma * query.count_weight / math.sqrt(query.count)
        out["count"] = (s, s)
    s = sigma * r / math.sqrt(query.mean)
    out["mean"] = (s, s)
    for block, share in (("second", query.second), ("pooled", query.pooled)):
        if share:
            s = sigma * r**2 / math.sqrt(share)
            out[block] = (s, s / math.sqrt(2))
    return out


def share_scale(scale: float, parties: int, missing: int) -> float:
    """Return the scale of one party's share so that any ``parties - missing`` of them suffice.

    Raises:
        PrivacyError: the share is below `MIN_SHARE_SCALE` grid units, where the zCDP formula for a
            sum of discrete Gaussians stops being exact.
    """
    if not 0 <= missing < parties:
        raise ConfigError(
            f"missing parties must be between 0 and {parties - 1}. Got {missing} of {parties}"
        )
    share = scale / math.sqrt(parties - missing)
    if 0 < share < MIN_SHARE_SCALE:
        raise PrivacyError(
            f"a noise share must be at least {MIN_SHARE_SCALE} grid units. Got {share:.2f} for "
            f"{parties - missing} parties: use more levels or a larger count_weight"
        )
    return share


def noise_tensors(
    query: Query, sigma: float, noise: Noise, like: Tensors, *, parties: int = 1, missing: int = 0
) -> Tensors:
    """Draw one noise share for every block of ``like`` (int64 tensors), same shapes.

    With one party that is the whole noise.

    Raises:
        PrivacyError: a block has no noise scale in the query; only declared exact counts may.
    """
    scales = noise_scales(query, sigma)
    if isinstance(query, MomentsQuery) and query.exact_counts:
        scales["count"] = (0.0, 0.0)
    sampled = isinstance(query, SumQuery) and bool(query.rates)
    if sampled and parties > 1:
        raise PrivacyError("noise of a sampled query must not be shared. Got trust = distributed")
    draw = noise.rounded if sampled else noise.sample
    out: Tensors = {}
    for name in sorted(like):
        shape = like[name].shape
        block = "rows" if isinstance(query, SumQuery) else name
        if block not in scales:
            raise PrivacyError(f"blocks must be {sorted(scales)}. Got '{name}', without noise")
        plain, off = scales[block]
        if parties > 1:
            plain, off = (share_scale(s, parties, missing) for s in (plain, off))
        if plain == off:
            out[name] = draw(plain, like[name].numel()).reshape(shape)
            continue
        assert isinstance(query, MomentsQuery)
        d = query.dim  # the triangle starts with its diagonal
        rows = like[name].reshape(-1, shape[-1]).shape[0]
        diagonal = noise.sample(plain, rows * d).reshape(rows, d)
        upper = noise.sample(off, rows * (shape[-1] - d)).reshape(rows, -1)
        out[name] = torch.cat([diagonal, upper], dim=1).reshape(shape)
    return out
