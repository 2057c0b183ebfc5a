"""What both ends of a wire work out from the task: blocks, bits, terms of a sum, the promise."""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import sha256

import torch
from torch import Tensor

from fedgist.agreement import Agreement
from fedgist.errors import ConfigError, ProtocolError
from fedgist.exchange.gist import Duty
from fedgist.exchange.letter import Letter, Spec
from fedgist.privacy.secure_sum import Block, Terms
from fedgist.privacy.statistics import pack, unpack
from fedgist.queries import prefixed
from fedgist.run import Sent, sent_blocks
from fedgist.types import Round, Tensors

__all__ = [
    "as_bytes",
    "duty_of",
    "from_wire",
    "message_of",
    "promise",
    "shared_of",
    "sum_terms",
    "to_shared",
    "to_tensor",
    "to_wire",
    "wire_blocks",
    "wire_specs",
]

SHARED = "shared."
Blocks = Mapping[str, Sent]


def duty_of(agreement: Agreement) -> Duty:
    """Return what every party of a task knows."""
    return Duty(
        agreement.built,
        agreement.task,
        agreement.privacy,
        agreement.plan.sigma,
        len(agreement.sites),
        agreement.seed,
    )


def wire_blocks(duty: Duty, rnd: Round) -> dict[str, Sent]:
    """Return shape and bits of every block of one site's gist of a sum round.

    Raises:
        ConfigError: the plan does not know a shape, so that nothing could be checked on arrival.
    """
    out: dict[str, Sent] = {}
    for query in rnd.queries:
        sent = sent_blocks(query, duty.task, duty.privacy, duty.sigma)
        if not sent:
            raise ConfigError(
                "a query must declare the shape of its rows to be summed between sites. "
                f"Got {query}"
            )
        out |= prefixed(query, sent)
    return out


def to_wire(gist: Tensors, blocks: Blocks) -> Tensors:
    """Pack int64 sums as uint8 ``[bytes]``, block by block, at the bits that the plan gives."""
    return {k: to_tensor(pack(gist[k], b.bits)) for k, b in blocks.items()}


def wire_specs(blocks: Blocks) -> dict[str, Spec]:
    """Return what a packed gist must look like."""
    return {k: (torch.uint8, (b.bytes,)) for k, b in blocks.items()}


def from_wire(packed: Tensors, blocks: Blocks) -> Tensors:
    """Undo `to_wire`."""
    return {k: unpack(as_bytes(packed[k]), b.bits, b.shape) for k, b in blocks.items()}


def sum_terms(agreement: Agreement, r: int) -> Terms:
    """Return the terms of the secure sum of round ``r``."""
    blocks, terms = wire_blocks(duty_of(agreement), agreement.plan.rounds[r]), agreement.exchange
    return Terms(
        context=sha256(f"fedgist sum\n{agreement.digest}\n{r}".encode()).digest(),
        roster=tuple(s.sign for s in agreement.roster),
        threshold=terms.threshold,
        blocks=tuple(Block(name, b.shape, b.bits) for name, b in blocks.items()),
        degree=terms.degree,
        quorum=max(terms.threshold, terms.quorum),
    )


def promise(agreement: Agreement) -> dict[str, str]:
    """Return what every answer says of its own privacy; the coordinator takes no other."""
    claim = agreement.plan.claim
    return {
        "method": str(agreement.method["name"]),
        "claim": claim.line(),
        "epsilon": repr(claim.epsilon),
        "sigma": repr(claim.sigma),
        "noise": agreement.privacy.noise,
    }


def message_of(letter: Letter) -> bytes:
    """Return the secure sum's message in a letter.

    Raises:
        ProtocolError: there is none.
    """
    message = letter.tensors(finite=False).get("message")
    if message is None or message.dtype != torch.uint8:
        raise ProtocolError(f"{letter.sender.name}: a stage must carry a message. Got none")
    return as_bytes(message)


def to_shared(tensors: Tensors) -> Tensors:
    """Name what the server broadcasts, so that it can travel beside a message."""
    return {SHARED + k: v for k, v in tensors.items()}


def shared_of(tensors: Tensors) -> Tensors:
    """Undo `to_shared`."""
    return {k.removeprefix(SHARED): v for k, v in tensors.items() if k.startswith(SHARED)}


def to_tensor(data: bytes) -> Tensor:
    """Return bytes as uint8 ``[n]``, to travel in a letter."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()


def as_bytes(tensor: Tensor) -> bytes:
    """Undo `to_tensor`."""
    return tensor.numpy().tobytes()
