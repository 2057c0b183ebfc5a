"""Fixed transforms of images into smaller ones, by name, without noise.

A name is ``kind:number[:number]``, so that a saved classifier can be rebuilt from it.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor
from torch.nn import functional as F

from fedgist.compress.wavelet import pooled_packet
from fedgist.errors import ConfigError

__all__ = ["build"]

Transform = Callable[[Tensor], Tensor]
LARGEST = 4096  # of a number in a name: names also come from files


def build(spec: str) -> Transform:
    """Return the transform of that name: float32 ``[b, c, s, s]`` in [0, 1] to a smaller one.

    - ``bicubic:Y``: bicubic down-sampling to Y x Y with antialiasing.
    - ``area:Y``: means over a grid of Y x Y areas. Where s / Y is a power of two, the low-pass band
      of a Haar transform, up to its scale.
    - ``cells:B``: means of cells of B x B pixels; those at the right and lower edge may be smaller.
    - ``wavelet:J:P``: `wavelet.pooled_packet` of J levels and P x P patches.

    Raises:
        ConfigError: no such transform, or numbers that do not suit it.
    """
    kind, *words = spec.split(":")
    if kind not in KINDS:
        raise ConfigError(f"a fixed transform must be one of {', '.join(KINDS)}. Got '{spec}'")
    make, count = KINDS[kind]
    whole = all(w.isascii() and w.isdigit() and len(w) <= 4 for w in words)
    if len(words) != count or not whole or not all(1 <= int(w) <= LARGEST for w in words):
        raise ConfigError(
            f"'{kind}' must be followed by {':'.join(['NUMBER'] * count)}, each a whole number "
            f"from 1 to {LARGEST}. Got '{spec}'"
        )
    return make(*map(int, words))


def _bicubic(side: int) -> Transform:
    def small(x: Tensor) -> Tensor:
        y = F.interpolate(x, (side, side), mode="bicubic", align_corners=False, antialias=True)
        return y.clamp(0, 1)

    return small


def _area(side: int) -> Transform:
    return lambda x: F.adaptive_avg_pool2d(x, side)


def _cells(cell: int) -> Transform:
    return lambda x: F.avg_pool2d(x, cell, ceil_mode=True, count_include_pad=False)


def _wavelet(levels: int, patches: int) -> Transform:
    return lambda x: pooled_packet(x, levels, patches)


# kind -> (what makes the transform, how many numbers it takes)
KINDS: dict[str, tuple[Callable[..., Transform], int]] = {
    "bicubic": (_bicubic, 1),
    "area": (_area, 1),
    "cells": (_cells, 1),
    "wavelet": (_wavelet, 2),
}
