"""What all parties of a secure sum know before it starts: sites, threshold, blocks, graph.

Nothing here is secret and nothing comes from a server.
"""

from __future__ import annotations

import hashlib
import math
import struct
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from fedgist.errors import ConfigError, DataError
from fedgist.privacy.packing import Words, pack_ring, packed_bytes, unpack_ring
from fedgist.privacy.secure_sum.masks import KEY
from fedgist.types import Tensors

__all__ = ["LABEL", "STAGES", "Block", "Terms"]

STAGES = ("keys", "shares", "upload", "confirm", "unmask")
LABEL = b"fedgist secure sum 1 "  # separates these hashes, keys and signatures from all others
COUNT = 64  # bits of the element that counts contributors: wrong masks pass with 2^-64


@dataclass(frozen=True)
class Block:
    """One tensor of the sum.

    Attributes:
        name: unlike the other blocks' names.
        shape: every size positive.
        bits: of one site's signed number (two's complement), from public bounds.
    """

    name: str
    shape: tuple[int, ...]
    bits: int

    def __post_init__(self) -> None:
        if not self.name or any(n < 1 for n in self.shape):
            raise ConfigError(f"a block must have a name and sizes >= 1. Got {self}")
        if not 1 <= self.bits <= 64:
            raise ConfigError(f"bits of block '{self.name}' must lie in 1..64. Got {self.bits}")

    @property
    def size(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)


@dataclass(frozen=True)
class Terms:
    """The agreement behind one secure sum; from the task file, never from the server.

    Attributes:
        context: 32 bytes, a hash of the task file and the round. A context serves one sum.
        roster: raw Ed25519 public keys, all different; a site's id is its position. Two sites are
            allowed, but then each can subtract its own numbers from the sum: two are hidden from
            the server only, three or more from each other as well.
        threshold: how many sites of one neighbourhood (a site and its neighbours; without a degree
            all sites) must be there at every stage. More than half of it, so that a server cannot
            get one answer from one half and another from the other.
        blocks: what is summed.
        degree: None joins every pair of sites. An even k joins each site to the k nearest on a
            circle, in an order drawn from the context: for more than about 200 sites.
        quorum: fewest sites that a sum may hold (at least the threshold, the default). Members
            enforce it: set it to the sites whose noise the claim needs.
    """

    context: bytes
    roster: tuple[bytes, ...]
    threshold: int
    blocks: tuple[Block, ...]
    degree: int | None = None
    quorum: int | None = None

    def __post_init__(self) -> None:
        n = len(self.roster)
        if len(self.context) != KEY or any(len(k) != KEY for k in self.roster):
            raise ConfigError("context and rostered keys must have 32 bytes. Got another length")
        if n < 2 or len(set(self.roster)) != n:
            raise ConfigError(f"roster must hold two or more distinct keys. Got {n} keys")
        k = self.degree
        if k is not None and not (k % 2 == 0 and 2 <= k < n):
            raise ConfigError(f"degree must be even and lie in 2..{n - 1}. Got {k}")
        if not self.group < 2 * self.threshold <= 2 * self.group:
            raise ConfigError(
                f"threshold must be more than half of {self.group} sites and no more than all. "
                f"Got {self.threshold}"
            )
        if not self.threshold <= self.least <= n:
            raise ConfigError(f"quorum must lie in {self.threshold}..{n}. Got {self.quorum}")
        names = [b.name for b in self.blocks]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"blocks must be one or more with distinct names. Got {names}")
        for b in self.blocks:
            if self.width(b) > 64:
                raise ConfigError(
                    f"bits of block '{b.name}' must be at most {64 - self.width(b) + b.bits} "
                    f"for {n} sites. Got {b.bits}"
                )

    @property
    def group(self) -> int:
        """Sites in one neighbourhood, its own site included."""
        return len(self.roster) if self.degree is None else self.degree + 1

    @property
    def least(self) -> int:
        """Fewest sites that a sum may hold."""
        return self.threshold if self.quorum is None else self.quorum

    @property
    def colluders(self) -> int:
        """Most members of one neighbourhood that may side with a server that breaks the rules.

        With c of them, honest members can be split only if 2 (threshold - c) <= group - c.
        """
        return 2 * self.threshold - self.group - 1

    def width(self, block: Block) -> int:
        """Bits of the ring: the sum of all sites' numbers fits as a signed number."""
        return block.bits + (len(self.roster) - 1).bit_length()

    @cached_property
    def digest(self) -> bytes:
        """Hash of everything in here: part of every key, hash and signature."""
        parts = [LABEL + b"terms", self.context, *self.roster]
        parts.append(
            struct.pack("<IIII", len(self.roster), self.threshold, self.degree or 0, self.least)
        )
        for b in self.blocks:
            name = b.name.encode()
            parts.append(struct.pack("<II", len(name), len(b.shape)) + name)
            parts.append(struct.pack(f"<{len(b.shape)}Q", *b.shape) + bytes([b.bits]))
        return hashlib.sha256(b"".join(parts)).digest()

    @cached_property
    def _circle(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The sites in the order of the circle, and the place of each."""
        sites = range(len(self.roster))
        order = sorted(sites, key=lambda i: self.hash(b"circle", i))
        place = sorted(sites, key=order.__getitem__)
        return tuple(order), tuple(place)

    def neighbours(self, site: int) -> tuple[int, ...]:
        """Return the sites that ``site`` shares a mask with, in ascending order."""
        n = len(self.roster)
        if self.degree is None:
            return tuple(i for i in range(n) if i != site)
        order, place = self._circle
        half = self.degree // 2
        return tuple(sorted(order[(place[site] + d) % n] for d in range(-half, half + 1) if d))

    def hash(self, label: bytes, *parts: int | bytes) -> bytes:
        """Return SHA-256 over the terms, a label and parts of fixed length."""
        data = [p if isinstance(p, bytes) else p.to_bytes(4, "big") for p in parts]
        return hashlib.sha256(b"".join([LABEL, label, b"\0", self.digest, *data])).digest()

    @property
    def length(self) -> int:
        """Numbers in one masked vector: the contributor count, then every block."""
        return 1 + sum(b.size for b in self.blocks)

    @property
    def upload_bytes(self) -> int:
        """Bytes of one masked vector on the wire."""
        return sum(packed_bytes(size, bits) for size, bits in self._layout)

    @property
    def _layout(self) -> list[tuple[int, int]]:
        return [(1, COUNT), *((b.size, self.width(b)) for b in self.blocks)]

    def encode(self, tensors: Tensors) -> Words:
        """Return one site's vector of uint64 words, two's complement, led by a 1.

        Raises:
            DataError: a block is missing, has another shape or dtype, or a number does not fit.
        """
        if set(tensors) != {b.name for b in self.blocks}:
            names = [b.name for b in self.blocks]
            raise DataError(f"blocks must be {names}. Got {sorted(tensors)}")
        words = [np.ones(1, np.int64)]
        for b in self.blocks:
            t, half = tensors[b.name], 1 << (b.bits - 1)
            if t.dtype != torch.int64 or tuple(t.shape) != b.shape:
                raise DataError(
                    f"block '{b.name}' must be int64 {list(b.shape)}. Got {t.dtype} {list(t.shape)}"
                )
            low, high = int(t.min()), int(t.max())
            if not -half <= low <= high < half:
                raise DataError(
                    f"numbers of block '{b.name}' must lie in {-half}..{half - 1}. "
                    f"Got {low}..{high}: declare a larger max_images in the task"
                )
            words.append(t.detach().reshape(-1).numpy())
        return np.concatenate(words).view(np.uint64)

    def to_wire(self, words: Words) -> bytes:
        """Pack a masked vector, each block at its ring's width."""
        out, at = [], 0
        for size, bits in self._layout:
            out.append(pack_ring(words[at : at + size], bits))
            at += size
        return b"".join(out)

    def add_wire(self, total: Words, data: bytes) -> None:
        """Add a packed vector of `upload_bytes` bytes to ``total`` in place."""
        at = byte = 0
        for size, bits in self._layout:
            end = byte + packed_bytes(size, bits)
            total[at : at + size] += unpack_ring(data[byte:end], bits, size)
            at, byte = at + size, end

    def decode(self, words: Words) -> tuple[int, Tensors]:
        """Return how many sites are in an unmasked sum, and the sum as int64 by block."""
        tensors: Tensors = {}
        at = 1
        for b in self.blocks:
            shift = 64 - self.width(b)
            numbers = (words[at : at + b.size] << np.uint64(shift)).view(np.int64) >> shift
            tensors[b.name] = torch.from_numpy(numbers.reshape(b.shape))
            at += b.size
        return int(words[0]), tensors
