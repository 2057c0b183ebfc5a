"""What a review keeps on disk: the gist that waits, and the signed decision about it."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, Protocol

import torch

from fedgist.agreement import Agreement
from fedgist.errors import ProtocolError
from fedgist.privacy.identity import Identity, Public
from fedgist.types import Images

__all__ = [
    "Desk",
    "Pending",
    "Receipt",
    "Verdict",
    "WithheldImages",
    "data_hash",
    "image_hashes",
    "kept_receipt",
    "round_of",
    "said_of",
    "utc_now",
]

Verdict = Literal["send", "refuse"]

PENDING, DECISION, SENT = b"pending gist", b"decision on a gist", b"gist sent after a decision"


@dataclass(frozen=True)
class WithheldImages:
    """What a site keeps out of a task.

    Attributes:
        classes: names of classes of which nothing is used.
        images: SHA-256 of pixels (see `image_hashes`); every image with these pixels is left out.
    """

    classes: tuple[str, ...] = ()
    images: tuple[str, ...] = ()

    def __or__(self, other: WithheldImages) -> WithheldImages:
        return WithheldImages(
            tuple(sorted({*self.classes, *other.classes})),
            tuple(sorted({*self.images, *other.images})),
        )

    def left(self, images: Images) -> Images:
        """Return the images that may still be used, in their order; the same when none is out."""
        return images.take(self.kept(images)) if self else images

    def kept(self, images: Images) -> torch.Tensor:
        """Return bool ``[n]``: which images may still be used."""
        out = {images.classes.index(c) for c in self.classes if c in images.classes}
        keep = torch.tensor([y not in out for y in images.labels.tolist()], dtype=torch.bool)
        if self.images:
            hashes = set(self.images)
            keep &= torch.tensor([h not in hashes for h in image_hashes(images)], dtype=torch.bool)
        return keep

    def __bool__(self) -> bool:
        return bool(self.classes or self.images)


@dataclass(frozen=True)
class Pending:
    """A gist that waits.

    Attributes:
        task: hash of the task file.
        step: such as ``0.gist``.
        asked: SHA-256 of the request; empty when nobody asked.
        data: `data_hash` of the images that it was made of, withheld ones included.
        made: UTC time, ISO 8601.
        withheld: what earlier rounds keep out.
        gist: safetensors, as it would leave: packed, and with its noise where the site adds any.
        before: the method's memory (safetensors) from which it was made; empty when there is none.
        after: the memory that it leaves behind.
    """

    task: str
    step: str
    asked: str
    data: str
    made: str
    withheld: WithheldImages
    gist: bytes
    before: bytes
    after: bytes

    @property
    def digest(self) -> str:
        """SHA-256 of the gist, hexadecimal."""
        return sha256(self.gist).hexdigest()

    def dump(self, identity: Identity) -> bytes:
        """Return the file: signature, length of the header, header (JSON), the three bodies."""
        parts = {"gist": self.gist, "before": self.before, "after": self.after}
        head: dict[str, Any] = {k: getattr(self, k) for k in ("task", "step", "asked", "data")}
        head |= {"made": self.made, "withheld": vars(self.withheld)}
        head |= {k: [len(v), sha256(v).hexdigest()] for k, v in parts.items()}
        text = _canonical(head)
        signature = identity.sign(text, PENDING)
        return signature + struct.pack("<I", len(text)) + text + b"".join(parts.values())

    @staticmethod
    def read(data: bytes, public: Public) -> Pending:
        """Undo `dump`.

        Raises:
            ValueError: a byte of it is not what this site wrote.
        """
        (size,) = struct.unpack("<I", data[64:68])
        text, body = data[68 : 68 + size], data[68 + size :]
        if not public.verify(data[:64], text, PENDING):
            raise ValueError("a file with another signature")
        head, parts = json.loads(text), {}
        for name in ("gist", "before", "after"):
            length, digest = head.pop(name)
            parts[name], body = body[:length], body[length:]
            if sha256(parts[name]).hexdigest() != digest:
                raise ValueError(f"another {name}")
        if body:
            raise ValueError("more bytes than it should have")
        return Pending(**(head | {"withheld": _withheld(head["withheld"])} | parts))


@dataclass(frozen=True)
class Receipt:
    """A decision, signed by the site.

    Attributes:
        said: ``task`` (hash), ``name``, ``step``, ``round`` (from 1), ``site``, ``gist`` (SHA-256),
            ``decision`` (send or refuse), ``classes`` and ``images`` (withheld, here and before),
            ``claim`` (its line), ``time`` (UTC) and, with a refusal, maybe ``asked_epsilon``: the
            ε at which the site would take part.
        sent: what was then made ready to leave: ``gist`` (SHA-256, another one where something was
            withheld), ``bytes``, ``time``; None before that.
    """

    said: Mapping[str, Any]
    sent: Mapping[str, Any] | None = None

    @property
    def withheld(self) -> WithheldImages:
        """What the decision keeps out, of this and every later round."""
        return _withheld(self.said)

    def same(self, said: Mapping[str, Any]) -> bool:
        """Tell whether another decision says the same, but for when."""
        times = ("time",)
        return {k: v for k, v in self.said.items() if k not in times} == {
            k: v for k, v in said.items() if k not in times
        }

    def dump(self, identity: Identity) -> bytes:
        """Return the file, JSON for people and programs."""
        out = {"decision": self.said, "signature": _signed(identity, self.said, DECISION)}
        if self.sent is not None:
            whole = {"decision": self.said, "sent": self.sent}
            out |= {"sent": self.sent, "sent_signature": _signed(identity, whole, SENT)}
        return json.dumps(out, indent=2, ensure_ascii=False).encode() + b"\n"

    @staticmethod
    def read(data: bytes, public: Public) -> Receipt:
        """Undo `dump`.

        Raises:
            ValueError: it was not signed by this site as it stands.
        """
        out = json.loads(data)
        said, sent = out["decision"], out.get("sent")
        if not public.verify(bytes.fromhex(out["signature"]), _canonical(said), DECISION):
            raise ValueError("another signature")
        if sent is not None:
            whole = _canonical({"decision": said, "sent": sent})
            if not public.verify(bytes.fromhex(out["sent_signature"]), whole, SENT):
                raise ValueError("another signature of what was sent")
        return Receipt(said, sent)


class Desk(Protocol):
    """Where a gist lies while somebody looks at it, and where the decision about it is put."""

    @property
    def public(self) -> Public:
        """The site whose gist it is."""

    @property
    def folder(self) -> Path:
        """Where its files are."""

    def waiting(self) -> Pending | None:
        """Return the gist, if there is one."""

    def receipt(self, step: str) -> Receipt | None:
        """Return the decision under a step."""

    def receipts(self) -> list[Receipt]:
        """Return every decision."""

    def place(self, step: str) -> Path:
        """Return where the decision under a step lies."""

    def decide(
        self,
        identity: Identity,
        step: str,
        gist: str,
        verdict: Verdict,
        withheld: WithheldImages | None = None,
        asked: float | None = None,
    ) -> Receipt:
        """Write down a decision."""


def said_of(
    agreement: Agreement,
    public: Public,
    step: str,
    gist: str,
    verdict: Verdict,
    out: WithheldImages,
    asked: float | None = None,
) -> dict[str, Any]:
    """Return what a receipt says; see `Receipt`."""
    said = {
        "task": agreement.digest,
        "name": agreement.task.name,
        "step": step,
        "round": round_of(step) + 1,
        "site": public.name,
        "gist": gist,
        "decision": verdict,
        "classes": list(out.classes),
        "images": list(out.images),
        "claim": agreement.plan.claim.line(),
        "time": utc_now(),
    }
    return said if asked is None else said | {"asked_epsilon": asked}


def round_of(step: str) -> int:
    """Return the number of a step's round, from 0; -1 where it names none."""
    number = step.partition(".")[0]
    return int(number) if number.isdecimal() else -1


def kept_receipt(path: Path, public: Public, task: str, step: str) -> Receipt | None:
    """Read a decision of a site about one step of a task; None where there is no file.

    Raises:
        ProtocolError: it is forged, altered, or for another task, step or site.
    """
    try:
        found = Receipt.read(path.read_bytes(), public)
        for key, value in {"task": task, "step": step, "site": public.name}.items():
            if found.said[key] != value:
                raise ValueError(f"{key} {found.said[key]}")
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ProtocolError(
            f"'{path}' must be a decision that this site signed. Got {e}: it counts for "
            "nothing; delete it and decide again"
        ) from e
    return found


def image_hashes(images: Images) -> list[str]:
    """Return SHA-256 of the pixels of every image as the task sees them, ``[c, h, w]`` in order."""
    return [sha256(x.numpy().tobytes()).hexdigest() for x in images.pixels.contiguous()]


def data_hash(images: Images) -> str:
    """Return SHA-256 over all pixels and labels, in order."""
    out = sha256(images.pixels.contiguous().numpy().tobytes())
    out.update(images.labels.contiguous().numpy().tobytes())
    return out.hexdigest()


def utc_now() -> str:
    """Return the time in UTC, ISO 8601, to the second."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _withheld(value: Mapping[str, Any]) -> WithheldImages:
    return WithheldImages(tuple(value["classes"]), tuple(value["images"]))


def _signed(identity: Identity, value: Mapping[str, Any], purpose: bytes) -> str:
    return identity.sign(_canonical(value), purpose).hex()


def _canonical(value: Mapping[str, Any]) -> bytes:
    """Return the one text that stands for a JSON value, so that it can be signed."""
    return json.dumps(value, sort_keys=True, ensure_ascii=False, separators=(",", ":")).encode()
