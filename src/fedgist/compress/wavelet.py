"""Haar wavelet packets of images, and the pooled magnitudes of their sub-bands as one image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError

__all__ = ["grid_side", "haar_packet", "pooled_packet"]

LEAST = 1e-10  # its root, 1e-5, is 0 as a byte


def grid_side(size: int, levels: int, patches: int) -> int:
    """Return the side of `pooled_packet` of an image of ``size`` pixels a side: 2^levels patches.

    Raises:
        ConfigError: larger than the image.
    """
    # Levels are looked at first: names come from files, and 2^4096 is no size.
    if levels >= size.bit_length() or 2**levels * patches > size:
        raise ConfigError(
            f"2^levels times patches must be at most {size}, the side of an image. Got "
            f"2^{levels} x {patches}"
        )
    return int(2**levels * patches)


def haar_packet(x: Tensor, levels: int) -> Tensor:
    """Return all 4^levels sub-bands of a two-dimensional Haar packet.

    One level maps every 2x2 block (a b; c d) to (a+b+c+d, a-b+c-d, a+b-c-d, a-b-c+d) / 2: an
    orthonormal map, so that the sum of squares is kept. In a packet the next level splits all four
    bands. An image whose side is no multiple of 2^levels is first continued by its last row and
    column.

    Args:
        x: float ``[b, c, s, s]``.
        levels: J >= 1.

    Returns:
        ``[b, c, 2^J, 2^J, q, q]``, q = ceil(s / 2^J). The first pair of indices is a sub-band: the
        vertical and the horizontal one, from the coarsest split (most significant bit) to the last;
        a bit is 1 for differences. ``[..., 0, 0, :, :]`` is 2^J times the mean of blocks.
    """
    n = 2**levels
    odd = -x.shape[-1] % n
    x = F.pad(x, (0, odd, 0, odd), mode="replicate")
    b, c, side, _ = x.shape
    bands = x[:, :, None, None]
    for _ in range(levels):
        side //= 2
        k = bands.shape[2]
        blocks = bands.reshape(b, c, k, k, side, 2, side, 2)
        up, down = blocks[..., 0, :, :], blocks[..., 1, :, :]
        rows = torch.stack([up + down, up - down], 3)  # [b, c, k, 2, k, side, side, 2]
        left, right = rows[..., 0], rows[..., 1]
        both = torch.stack([left + right, left - right], 5) / 2
        bands = both.reshape(b, c, 2 * k, 2 * k, side, side)
    return bands


def pooled_packet(x: Tensor, levels: int, patches: int) -> Tensor:
    """Return mean magnitudes of `haar_packet` in a grid of patches, tiled into one image.

    A coefficient of an image in [0, 1] is at most 2^J in the low-pass band and 2^J / 2 in any other
    in magnitude: these public constants scale magnitudes to [0, 1]. The root of all but the
    low-pass band is taken, or most of them would vanish when rounded to bytes.

    Args:
        x: float ``[b, c, s, s]`` in [0, 1].
        levels: J.
        patches: P; a sub-band is divided into P x P of them.

    Returns:
        ``[b, c, 2^J P, 2^J P]`` in [0, 1]: a tile of P x P for each sub-band.

    Raises:
        ConfigError: an image too small for that many levels and patches.
    """
    side = grid_side(x.shape[-1], levels, patches)
    bands = haar_packet(x, levels)
    b, c, n, _, q, _ = bands.shape
    pooled = F.adaptive_avg_pool2d(bands.abs().reshape(b, c * n * n, q, q), patches)
    pooled = pooled.reshape(b, c, n, n, patches, patches)
    low = torch.zeros(n, n, 1, 1, dtype=torch.bool)
    low[0, 0] = True
    # Clamped, since the slope of a root has no bound at 0, and attacks differentiate through it.
    scaled = torch.where(low, pooled / n, (2 / n * pooled).clamp(min=LEAST).sqrt())
    tiled = scaled.permute(0, 1, 2, 4, 3, 5).reshape(b, c, side, side)
    return tiled.clamp(0, 1)
