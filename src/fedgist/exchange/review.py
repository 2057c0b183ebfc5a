"""The audit of a gist by the person who answers for the data, before anything is sent.

::

    STATE/<task>/review/<step>.pending          the gist as it would leave, waiting (mode 600)
    STATE/<task>/review/decision-<step>.json    what was decided about it, signed by the site

A decision is about one gist, named by the SHA-256 of its safetensors bytes. A folder named
``review`` stays behind once there has been one, so that forgetting an option at the next start
lets nothing out.
"""

from __future__ import annotations

import os
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import final

from safetensors.torch import load, save

from fedgist.agreement import Agreement
from fedgist.errors import Awaiting, ProtocolError, Withheld
from fedgist.exchange.receipt import (
    Pending,
    Receipt,
    Verdict,
    WithheldImages,
    data_hash,
    kept_receipt,
    round_of,
    said_of,
    utc_now,
)
from fedgist.exchange.store import lock_folder, write_durably
from fedgist.privacy.identity import Identity, Public
from fedgist.types import Images, Tensors

__all__ = ["Agreed", "Maker", "Review"]

FOLDER = "review"
PATIENCE = 5.0  # seconds that a site waits while a decision is being written


@dataclass(frozen=True)
class Maker:
    """How a site makes a gist in one round.

    Attributes:
        make: maps images and the method's memory, which it changes, to the gist.
        memory: returns the memory as it is on disk.
        check: refuses images that the site's policy does not allow.
        spend: refuses what the ledger's cap would not allow; records nothing.
    """

    make: Callable[[Images, Tensors], Tensors]
    memory: Callable[[], Tensors]
    check: Callable[[Images], None]
    spend: Callable[[], None]


@dataclass(frozen=True)
class Agreed:
    """A gist that may leave.

    Attributes:
        receipt: the decision.
        gist: safetensors.
        after: the method's memory after it, safetensors; empty when there is none.
    """

    receipt: Receipt
    gist: bytes
    after: bytes

    @property
    def tensors(self) -> Tensors:
        """The gist to be put into a letter."""
        return _tensors(self.gist)


@final
@dataclass(frozen=True)
class Review:
    """What waits at one site of one task, and what was decided.

    Attributes:
        state: the site's folder of this task; the review's own folder is made in it.
        agreement: the site's own copy of the task.
        public: the site.
    """

    state: Path
    agreement: Agreement
    public: Public

    @property
    def folder(self) -> Path:
        """Where it keeps its files."""
        return self.state / FOLDER

    @property
    def begun(self) -> bool:
        """Whether this task is under review at this site."""
        return self.folder.is_dir()

    def begin(self) -> None:
        """Put the task under review for good; mode 700."""
        self.folder.mkdir(exist_ok=True, mode=0o700)
        for step in self._steps():
            if self.answered(step):  # killed between sealing and clearing
                self.clear(step)

    @contextmanager
    def held(self, patience: float = PATIENCE) -> Iterator[None]:
        """Let no decision change meanwhile.

        Raises:
            Awaiting: somebody else holds it for longer.
        """
        limit = time.monotonic() + patience
        while True:
            try:
                handle = lock_folder(self.folder)
                break
            except ProtocolError as e:
                if time.monotonic() > limit:
                    raise Awaiting(f"{e}, then run the same command again") from e
                time.sleep(0.02)
        try:
            yield
        finally:
            os.close(handle)

    def agreed(
        self,
        identity: Identity,
        step: str,
        asked: str,
        images: Images,
        maker: Maker,
        look: str,
    ) -> Agreed:
        """Return the gist that may leave, once there is a decision to send it.

        What is withheld is withheld by making the gist anew, with fresh noise. That is sound
        because the first gist never leaves these walls: what others see is one noised gist, as if
        the images withheld had never been there.

        Args:
            identity: the site's keys.
            step: which.
            asked: SHA-256 of the request; empty when nobody asked.
            images: all of the site's.
            maker: how a gist is made.
            look: the command that shows what waits, for the message.

        Raises:
            Awaiting: there is no decision about this gist yet.
            Withheld: it was refused.
            ProtocolError: what waits, or the decision, was changed.
        """
        waiting = self.pending(step)
        if waiting is None or (waiting.asked, waiting.data) != (asked, data_hash(images)):
            # One that was made for another request or of other images has not left: it is dropped.
            waiting = self._propose(identity, step, asked, images, maker, waiting)
        receipt, who = self.receipt(step), f"{self.public.name}: round {round_of(step) + 1}"
        if receipt is None or receipt.said["gist"] != waiting.digest:
            raise Awaiting(
                f"{who} waits for your decision, and nothing of it is sent before. Run: {look}"
            )
        if receipt.said["decision"] != "send":
            raise Withheld(f"{who} must not be sent. Got a refusal at {receipt.said['time']}")
        if receipt.withheld == waiting.withheld:
            agreed = Agreed(receipt, waiting.gist, waiting.after)
            if _saved(agreed.tensors) != waiting.gist:  # a letter would have other bytes
                raise ProtocolError(f"{who} must be sent as it was looked at. Got other bytes")
            return agreed
        left = receipt.withheld.left(images)
        maker.check(left)
        memory = _tensors(waiting.before)  # as it was before the first making
        gist = _saved(maker.make(left, memory))
        return Agreed(receipt, gist, _saved(memory))

    def _propose(
        self,
        identity: Identity,
        step: str,
        asked: str,
        images: Images,
        maker: Maker,
        old: Pending | None,
    ) -> Pending:
        """Make a gist and put it where it waits; nothing is spent."""
        maker.spend()
        withheld = self.withheld(before=round_of(step))
        left = withheld.left(images)
        maker.check(left)
        before = _saved(maker.memory()) if old is None else old.before
        memory = _tensors(before)
        gist = _saved(maker.make(left, memory))
        facts = (self.agreement.digest, step, asked, data_hash(images), utc_now(), withheld)
        found = Pending(*facts, gist, before, _saved(memory))
        write_durably(self._pending(step), found.dump(identity))
        return found

    def pending(self, step: str) -> Pending | None:
        """Return what waits under a step.

        Raises:
            ProtocolError: the file was changed, or belongs to another task or step.
        """
        path = self._pending(step)
        try:
            found = Pending.read(path.read_bytes(), self.public)
            if (found.task, found.step) != (self.agreement.digest, step):
                raise ValueError(f"that of step '{found.step}' of task {found.task[:12]}")
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError, struct.error) as e:
            raise ProtocolError(
                f"'{path}' must be the gist that this site made. Got {e}: nothing of it is sent; "
                "restore the file, or delete it to have the gist made anew"
            ) from e
        return found

    def waiting(self) -> Pending | None:
        """Return what waits in the latest round, if anything does."""
        steps = [s for s in self._steps() if not self.answered(s)]
        return self.pending(max(steps, key=round_of)) if steps else None

    def answered(self, step: str) -> bool:
        """Tell whether the gist of a step was sent."""
        return (self.state / f"{step}.answered").is_file()

    def receipt(self, step: str) -> Receipt | None:
        """Return the decision under a step, whichever gist it was about.

        Raises:
            ProtocolError: it is forged, altered, or for another task or step.
        """
        return kept_receipt(self.place(step), self.public, self.agreement.digest, step)

    def receipts(self) -> list[Receipt]:
        """Return every decision of the task, the first round first. Raises as `receipt`."""
        names = [p.stem.removeprefix("decision-") for p in self.folder.glob("decision-*.json")]
        found = [self.receipt(step) for step in sorted(names, key=round_of)]
        return [r for r in found if r is not None]

    def withheld(self, before: int) -> WithheldImages:
        """Return what decisions about rounds before ``before`` keep out of the later ones."""
        out = WithheldImages()
        for r in self.receipts():
            if round_of(r.said["step"]) < before:
                out |= r.withheld
        return out

    def stamp(self, step: str) -> tuple[int, int] | None:
        """Return what changes when a decision does: cheap to look at again and again."""
        try:
            s = self.place(step).stat()
        except OSError:
            return None
        return (s.st_mtime_ns, s.st_size)

    def decide(
        self,
        identity: Identity,
        step: str,
        gist: str,
        verdict: Verdict,
        withheld: WithheldImages | None = None,
        asked: float | None = None,
    ) -> Receipt:
        """Write down a decision; until the gist is sent, it takes the place of an earlier one.

        Args:
            identity: the site's keys.
            step: which.
            gist: SHA-256 of the gist that was looked at.
            verdict: send (without what is withheld) or refuse.
            withheld: what to leave out, in this and every later round.
            asked: with a refusal, the ε at which the site would take part; for people to read.

        Raises:
            ProtocolError: the gist was sent already and another decision was taken then; or it is
                not the one that waits.
            Awaiting: the site is sending at this moment.
        """
        with self.held():
            pending = self.pending(step)
            before = pending.withheld if pending else self.withheld(round_of(step))
            out = before | (withheld or WithheldImages())
            old = self.receipt(step)
            said = said_of(self.agreement, self.public, step, gist, verdict, out, asked)
            if old and old.same(said):
                return old
            if self.answered(step):
                raise ProtocolError(
                    f"a decision must come before the gist of step '{step}' is sent. Got another "
                    "one after it: what was sent cannot be called back"
                )
            if pending is None or pending.digest != gist:
                raise ProtocolError(
                    f"a decision must be about the gist that waits. Got one about {gist[:12]}: "
                    "look at it again, then decide"
                )
            receipt = Receipt(said)
            write_durably(self.place(step), receipt.dump(identity))
            return receipt

    def sending(self, identity: Identity, agreed: Agreed) -> None:
        """Complete a receipt by what is about to leave; before it may."""
        gist, said = agreed.gist, agreed.receipt.said
        sent = {"gist": sha256(gist).hexdigest(), "bytes": len(gist), "time": utc_now()}
        write_durably(self.place(said["step"]), Receipt(said, sent).dump(identity))

    def clear(self, step: str) -> None:
        """Remove a gist that is no longer needed: it was sent, or another in its place."""
        # With noise, the two would add up to less noise than either has.
        with suppress(FileNotFoundError):
            self._pending(step).unlink()

    def place(self, step: str) -> Path:
        """Return where the decision under a step lies."""
        return self.folder / f"decision-{step}.json"

    def _steps(self) -> list[str]:
        return [p.name.removesuffix(".pending") for p in self.folder.glob("*.pending")]

    def _pending(self, step: str) -> Path:
        return self.folder / f"{step}.pending"


def _saved(tensors: Tensors) -> bytes:
    """Return safetensors, the same bytes as a letter's body; nothing for none."""
    return save({k: v.contiguous() for k, v in tensors.items()}) if tensors else b""


def _tensors(data: bytes) -> Tensors:
    """Undo `_saved`."""
    return dict(load(data)) if data else {}
