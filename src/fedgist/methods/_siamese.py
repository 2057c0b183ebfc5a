"""Augmentation that real and synthetic images go through alike, differentiable."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

__all__ = ["Policy", "siamese"]

Policy = Literal["none", "shift", "flip"]
Augmentation = Callable[[Tensor], Tensor]


def siamese(policy: Policy, rng: torch.Generator) -> Augmentation:
    """Draw one augmentation that real and synthetic images go through alike, differentiable.

    One operation is drawn with one set of parameters for all images (Zhao and Bilen, "Dataset
    Condensation with Differentiable Siamese Augmentation", ICML 2021): a shift, a rotation, a
    change of size, a blank square; ``flip`` also mirrors every other draw.
    """
    if policy == "none":
        return lambda x: x
    kind = int(torch.randint(5, (), generator=rng))
    a, b = (torch.rand(2, generator=rng) * 2 - 1).tolist()
    mirrored = policy == "flip" and bool(torch.rand((), generator=rng) < 0.5)
    angle = a * math.radians(15) if kind == 1 else 0.0
    scale = 1 + 0.2 * a if kind == 2 else 1.0
    shift = (0.25 * a, 0.25 * b) if kind == 0 else (0.0, 0.0)
    cos, sin = math.cos(angle) / scale, math.sin(angle) / scale
    sign = -1.0 if mirrored else 1.0
    theta = torch.tensor([[sign * cos, -sin, shift[0]], [sign * sin, cos, shift[1]]])

    def apply(x: Tensor) -> Tensor:
        if kind == 3:
            x = x * _hole(x, a, b)
        if kind > 2 and not mirrored:  # neither moved, turned nor scaled
            return x
        grid = F.affine_grid(theta.expand(len(x), 2, 3), list(x.shape), align_corners=False)
        return F.grid_sample(x, grid, padding_mode="zeros", align_corners=False)

    return apply


def _hole(x: Tensor, a: float, b: float) -> Tensor:
    """Return a mask ``[h, w]`` that is 0 in a square of half the side."""
    inside = [
        ((torch.arange(side) + 0.5) / side - 0.5 - at / 2).abs() < 0.25
        for side, at in zip(x.shape[2:], (a, b), strict=True)
    ]
    return (~(inside[0][:, None] & inside[1][None, :])).to(x.dtype)
