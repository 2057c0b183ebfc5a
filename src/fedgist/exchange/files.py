"""Gists that lie there as files: each site has made one, and somebody brings them together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from fedgist.errors import ProtocolError
from fedgist.exchange.letter import sender_key
from fedgist.exchange.transport import Failure, Take

__all__ = ["FileTransport"]


@final
@dataclass
class FileTransport:
    """Nobody is asked; every file is taken once.

    Attributes:
        paths: gist files, one for each site, in any order.
        names: signing key -> site.
        refused: filled with one line for every file that is not used.
    """

    paths: Sequence[Path]
    names: Mapping[bytes, str]
    refused: list[str] = field(default_factory=list)

    def ask(self, step: str, requests: Mapping[str, bytes], take: Take) -> Mapping[str, Failure]:
        """See `Transport.ask`. A file that is refused is named; the others are not lost."""
        taken: dict[str, bytes] = {}
        for path in self.paths:
            try:
                data = path.read_bytes()
                name = self.names.get(sender_key(data))
            except (OSError, ProtocolError) as e:
                self.refused.append(f"{path}: {e}")
                continue
            if name is None or name not in requests:
                self.refused.append(f"{path}: its key is not one of a site that is asked")
            elif taken.get(name, data) != data:
                self.refused.append(f"{path}: {name} has sent another file; the first one counts")
            elif name in taken or take(name, data):
                taken[name] = data
            else:
                self.refused.append(f"{path}: not a gist of {name} that can be used")
        missing = [n for n in requests if n not in taken]
        return {n: Failure("no file of it was given that can be used") for n in missing}

    def end(self, letters: Mapping[str, bytes]) -> None:
        """Nobody waits."""
