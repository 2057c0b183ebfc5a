"""Files that readers see whole or not at all."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from fedgist.errors import ConfigError

__all__ = ["write_whole"]


def write_whole(path: Path, data: bytes) -> None:
    """Write a file aside and put it in place, so that readers see the old one or the new one.

    Raises:
        ConfigError: the file cannot be written; the old one is untouched.
    """
    aside = path.with_name(path.name + ".part")
    try:
        aside.write_bytes(data)
        os.replace(aside, path)
    except OSError as e:
        with contextlib.suppress(OSError):
            aside.unlink()
        raise ConfigError(
            f"the output file must be writable. Got '{path}': {e.strerror or e}"
        ) from e
