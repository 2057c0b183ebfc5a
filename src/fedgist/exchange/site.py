"""One data holder: answers the coordinator's letters, one by one, and survives being killed.

A site trusts its own copy of the task, its policy and its ledger. Each step is answered once. The
answer, with whatever secrets the next step needs, is one file that is in place before anything
leaves; asked again for the same, the site sends the same bytes; asked for something else under the
same step, it refuses, so that no coordinator can repeat a sum over other sites and take the
difference. A release is in the ledger before it exists.

Under review a gist is made first, waits in a file and is sent only after a decision about exactly
that gist (`fedgist.exchange.review`); it is in the ledger before it may be sent.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from safetensors.torch import load, save

from fedgist.agreement import Agreement
from fedgist.errors import FedGistError, ProtocolError
from fedgist.exchange.gist import answer
from fedgist.exchange.letter import Kind, Letter, read_letter, write_letter
from fedgist.exchange.review import Maker, Review
from fedgist.exchange.store import Answered, lock_folder, write_durably
from fedgist.exchange.wire import (
    duty_of,
    message_of,
    promise,
    shared_of,
    sum_terms,
    to_tensor,
    to_wire,
    wire_blocks,
)
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity
from fedgist.privacy.ledger import Ledger
from fedgist.privacy.secure_sum import STAGES, Member
from fedgist.run import generator
from fedgist.types import Images, Round, Tensors

__all__ = ["Site"]


@final
@dataclass
class Site:
    """A site of one task.

    Attributes:
        agreement: the site's own copy of the task.
        identity: its keys.
        load: returns its images.
        folder: where it remembers what it has answered; mode 700.
        ledger: what its data have spent.
        policy: what it allows.
        review: whether a person looks at every gist before it is sent; True, too, where the policy
            says so, and once this task has been under review in this folder.
        look: the command that shows what waits, for messages.
        name: how messages call it.
    """

    agreement: Agreement
    identity: Identity
    load: Callable[[], Images]
    folder: Path
    ledger: Ledger
    policy: Policy = field(default_factory=Policy)
    review: bool = False
    look: str = "fedgist inspect"

    def __post_init__(self) -> None:
        self.place = self.agreement.place(self.identity.public)
        self.policy.check(self.agreement)
        self.agreement.check_encoders()
        self.folder = self.folder / self.agreement.digest[:16]
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_folder(self.folder)
        self._desk = Review(self.folder, self.agreement, self.identity.public)
        self.review = self.review or self.policy.review or self._desk.begun
        if self.review:
            self._desk.begin()

    @property
    def name(self) -> str:
        """The site's name in the roster."""
        return self.identity.public.name

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def answer(self, request: bytes) -> bytes:
        """Answer one letter of the coordinator.

        Args:
            request: as it came.

        Returns:
            The signed answer, the same bytes whenever the same is asked.

        Raises:
            ProtocolError: the letter is not the coordinator's, not for this task or site, out of
                order, or asks anew for a step that was answered.
            PrivacyError: the ledger's cap would be passed, or the ledger cannot be written.
            DataError: the images cannot be used.
            Awaiting: the gist waits for a decision; ask again.
            Withheld: the decision is to send nothing.
        """
        letter = read_letter(request, [self.agreement.leader], self.agreement.digest, to=self.name)
        if letter.kind != "ask":
            raise ProtocolError(f"{self.name}: a request must be of kind 'ask'. Got {letter.kind}")
        r, stage = self._parse(letter.step)  # first: the step names a file
        with self._undisturbed(stage):
            return self._answered(letter, r, stage)

    def _answered(self, letter: Letter, r: int, stage: str) -> bytes:
        if (kept := self._kept(letter.step)) is not None:
            if kept.asked != letter.digest:
                raise ProtocolError(
                    f"{self.name}: step '{letter.step}' must be asked once. Got another request "
                    "for it, which could be used to take differences: refused"
                )
            self._desk.clear(letter.step)  # killed between sealing and clearing
            return kept.reply
        if self.agreement.overdue:
            raise ProtocolError(
                f"{self.name}: the task must be answered before {self.agreement.exchange.deadline}."
                f" Got step '{letter.step}' later"
            )
        rnd = self._rounds[r]
        secret = b""
        if stage == "gist":
            shared = shared_of(letter.tensors(finite=False))
            tensors = self._release(letter.step, letter.digest, r, rnd, shared)
        else:
            tensors, secret = self._stage(r, rnd, stage, letter)
        return self._seal(letter.step, letter.digest, tensors, secret)

    def contribute(self) -> bytes:
        """Make the whole contribution unasked, where one file is all that the task takes.

        Raises:
            ProtocolError: the task takes more than one letter from each site.
            Awaiting, Withheld: as `answer`.
        """
        step, (rounds, task) = "0.gist", (self._rounds, self.agreement.task)
        if len(rounds) != 1 or (self.agreement.secure and rounds[0].noised):
            raise ProtocolError(
                f"a single file must be enough for the task. Got {len(rounds)} rounds, trust "
                f"'{self.agreement.privacy.trust}': use `fedgist join`, or trust 'local'"
            )
        with self._undisturbed("gist"):
            if (kept := self._kept(step)) is not None:
                self._desk.clear(step)
                return kept.reply
            drawn = generator(self.agreement.seed, "start")
            shared = self.agreement.built.start(task, drawn).shared
            return self._seal(step, "", self._release(step, "", 0, rounds[0], shared), b"")

    def decided(self, step: str) -> tuple[int, int] | None:
        """Return what changes when a decision about a step does; None while there is none."""
        return self._desk.stamp(step) if self.review else None

    def fault(self, request: bytes, error: FedGistError) -> bytes:
        """Return a signed letter saying that a request was not answered.

        It says what kind of error it was; the text may speak of the data and stays here.
        """
        letter = read_letter(request, [self.agreement.leader], self.agreement.digest, to=self.name)
        return self._letter(letter.step, "fault", {}, letter.digest, cause=type(error).__name__)

    def ended(self, data: bytes) -> str:
        """Return how the run ended, from the coordinator's last letter.

        Raises:
            ProtocolError: it is not one.
        """
        letter = read_letter(data, [self.agreement.leader], self.agreement.digest, to=self.name)
        if letter.kind != "end":
            raise ProtocolError(f"{self.name}: the last letter must say 'end'. Got {letter.kind}")
        return str(letter.header.get("text", ""))

    def _parse(self, step: str) -> tuple[int, str]:
        number, _, stage = step.partition(".")
        rounds = self._rounds
        if number.isdecimal() and int(number) < len(rounds):
            secure = self.agreement.secure and rounds[int(number)].noised
            if stage in (STAGES if secure else ("gist",)):
                return int(number), stage
        raise ProtocolError(f"{self.name}: a step must be one of the task's plan. Got '{step}'")

    def _undisturbed(self, stage: str) -> AbstractContextManager[None]:
        """Keep a decision as it is from when it is read until the gist is sealed."""
        return self._desk.held() if self.review and _releases(stage) else nullcontext()

    def _stage(self, r: int, rnd: Round, stage: str, letter: Letter) -> tuple[Tensors, bytes]:
        """Answer one stage of a secure sum; return the answer and the secrets to keep."""
        terms = sum_terms(self.agreement, r)
        before = STAGES.index(stage)
        if before == 0:
            member = Member(terms, self.place, self.identity.sign_key)
        else:
            kept = self._kept(f"{r}.{STAGES[before - 1]}")
            if kept is None:
                raise ProtocolError(
                    f"{self.name}: stage '{stage}' must come after '{STAGES[before - 1]}'. Got it "
                    "first"
                )
            member = Member.restore(terms, self.place, self.identity.sign_key, kept.secret)
        message, sums = message_of(letter), None
        if stage == "upload":
            shared = shared_of(letter.tensors(finite=False))
            sums = self._release(letter.step, letter.digest, r, rnd, shared)
        reply = member.answer(stage, message, sums)
        return {"message": to_tensor(reply)}, member.dump()

    def _release(self, step: str, asked: str, r: int, rnd: Round, shared: Tensors) -> Tensors:
        """Write the release down, then make it; under review the other way round."""
        images = self.load()
        if self.review:
            return self._reviewed(step, asked, r, rnd, shared, images)
        self.policy.check_images(images)
        if r == 0:  # no round is spent on a task that the cap would stop half-way
            self.ledger.check([self.agreement.release(n) for n in range(len(self._rounds))], images)
        self.ledger.record(self.agreement.release(r), images, by=self._token())
        memory = self._memory()
        gist = self._made(r, rnd, shared, images, memory)
        if memory:
            write_durably(self.folder / "memory.safetensors", save(memory))
        return gist

    def _made(
        self, r: int, rnd: Round, shared: Tensors, images: Images, memory: Tensors
    ) -> Tensors:
        """Make a gist in the form in which it leaves, but for the masks of a secure sum."""
        duty = duty_of(self.agreement)
        made = answer(duty, self.place, self.name, lambda: images, r, rnd, shared, memory)
        if not rnd.noised or self.agreement.secure:
            return made.gist
        return to_wire(made.gist, wire_blocks(duty, rnd))

    def _reviewed(
        self, step: str, asked: str, r: int, rnd: Round, shared: Tensors, images: Images
    ) -> Tensors:
        """Return the gist that a person has agreed to, written down and ready to be sealed.

        The order is: ledger, receipt, memory; then the caller seals, and the waiting file goes.
        Killed anywhere in between, nothing has left: the waiting file still has the gist and the
        memory from before it, and all is done again with the decision that then stands.

        The choice of what to withhold is a person's, who saw the data, and no ε covers it: so the
        ledger charges every image that could have been chosen.
        """
        maker = Maker(
            make=lambda left, memory: self._made(r, rnd, shared, left, memory),
            memory=self._memory,
            check=self.policy.check_images,
            # Nothing is spent by making, but what could not be sent need not be looked at.
            spend=lambda: self.ledger.check(
                [self.agreement.release(n) for n in (range(len(self._rounds)) if r == 0 else (r,))],
                images,
            ),
        )
        agreed = self._desk.agreed(self.identity, step, asked, images, maker, self.look)
        self.ledger.record(self.agreement.release(r), images, by=self._token())
        self._desk.sending(self.identity, agreed)
        if agreed.after:
            write_durably(self.folder / "memory.safetensors", agreed.after)
        return agreed.tensors

    def _token(self) -> str:
        """Return what tells this folder from any other: drawn once, kept in it.

        A record by this folder without its answer means that it was killed in between: the answer
        cannot have left and may be made anew. The ledger refuses any other folder.
        """
        path = self.folder / "token"
        if not path.is_file():
            write_durably(path, secrets.token_hex(16).encode())
        return path.read_text()

    @property
    def _rounds(self) -> tuple[Round, ...]:
        return self.agreement.plan.rounds

    def _seal(self, step: str, asked: str, tensors: Tensors, secret: bytes) -> bytes:
        """Sign an answer and keep it, with its secrets, before it may leave."""
        reply = self._letter(step, "reply", tensors, asked)
        Answered(asked, reply, secret).write(self._record(step))
        self._desk.clear(step)
        return reply

    def _letter(self, step: str, kind: Kind, tensors: Tensors, asked: str, **more: str) -> bytes:
        return write_letter(
            self.identity,
            self.agreement.digest,
            step,
            self.agreement.leader.name,
            kind,
            tensors,
            asked=asked,
            **promise(self.agreement),
            **more,
        )

    def _record(self, step: str) -> Path:
        return self.folder / f"{step}.answered"

    def _kept(self, step: str) -> Answered | None:
        return Answered.read(self._record(step))

    def _memory(self) -> Tensors:
        path = self.folder / "memory.safetensors"
        return dict(load(path.read_bytes())) if path.is_file() else {}


def _releases(stage: str) -> bool:
    """Tell whether a stage makes a gist."""
    return stage in ("gist", "upload")
