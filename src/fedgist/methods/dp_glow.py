"""An orthogonal stand-in for DP-GLOW: noise on the coefficients of a public invertible transform.

The comparison of the FedSumUp paper names DP-GLOW (arXiv 2212.10688), which noises the latents of a
trained invertible network (Glow). No code or weights of it are public. This is *not* DP-GLOW: the
network is replaced by a seeded public orthogonal transform Q, the simplest invertible map, and the
Laplace noise by Gaussian noise, which suits the L2 norm that Q preserves. Results must be named so.

A client shrinks an image to y x y areas (as `ldp_slicing` does), d = c y² numbers in [0, 1], and
sends, after rounding to bytes,

    x' = ½ + Qᵀ (q + e),        q = Q (x - ½) clipped to norm R,        e ~ N(0, τ² I)

R is ``radius`` times √d / 2, the norm of the furthest image. q is put on a grid and q + e rounded
to it (`clip_to_grid`), so that what leaves are whole numbers: rounding comes after the noise, and
the low bits of floating-point numbers tell nothing (Mironov, CCS 2012).

What ε holds: two images differ by at most 2 R after clipping, so with τ = 2 R σ what is sent of one
image is (ε, δ)-indistinguishable from what would be sent of any other: local differential privacy
of one whole image, by the analytic Gaussian mechanism (Balle and Wang, ICML 2018, Theorem 8, gives
σ from ε and δ). The label, and that an image was sent, are not covered: the claim is ε = inf. A
person's k images have k ε.

N(0, τ² I) looks alike in every orthogonal basis, and so does the clip: Q changes neither ε nor how
much noise a pixel gets. A trained network does change the latter, so that what the stand-in reaches
is no verdict on Glow.

Q = C D₂ C D₁: random signs D, then the orthonormal cosine transform C over rows, columns and
channels, twice. It mixes all numbers and needs no d x d matrix.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import torch
from torch import Tensor

from fedgist.compress.fixed import build
from fedgist.errors import ConfigError
from fedgist.methods._obfuscation import Obfuscated
from fedgist.privacy.accounting import check_budget, sigma_gaussian
from fedgist.privacy.statistics import clip_to_grid
from fedgist.types import BATCH, Task

__all__ = ["OrthogonalNoise", "analysed", "cosines", "synthesised"]

LEVELS = 2**16  # integer radius: rounding stays far below the noise


@lru_cache(maxsize=16)
def cosines(n: int) -> Tensor:
    """Return the orthonormal cosine transform (DCT-II), float64 ``[n, n]``."""
    k = torch.arange(n, dtype=torch.float64)
    out = torch.cos(math.pi / n * (k[None] + 0.5) * k[:, None]) * math.sqrt(2 / n)
    out[0] /= math.sqrt(2)
    return out


def analysed(x: Tensor, seed: int) -> Tensor:
    """Return Q x of images, float64 ``[b, c, y, y]``, in that shape."""
    for signs in _signs(tuple(x.shape[1:]), seed):
        x = _turned(x * signs, False)
    return x


def synthesised(z: Tensor, seed: int) -> Tensor:
    """Undo `analysed`: return Qᵀ z."""
    for signs in reversed(_signs(tuple(z.shape[1:]), seed)):
        z = _turned(z, True) * signs
    return z


def _turned(x: Tensor, back: bool) -> Tensor:
    channel, side = (c.T if back else c for c in (cosines(x.shape[1]), cosines(x.shape[2])))
    return torch.einsum("dc,bchw->bdhw", channel, side @ x @ side.T)


@lru_cache(maxsize=16)
def _signs(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    first, second = torch.randint(0, 2, (2, *shape), generator=rng).to(torch.float64) * 2 - 1
    return first, second


@dataclass(frozen=True)
class OrthogonalNoise(Obfuscated):
    """Images with noisy coefficients, and labels, once. Stands in for DP-GLOW.

    Attributes:
        side: y, of the small image, in pixels.
        radius: R, as a share of the norm of the furthest image.
        delta: δ of the disturbance, beside its ``epsilon``.
        seed: of the transform's signs: public, the same at every client.
    """

    side: int = 7
    radius: float = 0.8
    delta: float = 1e-5
    seed: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_budget(self.epsilon, self.delta)
        if self.side < 1:
            raise ConfigError(f"method.side must be at least 1. Got {self.side}")
        if not 0 < self.radius <= 1:
            raise ConfigError(f"method.radius must lie in (0, 1]. Got {self.radius}")

    @property
    def spec(self) -> str:
        """Means over a grid."""
        return f"area:{self.side}"

    @property
    def statement(self) -> str:
        """Local DP for one whole image."""
        return (
            f"an orthogonal transform that stands in for DP-GLOW: ε = {self.epsilon:g}, δ = "
            f"{self.delta:g} holds for all that is sent of one image except its label, any other "
            "image in its place (analytic Gaussian mechanism)"
        )

    def small_side(self, task: Task) -> int:
        """Return ``side``.

        Raises:
            ConfigError: larger than an image.
        """
        if self.side > task.size:
            raise ConfigError(f"method.side must be at most {task.size}. Got {self.side}")
        return self.side

    def clip(self, channels: int) -> float:
        """Return R."""
        return self.radius * math.sqrt(channels) * self.side / 2

    def deviation(self, channels: int) -> float:
        """Return τ, of the noise in every coefficient: 2 R σ."""
        return 2 * self.clip(channels) * sigma_gaussian(self.epsilon, self.delta)

    def disturbed(self, task: Task, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return noisy small images, clamped."""
        return torch.cat([self._disturbed(part, rng) for part in torch.split(x, BATCH)])

    def _disturbed(self, x: Tensor, rng: torch.Generator) -> Tensor:
        small = build(self.spec)(x).to(torch.float64)
        q = analysed(small - 0.5, self.seed)
        clip = self.clip(q.shape[1])
        unit = clip / LEVELS
        whole = clip_to_grid(q.flatten(1), clip, LEVELS)
        noise = torch.randn(whole.shape, generator=rng, dtype=torch.float64)
        noisy = (whole + noise * (self.deviation(q.shape[1]) / unit)).round().view_as(q)
        out = 0.5 + synthesised(noisy * unit, self.seed)
        return out.clamp(0, 1).to(torch.float32)
