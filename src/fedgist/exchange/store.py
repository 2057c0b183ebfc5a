"""Files that must survive a kill at any moment: written aside, synced, renamed, private."""

from __future__ import annotations

import fcntl
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from fedgist.errors import ProtocolError

__all__ = ["Answered", "lock_folder", "write_durably"]


@dataclass(frozen=True)
class Answered:
    """What a site keeps of one step: in one file, so that no kill can part its pieces.

    Attributes:
        asked: SHA-256 of the request, hexadecimal; empty when nobody asked.
        reply: the letter that left, or is about to.
        secret: what the next step needs; never leaves.
    """

    asked: str
    reply: bytes
    secret: bytes

    def write(self, path: Path) -> None:
        """Put the file in place."""
        asked = self.asked.encode()
        lengths = struct.pack("<QQ", len(asked), len(self.reply))
        write_durably(path, lengths + asked + self.reply + self.secret)

    @staticmethod
    def read(path: Path) -> Answered | None:
        """Read it back; None when there is none.

        Raises:
            ProtocolError: the file cannot be read.
        """
        try:
            data = path.read_bytes()
            first, second = struct.unpack("<QQ", data[:16])
            if 16 + first + second > len(data):
                raise ValueError("it is cut short")
            end = 16 + first
            return Answered(data[16:end].decode(), data[end : end + second], data[end + second :])
        except FileNotFoundError:
            return None
        except (OSError, struct.error, ValueError) as e:
            raise ProtocolError(f"'{path}' must be what this site wrote. Got {e}") from e


def write_durably(path: Path, data: bytes, *, private: bool = True) -> None:
    """Write a file; whole or not at all, even if power fails.

    Args:
        path: in a folder that exists.
        data: its content.
        private: only its owner may read it (mode 600); else as the system's mask allows.

    Raises:
        ProtocolError: it cannot be written; what was there is untouched.
    """
    aside = path.with_name(f".{path.name}.{os.getpid()}.part")
    mode = 0o600 if private else 0o666
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        os.replace(aside, path)
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
    except OSError as e:
        with suppress(OSError):
            aside.unlink()
        raise ProtocolError(f"'{path}' must be writable. Got {e.strerror or e}") from e


def lock_folder(folder: Path) -> int:
    """Hold a folder for this process until it ends; return the descriptor that holds it.

    Raises:
        ProtocolError: another process holds it.
    """
    handle = os.open(folder / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as e:
        os.close(handle)
        raise ProtocolError(
            f"'{folder}' must be used by one process at a time. Got another that holds it: wait "
            "until it ends"
        ) from e
    return handle
