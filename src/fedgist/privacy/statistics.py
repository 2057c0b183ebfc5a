"""Exact integer statistics of codes: clip, quantise, sum, pack.

A record becomes integers of L2 norm at most ``levels`` before anything is summed, so every sum is
an exact integer: the same for every split of the data, every order and every exchange, and the
sensitivity is exact too. Products run in float64, where integers below 2^53 are exact.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from fedgist.errors import ConfigError, DataError
from fedgist.privacy.packing import pack_ring, packed_bytes, unpack_ring
from fedgist.queries import MomentsQuery, Query
from fedgist.types import Tensors

__all__ = [
    "BLOCK",
    "MomentSums",
    "bit_widths",
    "clip_to_grid",
    "complete",
    "from_triangle",
    "pack",
    "packed_bytes",
    "to_triangle",
    "unpack",
]

BLOCK = 1000  # rows that are multiplied at once


def clip_to_grid(z: Tensor, clip: float, levels: int) -> Tensor:
    """Clip rows to L2 norm ``clip`` and put them on the integer grid of radius ``levels``.

    Args:
        z: float64 ``[n, d]``, finite.
        clip: R > 0, in the units of ``z``.
        levels: integer radius L; one grid unit is R / L.

    Returns:
        float64 ``[n, d]`` holding integers with ‖u‖² <= L², checked exactly. Rounding to nearest
        can push a clipped row over the bound: such a row is drawn in by one unit of norm, and as a
        last resort rounded towards zero, which never grows a norm.
    """
    if levels >= 2**26:
        raise ConfigError(f"levels must be below 2^26 for exact norms. Got {levels}")
    z = z.contiguous()  # strided rows are summed in an order that depends on the batch
    norms = torch.linalg.vector_norm(z, dim=1)
    factor = (levels / clip) * (clip / norms.clamp(min=clip))
    v = z * factor[:, None]
    u: Tensor = v.round()
    bound = float(levels) ** 2
    over = ~(torch.linalg.vecdot(u, u) <= bound)  # NaN is over
    if bool(over.any()):  # whole batches, not rows: gathering them costs more than the sums
        u = torch.where(over[:, None], (v * (1 - 1 / levels)).round(), u)
        over = ~(torch.linalg.vecdot(u, u) <= bound)
        if bool(over.any()):
            u[over] = (v[over] * (1 - 1e-12)).trunc()
    norm2 = torch.linalg.vecdot(u, u)  # exact: integers below 2^53
    if not bool((norm2 <= bound).all()):  # cannot happen; the proof rests on it, so look
        raise DataError(f"integer norm must be at most {levels}. Got {float(norm2.max()) ** 0.5}")
    return u


def to_triangle(a: Tensor) -> Tensor:
    """Return symmetric ``[..., d, d]`` as ``[..., d(d+1)/2]``: diagonal first, then upper rows."""
    d = a.shape[-1]
    i, j = torch.triu_indices(d, d, 1)
    return torch.cat([torch.diagonal(a, dim1=-2, dim2=-1), a[..., i, j]], dim=-1)


def from_triangle(t: Tensor) -> Tensor:
    """Undo `to_triangle`."""
    d = (math.isqrt(8 * t.shape[-1] + 1) - 1) // 2
    i, j = torch.triu_indices(d, d, 1)
    a = t.new_zeros(*t.shape[:-1], d, d)
    a[..., i, j] = t[..., d:]
    a = a + a.transpose(-1, -2)
    torch.diagonal(a, dim1=-2, dim2=-1).copy_(t[..., :d])
    return a


class MomentSums:
    """Accumulates (n, Σu, Σuuᵀ) per class from integer rows; never holds n·d² numbers.

    Rows are multiplied `BLOCK` at a time, in float32 where that is exact
    (|Σ u_i u_j| <= rows · levels² <= 2^24), else in float64.
    """

    def __init__(self, query: MomentsQuery) -> None:
        self._q = query
        c, d = query.classes, query.dim
        self._count = torch.zeros(c, dtype=torch.int64)
        self._mean = torch.zeros(c, d, dtype=torch.float64)
        self._second = torch.zeros(c if query.second else 1, d, d, dtype=torch.float64)
        small = BLOCK * query.levels**2 <= 2**24
        self._dtype = torch.float32 if small else torch.float64

    def add(self, u: Tensor, labels: Tensor) -> None:
        """Add float64 integer rows ``[b, d]`` with ``labels`` (int64 ``[b]``), in any order."""
        for part, y in zip(torch.split(u, BLOCK), torch.split(labels, BLOCK), strict=True):
            self._add(part.to(self._dtype), y)

    def _add(self, rows: Tensor, labels: Tensor) -> None:
        counts = torch.bincount(labels, minlength=self._q.classes)
        self._count += counts
        rows = rows[torch.argsort(labels, stable=True)]
        if self._q.pooled and not self._q.second:
            self._second[0] += rows.T @ rows
        for c, part in enumerate(torch.split(rows, counts.tolist())):
            if len(part):
                self._mean[c] += part.sum(0)
                if self._q.second:
                    self._second[c] += part.T @ part

    def tensors(self) -> Tensors:
        """Return the sums as int64, in the shapes of ``query.shapes(noised=False)``."""
        q = self._q
        out = {"count": self._count * q.count_weight, "mean": self._mean.to(torch.int64)}
        if q.second:
            out["second"] = to_triangle(self._second).to(torch.int64)
        elif q.pooled:
            out["pooled"] = to_triangle(self._second[0]).to(torch.int64)
        return out


def complete(query: MomentsQuery, sums: Tensors) -> Tensors:
    """Add the pooled block to exact sums that carry the class blocks only."""
    if query.pooled and "pooled" not in sums:
        return sums | {"pooled": sums["second"].sum(0)}
    return sums


def bit_widths(
    query: Query, max_images: int, noise: dict[str, tuple[float, float]] | None = None
) -> dict[str, int]:
    """Return the bits that one signed number of each block needs, from public bounds alone.

    Args:
        query: what is asked.
        max_images: public bound on the records behind the sum.
        noise: scales of `privacy.noise.noise_scales` when noise is already inside; 14 of them are
            allowed for (a larger draw has probability below 2^-140).
    """
    r = query.levels
    largest = {"rows": max_images * r}
    if isinstance(query, MomentsQuery):
        count, square = max_images * query.count_weight, max_images * r * r
        largest = {"count": count, "mean": max_images * r, "second": square, "pooled": square}
    if max(largest.values()) >= 2**53:
        raise ConfigError(
            f"max_images x levels² must stay below 2^53. Got {max_images} x {r}²: lower one of them"
        )
    widths = {}
    for name in query.shapes(noised=noise is not None):
        head = math.ceil(14 * max((noise or {}).get(name, (0.0, 0.0))))
        widths[name] = (largest[name] + head).bit_length() + 1
    return widths


def pack(values: Tensor, bits: int) -> bytes:
    """Pack int64 numbers of any shape as ``bits``-bit two's complement, little end first.

    Raises:
        DataError: a number does not fit; nothing is clipped or wrapped.
    """
    v = values.reshape(-1).numpy()
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    if v.size and not (low <= v.min() and v.max() <= high):
        raise DataError(
            f"numbers must lie in {low}..{high} to be packed in {bits} bits. "
            f"Got {v.min()}..{v.max()}: declare a larger max_images in the task"
        )
    return pack_ring(np.ascontiguousarray(v).view(np.uint64), bits)


def unpack(data: bytes, bits: int, shape: tuple[int, ...]) -> Tensor:
    """Undo `pack`."""
    n = math.prod(shape)
    if len(data) != packed_bytes(n, bits):
        raise DataError(f"payload must have {packed_bytes(n, bits)} bytes. Got {len(data)}")
    sign = np.uint64(1 << (bits - 1))
    words = (unpack_ring(data, bits, n) ^ sign) - sign  # two's complement of any width
    return torch.from_numpy(words.view(np.int64).reshape(shape))
