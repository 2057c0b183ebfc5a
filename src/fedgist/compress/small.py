"""What every upload of small images goes through: rounding to bytes, and enlarging."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["as_uint8", "enlarge", "quantised"]


def enlarge(x: Tensor, size: int) -> Tensor:
    """Enlarge ``[b, c, y, y]`` to ``[b, c, size, size]``: bilinear, corners not aligned."""
    if x.shape[-1] == size:
        return x
    return F.interpolate(x, (size, size), mode="bilinear", align_corners=False)


def as_uint8(x: Tensor) -> Tensor:
    """Round float images in [0, 1] to the bytes that stand for them."""
    return (x * 255).round().clamp(0, 255).to(torch.uint8)


def quantised(x: Tensor) -> Tensor:
    """Return float images in [0, 1] as they are after a trip as bytes."""
    return (x * 255).round().clamp(0, 255) / 255
