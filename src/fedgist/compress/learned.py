"""The learned compressor of FedSumUp, and the loss that tells it what to forget.

Source: "FedSumUp: User-Auditable Privacy-Aware Representation Sharing for Resource-Constrained
Federated Intelligence". ``paper`` is its compressor: five 3x3 convolutions of 128 channels, each
with GroupNorm and ReLU, adaptive average pooling to y x y, squeeze-and-excitation (two layers after
global pooling), a 1x1 convolution to the image's channels, tanh. It runs at full resolution: 465
million multiply-adds for a grey 28x28 image, nine times a ConvNet-3 of that width. ``light`` folds
2x2 pixels into channels first and is narrower: the same interface, a hundred times fewer.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.errors import ConfigError
from fedgist.train.models import initialise

__all__ = [
    "Compressor",
    "Kind",
    "build_compressor",
    "dissimilarity",
    "load_compressor",
    "multiply_adds",
    "ssim",
]

Kind = Literal["light", "paper"]
KINDS: dict[str, tuple[int, int]] = {"light": (2, 24), "paper": (1, 128)}  # fold, channels
LAYERS = 5
GROUPS = 8  # of GroupNorm; the paper does not say how many
REDUCED = 4  # squeeze-and-excitation narrows by this factor
LEAST_ERROR = 1e-4  # squared error added within PSNR: without it the gradient has no bound
FLOOR = 5.0  # dB; images this different are not pushed further apart


class Compressor(nn.Module):
    """Maps images to small images of the same channels; no buffers, no random numbers.

    Args:
        kind: ``light`` or ``paper``.
        channels: 1 or 3.
        size: side of an image in pixels.
        side: side y of a small image, in 2 .. size.
    """

    def __init__(self, kind: str, channels: int, size: int, side: int) -> None:
        super().__init__()
        if kind not in KINDS:
            raise ConfigError(f"compressor must be one of {', '.join(KINDS)}. Got '{kind}'")
        if not 2 <= side <= size:
            raise ConfigError(f"side must lie in 2..{size}, the side of an image. Got {side}")
        self.kind, self.channels, self.size, self.side = kind, channels, size, side
        self.fold, width = KINDS[kind]
        layers: list[nn.Module] = []
        inputs = channels * self.fold**2
        for _ in range(LAYERS):
            norm = nn.GroupNorm(GROUPS, width)
            layers += [nn.Conv2d(inputs, width, 3, padding=1), norm, nn.ReLU(inplace=True)]
            inputs = width
        self.body = nn.Sequential(*layers)
        self.gate = nn.Sequential(
            nn.Linear(width, width // REDUCED),
            nn.ReLU(inplace=True),
            nn.Linear(width // REDUCED, width),
            nn.Sigmoid(),
        )
        self.colour = nn.Conv2d(width, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, channels, size, size]`` to ``[b, channels, side, side]``, in [0, 1].

        The network itself works in [-1, 1], as the paper's.
        """
        x = 2 * x - 1
        if self.fold > 1:
            odd = -x.shape[-1] % self.fold
            x = F.pixel_unshuffle(F.pad(x, (0, odd, 0, odd), mode="replicate"), self.fold)
        h = self.body(x)
        if self.side <= h.shape[-1]:
            h = F.adaptive_avg_pool2d(h, self.side)
        else:
            h = F.interpolate(h, (self.side, self.side), mode="bilinear", align_corners=False)
        h = h * self.gate(h.mean((2, 3)))[:, :, None, None]
        return (torch.tanh(self.colour(h)) + 1) / 2


def build_compressor(
    kind: str, channels: int, size: int, side: int, rng: torch.Generator
) -> Compressor:
    """Build a compressor with freshly drawn parameters: He's, zero biases, unit normalisation.

    Raises:
        ConfigError: unknown kind, or a side that does not fit.
    """
    model = _blank(kind, channels, size, side)
    initialise(model, rng)
    return model


def load_compressor(
    kind: str, channels: int, size: int, side: int, tensors: Mapping[str, Tensor]
) -> Compressor:
    """Build a frozen compressor with a copy of these parameters.

    Raises:
        ConfigError: unknown kind, or a side that does not fit.
        RuntimeError: other tensors than it has.
    """
    model = _blank(kind, channels, size, side)
    model.load_state_dict(tensors)
    return model.requires_grad_(False).eval()


def _blank(kind: str, channels: int, size: int, side: int) -> Compressor:
    with torch.device("meta"):  # layers would otherwise draw from the global generator
        model = Compressor(kind, channels, size, side)
    return model.to_empty(device="cpu")


def multiply_adds(kind: str, channels: int, size: int) -> int:
    """Return the multiply-adds of the convolutions for one image."""
    fold, width = KINDS[kind]
    cells = math.ceil(size / fold) ** 2
    return 9 * cells * width * (channels * fold**2 + (LAYERS - 1) * width)


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Return the mean structural similarity of each pair, float ``[n]``; differentiable.

    Wang et al., "Image Quality Assessment: From Error Visibility to Structural Similarity", IEEE
    TIP 2004: Gaussian windows of deviation 1.5 over 11 pixels (fewer where an image has fewer than
    6), K1 = 0.01, K2 = 0.03, images in [0, 1]; borders are mirrored, and channels averaged.
    """
    reach = min(5, a.shape[-1] - 1)
    at = torch.arange(-reach, reach + 1, dtype=a.dtype)
    line = torch.exp(-at.square() / (2 * 1.5**2))
    line = line / line.sum()
    n, c, h, w = a.shape

    def blurred(x: Tensor) -> Tensor:
        x = F.pad(x.reshape(-1, 1, h, w), (reach,) * 4, mode="reflect")
        return F.conv2d(F.conv2d(x, line.view(1, 1, 1, -1)), line.view(1, 1, -1, 1))

    parts = blurred(torch.cat([a, b, a * a, b * b, a * b])).view(5, n, c, h, w)
    mean_a, mean_b, aa, bb, ab = parts
    c1, c2 = 0.01**2, 0.03**2
    top = (2 * mean_a * mean_b + c1) * (2 * (ab - mean_a * mean_b) + c2)
    bottom = (mean_a**2 + mean_b**2 + c1) * (aa - mean_a**2 + bb - mean_b**2 + c2)
    out: Tensor = (top / bottom).mean((1, 2, 3))
    return out


def dissimilarity(a: Tensor, b: Tensor, beta: float) -> Tensor:
    """Return SSIM + β PSNR of images in [0, 1], meaned over pairs: what is made small.

    PSNR is 10 log10(1 / (MSE + 1e-4)), and not lowered below 5 dB.
    """
    error = (a - b).square().mean((1, 2, 3))
    psnr = -10 * torch.log10(error + LEAST_ERROR)
    return ssim(a, b).mean() + beta * psnr.clamp(min=FLOOR).mean()
