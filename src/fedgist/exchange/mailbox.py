"""One folder that all can read and write: a network share, a mounted server, a synced drive.

::

    MAILBOX/<task>/to/<site>/<step>.letter     from the coordinator
    MAILBOX/<task>/from/<site>/<step>.letter   the answer; <step>.fault where a site refused
    MAILBOX/<task>/status.json                 for people: which step, who is awaited

Letters are signed, so the folder need not be trusted with anything but delivery. Files are written
aside and renamed; one that is only half synced is left alone until it is whole. Nothing is deleted:
whoever starts again finds everything where it was.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, final

from fedgist.agreement import Agreement
from fedgist.errors import Awaiting, FedGistError, ProtocolError
from fedgist.exchange.letter import is_whole
from fedgist.exchange.site import Site
from fedgist.exchange.store import write_durably
from fedgist.exchange.transport import Failure, Take

__all__ = ["MailboxTransport", "join", "mailbox_status", "place_file", "task_folder"]

Say = Callable[[str], None]
POLL = 0.5  # seconds between two looks into the folder


@final
@dataclass
class MailboxTransport:
    """The coordinator's side of a mailbox.

    Attributes:
        folder: the mailbox.
        agreement: the task: patience, deadline, and the name of its folder.
        memory: a folder of the coordinator's own, where it notes when it asked.
        poll: seconds between two looks.
    """

    folder: Path
    agreement: Agreement
    memory: Path
    poll: float = POLL
    _seen: dict[Path, tuple[int, int]] = field(default_factory=dict)
    _shown: dict[str, Any] = field(default_factory=dict)

    def ask(self, step: str, requests: Mapping[str, bytes], take: Take) -> Mapping[str, Failure]:
        """See `Transport.ask`; waits the task's patience, counted from the first time of asking."""
        root = task_folder(self.folder, self.agreement)
        for name, letter in requests.items():
            path = root / "to" / name / f"{step}.letter"
            if not path.is_file() or path.read_bytes() != letter:
                place_file(path, letter)
        limit = self._asked(step) + self.agreement.exchange.patience
        waiting = set(requests)
        while True:
            for name in sorted(waiting):
                if self._look(root / "from" / name, step, name, take):
                    waiting.discard(name)
            self._status(step, requests, waiting)
            if not waiting or time.time() > limit or self.agreement.overdue:
                break
            time.sleep(self.poll)
        return {name: self._why(root / "from" / name, step) for name in waiting}

    def end(self, letters: Mapping[str, bytes]) -> None:
        """See `Transport.end`."""
        root = task_folder(self.folder, self.agreement)
        for name, letter in letters.items():
            place_file(root / "to" / name / "end.letter", letter)
        self._status("end", {}, set())

    def _asked(self, step: str) -> float:
        """Return when a step was first asked, in seconds since 1970."""
        note = self.memory / f"{step}.asked"
        if note.is_file():
            with suppress(ValueError):
                return float(note.read_text())
        now = time.time()
        self.memory.mkdir(parents=True, exist_ok=True)
        write_durably(note, repr(now).encode())
        return now

    def _look(self, folder: Path, step: str, name: str, take: Take) -> bool:
        """Hand over what has arrived from one site since the last look."""
        for path in (folder / f"{step}.letter", folder / f"{step}.fault"):
            stamp = _stamp(path)
            if stamp is None or self._seen.get(path) == stamp:
                continue
            with suppress(OSError):
                data = path.read_bytes()
                if is_whole(data):
                    self._seen[path] = stamp
                    if take(name, data):
                        return True
        return False

    def _why(self, folder: Path, step: str) -> Failure:
        path = folder / f"{step}.letter"
        if path.is_file() and path not in self._seen:
            return Failure("its file is not whole", "let the shared folder finish syncing")
        seconds = self.agreement.exchange.patience
        return Failure(
            f"no answer in {seconds:g} s", "see that `fedgist join` runs there and the folder syncs"
        )

    def _status(self, step: str, asked: Mapping[str, bytes], waiting: set[str]) -> None:
        status = {
            "task": self.agreement.task.name,
            "hash": self.agreement.digest,
            "step": step,
            "answered": sorted(asked.keys() - waiting),
            "waiting": sorted(waiting),
        }
        if status == self._shown:
            return
        since = {"since": datetime.now(UTC).isoformat(timespec="seconds")}
        text = json.dumps(status | since, indent=2, ensure_ascii=False)
        with suppress(ProtocolError):  # for people: the run does not depend on it
            place_file(task_folder(self.folder, self.agreement) / "status.json", text.encode())
            self._shown = status


def join(site: Site, folder: Path, *, say: Say, poll: float = POLL, once: bool = False) -> str:
    """Answer whatever the coordinator asks of a site until it says that the run is over.

    Args:
        site: who answers.
        folder: the mailbox.
        say: told, line by line, what happens, for the site's own log.
        poll: seconds between two looks.
        once: answer what is there and return.

    Returns:
        How the run ended, in the coordinator's words; empty when it has not.

    Raises:
        ProtocolError: the deadline has passed.
    """
    root = task_folder(folder, site.agreement)
    inbox, outbox = root / "to" / site.name, root / "from" / site.name
    seen: dict[Path, object] = {}
    while True:
        for path in sorted(inbox.glob("*.letter"), key=_order):
            stamp = _stamp(path)
            # Read before the answer is tried: a decision that comes meanwhile is a new one.
            if stamp is None or seen.get(path) == (mark := (stamp, site.decided(path.stem))):
                continue
            try:
                data = path.read_bytes()
            except OSError:
                continue
            if not is_whole(data):
                continue
            seen[path] = mark
            if path.stem == "end":
                with suppress(ProtocolError):
                    return site.ended(data)
                say("a letter that says 'end' is not the coordinator's: ignored")
                continue
            _answer(site, data, path.stem, outbox, say)
        if once:
            return ""
        if site.agreement.overdue:
            raise ProtocolError(
                f"the task must be over by {site.agreement.exchange.deadline}. Got no end"
            )
        time.sleep(poll)


def mailbox_status(folder: Path, agreement: Agreement) -> dict[str, Any]:
    """Return which step a run is in, who has answered and who is awaited."""
    path = task_folder(folder, agreement) / "status.json"
    try:
        status = json.loads(path.read_text())
        return dict(status)
    except FileNotFoundError:
        return {"task": agreement.task.name, "hash": agreement.digest, "step": "not begun"}
    except (OSError, ValueError) as e:
        raise ProtocolError(f"'{path}' must be a readable status. Got {e}") from e


def task_folder(folder: Path, agreement: Agreement) -> Path:
    """Return the folder of one task in a mailbox.

    Raises:
        ProtocolError: the mailbox is not a folder.
    """
    if not folder.is_dir():
        raise ProtocolError(f"the mailbox must be a folder that is there. Got '{folder}'")
    return folder / f"{agreement.task.name}-{agreement.digest[:8]}"


def place_file(path: Path, data: bytes) -> None:
    """Put a file where others can read it, all of it or none; folders are made.

    Raises:
        ProtocolError: it cannot be written.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise ProtocolError(f"'{path.parent}' must be a folder. Got {e.strerror or e}") from e
    write_durably(path, data, private=False)


def _answer(site: Site, request: bytes, step: str, outbox: Path, say: Say) -> None:
    """Answer one request; what goes wrong is said here in full, and there in a word."""
    try:
        reply = site.answer(request)
    except Awaiting as e:
        say(str(e))
        return
    except FedGistError as e:
        say(f"step {step} not answered: {e}")
        with suppress(ProtocolError):
            place_file(outbox / f"{step}.fault", site.fault(request, e))
        return
    target = outbox / f"{step}.letter"
    with suppress(OSError):
        (outbox / f"{step}.fault").unlink()
    if not target.is_file() or target.read_bytes() != reply:
        place_file(target, reply)
        say(f"step {step} answered, {len(reply):,} bytes")


def _order(path: Path) -> tuple[int, int, str]:
    """Sort letters by age, the last one last."""
    stamp = _stamp(path) or (0, 0)
    return (path.stem == "end", stamp[0], path.name)


def _stamp(path: Path) -> tuple[int, int] | None:
    try:
        s = path.stat()
    except OSError:
        return None
    return (s.st_mtime_ns, s.st_size)
