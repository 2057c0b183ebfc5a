"""One answer in a process of its own, so that work that hangs can be ended.

Neither a signal nor an exception reaches a thread that waits in a kernel for a dead network drive;
a process can be left behind. ::

    parent  --- JSON line, request ---->  worker
    parent  <-- a word, line, letter ---

The worker ends itself, too, a little after its time and when its parent has gone.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from fedgist.errors import ConfigError, FedGistError
from fedgist.exchange.transport import Failure

__all__ = ["Answering", "Place", "answer_apart", "serve_one"]

COMMAND = (sys.executable, "-m", "fedgist.flower_app.worker")
DONE = b"done"
GRACE = 10.0  # seconds after its time that a worker ends itself, if its parent has not
LOOK = 1.0  # seconds between two looks whether the parent is still there


@dataclass(frozen=True)
class Place:
    """Where a site keeps its things.

    Attributes:
        task: its copy of the task file.
        key: its private key file.
        data: its images, as for `fedgist.data.open_source`.
        state: folder of what it has answered; None for the default.
        policy: its policy file; None for the careful defaults.
        ledger: its ledger; None for the holder's own.
    """

    task: Path
    key: Path
    data: str
    state: Path | None = None
    policy: Path | None = None
    ledger: Path | None = None

    @staticmethod
    def of(values: Mapping[str, object]) -> Place:
        """Read plain values; others are left alone.

        Raises:
            ConfigError: one is missing.
        """
        got = {k: str(v) for k, v in values.items() if k in Place.__annotations__ and v}
        if missing := [k for k in ("task", "key", "data") if k not in got]:
            raise ConfigError(
                f"a site's configuration must give {', '.join(missing)}. Got {sorted(values)}"
            )
        paths = {k: Path(v) for k, v in got.items() if k != "data"}
        return Place(data=got["data"], **paths)


class Answering(Protocol):
    """What a worker asks of a site; see `fedgist.exchange.site.Site`."""

    def answer(self, request: bytes) -> bytes:
        """Answer one letter."""

    def fault(self, request: bytes, error: FedGistError) -> bytes:
        """Return a signed letter saying that a request was not answered."""

    def ended(self, data: bytes) -> str:
        """Return how the run ended."""


def answer_apart(
    place: Place, request: bytes, limit: float, command: Sequence[str] = COMMAND
) -> bytes | Failure:
    """Answer one letter in another process.

    Args:
        place: where the site's things are.
        request: the coordinator's letter.
        limit: seconds after which the work is ended.
        command: the worker.

    Returns:
        The letter that answers it, which may be a signed refusal; empty for the last letter, which
        wants no answer. A failure when there is none: its cause is one word that says nothing of
        the data, such as the kind of error. The worker's stderr has the rest.
    """
    order = {k: v if v is None else str(v) for k, v in vars(place).items()} | {"limit": limit}
    worker = subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,  # what it starts goes with it
    )
    try:
        said, _ = worker.communicate(json.dumps(order).encode() + b"\n" + request, limit)
    except subprocess.TimeoutExpired:
        return Failure("TimeoutError")
    finally:
        _end(worker)
    word, _, letter = said.partition(b"\n")
    if word == DONE and worker.returncode == 0:
        return letter
    return Failure(word.decode("ascii", "replace")[:40] or f"exit {worker.returncode}")


def serve_one(open_site: Callable[[Place], Answering]) -> int:
    """Answer the letter on stdin, in the worker; return its exit code."""
    order: dict[str, Any] = json.loads(sys.stdin.buffer.readline())
    faulthandler.dump_traceback_later(order["limit"] + GRACE, exit=True)  # needs no lock of Python
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # whatever a library prints must not stand in the letter
        word, letter = _answer(open_site, Place.of(order), sys.stdin.buffer.read())
        out.write(word + b"\n" + letter)
    return 0


def _answer(
    open_site: Callable[[Place], Answering], place: Place, request: bytes
) -> tuple[bytes, bytes]:
    try:
        site = open_site(place)
        with suppress(FedGistError):
            print(f"fedgist: {site.ended(request)}", file=sys.stderr, flush=True)
            return DONE, b""
        if getattr(site, "review", False):
            # A node answers within its time or not at all: "not yet" would read as a refusal.
            raise ConfigError(
                "a site under review must take part through a shared folder or a file. Got "
                "Flower: use `fedgist join` or `fedgist contribute`"
            )
        try:
            return DONE, site.answer(request)
        except FedGistError as e:
            _say(e)
            return DONE, site.fault(request, e)
    except FedGistError as e:
        _say(e)
        return type(e).__name__.encode(), b""


def _say(error: FedGistError) -> None:
    print(f"fedgist: not answered: {error}", file=sys.stderr, flush=True)


def _follow(parent: int) -> None:
    """End when the parent has: nobody would take the answer, and the state folder stays locked."""
    while os.getppid() == parent:
        time.sleep(LOOK)
    os._exit(1)


def _end(worker: subprocess.Popen[bytes]) -> None:
    if worker.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(worker.pid, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):  # stuck in a kernel: it is left behind
            worker.wait(2.0)
    for pipe in (worker.stdin, worker.stdout):
        if pipe is not None:
            with suppress(OSError):
                pipe.close()
