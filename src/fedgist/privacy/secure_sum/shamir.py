"""Shamir's secret sharing of 32-byte secrets over the field of p = 2^521 - 1.

Shamir 1979. Fewer than ``threshold`` shares say nothing at all about the secret. The field is far
wider than a secret, so shares that do not belong together almost never join to 32 bytes.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence

from fedgist.errors import ProtocolError

__all__ = ["SECRET", "SHARE", "join", "split"]

PRIME = (1 << 521) - 1
SECRET = 32  # bytes of a secret
SHARE = 66  # bytes of a share, big-endian


def split(secret: bytes, threshold: int, points: Sequence[int]) -> list[bytes]:
    """Return one share per point; any ``threshold`` of them give the secret back.

    Args:
        secret: `SECRET` bytes.
        threshold: at least 1.
        points: distinct, at least 1, far below the prime: the places where the polynomial is read.
    """
    higher = [secrets.randbelow(PRIME) for _ in range(threshold - 1)]
    constant = int.from_bytes(secret, "big")
    shares = []
    for x in points:
        y = 0
        for c in higher:
            y = (y + c) * x % PRIME
        shares.append(((y + constant) % PRIME).to_bytes(SHARE, "big"))
    return shares


def join(shares: Mapping[int, bytes]) -> bytes:
    """Return the secret from exactly ``threshold`` shares by point (Lagrange at 0).

    Raises:
        ProtocolError: a share is not a number of the field, or they join to no 32-byte secret.
    """
    whole = math.prod(shares)
    total = 0
    for x, share in shares.items():
        y = int.from_bytes(share, "big")
        if len(share) != SHARE or y >= PRIME:
            raise ProtocolError(f"a share must be below 2^521 - 1. Got {len(share)} bytes at {x}")
        below = math.prod(other - x for other in shares if other != x)
        total += y * (whole // x) * pow(below, -1, PRIME)
    total %= PRIME
    if total >> (8 * SECRET):
        raise ProtocolError("shares must join to 32 bytes. Got more: they do not belong together")
    return total.to_bytes(SECRET, "big")
