"""Primitives of the secure sum: key agreement and mask streams.

X25519 (RFC 7748), HKDF-SHA256 (RFC 5869) and ChaCha20 (RFC 8439), all from ``cryptography``.
"""

from __future__ import annotations

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher
from cryptography.hazmat.primitives.ciphers.algorithms import ChaCha20
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fedgist.errors import ProtocolError
from fedgist.privacy.packing import Words

__all__ = [
    "KEY",
    "add_stream",
    "agree",
    "private_key",
]

KEY = 32  # bytes of a key, a seed or a hash
CHUNK = 1 << 15  # words that are masked at once: they stay in the cache


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
