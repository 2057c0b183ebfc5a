"""A gist file that `fedgist contribute` wrote, looked at before somebody carries it away.

The file cannot be changed any more: it may be sent or kept back. The signed decision lies beside
it, in ``GIST.decision.json``.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import final

from fedgist.agreement import Agreement
from fedgist.errors import ConfigError, ProtocolError
from fedgist.exchange.gist import sent_specs
from fedgist.exchange.letter import Letter, read_letter
from fedgist.exchange.receipt import (
    Pending,
    Receipt,
    Verdict,
    WithheldImages,
    kept_receipt,
    said_of,
)
from fedgist.exchange.store import write_durably
from fedgist.exchange.wire import duty_of, promise, wire_blocks, wire_specs
from fedgist.privacy.identity import Identity, Public

__all__ = ["Handed"]


@final
@dataclass(frozen=True)
class Handed:
    """One gist file.

    Attributes:
        path: the file.
        agreement: the task.
        letter: what is in it, its signature and hash checked.
    """

    path: Path
    agreement: Agreement
    letter: Letter

    @staticmethod
    def open(path: Path, agreement: Agreement) -> Handed:
        """Read a gist file of a task.

        Raises:
            ProtocolError: it cannot be read, is no gist, is of another task, or was changed.
        """
        try:
            data = path.read_bytes()
        except OSError as e:
            raise ProtocolError(
                f"a gist file must be readable. Got '{path}': {e.strerror or e}"
            ) from e
        try:
            letter = read_letter(data, agreement.roster, agreement.digest, to=agreement.leader.name)
        except ProtocolError as e:
            raise ProtocolError(f"'{path}' must be a site's gist for this task. {e}") from e
        if letter.kind != "reply" or not letter.step.endswith(".gist"):
            raise ProtocolError(
                f"'{path}' must be a gist. Got a letter of kind '{letter.kind}', step "
                f"'{letter.step}'"
            )
        rnd = agreement.plan.rounds[0]
        blocks = wire_blocks(duty_of(agreement), rnd) if rnd.noised else {}
        letter.tensors(wire_specs(blocks) if rnd.noised else sent_specs(rnd))
        return Handed(path, agreement, letter)

    @property
    def public(self) -> Public:
        """The site that made it."""
        return self.letter.sender

    @property
    def folder(self) -> Path:
        """Where the file is."""
        return self.path.absolute().parent

    @property
    def broken(self) -> list[tuple[str, str, str]]:
        """What the file states of its privacy and the task does not: name, task's word, file's."""
        want, got = promise(self.agreement), self.letter.header
        return [(k, v, str(got.get(k))) for k, v in want.items() if got.get(k) != v]

    def waiting(self) -> Pending:
        """Return the gist."""
        made = datetime.fromtimestamp(self.path.stat().st_mtime, UTC).isoformat(timespec="seconds")
        facts = (self.agreement.digest, self.letter.step, "", "", made, WithheldImages())
        return Pending(*facts, self.letter.body, b"", b"")

    def receipt(self, step: str) -> Receipt | None:
        """Return the decision about it.

        Raises:
            ProtocolError: it was not signed by this site as it stands, or is about another task.
        """
        return kept_receipt(self.place(step), self.public, self.agreement.digest, step)

    def receipts(self) -> list[Receipt]:
        """Return the decision about it, if there is one."""
        found = self.receipt(self.letter.step)
        return [] if found is None else [found]

    def place(self, step: str) -> Path:
        """Return where the decision lies."""
        return self.path.with_name(self.path.name + ".decision.json")

    def decide(
        self,
        identity: Identity,
        step: str,
        gist: str,
        verdict: Verdict,
        withheld: WithheldImages | None = None,
        asked: float | None = None,
    ) -> Receipt:
        """Write down a decision, in the place of an earlier one. See `Review.decide`.

        Raises:
            ConfigError: something is to be withheld, which a file that exists cannot do; or the
                key is another site's.
        """
        if withheld:
            raise ConfigError(
                "a gist file must be sent or kept as it is. Got images to withhold: make it anew "
                "with `fedgist contribute --review`, which asks before it writes the file"
            )
        if identity.public != self.public:
            raise ConfigError(
                f"--key must be that of {self.public.name}, who made the gist. Got "
                f"{identity.name}'s"
            )
        said = said_of(self.agreement, self.public, step, gist, verdict, WithheldImages(), asked)
        old = self.receipt(step)
        if old and old.same(said):
            return old
        receipt = Receipt(said)
        write_durably(self.place(step), receipt.dump(identity))
        return receipt
