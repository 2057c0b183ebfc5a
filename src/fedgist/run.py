"""The protocol on one screen: `plan_of` before any data, `drive` through every exchange."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from fedgist.errors import PrivacyError
from fedgist.method import Method
from fedgist.privacy.claim import Claim, Privacy, calibrate, claim_of
from fedgist.privacy.noise import noise_scales
from fedgist.privacy.statistics import bit_widths, packed_bytes
from fedgist.progress import Progress
from fedgist.queries import MomentsQuery, Query, SumQuery
from fedgist.types import Merged, Outcome, Round, Task, Tensors

__all__ = [
    "Exchange",
    "Plan",
    "Sent",
    "budget",
    "derive",
    "drive",
    "generator",
    "plan_of",
    "sent_blocks",
    "sent_pieces",
    "upload_bytes",
]


class Exchange(Protocol):
    """How gists travel: broadcast, collect, reduce."""

    def round(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Ask every client for its gist of round ``r`` and merge the answers."""


@dataclass(frozen=True)
class Plan:
    """Everything that is known before any image is read.

    Attributes:
        rounds: the method's declaration.
        sigma: calibrated noise multiplier.
        claim: what follows from both.
        bytes_up: bytes that one client sends over all rounds, or None where it depends on the data.
    """

    rounds: tuple[Round, ...]
    sigma: float
    claim: Claim
    bytes_up: int | None


def plan_of(
    method: Method,
    task: Task,
    privacy: Privacy,
    *,
    secure: bool = False,
    notes: Sequence[str] = (),
) -> Plan:
    """Plan a run: rounds, noise, claim and bytes, from public facts alone.

    Args:
        method: what is to be done.
        task: with what.
        privacy: under which terms.
        secure: sums over clients go through a secure sum.
        notes: what the claim's reader must know besides.

    Raises:
        PrivacyError: the method is for comparisons only and the noise is not a simulation's, or no
            noise can make the plan private.
    """
    if method.unfit and privacy.noise == "system":
        raise PrivacyError(f"a release must be of a method that is fit for it. Got {method.unfit}")
    rounds = tuple(method.plan(task))
    sigma = calibrate(rounds, privacy)
    track = str(getattr(method, "track", "no public data"))
    notes = [*filter(None, [method.unfit]), *method.notes, *notes]
    claim = claim_of(rounds, privacy, sigma, track=track, secure=secure, notes=notes)
    up = [upload_bytes(r, task, privacy, sigma) for r in rounds]
    return Plan(rounds, sigma, claim, None if None in up else sum(b for b in up if b is not None))


def drive(
    method: Method,
    task: Task,
    exchange: Exchange,
    rounds: Sequence[Round],
    seed: int,
    progress: Progress | None = None,
) -> Outcome:
    """Run the whole protocol. Every exchange uses this loop and no other."""
    tell = progress or Progress()
    state = method.start(task, generator(seed, "start"))
    for r, rnd in enumerate(rounds):
        tell.stage(f"round {r + 1} of {len(rounds)}")
        merged = exchange.round(r, rnd, state.shared)
        state = method.update(r, task, state, merged, generator(seed, "update", r))
        if state.done:
            break
    tell.stage("server")
    return method.finish(task, state, generator(seed, "finish"))


def generator(seed: int, *path: str | int) -> torch.Generator:
    """Return a generator of its own for every purpose, derived from the run's seed."""
    return torch.Generator().manual_seed(derive(seed, *path))


def derive(seed: int, *path: str | int) -> int:
    """Return a 63-bit seed for one purpose."""
    text = "/".join(str(p) for p in (seed, *path))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1


def upload_bytes(rnd: Round, task: Task, privacy: Privacy, sigma: float) -> int | None:
    """Return the payload in bytes of one client's gist, or None where it depends on the data."""
    if rnd.sends:
        depends = any(p.by_image for p in rnd.sends)
        return None if depends else sum(b.bytes for b in sent_pieces(rnd).values())
    sent = [sent_blocks(q, task, privacy, sigma) for q in rnd.queries]
    if rnd.reduce == "pool" or rnd.raw or not all(sent):
        return None
    return sum(b.bytes for blocks in sent for b in blocks.values())


@dataclass(frozen=True)
class Sent:
    """One block of what a client sends: its shape, and the bits of one number."""

    shape: tuple[int, ...]
    bits: int

    @property
    def numbers(self) -> int:
        """How many numbers it holds."""
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        """Its length when packed."""
        return packed_bytes(self.numbers, self.bits)


def sent_blocks(query: Query, task: Task, privacy: Privacy, sigma: float) -> dict[str, Sent]:
    """Return what a client sends in answer to a query; empty where the plan does not know it."""
    noised = privacy.trust != "central" and sigma > 0
    shapes = query.shapes(noised=noised)
    if not shapes:
        return {}
    widths = bit_widths(query, task.max_images, noise_scales(query, sigma) if noised else None)
    return {name: Sent(shape, widths[name]) for name, shape in shapes.items()}


def budget(rounds: Sequence[Round]) -> list[dict[str, object]]:
    """Divide the squared budget 1/σ² of one record at the clip radius over rounds and blocks.

    A query has ``times / scale²`` of it, and a block of moments its share of that: squares of
    Gaussian-DP distances add up.

    Returns:
        ``round`` (from 1), ``view``, ``block`` and ``share``, which sum to 1. Empty where nothing
        is noised, where part of what leaves is not, or where sampling rates differ: those have no
        common curve.
    """
    rows: list[tuple[int, str, str, float]] = []
    queries = [q for rnd in rounds for q in rnd.queries]
    rates = {q.rates for q in queries if isinstance(q, SumQuery)}
    if any(r.raw for r in rounds) or len(rates) > 1 or any(len(set(r)) > 1 for r in rates):
        return []
    for r, rnd in enumerate(rounds):
        for q in rnd.queries:
            shares = q.shares if isinstance(q, MomentsQuery) else {"rows": 1.0}
            rows += [(r + 1, q.name, k, q.times * v / q.scale**2) for k, v in shares.items() if v]
    total = sum(part for *_, part in rows)
    return [
        {"round": r, "view": view, "block": block, "share": part / total}
        for r, view, block, part in rows
    ]


def sent_pieces(rnd: Round) -> dict[str, Sent]:
    """Return what a client sends in a pool or raw round: for each image where that is the row."""
    return {p.name: Sent((1, *p.shape[1:]) if p.by_image else p.shape, p.bits) for p in rnd.sends}
