"""DP-Pix: means of cells with Laplace noise (Fan, "Image Pixelization with DP", DBSec 2018).

Neighbouring images differ in at most m pixels. The paper adds Laplace noise of scale m / (b² ε), on
the scale [0, 1], to the mean of every cell of b x b pixels; with c channels that differ together
it is m c / (b² ε).

The noise here is discrete, on whole sums of bytes. One pixel belongs to one cell and changes its
sum by at most 255 in each channel, so m pixels change the sums of an image by at most 255 m c in
all, counted in L1. Whole sums with noise P(k) ∝ exp(-|k| / t), t = 255 m c / ε, are thus ε-DP: the
ratio of two probabilities is at most exp(255 m c / t). Division by b², clamping and rounding come
after. Floating-point Laplace noise would not do: which floats x + noise can reach depends on x, and
the gaps tell x apart (Mironov, "On Significance of the Least Significant Bits for DP", CCS 2012).
The standard deviation is that of the paper's noise up to the grid's step of 1 / (255 b²).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError
from fedgist.methods._obfuscation import Obfuscated, discrete_laplace
from fedgist.types import Task

__all__ = ["DPPix", "cell_sums", "noise_scale"]


def cell_sums(x: Tensor, cell: int) -> tuple[Tensor, Tensor]:
    """Sum the bytes of float images in [0, 1] over cells; those at the far edges may be smaller.

    Returns:
        Sums, int64 ``[b, c, y, y]``, and the pixels of each cell, int64 ``[y, y]``.
    """
    b, c, size, _ = x.shape
    pad = -size % cell
    y = (size + pad) // cell
    values = F.pad((x * 255).round().to(torch.int64), (0, pad, 0, pad))
    side = torch.full((y,), cell)
    side[-1] -= pad
    return values.reshape(b, c, y, cell, y, cell).sum((3, 5)), torch.outer(side, side)


def noise_scale(neighbourhood: int, channels: int, epsilon: float) -> float:
    """Return t: the L1 sensitivity of all cell sums of an image, by ε."""
    return 255 * neighbourhood * channels / epsilon


@dataclass(frozen=True)
class DPPix(Obfuscated):
    """Noisy mosaics and labels, once.

    Attributes:
        cell: b, the side of a cell in pixels.
        neighbourhood: m, the number of pixels in which neighbouring images may differ.
    """

    cell: int = 4
    neighbourhood: int = 16

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("cell", "neighbourhood"):
            if getattr(self, name) < 1:
                raise ConfigError(f"method.{name} must be at least 1. Got {getattr(self, name)}")

    @property
    def spec(self) -> str:
        """Means of cells."""
        return f"cells:{self.cell}"

    @property
    def statement(self) -> str:
        """DP for neighbourhoods of pixels."""
        m = self.neighbourhood
        return (
            f"DP-Pix: ε = {self.epsilon:g} holds between two images that differ in at most {m} "
            f"pixels; between any two images of s x s pixels it is s²/{m} times that"
        )

    def small_side(self, task: Task) -> int:
        """Return the number of cells in a row.

        Raises:
            ConfigError: a cell, or a neighbourhood, beyond the image.
        """
        for name, most in (("cell", task.size), ("neighbourhood", task.size**2)):
            if getattr(self, name) > most:
                raise ConfigError(
                    f"method.{name} must be at most {most} for images of {task.size} pixels. Got "
                    f"{getattr(self, name)}"
                )
        return -(-task.size // self.cell)

    def disturbed(self, task: Task, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return noisy means, clamped."""
        sums, pixels = cell_sums(x, self.cell)
        scale = noise_scale(self.neighbourhood, task.channels, self.epsilon)
        noisy = sums + discrete_laplace(scale, sums.shape, rng)
        return (noisy / (255 * pixels)).clamp(0, 1)
