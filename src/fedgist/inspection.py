"""What a site needs to look at a gist before it is sent: one that waits, or one in a file."""

from __future__ import annotations

import shlex
from pathlib import Path

from fedgist.agreement import Agreement
from fedgist.data import open_source
from fedgist.errors import ConfigError, ProtocolError
from fedgist.exchange.handed import Handed
from fedgist.exchange.letter import task_of
from fedgist.exchange.review import Review
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity
from fedgist.privacy.ledger import Ledger
from fedgist.report.inspect import Subject, names_of
from fedgist.setup import blocks
from fedgist.types import Images

__all__ = ["look", "open_gist", "open_review"]

TASK = "task.toml"  # what a task file is called unless told otherwise


def open_review(
    task: Path,
    key: Path,
    data: str,
    folder: Path,
    *,
    state: Path | None = None,
    policy: Path | None = None,
    ledger: Path | None = None,
) -> Subject:
    """Open what waits at a site for a decision; the site itself may be running.

    Args:
        task: the site's own copy of the task file.
        key: its private key file.
        data: the images, named as for `fedgist.federation.open_site`.
        folder: where sites remember.
        state: the same, if it was named: for the command on the page.
        policy: the site's policy file; None for the careful defaults.
        ledger: the ledger's file; it is read where it exists.

    Raises:
        ConfigError, PrivacyError, DataError: the task, key or data cannot be used.
        ProtocolError: the task is not under review in this folder.
    """
    agreement, identity = Agreement.load(task), Identity.load(key)
    agreement.place(identity.public)
    review = Review(folder / agreement.digest[:16], agreement, identity.public)
    if not review.begun:
        raise ProtocolError(
            f"a gist must wait before it can be looked at. Got no review of task "
            f"'{agreement.task.name}' in '{folder}': start `fedgist join` or `fedgist "
            "contribute` with --review, and name the same --state here; or name a gist file"
        )
    images, names = _images(data, agreement)
    return Subject(
        agreement,
        identity,
        review,
        images,
        names,
        blocks(agreement.plan, agreement.task, agreement.privacy),
        look(task, key, data, state),
        None if policy is None else Policy.load(policy),
        _ledger(ledger),
    )


def open_gist(
    gist: Path,
    task: Path | None = None,
    *,
    key: Path | None = None,
    data: str | None = None,
    policy: Path | None = None,
    ledger: Path | None = None,
) -> Subject:
    """Open a gist file that `fedgist contribute` wrote.

    Args:
        gist: the file.
        task: the task file; None for ``task.toml`` beside the gist or in the current folder.
        key: the site's private key file, to decide with.
        data: the images that it was made of; without them nothing can be compared.
        policy: as for `open_review`.
        ledger: as for `open_review`.

    Raises:
        ConfigError: the task file is not there or another one.
        ProtocolError: the file is no gist of this task.
        DataError: the images cannot be used.
    """
    agreement, found = _task_for(gist, task)
    images, names = (None, []) if data is None else _images(data, agreement)
    words = ["fedgist", "inspect", str(gist), "--task", str(found)]
    words += [] if data is None else ["--data", data]
    words += ["--key", "NAME.key" if key is None else str(key)]
    return Subject(
        agreement,
        None if key is None else Identity.load(key),
        Handed.open(gist, agreement),
        images,
        names,
        blocks(agreement.plan, agreement.task, agreement.privacy),
        shlex.join(words),
        None if policy is None else Policy.load(policy),
        _ledger(ledger),
    )


def look(task: Path, key: Path, data: str, state: Path | None) -> str:
    """Return the command that shows what waits at a site."""
    words = ["fedgist", "inspect", "--task", str(task), "--key", str(key), "--data", data]
    return shlex.join(words if state is None else [*words, "--state", str(state)])


def _task_for(gist: Path, task: Path | None) -> tuple[Agreement, Path]:
    """Return the task that a gist says it is of, and its file."""
    if task is not None:
        return Agreement.load(task), task
    try:
        want = task_of(gist.read_bytes())
    except OSError as e:
        raise ProtocolError(f"a gist file must be readable. Got '{gist}': {e.strerror or e}") from e
    except ProtocolError as e:
        raise ProtocolError(f"'{gist}' must be a gist file. {e}") from e
    for path in (gist.parent / TASK, Path(TASK)):
        if path.is_file() and (agreement := Agreement.load(path)).digest == want:
            return agreement, path
    raise ConfigError(
        f"--task must name the task file with hash {want[:12]}, which '{gist}' is of. Got none, "
        f"and no such {TASK} beside it or here"
    )


def _images(data: str, agreement: Agreement) -> tuple[Images, list[str]]:
    """Return a site's images and the names of their files, where they have any."""
    source = open_source(data)
    split = "train" if "train" in source.splits else source.splits[0]
    return source.prefer("train", agreement.task), names_of(source.read(split).pixels)


def _ledger(path: Path | None) -> Ledger | None:
    return Ledger(path) if path is not None and path.is_file() else None
