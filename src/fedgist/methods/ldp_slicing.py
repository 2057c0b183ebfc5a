"""LDP-Slicing: randomised response on the bits of pixels (Cao et al., CVPR 2026, 2603.03711).

Bit k (weight 2^k) of a channel's byte is kept with probability p_k = e^{ε_k} / (1 + e^{ε_k}) and
flipped otherwise. By composition over bits and channels a pixel has ε = c Σ ε_k; every channel has
the same share. (b' - (1 - p_k)) / (2 p_k - 1) estimates bit b from the received b' without bias and
with variance 1 / (4 sinh²(ε_k / 2)); so does Σ 2^k of these a byte, with squared error

    Σ 4^k / (4 sinh²(ε_k / 2)),     which is convex in the ε_k.

`allocation` minimises it subject to Σ ε_k = E = ε / c. With a multiplier λ (Lagrange) every bit has

    4^k cosh(ε_k / 2) / (4 sinh³(ε_k / 2)) = λ.

The left side falls in ε_k from infinity to 0, so each λ gives one ε_k, which falls in λ; hence one
λ gives the sum E. For small E it is ε_k ∝ 4^{k/3}; for large E each bit has ln 4 more than the next
lower one.

Departures from the paper: images are first down-sampled (which decides how many pixels share the
total), no sub-band is pruned, channels are RGB with equal shares, and the allocation is the one
derived here. The server estimates bytes without bias, then clamps them to 0..255, which does bias
those near the ends where ε is small.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import brentq
from torch import Tensor

from fedgist.compress import as_uint8
from fedgist.compress.fixed import build
from fedgist.errors import ConfigError
from fedgist.methods._obfuscation import Obfuscated, happens
from fedgist.types import Images, Task

__all__ = ["LDPSlicing", "allocation", "estimates", "flipped", "squared_error"]

WEIGHTS = 4.0 ** np.arange(8)


def squared_error(epsilons: NDArray[np.float64]) -> float:
    """Return the variance of an estimated byte, from the ε of its bits, lowest first."""
    return float((WEIGHTS / (4 * np.sinh(epsilons / 2) ** 2)).sum())


@lru_cache(maxsize=32)
def allocation(epsilon: float) -> tuple[float, ...]:
    """Return the ε of each of the 8 bits of a byte, lowest first, that sum to ``epsilon``.

    With y = sinh²(ε_k / 2) and a = (4^k / 4λ)², Lagrange's equation reads y³ = a (1 + y).
    """

    def given(log_lagrange: float) -> NDArray[np.float64]:
        a = (WEIGHTS / (4 * np.exp(log_lagrange))) ** 2
        low, high = np.zeros(8), 2 * (a ** (1 / 3) + a**0.5)  # the root lies between
        for _ in range(200):
            y = (low + high) / 2
            above = y**3 > a * (1 + y)
            low, high = np.where(above, low, y), np.where(above, y, high)
        return np.asarray(2 * np.arcsinh(np.sqrt((low + high) / 2)))

    log = brentq(lambda v: given(v).sum() - epsilon, -200.0, 100.0, xtol=1e-12)
    found = given(float(log))
    return tuple(float(e) for e in found * (epsilon / found.sum()))


def flipped(values: Tensor, epsilons: tuple[float, ...], rng: torch.Generator) -> Tensor:
    """Return uint8 ``values`` with bit k flipped with probability 1 / (1 + e^{ε_k})."""
    out = values.clone()
    for k, epsilon in enumerate(epsilons):
        flip = happens(math.exp(-epsilon) / (1 + math.exp(-epsilon)), values.shape, rng)
        out ^= flip.to(torch.uint8) << k
    return out


def estimates(epsilons: tuple[float, ...]) -> Tensor:
    """Return the unbiased estimate of a byte for each received one, float64 ``[256]``."""
    bits = (torch.arange(256)[:, None] >> torch.arange(8)) & 1
    kept = 1 / (1 + torch.exp(-torch.tensor(epsilons, dtype=torch.float64)))
    return ((bits - (1 - kept)) / (2 * kept - 1) * 2.0 ** torch.arange(8)).sum(1)


@dataclass(frozen=True)
class LDPSlicing(Obfuscated):
    """Thumbnails with randomised bits and labels, once.

    Attributes:
        side: of a thumbnail, in pixels.
    """

    side: int = 14

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.epsilon < 1e-6:
            raise ConfigError(f"method.epsilon must be at least 1e-6. Got {self.epsilon}")
        if self.side < 1:
            raise ConfigError(f"method.side must be at least 1. Got {self.side}")

    @property
    def spec(self) -> str:
        """Means over a grid."""
        return f"area:{self.side}"

    @property
    def statement(self) -> str:
        """Local DP for pixels."""
        whole = self.side**2 * self.epsilon
        return (
            f"LDP-Slicing: ε = {self.epsilon:g} holds for one pixel, all channels, of the "
            f"{self.side} x {self.side} image that is sent; for that image it is {whole:g}"
        )

    def small_side(self, task: Task) -> int:
        """Return ``side``.

        Raises:
            ConfigError: larger than an image.
        """
        if self.side > task.size:
            raise ConfigError(f"method.side must be at most {task.size}. Got {self.side}")
        return self.side

    def disturbed(self, task: Task, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return randomised bytes, by 255."""
        small = as_uint8(build(self.spec)(x))
        return flipped(small, self._bits(task.channels), rng) / 255

    def received(self, small: Images) -> Images:
        """Return what the server takes the bytes for."""
        table = estimates(self._bits(small.pixels.shape[1])).round().clamp(0, 255)
        pixels = table.to(torch.uint8)[small.pixels.to(torch.int64)]
        return Images(pixels, small.labels, small.classes)

    def _bits(self, channels: int) -> tuple[float, ...]:
        return allocation(self.epsilon / channels)
