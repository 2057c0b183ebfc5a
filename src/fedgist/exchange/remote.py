"""The coordinator's end: asks sites for their gists over a transport and merges what comes.

Killed at any moment, it goes on: every answer is on disk before the next step begins, every merged
round before the method sees it, and what is asked is the same each time. Who is in a step is
settled once, when the step is closed; what comes later is not used.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from pathlib import Path
from typing import final

from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedgist.agreement import Agreement
from fedgist.errors import PrivacyError, ProtocolError
from fedgist.exchange.gist import Merger, sent_specs
from fedgist.exchange.letter import Letter, Spec, read_letter, write_letter
from fedgist.exchange.store import lock_folder, write_durably
from fedgist.exchange.transport import Transport
from fedgist.exchange.wire import (
    duty_of,
    from_wire,
    message_of,
    promise,
    sum_terms,
    to_shared,
    to_tensor,
    wire_blocks,
    wire_specs,
)
from fedgist.privacy.identity import Identity
from fedgist.privacy.secure_sum import Collector
from fedgist.progress import Progress, Visit
from fedgist.types import Merged, Round, Tensors

__all__ = ["RemoteExchange"]

HEAD = 4096  # bytes of a body that are not numbers: its own table


@final
@dataclass
class RemoteExchange:
    """Runs rounds with the sites of a task.

    Attributes:
        agreement: the task.
        identity: the coordinator's keys.
        transport: what carries letters.
        folder: where it remembers; mode 700.
        faults: (step, site) -> why its answer was not used.
        visits: filled as answers come; how many images a site used is not known here.
    """

    agreement: Agreement
    identity: Identity
    transport: Transport
    folder: Path
    progress: Progress = field(default_factory=Progress)
    faults: dict[tuple[str, str], str] = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)

    def __post_init__(self) -> None:
        if self.identity.public != self.agreement.leader:
            raise ProtocolError(
                f"the coordinator's key must be the task's, {self.agreement.leader.name} "
                f"({self.agreement.leader.fingerprint}). Got {self.identity.public.name} "
                f"({self.identity.public.fingerprint})"
            )
        self.folder = self.folder / self.agreement.digest[:16]
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._lock = lock_folder(self.folder)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The sites' names, in order."""
        return tuple(s.name for s in self.agreement.roster)

    def round(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Ask every site for its gist and merge the answers.

        Raises:
            ProtocolError: too few sites answered; the message names those that are missing.
            PrivacyError: so few that their noise shares do not add up.
        """
        if (done := self._merged(r)) is not None:
            self._recall(f"{r}.")
            return done
        secure = self.agreement.secure and rnd.noised
        merged = self._secure(r, rnd, shared) if secure else self._plain(r, rnd, shared)
        meta = {"sigma": repr(merged.sigma), "clients": str(merged.clients)}
        write_durably(self.folder / f"{r}.merged", save(merged.tensors, meta))
        return merged

    def close(self) -> None:
        """Let another process have the folder."""
        os.close(self._lock)

    def end(self, text: str) -> None:
        """Tell every site that the run is over, and how it ended."""
        digest = self.agreement.digest
        self.transport.end(
            {
                n: write_letter(self.identity, digest, "end", n, "end", {}, text=text)
                for n in self.names
            }
        )

    def _plain(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Take one letter from each site."""
        duty = duty_of(self.agreement)
        blocks = wire_blocks(duty, rnd) if rnd.noised else None
        specs = sent_specs(rnd) if blocks is None else wire_specs(blocks)
        merger = Merger(duty, rnd)

        def check(letter: Letter) -> None:
            letter.tensors(specs)

        step = f"{r}.gist"
        for name in self._step(step, dict.fromkeys(self.names, to_shared(shared)), check, specs):
            tensors = self._stored(step, name).tensors(specs)
            merger.add(tensors if blocks is None else from_wire(tensors, blocks), name)
        return merger.merged(r)

    def _secure(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Go through the stages of a secure sum; the collector decides who is still in it."""
        collector = Collector(sum_terms(self.agreement, r))
        requests = collector.open()
        while requests:
            stage = collector.stage
            more = to_shared(shared) if stage == "upload" else {}
            asked = {self.names[i]: {"message": to_tensor(m)} | more for i, m in requests.items()}
            step = f"{r}.{stage}"
            for name in self._step(step, asked, message_of, None):
                collector.receive(self.names.index(name), message_of(self._stored(step, name)))
            requests = collector.advance()
            for i, cause in collector.faults.items():
                self.faults.setdefault((step, self.names[i]), cause)
        present = len(collector.survivors)
        if present < self.agreement.exchange.quorum:
            raise PrivacyError(
                f"round {r} must hold {self.agreement.exchange.quorum} sites. Got {present}"
            )
        merger = Merger(duty_of(self.agreement), rnd)
        merger.add_sum(collector.result(), present)
        return merger.merged(r)

    def _step(
        self,
        step: str,
        bodies: Mapping[str, Tensors],
        check: Callable[[Letter], object],
        specs: Mapping[str, Spec] | None,
    ) -> list[str]:
        """Ask one thing of some sites; return those that answered, settled for good."""
        closed = self.folder / f"{step}.closed"
        self._recall(f"{step}.")
        if closed.is_file():
            return list(json.loads(closed.read_text()))
        letters = {
            n: write_letter(self.identity, self.agreement.digest, step, n, "ask", body)
            for n, body in bodies.items()
        }
        asked = {n: sha256(letter).hexdigest() for n, letter in letters.items()}
        done = {n for n in letters if self._path(step, n).is_file()}
        self.progress.stage(f"{step} of {len(letters)} sites")

        def take(name: str, data: bytes) -> bool:
            try:
                letter = self._checked(data, name, step, asked[name], specs)
                if letter.kind == "fault":
                    cause = letter.header.get("cause", "no reason given")
                    self.faults[step, name] = f"the site refused ({cause}); its own log says why"
                    return True
                check(letter)
            except ProtocolError as e:
                self.faults[step, name] = str(e)
                return False
            write_durably(self._path(step, name), data)
            done.add(name)
            self.faults.pop((step, name), None)
            self._note(name, len(done), len(letters), data, letters[name])
            return True

        open_ = {n: letter for n, letter in letters.items() if n not in done}
        for name, failure in self.transport.ask(step, open_, take).items() if open_ else ():
            self.faults.setdefault((step, name), str(failure))
        self._enough(step, done, letters)
        answered = [n for n in self.names if n in done]
        write_durably(closed, json.dumps(answered).encode())
        return answered

    def _enough(self, step: str, done: Collection[str], letters: Mapping[str, bytes]) -> None:
        """Refuse to close a step that too few have answered; it may be asked again."""
        terms = self.agreement.exchange
        late = step.endswith((".confirm", ".unmask"))  # the sum is made: it only has to be opened
        need = min(terms.threshold, len(letters)) if late else terms.quorum
        if len(done) < need:
            missing = "; ".join(
                f"{n} ({self.faults.get((step, n), 'no answer')})"
                for n in self.names
                if n in letters and n not in done
            )
            raise ProtocolError(
                f"step '{step}' must be answered by at least {need} sites. Got {len(done)}; "
                f"missing: {missing}. Nothing is lost: start again when they are back"
            )

    def _checked(
        self,
        data: bytes,
        name: str,
        step: str,
        asked: str,
        specs: Mapping[str, Spec] | None,
    ) -> Letter:
        """Return an answer that is this site's, for this step, and promises what the task does."""
        agreement = self.agreement
        sender = agreement.roster[self.names.index(name)]
        limit = agreement.exchange.most_bytes
        most = limit if specs is None else _most(specs, agreement.task.max_images)
        letter = read_letter(
            data, [sender], agreement.digest, to=self.identity.public.name, most=most
        )
        wanted = {"step": step} if letter.kind == "fault" else {"step": step} | promise(agreement)
        for key, want in wanted.items():
            if letter.header.get(key) != want:
                raise ProtocolError(
                    f"{name}: an answer must say {key} = {want}. Got {letter.header.get(key)}"
                )
        alone = step == "0.gist" and len(agreement.plan.rounds) == 1  # `contribute`, unasked
        if letter.header.get("asked") not in ((asked, "") if alone else (asked,)):
            raise ProtocolError(
                f"{name}: an answer must be to what was asked. Got another request's"
            )
        if letter.kind not in ("reply", "fault"):
            raise ProtocolError(f"{name}: an answer must be a reply. Got kind '{letter.kind}'")
        return letter

    def _stored(self, step: str, name: str) -> Letter:
        """Read back an answer that was taken."""
        sender = self.agreement.roster[self.names.index(name)]
        data = self._path(step, name).read_bytes()
        return read_letter(data, [sender], self.agreement.digest, to=self.identity.public.name)

    def _path(self, step: str, name: str) -> Path:
        return self.folder / f"{step}.{name}.letter"

    def _note(self, name: str, done: int, total: int, up: bytes, down: bytes) -> None:
        visit = Visit(name, None, None, len(up), len(down))
        self.visits.append(visit)
        self.progress.client(done, total, visit)

    def _recall(self, start: str) -> None:
        """Count letters that were taken before this process began."""
        for path in sorted(self.folder.glob(f"{start}*.letter")):
            name = path.name.removesuffix(".letter").split(".", 2)[2]
            self.visits.append(Visit(name, None, None, path.stat().st_size, 0))

    def _merged(self, r: int) -> Merged | None:
        path = self.folder / f"{r}.merged"
        if not path.is_file():
            return None
        try:
            with safe_open(path, "pt") as f:
                meta = f.metadata() or {}
                tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118
                return Merged(tensors, float(meta["sigma"]), int(meta["clients"]))
        except (SafetensorError, KeyError, ValueError, OSError) as e:
            raise ProtocolError(f"'{path}' must be what this coordinator wrote. Got {e}") from e


def _most(specs: Mapping[str, Spec], images: int) -> int:
    """Return how long the body of an answer may be in bytes, with ``images`` rows where open."""
    numbers = (dtype.itemsize * math.prod(shape) for dtype, shape in specs.values())
    return HEAD + sum(n if n >= 0 else -n * images for n in numbers)
