"""Results as JSON lines: one for every run that ended, on disk before the next one begins."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgist.errors import ConfigError, DataError
from fedgist.report.record import decode, to_json

__all__ = ["Lines", "plain", "read_lines"]


def plain(record: Mapping[str, Any]) -> dict[str, Any]:
    """Return a result as it reads once written: lists for tuples, plain numbers.

    Raises:
        DataError: a value is not plain JSON.
    """
    return _read(to_json(record))


def _read(text: str | bytes) -> dict[str, Any]:
    found: dict[str, Any] = decode(json.loads(text))  # "inf" is the number again
    return found


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the results of a file; none where there is no file.

    A last line without its end was cut short and is left out.

    Raises:
        DataError: the file cannot be read, or a whole line is not a result.
    """
    try:
        data = path.read_bytes() if path.exists() else b""
    except OSError as e:
        raise DataError(f"results must be a readable file. Got '{path}': {e.strerror}") from e
    return [_parsed(row, path, i) for i, row in enumerate(data.split(b"\n")[:-1], 1) if row.strip()]


def _parsed(row: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        line = _read(row)
    except ValueError as e:
        raise DataError(f"{path}, line {number} must be JSON. Got {row[:40]!r}: {e}") from e
    if not isinstance(line, dict) or not {"hash", "case", "seed"} <= line.keys():
        raise DataError(
            f"{path}, line {number} must be a result with hash, case and seed. Got {row[:40]!r}"
        )
    return line


class Lines:
    """A file of results that is appended to, by one process at a time.

    Raises:
        ConfigError: the file cannot be written, or another process writes it.
        DataError: it holds something else than results.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all = read_lines(path)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a+b")
        except OSError as e:
            raise ConfigError(f"results must be writable. Got '{path}': {e.strerror}") from e
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            self._file.close()
            raise ConfigError(
                f"results must be written by one process at a time. Got '{path}', which another "
                "one holds: wait for it, or take another --out"
            ) from e
        self._drop_tail()

    def __enter__(self) -> Lines:
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def add(self, record: Mapping[str, Any]) -> dict[str, Any]:
        """Append a result and wait until it is on disk; return it as `plain`.

        Raises:
            DataError: a value is not plain JSON.
        """
        text = json.dumps(json.loads(to_json(record)), ensure_ascii=False, allow_nan=False)
        self._file.write((text + "\n").encode("utf-8", "backslashreplace"))
        self._file.flush()
        os.fsync(self._file.fileno())
        self.all.append(_read(text))
        return self.all[-1]

    def _drop_tail(self) -> None:
        """Cut off what a killed process had written of a line."""
        self._file.seek(0)
        self._file.truncate(self._file.read().rfind(b"\n") + 1)
