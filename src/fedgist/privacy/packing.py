"""Numbers of any width from 1 to 64 bits, packed without gaps, little end first."""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["Words", "pack_ring", "packed_bytes", "unpack_ring"]

CHUNK = 1 << 15  # words that are packed at once: they stay in the cache

Words: TypeAlias = NDArray[np.uint64]


def packed_bytes(numbers: int, bits: int) -> int:
    """Return the length of `pack_ring`'s output."""
    return (numbers * bits + 7) // 8


def pack_ring(words: Words, bits: int) -> bytes:
    """Pack the low ``bits`` (1..64) of every word, little end first.

    Eight numbers of w bits fill w bytes, so every eighth number starts at a whole byte and the
    eight places can be moved as columns.
    """
    parts = [_pack(words[i : i + CHUNK], bits) for i in range(0, len(words), CHUNK)]
    return b"".join(parts)[: packed_bytes(len(words), bits)]


def unpack_ring(data: bytes, bits: int, numbers: int) -> Words:
    """Undo `pack_ring`; ``data`` must have `packed_bytes` bytes. Returns words below 2^bits."""
    words = np.empty(numbers, np.uint64)
    step = CHUNK * bits // 8
    for k, at in enumerate(range(0, numbers, CHUNK)):
        part = words[at : at + CHUNK]
        part[:] = _unpack(data[k * step : (k + 1) * step], bits, len(part))
    return words


def _pack(words: Words, bits: int) -> bytes:
    groups = -(-len(words) // 8)
    columns = np.zeros((groups, 8), np.uint64)
    columns.reshape(-1)[: len(words)] = words & _low(bits)
    out = np.zeros((groups, bits + 8), np.uint8)  # the last column writes past its group
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        column = columns[:, j]
        moved = (column << np.uint64(shift)).astype("<u8")
        out[:, byte : byte + 8] |= moved.view(np.uint8).reshape(groups, 8)
        if shift + bits > 64:
            out[:, byte + 8] |= (column >> np.uint64(64 - shift)).astype(np.uint8)
    return out[:, :bits].tobytes()


def _unpack(data: bytes, bits: int, numbers: int) -> Words:
    groups = -(-numbers // 8)
    flat = np.zeros(groups * bits, np.uint8)
    flat[: len(data)] = np.frombuffer(data, np.uint8)
    rows = np.zeros((groups, bits + 8), np.uint8)
    rows[:, :bits] = flat.reshape(groups, bits)
    columns = np.empty((groups, 8), np.uint64)
    for j in range(8):
        byte, shift = divmod(j * bits, 8)
        moved = np.ascontiguousarray(rows[:, byte : byte + 8]).view("<u8")[:, 0]
        column = moved >> np.uint64(shift)
        if shift + bits > 64:
            column |= rows[:, byte + 8].astype(np.uint64) << np.uint64(64 - shift)
        columns[:, j] = column & _low(bits)
    return columns.reshape(-1)[:numbers]


def _low(bits: int) -> np.uint64:
    return np.uint64((1 << bits) - 1)
