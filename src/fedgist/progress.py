"""What a run tells while it goes on. Imports nothing heavy: the command line starts with it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

__all__ = ["Progress", "Visit", "by_client"]


@dataclass(frozen=True)
class Visit:
    """What one client's part of a round took; None where only the client knows."""

    client: str
    images: int | None
    seconds: float | None
    bytes_up: int
    bytes_down: int
    note: str | None = None


def by_client(visits: Iterable[Visit]) -> list[Visit]:
    """Join the visits of all rounds to one for each client: seconds and bytes add up."""
    out: dict[str, Visit] = {}
    for v in visits:
        if (seen := out.get(v.client)) is not None:
            v = replace(
                v,
                seconds=_both(seen.seconds, v.seconds),
                bytes_up=seen.bytes_up + v.bytes_up,
                bytes_down=seen.bytes_down + v.bytes_down,
            )
        out[v.client] = v
    return list(out.values())


def _both(a: float | None, b: float | None) -> float | None:
    return None if a is None or b is None else a + b


class Progress:
    """What a run tells while it goes on. The default says nothing."""

    def stage(self, text: str) -> None:
        """A new stage begins."""

    def client(self, done: int, total: int, visit: Visit) -> None:
        """One client has answered."""
