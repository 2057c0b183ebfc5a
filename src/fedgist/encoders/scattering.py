"""`scattering`: wavelet scattering features, whitened by public images. No learned weights.

Bruna and Mallat, "Invariant Scattering Convolution Networks", arXiv 1203.1513, with J = 2 octaves
and L = 8 orientations on 32x32 luminance:

* order 0: x * φ; order 1: |x * ψ_1| * φ; order 2: ||x * ψ_1| * ψ_2| * φ for ψ_2 one octave below
  ψ_1: 1 + 16 + 64 channels. ψ are Morlet wavelets, φ a Gaussian sampled every 4 pixels;
* log(1 + S / s) for orders 1 and 2, s a tenth of the channel's mean on public images;
* 2x2 means: 81 x 4 x 4 features, projected on the principal directions of public images.

Wavelets this short are cheaper as direct, strided convolutions than by Fourier transform (1.9
times on one thread), and a convolution treats every image of the batch alike.
"""

from __future__ import annotations

import math
from functools import lru_cache
from pathlib import Path
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.encoders import files
from fedgist.encoders.base import GRID, Encoder
from fedgist.encoders.projection import Projection
from fedgist.errors import EncoderError

__all__ = [
    "FEATURES",
    "ScatteringEncoder",
    "features",
    "luminance",
    "scatter",
    "wavelets",
]

KIND = "scattering"
PATH = Path(__file__).with_name("scattering.safetensors")
SIZE = 32
ANGLES = 8
CHANNELS = 1 + 2 * ANGLES + ANGLES**2
FEATURES = CHANNELS * 16
RADII = (4, 7)  # of the wavelets of octaves 0 and 1, in pixels
LUMA = (77.0, 150.0, 29.0)  # ITU-R BT.601 in 256ths: exact in float32 on the grid of pixels


def wavelets(octave: int) -> Tensor:
    """Return float64 ``[16, k, k]``: real parts of 8 Morlet wavelets, then imaginary parts.

    ψ(u) = g(u) (exp(iξu·e) - β), g a Gaussian of standard deviation σ along e and 2σ across,
    σ = 0.8·2^octave, ξ = (3π/4) / 2^octave, e at angle πl/8, β such that ψ sums to 0.
    """
    sigma, xi, r = 0.8 * 2**octave, 0.75 * math.pi / 2**octave, RADII[octave]
    axis = torch.arange(-r, r + 1, dtype=torch.float64)
    y, x = axis[:, None], axis[None, :]
    waves = []
    for turn in range(ANGLES):
        c, s = math.cos(math.pi * turn / ANGLES), math.sin(math.pi * turn / ANGLES)
        along, across = c * x + s * y, c * y - s * x
        g = torch.exp(-(along**2 + across**2 / 4) / (2 * sigma**2)) / (4 * math.pi * sigma**2)
        wave = torch.polar(torch.ones_like(along), xi * along)
        waves.append(g * (wave - (g * wave).sum() / g.sum()))
    psi = torch.stack(waves)
    return torch.cat([psi.real, psi.imag])


@lru_cache
def _psi(octave: int) -> Tensor:
    return wavelets(octave)[:, None].to(torch.float32)


@lru_cache
def _phi(n: int) -> Tensor:
    """Return ``[8, n]``: a Gaussian of 1.6 pixels around each of 8 centres, ends reflected."""
    at = torch.arange(-n + 1, 2 * n - 1)
    centres = 4 * torch.arange(8, dtype=torch.float64) + 1.5
    g = torch.exp(-((at * (SIZE // n) - centres[:, None]) ** 2) / (2 * 1.6**2))
    at = at.abs()
    folded = torch.where(at >= n, 2 * n - 2 - at, at)
    out = torch.zeros(8, n, dtype=torch.float64).index_add_(1, folded, g)
    return (out / out.sum(1, keepdim=True)).to(torch.float32)


def _modulus(x: Tensor, octave: int) -> Tensor:
    """Map ``[b, 1, n, n]`` to ``[b, 8, n / 2^octave, ...]``: |x * ψ|, ends reflected."""
    y = F.pad(x, (RADII[octave],) * 4, mode="reflect")
    y = F.conv2d(y, _psi(octave), stride=2**octave)
    return y[:, :ANGLES].square().add_(y[:, ANGLES:].square()).sqrt_()


def _smooth(u: Tensor) -> Tensor:
    """Map ``[b, c, n, n]`` to ``[b, c, 8, 8]``: u * φ every 4 pixels."""
    phi = _phi(u.shape[-1])
    return phi @ (u @ phi.T)


def scatter(x: Tensor) -> Tensor:
    """Map float32 ``[b, 1, 32, 32]`` to scattering coefficients ``[b, 81, 8, 8]``, at least 0.

    Channels: order 0; order 1 by octave, then angle; order 2 by first angle, then second.
    """
    fine, coarse = _modulus(x, 0), _modulus(x, 1)
    second = _modulus(fine.view(-1, 1, SIZE, SIZE), 1).view(-1, ANGLES**2, SIZE // 2, SIZE // 2)
    return torch.cat([_smooth(u) for u in (x, fine, coarse, second)], dim=1)


def features(x: Tensor, scale: Tensor) -> Tensor:
    """Map float32 ``[b, 1, 32, 32]`` to float32 ``[b, 1296]``.

    Args:
        x: luminance in [0, 1].
        scale: float32 ``[80]``, s of log(1 + S / s) for the channels of orders 1 and 2.
    """
    s = scatter(x)
    s[:, 1:].div_(scale[:, None, None]).log1p_()
    return F.avg_pool2d(s, 2).flatten(1)


@final
class ScatteringEncoder(Encoder):
    """Wavelet scattering on luminance: features for classifier heads, no decoder.

    Colour is not seen: an image and its grey version have the same code.
    """

    size: ClassVar[int] = SIZE
    decodes: ClassVar[bool] = False
    step: ClassVar[int] = 25

    def __init__(self, file: files.CodecFile, name: str = KIND, dim: int | None = None) -> None:
        """Build from a codec file of kind ``scattering``.

        Args:
            file: what `scripts/fit_scattering.py` wrote.
            name: as written in the task.
            dim: keep this many leading directions, one of the file's dimensions; None for its
                largest.

        Raises:
            EncoderError: it does not fit, or was not measured at ``dim``.
        """
        self._project = Projection(file, dim, name)
        scale = file.meta.get("scale")
        if self._project.features != FEATURES or not _positive(scale, CHANNELS - 1):
            raise EncoderError(
                f"'{name}' must project {FEATURES} features and hold {CHANNELS - 1} positive "
                f"scales. Got {self._project.features} and {scale!s:.40}"
            )
        self.name, self.digest = name, file.digest
        self.dim, self.public = self._project.dim, self._project.public
        self._scale = torch.tensor(scale, dtype=torch.float32)

    @staticmethod
    def load(spec: str = KIND) -> ScatteringEncoder:
        """Load the shipped file: ``scattering`` or ``scattering:D``.

        Raises:
            EncoderError: D is not one of the file's dimensions, or the file is damaged.
        """
        _, _, dim = spec.partition(":")
        if dim and not dim.isdecimal():
            raise EncoderError(f"encoder must be scattering:D with D a number. Got '{spec}'")
        return ScatteringEncoder(files.read(PATH), spec, int(dim) if dim else None)

    def encode(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, 3, 32, 32]`` on the grid k/65535 to float64 ``[b, dim]``.

        The projection is exact; the features before it come from convolutions, whose rounding
        may differ between machines.
        """
        grey = x.stride(1) == 0  # one channel seen three times
        return self._project(features(x[:, :1] if grey else luminance(x), self._scale))


def luminance(x: Tensor) -> Tensor:
    """Map float32 ``[b, 3, h, w]`` on the grid k/65535 to ``[b, 1, h, w]``.

    Sums of integers below 2^24 are exact: three equal channels give back that channel.
    """
    k = x.mul(GRID).round_()
    y = k[:, 0] * LUMA[0] + k[:, 1] * LUMA[1] + k[:, 2] * LUMA[2]
    return y.div_(256).div_(GRID)[:, None]


def _positive(numbers: object, size: int) -> bool:
    return (
        isinstance(numbers, list)
        and len(numbers) == size
        and all(type(v) is float and 0 < v < math.inf for v in numbers)
    )
