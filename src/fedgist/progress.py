"""What a run tells while it goes on. Imports nothing heavy: the command line starts with it."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["Progress", "Visit"]


@dataclass(frozen=True)
class Visit:
    """What one client's part of a round took."""

    client: str
    images: int
    seconds: float
    bytes_up: int
    bytes_down: int
    note: str | None = None


class Progress:
    """What a run tells while it goes on. The default says nothing."""

    def stage(self, text: str) -> None:
        """A new stage begins."""

    def client(self, done: int, total: int, visit: Visit) -> None:
        """One client has answered."""
