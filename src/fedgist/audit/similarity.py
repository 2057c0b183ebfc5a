"""How much an image that leaves a client shows of the original: PSNR, SSIM and a feature distance.

All images are float ``[b, c, h, w]`` in [0, 1], c 1 or 3, and every figure is one per image. What
is smaller than its original is enlarged first (`compress.enlarge`), as in the papers that report
these.

- PSNR as IQA-PyTorch has it: 10 log10(1 / (MSE + 1e-8)), so identical images read 80 dB.
- SSIM (Wang et al. 2004) by torchmetrics: Gaussian window, reflected borders kept, channels
  averaged, data range always 1. Other programs crop the border or take luma only: such values do
  not belong in one table with these.
- The distance is LPIPS-like: LPIPS itself (`audit.lpips`) needs weights that are no package's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, final

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.compress import enlarge, quantised
from fedgist.encoders.efficientnet import _network
from fedgist.encoders.random_conv import RandomConv
from fedgist.errors import DataError, MissingExtra
from fedgist.types import BATCH

__all__ = [
    "Compress",
    "Distance",
    "PerImage",
    "Perceptual",
    "Similarity",
    "identified",
    "per_image",
    "psnr",
    "similarity",
    "ssim",
    "summary",
    "three_channels",
]

Compress = Callable[[Tensor], Tensor]
EPSILON = 1e-8  # of PSNR, in units of MSE
# Smallest side -> σ of SSIM's window, which is 2 int(3.5 σ + 0.5) + 1 pixels wide: 11, 7 or 5
SIGMAS = ((11, 1.5), (7, 0.8), (4, 0.5))
SIDE = 64  # pixels, what `Perceptual` resizes to
STEP = 25  # pairs whose maps stay in the cache of one core
RANDOM = (0, 4)  # seed and number of the random networks that stand in for a trained one


class Distance(Protocol):
    """A perceptual distance between images of one shape."""

    @property
    def name(self) -> str:
        """What it is, for a reader."""

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Map two float ``[b, c, h, w]`` in [0, 1] to ``[b]``, >= 0, 0 for equal images."""


@dataclass(frozen=True)
class PerImage:
    """Every pair's figures: float32 ``[n]`` each; higher is more alike but for ``distance``."""

    psnr: Tensor
    ssim: Tensor
    distance: Tensor


@dataclass(frozen=True)
class Similarity:
    """Means over ``n`` pairs.

    Attributes:
        psnr: dB, at most 80.
        ssim: in [-1, 1].
        distance: >= 0, of the `Distance` that was given.
        worst: position of the pair with the highest SSIM: the image least protected.
        n: pairs.
    """

    psnr: float
    ssim: float
    distance: float
    worst: int
    n: int


def psnr(a: Tensor, b: Tensor) -> Tensor:
    """Return the peak signal-to-noise ratio in dB, ``[b]``, of images in [0, 1]; at most 80.

    Raises:
        DataError: the shapes differ.
    """
    _check(a, b)
    mse = (a - b).square().mean((1, 2, 3))
    return -10 * torch.log10(mse + EPSILON)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the structural similarity, ``[b]`` in [-1, 1], of images in [0, 1].

    The Gaussian window has σ = 1.5 pixels from 11 pixels a side, 0.8 from 7 and 0.5 from 4, so
    that it fits.

    Raises:
        DataError: the shapes differ, or a side is below 4 pixels.
    """
    from torchmetrics.functional.image.ssim import (  # two seconds that most commands can spare
        structural_similarity_index_measure,
    )

    _check(a, b)
    side = min(a.shape[2:])
    sigma = next((sigma for least, sigma in SIGMAS if side >= least), None)
    if sigma is None:
        raise DataError(f"sides of images for SSIM must be at least 4 pixels. Got {side}")
    out = structural_similarity_index_measure(a, b, sigma=sigma, data_range=1.0, reduction="none")
    assert isinstance(out, Tensor)
    return out.reshape(len(a))


@final
class Perceptual:
    """A frozen, LPIPS-like distance that needs no download; not LPIPS.

    With m stages and unit-normalised channel vectors f of a stage's map,

        d(a, b) = 1/m Σ_stages mean_positions Σ_channels (f_a - f_b)²        in [0, 4]

    (Zhang et al., CVPR 2018, eq. 1 with all weights equal). Maps are those of EfficientNet-Lite0's
    stem and five stages when the extra ``encoders`` is installed, else those of three blocks of
    four random networks. Images are resized to 64x64, grey is repeated.

    Attributes:
        name: which of the two it is.
    """

    def __init__(self, *, trained: bool | None = None) -> None:
        """Load the network.

        Args:
            trained: True insists on the trained network, False takes the random ones, None takes
                what there is.

        Raises:
            MissingExtra: ``trained`` is True and the package with the weights is not installed.
        """
        self.name = "feature distance (EfficientNet-Lite0, unweighted; not LPIPS)"
        try:
            self._maps = _random() if trained is False else _lite0()
        except MissingExtra:
            if trained:
                raise
            trained, self._maps = False, _random()
        if trained is False:
            self.name = "feature distance (random networks, unweighted; not LPIPS)"

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Map two float32 ``[b, c, h, w]`` in [0, 1] to float32 ``[b]``.

        Raises:
            DataError: the shapes differ.
        """
        _check(a, b)
        with torch.no_grad():
            pairs = zip(torch.split(a, STEP), torch.split(b, STEP), strict=True)
            return torch.cat([self._some(torch.cat(pair)) for pair in pairs])

    def _some(self, both: Tensor) -> Tensor:
        both = three_channels(both)
        if min(both.shape[2:]) > SIDE:
            both = F.interpolate(both, (SIDE, SIDE), mode="bilinear", antialias=True)
        maps = self._maps(enlarge(both, SIDE))
        return torch.stack([_apart(m) for m in maps]).mean(0)


def per_image(originals: Tensor, shown: Tensor, perceptual: Distance) -> PerImage:
    """Compare every image with what is shown of it.

    Args:
        originals: float32 ``[n, c, s, s]`` in [0, 1], n >= 1.
        shown: float32 ``[n, c, y, y]`` in [0, 1]; upsampled when y < s.
        perceptual: of the column ``distance``.

    Raises:
        DataError: other shapes, or no image.
    """
    if not len(originals) or len(shown) != len(originals):
        raise DataError(
            "images to compare must be as many as originals, one or more. "
            f"Got {len(shown)} for {len(originals)}"
        )
    columns: list[tuple[Tensor, Tensor, Tensor]] = []
    with torch.no_grad():
        for a, b in zip(torch.split(originals, BATCH), torch.split(shown, BATCH), strict=True):
            b = enlarge(b, a.shape[-1])
            columns.append((psnr(a, b), ssim(a, b), perceptual(a, b)))
    return PerImage(*(torch.cat(column) for column in zip(*columns, strict=True)))


def summary(pairs: PerImage) -> Similarity:
    """Average the pairs."""
    return Similarity(
        psnr=float(pairs.psnr.mean()),
        ssim=float(pairs.ssim.mean()),
        distance=float(pairs.distance.mean()),
        worst=int(pairs.ssim.argmax()),
        n=len(pairs.ssim),
    )


def similarity(originals: Tensor, shown: Tensor, perceptual: Distance) -> Similarity:
    """Compare every image with what is shown of it, and average; see `per_image`."""
    return summary(per_image(originals, shown, perceptual))


def identified(
    uploads: Tensor,
    gallery: Tensor,
    truth: Tensor,
    compress: Callable[[Tensor], Tensor] | None = None,
) -> float:
    """Return the share of uploads whose nearest gallery image is the one they were made from.

    Nearest in L2: of the upsampled upload to the gallery's pixels or, given ``compress``, of the
    upload to what the gallery's images become. Where k images are nearest, a hit counts 1/k.

    Args:
        uploads: ``[n, c, y, y]``.
        gallery: ``[m, c, S, S]``.
        truth: int64 ``[n]``, positions in the gallery.
        compress: what made the uploads: float32 ``[b, c, S, S]`` to ``[b, c, y, y]``.
    """
    if compress is None:
        seen = enlarge(uploads, gallery.shape[-1])
        known = gallery
    else:
        seen = quantised(uploads)
        with torch.no_grad():
            known = torch.cat([quantised(compress(x)) for x in torch.split(gallery, BATCH)])
    a, b = (255 * x.flatten(1).to(torch.float64) for x in (seen, known))
    if compress is not None:
        a, b = a.round(), b.round()  # integers: ties are exact
    apart = a.square().sum(1)[:, None] - 2 * a @ b.T + b.square().sum(1)
    near = apart <= apart.min(1, keepdim=True).values + 1e-6
    hit = near.gather(1, truth[:, None])[:, 0]
    return float((hit / near.sum(1)).mean())


def three_channels(x: Tensor) -> Tensor:
    """Repeat grey ``[b, 1, h, w]`` to ``[b, 3, h, w]``; leave colour alone."""
    return x.expand(-1, 3, -1, -1) if x.shape[1] == 1 else x


def _check(a: Tensor, b: Tensor) -> None:
    if a.ndim != 4 or a.shape != b.shape:
        raise DataError(
            f"images to compare must have one shape [b, c, h, w]. Got {list(a.shape)} and "
            f"{list(b.shape)}: use `enlarge` on the smaller"
        )


def _apart(maps: Tensor) -> Tensor:
    """Map one stage's maps of both halves ``[2b, k, h, w]`` to ``[b]``."""
    a, b = F.normalize(maps, dim=1).chunk(2)
    return (a - b).square().sum(1).mean((1, 2))


Maps = Callable[[Tensor], list[Tensor]]


def _lite0() -> Maps:
    net = _network()

    def maps(x: Tensor) -> list[Tensor]:
        x = ((x * 255 - 127) / 128).contiguous(memory_format=torch.channels_last)
        out = [net._stem(x)]
        for stage in net._stages:
            out.append(stage(out[-1]))
        return out

    return maps


def _random() -> Maps:
    seed, nets = RANDOM
    drawn = RandomConv(seed, nets)._weights

    def maps(x: Tensor) -> list[Tensor]:
        stages: list[list[Tensor]] = []
        for weights in drawn:
            y, blocks = 2 * x - 1, []
            for w in weights:
                y = F.avg_pool2d(F.relu(F.conv2d(y, w, padding=1)), 2)
                blocks.append(y)
            stages.append(blocks)
        # channels of all networks side by side: one unit vector for each position and block
        return [torch.cat(blocks, 1) for blocks in zip(*stages, strict=True)]

    return maps
