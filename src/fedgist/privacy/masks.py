"""Primitives of the secure sum: key agreement, mask streams, numbers modulo 2^w on the wire.

X25519 (RFC 7748), HKDF-SHA256 (RFC 5869) and ChaCha20 (RFC 8439), all from ``cryptography``.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from fedgist.errors import ProtocolError

__all__ = [
    "KEY",
    "Words",
    "add_stream",
    "agree",
    "pack_ring",
    "private_key",
    "ring_bytes",
    "unpack_ring",
]

KEY = 32  # bytes of a key, a seed or a hash
CHUNK = 1 << 15  # words that are masked or packed at once: they stay in the cache

Words: TypeAlias = NDArray[np.uint64]


def private_key(raw: bytes) -> X25519PrivateKey:
    """Return the X25519 key of 32 bytes. Load a key once: it costs as much as an agreement."""
    return X25519PrivateKey.from_private_bytes(raw)


def agree(private: X25519PrivateKey, public: bytes, salt: bytes, info: bytes) -> bytes:
    """Return the 32-byte key that two X25519 keys share, bound to ``salt`` and ``info``.

    Raises:
        ProtocolError: the public key is a point of low order, which would fix the key.
    """
    try:
        theirs = X25519PublicKey.from_public_bytes(public)
        shared = private.exchange(theirs)
    except ValueError:
        raise ProtocolError("a public key must be of full order. Got a weak one") from None
    return HKDF(SHA256(), KEY, salt, info).derive(shared)


def add_stream(words: Words, key: bytes, *, negative: bool = False) -> None:
    """Add the ChaCha20 stream of ``key`` to ``words`` in place, modulo 2^64; or subtract it.

    A key has one stream, read from its start: use it for one vector only.
    """
    cipher = Cipher(ChaCha20(key, bytes(16)), mode=None).encryptor()
    zeros, stream = memoryview(bytes(8 * CHUNK)), bytearray(8 * CHUNK)
    numbers = np.frombuffer(stream, "<u8")
    for at in range(0, len(words), CHUNK):
        part = words[at : at + CHUNK]
        cipher.update_into(zeros[: part.nbytes], stream)
        if negative:
            part -= numbers[: len(part)]
        else:
            part += numbers[: len(part)]


def ring_bytes(numbers: int, bits: int) -> int:
    """Return the length of `pack_ring`'s output."""
    return (numbers * bits + 7) // 8


def pack_ring(words: Words, bits: int) -> bytes:
    """Pack the low ``bits`` (1..64) of every word, little end first: as `statistics.pack` does.

    Eight numbers of w bits fill w bytes, so every eighth number starts at a whole byte and the
    eight places can be moved as columns.
    """
    parts = [_pack(words[i : i + CHUNK], bits) for i in range(0, len(words), CHUNK)]
    return b"".join(parts)[: ring_bytes(len(words), bits)]


def unpack_ring(data: bytes, bits: int, numbers: int) -> Words:
    """Undo `pack_ring`; ``data`` must have `ring_bytes` bytes. Returns words below 2^bits."""
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
