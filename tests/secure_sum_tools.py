"""A secure sum in one process, with hooks for losses and lies. Shared by the tests."""

import hashlib
from collections.abc import Callable, Mapping, Sequence

import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from torch import Tensor

from fedgist.errors import ProtocolError
from fedgist.privacy.secure_sum import STAGES, Block, Collector, Member, Terms

BLOCKS = (Block("count", (3,), 9), Block("mean", (2, 5), 24))
Messages = dict[int, bytes]


def signer(i: int) -> Ed25519PrivateKey:
    return Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"site %d" % i).digest())


def terms(
    n: int,
    threshold: int | None = None,
    blocks: tuple[Block, ...] = BLOCKS,
    degree: int | None = None,
    context: bytes = bytes(32),
    quorum: int | None = None,
) -> Terms:
    group = n if degree is None else degree + 1
    t = group // 2 + 1 if threshold is None else threshold
    roster = tuple(signer(i).public_key().public_bytes_raw() for i in range(n))
    return Terms(context, roster, t, blocks, degree, quorum)


def members(t: Terms) -> list[Member]:
    return [Member(t, i, signer(i)) for i in range(len(t.roster))]


def numbers(t: Terms, seed: int = 0) -> list[dict[str, Tensor]]:
    """Signed values with a mean of -2."""
    rng = torch.Generator().manual_seed(seed)
    return [
        {b.name: torch.randint(-102, 99, b.shape, generator=rng) for b in t.blocks}
        for _ in t.roster
    ]


def total(values: Sequence[Mapping[str, Tensor]], sites: Sequence[int]) -> dict[str, list[int]]:
    """Add in Python's own integers, which cannot wrap."""
    rows = {name: [values[i][name].reshape(-1).tolist() for i in sites] for name in values[0]}
    return {name: [sum(c) for c in zip(*r, strict=True)] for name, r in rows.items()}


def flat(tensors: Mapping[str, Tensor]) -> dict[str, list[int]]:
    assert all(v.dtype == torch.int64 for v in tensors.values())
    return {k: v.reshape(-1).tolist() for k, v in tensors.items()}


def ask(
    sites: Sequence[Member],
    stage: str,
    requests: Mapping[int, bytes],
    values: Sequence[dict[str, Tensor]],
    errors: dict[int, str] | None = None,
) -> Messages:
    """Ask every site; with ``errors``, one that refuses counts as lost."""
    replies = {}
    for i, request in requests.items():
        try:
            replies[i] = sites[i].answer(stage, request, values[i] if stage == "upload" else None)
        except ProtocolError as e:
            if errors is None:
                raise
            errors[i] = str(e)
    return replies


def run(
    t: Terms,
    values: Sequence[dict[str, Tensor]],
    lost: Mapping[str, Sequence[int]] | None = None,
    bend: Callable[[str, Messages], None] | None = None,
    upto: str = "done",
) -> tuple[Collector, list[Member], Messages]:
    """Run all stages before ``upto``.

    Args:
        t: terms.
        values: by site.
        lost: sites that fall silent for good, by the first stage they do not answer.
        bend: changes the replies of a stage in place, before the server sees them.
        upto: the stage to stop before.
    """
    sites, server = members(t), Collector(t)
    requests, gone = server.open(), set[int]()
    for stage in STAGES[: (*STAGES, "done").index(upto)]:
        gone |= set((lost or {}).get(stage, ()))
        replies = ask(sites, stage, {i: r for i, r in requests.items() if i not in gone}, values)
        if bend:
            bend(stage, replies)
        requests = server.advance(replies)
    return server, sites, requests


def flip(data: bytes, at: int) -> bytes:
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def rows(messages: Messages) -> bytes:
    return b"".join(i.to_bytes(4, "big") + messages[i] for i in sorted(messages))
