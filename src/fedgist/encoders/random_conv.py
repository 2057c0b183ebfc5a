"""`RandomConv`: random convolutional networks that need no public data.

T networks of three blocks (3x3 convolution, one normalisation group per channel, ReLU, 2x2 average
pooling; Zhao and Bilen, "Dataset Condensation with Distribution Matching", WACV 2023,
https://arxiv.org/abs/2110.04181), He-initialised from a seed and never trained. Every network's
4x4 map of features is centred, scaled to norm 1 and then to 1/√T, so that the joint embedding of
an image has norm 1 whatever the image: it can be summed privately without clipping.
"""

from __future__ import annotations

import math
from functools import cached_property
from typing import ClassVar, final

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.encoders import files
from fedgist.encoders.base import Encoder, PublicCodes
from fedgist.encoders.public import blank
from fedgist.errors import ConfigError, EncoderError

__all__ = ["RandomConv"]

CELLS = 4  # cells per side of the last feature map: three poolings of 25 .. 32 pixels
PROBES = 200  # images of noise that a network's centre is measured on
BITS = 20  # weights are multiples of 2^-BITS: the same on machines that round a logarithm apart
COARSE = 10  # and centres of 2^-COARSE, for those that add in another order


@final
class RandomConv(Encoder):
    """T random ConvNet-3 networks; an `Encoder` without public data and a map to match images with.

    Everything follows from the seed, so that all sites have the same networks. The centre of a
    network is its mean map of images of pink noise: the mean that all images have in common would
    otherwise use up more than half of a record's norm. (On Fashion-MNIST classes differ by 0.13 of
    the squared norm without a centre, 0.31 with this one and 0.28 with one of public images.)

    Attributes:
        nets: T.
        width: channels of every block.
        strided: whether convolutions of stride 2 stand for the pooling: a quarter of the work,
            features a little worse.
        features: e = 16 · width, numbers per network; ``dim`` is T · e.
    """

    size: ClassVar[int] = 32
    decodes: ClassVar[bool] = False
    track: str = "no public data"
    step: ClassVar[int] = 50  # images whose feature maps stay in the cache of one core

    def __init__(
        self,
        seed: int,
        nets: int = 1,
        width: int = 32,
        name: str | None = None,
        *,
        strided: bool = False,
    ) -> None:
        """Draw the networks.

        Args:
            seed: of the weights; public.
            nets: number of networks T.
            width: channels of every block.
            name: as written in the task; ``random-conv:SEED`` when None.
            strided: take convolutions of stride 2 instead of pooling.

        Raises:
            ConfigError: nets or width below 1, or a negative seed.
        """
        for what, value, least in (("seed", seed, 0), ("nets", nets, 1), ("width", width, 1)):
            if value < least:
                raise ConfigError(f"{what} of random-conv must be at least {least}. Got {value}")
        self.name = name or f"random-conv:{seed}"
        self.strided = strided
        self.nets, self.width, self.features = nets, width, width * CELLS**2
        self.dim = nets * self.features
        rng = torch.Generator().manual_seed(seed)
        self._weights = [_draw(width, rng) for _ in range(nets)]
        self._centres: dict[int, Tensor] = {}
        flat = {f"{t}.{i}": w for t, net in enumerate(self._weights) for i, w in enumerate(net)}
        self.digest = files.tensors_digest(flat)

    @staticmethod
    def of(seed: str, name: str) -> RandomConv:
        """Build the encoder that a task calls ``random-conv:SEED``.

        Raises:
            EncoderError: the seed is not a whole number.
        """
        if not seed.isdecimal():
            raise EncoderError(
                f"random-conv must be followed by a seed, as in random-conv:7. Got '{name}'"
            )
        return RandomConv(int(seed), name=name)

    @cached_property
    def public(self) -> PublicCodes:  # type: ignore[override]
        """Nothing is public about the codes but their norm: mean 0, covariance I, norms 1."""
        empty = blank(self.dim)
        ones = torch.ones_like(empty.norms)
        return PublicCodes(empty.mean, empty.cov, empty.values, empty.vectors, ones, ones[0])

    def embed(self, x: Tensor, nets: range | None = None) -> Tensor:
        """Embed task images; differentiable in ``x``.

        Args:
            x: float32 ``[b, c, h, w]`` in [0, 1], c 1 or 3. Images of 25 to 32 pixels are taken as
                they are, others are resized to 32x32.
            nets: which networks; all when None.

        Returns:
            float32 ``[b, len(nets), features]``; each network's part has norm 1/√T.
        """
        x = _fit(x, self.size)
        return torch.stack([self._one(x, t) for t in nets or range(self.nets)], dim=1)

    def rows(self, x: Tensor) -> Tensor:
        """Return the records of a private sum: float32 ``[b, T, features]``, any b.

        The batch is filled up to whole steps, so that a row does not depend on its neighbours.
        """
        with torch.no_grad():
            parts = [self.embed(_pad(part, self.step)) for part in torch.split(x, self.step)]
        return torch.cat(parts)[: len(x)]

    def encode(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, 3, 32, 32]`` in [0, 1] to float64 ``[b, dim]`` of norm 1."""
        grey = x.stride(1) == 0  # one channel seen three times
        with torch.no_grad():
            z = self.embed((x[:, :1] if grey else x).contiguous())
        return z.flatten(1).to(torch.float64)

    def _one(self, x: Tensor, t: int) -> Tensor:
        centred = _maps(x, self._weights[t], self.strided) - self._centre(t)
        return F.normalize(centred, dim=1) / math.sqrt(self.nets)

    def _centre(self, t: int) -> Tensor:
        if t not in self._centres:
            with torch.no_grad():
                noise = torch.split(_pink(PROBES, self.size), self.step)
                maps = [_maps(x, self._weights[t], self.strided) for x in noise]
                centre = torch.cat(maps).mean(0)
            self._centres[t] = (centre * 2**COARSE).round() / 2**COARSE
        return self._centres[t]


def _draw(width: int, rng: torch.Generator) -> list[Tensor]:
    """Draw the filters of one network, He-initialised: float32 ``[width, inputs, 3, 3]``."""
    filters = []
    for inputs in (3, width, width):
        w = torch.randn(width, inputs, 3, 3, generator=rng, dtype=torch.float64)
        w = (w * math.sqrt(2 / (9 * inputs)) * 2**BITS).round() / 2**BITS
        filters.append(w.to(torch.float32))
    return filters


def _maps(x: Tensor, weights: list[Tensor], strided: bool) -> Tensor:
    """Run one network: ``[b, c, h, w]`` to ``[b, features]``."""
    for i, w in enumerate(weights):
        if i == 0 and x.shape[1] == 1:
            w = w.sum(1, keepdim=True)  # grey stands for three equal channels
        x = F.relu(F.group_norm(F.conv2d(x, w, stride=1 + strided, padding=1), len(w)))
        if not strided:
            x = F.avg_pool2d(x, 2, ceil_mode=True)
    return x.flatten(1)


def _fit(x: Tensor, size: int) -> Tensor:
    """Resize what three poolings would not bring to 4x4 cells."""
    if all(size - 2**3 < side <= size for side in x.shape[2:]):
        return x
    shrink = max(x.shape[2:]) > size
    return F.interpolate(x, (size, size), mode="bilinear", align_corners=False, antialias=shrink)


def _pink(n: int, size: int) -> Tensor:
    """Return grey images of 1/f noise, float32 ``[n, 1, size, size]`` in [0, 1], always the same.

    The power spectrum of natural images falls like theirs (Field 1987).
    """
    rng = torch.Generator().manual_seed(0)
    f = torch.fft.fftfreq(size, dtype=torch.float64)
    radius = (f[:, None] ** 2 + f[None, : size // 2 + 1] ** 2 + 1 / size**2).sqrt()
    white = torch.randn(n, 1, size, size, generator=rng, dtype=torch.float64)
    x = torch.fft.irfft2(torch.fft.rfft2(white) / radius, s=(size, size))
    x = (x - x.mean((2, 3), keepdim=True)) / x.std((2, 3), keepdim=True)
    out: Tensor = (x / 4 + 0.5).clamp(0, 1).to(torch.float32)
    return out


def _pad(x: Tensor, rows: int) -> Tensor:
    """Fill up to ``rows``, so that a convolution meets one batch shape only."""
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])]) if len(x) < rows else x
