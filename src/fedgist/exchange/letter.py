"""The one format in which anything travels between parties: a signed header and safetensors.

::

    8 bytes    "FEDGIST" and the format's version
    32 bytes   the sender's signing key (Ed25519)
    64 bytes   signature over everything before it and the header
    4 bytes    length of the header, little end first
    header     JSON: task, step, sender, receiver, kind, and length and SHA-256 of the body
    body       safetensors; nothing in it is trusted before its hash has been compared

A gist file is a letter of kind ``reply``. The signature is checked before the header is parsed, the
header before the body is looked at, names, types and shapes before numbers are read.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from fedgist.errors import ProtocolError
from fedgist.privacy.identity import Identity, Public
from fedgist.types import Tensors

__all__ = [
    "Kind",
    "Letter",
    "Spec",
    "fits",
    "is_whole",
    "read_letter",
    "sender_key",
    "task_of",
    "write_letter",
]

Kind = Literal["ask", "reply", "fault", "end"]
Spec = tuple[torch.dtype, tuple[int, ...]]

MAGIC = b"FEDGIST\x01"
FIXED = len(MAGIC) + 32 + 64 + 4
MOST_HEADER = 1 << 20
PURPOSE = b"letter"
DTYPES = {"U8": torch.uint8, "I64": torch.int64, "F32": torch.float32, "F64": torch.float64}


@dataclass(frozen=True)
class Letter:
    """A letter whose signature and hash have been checked.

    Attributes:
        sender: whose signature it carries.
        header: the signed JSON values.
        body: safetensors.
        digest: SHA-256 of the whole letter.
    """

    sender: Public
    header: Mapping[str, Any]
    body: bytes
    digest: str

    @property
    def kind(self) -> str:
        """What it is: ``ask``, ``reply``, ``fault`` or ``end``."""
        return str(self.header["kind"])

    @property
    def step(self) -> str:
        """Which step of the run it belongs to."""
        return str(self.header["step"])

    def tensors(
        self, expected: Mapping[str, Spec] | None = None, *, finite: bool = True
    ) -> Tensors:
        """Return the body's tensors.

        Args:
            expected: type and shape of every tensor, which must be there and no others, as `fits`
                reads them; None accepts any names and shapes.
            finite: refuse NaN and Inf. What a server broadcasts may hold them (the score of a class
                that nobody has); what a site sends may not.

        Raises:
            ProtocolError: the body is not safetensors, holds something else, or a float in it is
                not finite.
        """
        found = _outline(self.body, self._what())
        if expected is not None and not fits(found, expected):
            wrong = _difference(found, expected)
            raise ProtocolError(f"{self._what()} must hold what the task's plan says. Got {wrong}")
        try:
            tensors: Tensors = load(self.body)
        except (SafetensorError, ValueError, KeyError, TypeError) as e:
            raise ProtocolError(f"{self._what()} must be safetensors. Got {e}") from e
        for name, value in tensors.items():
            if finite and value.is_floating_point() and not bool(torch.isfinite(value).all()):
                raise ProtocolError(f"{self._what()} must be finite. Got NaN or Inf in '{name}'")
        return tensors

    def _what(self) -> str:
        return f"{self.sender.name}: letter '{self.step}'"


def write_letter(
    identity: Identity, task: str, step: str, to: str, kind: Kind, tensors: Tensors, **more: Any
) -> bytes:
    """Return a signed letter.

    Args:
        identity: the sender.
        task: hash of the task file.
        step: which step of the run, such as ``0.gist``.
        to: name of the receiver.
        kind: what it is.
        tensors: uint8, int64, float32 or float64.
        more: further JSON values for the header.
    """
    body: bytes = save({k: v.contiguous() for k, v in tensors.items()})
    header = {
        "task": task,
        "step": step,
        "from": identity.public.name,
        "to": to,
        "kind": kind,
        "bytes": len(body),
        "sha256": hashlib.sha256(body).hexdigest(),
        **more,
    }
    text = json.dumps(header, ensure_ascii=False, sort_keys=True, allow_nan=False).encode()
    start = MAGIC + identity.public.sign
    return start + identity.sign(start + text, PURPOSE) + struct.pack("<I", len(text)) + text + body


def is_whole(data: bytes) -> bool:
    """Tell whether a letter has arrived whole: its lengths and the hash of its body agree.

    A half-synced file is shorter, or has blanks where bytes are still to come.
    """
    try:
        _, _, text, body = _cut(data)
        header = json.loads(text)
        return bool(header["sha256"] == hashlib.sha256(body).hexdigest())
    except (ProtocolError, ValueError, KeyError, TypeError, RecursionError):
        return False


def read_letter(
    data: bytes, senders: Iterable[Public], task: str, *, to: str, most: int | None = None
) -> Letter:
    """Check a letter and return it.

    Args:
        data: the whole letter.
        senders: who may send it; anyone else is an intruder.
        task: hash of the task file that it must be for.
        to: the receiver that it must be meant for.
        most: the largest body in bytes.

    Raises:
        ProtocolError: it is damaged, of another format version, from an unknown key, badly signed,
            for another task or another receiver, or too large.
    """
    key, signature, text, body = _cut(data)
    sender = next((s for s in senders if s.sign == key), None)
    if sender is None:
        raise ProtocolError(
            f"a letter must come from a key in the task's roster. Got key {key.hex()[:16]}..."
        )
    if not sender.verify(signature, MAGIC + key + text, PURPOSE):
        raise ProtocolError(f"{sender.name}: a letter must carry a valid signature. Got another")
    header = _header(text, sender)
    what = f"{sender.name}: letter '{header['step']}'"
    for field, want in (("task", task), ("to", to), ("from", sender.name)):
        if header[field] != want:
            raise ProtocolError(f"{what} must say {field} = {want}. Got {header[field]}")
    if most is not None and len(body) > most:
        raise ProtocolError(f"{what} must have at most {most} bytes. Got {len(body)}")
    if header["bytes"] != len(body) or header["sha256"] != hashlib.sha256(body).hexdigest():
        raise ProtocolError(f"{what} must have the body that was signed. Got another")
    return Letter(sender, header, body, hashlib.sha256(data).hexdigest())


def task_of(data: bytes) -> str:
    """Return the hash of the task that a letter says it is of; nothing is checked yet.

    Raises:
        ProtocolError: it is not framed as a letter.
    """
    try:
        return str(json.loads(_cut(data)[2])["task"])
    except (ValueError, KeyError, TypeError, RecursionError) as e:
        raise ProtocolError("a letter's header must name its task. Got none") from e


def sender_key(data: bytes) -> bytes:
    """Return the signing key that a letter names as its sender's; nothing is checked yet.

    Raises:
        ProtocolError: it is not framed as a letter.
    """
    return _cut(data)[0]


def _cut(data: bytes) -> tuple[bytes, bytes, bytes, bytes]:
    """Return (sender's key, signature, header, body) of something at least framed as a letter."""
    if len(data) < FIXED or data[:7] != MAGIC[:7]:
        raise ProtocolError(f"a letter must begin with FEDGIST. Got {len(data)} other bytes")
    if data[7] != MAGIC[7]:
        raise ProtocolError(
            f"a letter must have format version {MAGIC[7]}. Got {data[7]}: install the FedGist "
            "that the other sites use"
        )
    (size,) = struct.unpack("<I", data[FIXED - 4 : FIXED])
    if size > MOST_HEADER or FIXED + size > len(data):
        raise ProtocolError(f"a letter must hold its header. Got {len(data)} bytes, cut short")
    text = data[FIXED : FIXED + size]
    return data[8:40], data[40 : FIXED - 4], text, data[FIXED + size :]


def _header(text: bytes, sender: Public) -> dict[str, Any]:
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as e:
        raise ProtocolError(f"{sender.name}: a letter's header must be JSON. Got {e}") from e
    kinds = {"task": str, "step": str, "from": str, "to": str, "kind": str, "sha256": str}
    good = isinstance(header, dict) and all(isinstance(header.get(k), t) for k, t in kinds.items())
    if not good or type(header.get("bytes")) is not int:
        raise ProtocolError(f"{sender.name}: a letter's header must be complete. Got {text[:80]!r}")
    return dict(header)


def fits(found: Mapping[str, Spec], expected: Mapping[str, Spec]) -> bool:
    """Tell whether tensors are those expected; a first size of -1 takes any, the same in all."""
    if found.keys() != expected.keys():
        return False
    rows = {found[k][1][:1] for k, (_, shape) in expected.items() if shape[:1] == (-1,)}
    return len(rows) <= 1 and all(
        found[k] == (dtype, (*found[k][1][:1], *shape[1:]) if shape[:1] == (-1,) else shape)
        for k, (dtype, shape) in expected.items()
    )


def _outline(body: bytes, what: str) -> dict[str, Spec]:
    """Return types and shapes from the body's own table, before anything is allocated."""
    try:
        (size,) = struct.unpack("<Q", body[:8])
        if size > min(MOST_HEADER, len(body) - 8):
            raise ValueError("a table longer than the body")
        table = json.loads(body[8 : 8 + size])
        table.pop("__metadata__", None)
        out = {
            str(k): (DTYPES[v["dtype"]], tuple(map(_size, v["shape"]))) for k, v in table.items()
        }
    except (struct.error, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(f"{what} must be safetensors of known types. Got {e!r}") from e
    need = sum(math.prod(shape) * dtype.itemsize for dtype, shape in out.values())
    if need != len(body) - 8 - size:
        raise ProtocolError(f"{what} must hold the numbers it lists. Got {len(body)} bytes")
    return out


def _size(n: object) -> int:
    if type(n) is not int or n < 0:
        raise ValueError(f"size {n!r}")
    return n


def _difference(found: Mapping[str, Spec], expected: Mapping[str, Spec]) -> str:
    if missing := sorted(expected.keys() - found.keys()):
        return f"no '{missing[0]}'"
    if extra := sorted(found.keys() - expected.keys()):
        return f"'{extra[0]}' besides"
    one = [k for k in sorted(found) if not fits({k: found[k]}, {k: expected[k]})]
    if not one:
        return "different numbers of rows"
    name = one[0]
    (dtype, shape), (want, size) = found[name], expected[name]
    return f"'{name}' of {dtype} {list(shape)} for {want} {list(size)}"
