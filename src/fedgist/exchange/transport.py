"""What carries letters between the coordinator and the sites, and nothing more."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

__all__ = ["Failure", "Take", "Transport"]

Take = Callable[[str, bytes], bool]


@dataclass(frozen=True)
class Failure:
    """Why a site gave no answer, and what to do about it."""

    cause: str
    remedy: str = ""

    def __str__(self) -> str:
        return f"{self.cause}: {self.remedy}" if self.remedy else self.cause


class Transport(Protocol):
    """Carries sealed letters. It cannot forge, read into or reorder what it carries."""

    def ask(self, step: str, requests: Mapping[str, bytes], take: Take) -> Mapping[str, Failure]:
        """Bring every site its request and hand over the answers as they come.

        Args:
            step: text without spaces, another for every step of a run.
            requests: site -> letter. Asking again, after a crash, must bring the same letters.
            take: called with (site, letter); True when the site has answered this step. False when
                the letter is no good: where a better one can still come, wait for it.

        Returns:
            Every site whose answer was not taken, and why.
        """

    def end(self, letters: Mapping[str, bytes]) -> None:
        """Bring every site the last letter, that the run is over."""
