"""Folders that readers see whole or not at all, and that replace nobody else's."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

from fedgist.errors import ConfigError

__all__ = ["MARK", "MODEL", "SET", "place_folder"]

MARK = "metadata.json"  # what tells a folder of ours from one of somebody else's
SET = "fedgist-synthetic-1"
MODEL = "fedgist-classifier-1"
FORMATS = (SET, MODEL)


def place_folder(target: Path, fill: Callable[[Path], None]) -> None:
    """Write a folder aside and put it in place when complete; an earlier one of ours goes.

    Args:
        target: the folder. Its parents are made.
        fill: writes everything into the empty folder that it is given, `MARK` included.

    Raises:
        ConfigError: it cannot be written, or ``target`` holds something that FedGist did not write.
            What was there before is untouched.
    """
    folder = target.parent
    aside, old = folder / f".{target.name}-incoming", folder / f".{target.name}-outgoing"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        _settle(target, aside, old)
        aside.mkdir()
        try:
            fill(aside)
            _swap(target, aside, old)
        except BaseException:  # ctrl-C too: the old folder stays, no half one is left
            shutil.rmtree(aside, ignore_errors=True)
            raise
    except OSError as e:
        raise ConfigError(
            f"the output folder must be writable. Got '{folder}': {e.strerror or e}"
        ) from e


def _settle(target: Path, aside: Path, old: Path) -> None:
    """Put right what an interrupted run left, and refuse a folder that is not ours."""
    if old.exists() and not target.exists():
        os.rename(old, target)
    for left in (aside, old):
        if left.exists():
            shutil.rmtree(left)
    if target.exists():
        try:
            ours = json.loads((target / MARK).read_bytes())["format"] in FORMATS
        except (OSError, ValueError, KeyError, TypeError):
            ours = False
        if not ours or target.is_symlink():
            raise ConfigError(
                f"'{target}' must be absent or a set that FedGist wrote. Got something else: move "
                "it away or choose another output folder"
            )


def _swap(target: Path, aside: Path, old: Path) -> None:
    try:
        if target.exists():
            os.rename(target, old)
        os.rename(aside, target)
    except BaseException:
        if old.exists() and not target.exists():
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)
