"""All clients in one process, one after the other: simulation, tests, benchmarks.

Memory does not grow with the number of clients: each is loaded, summed and dropped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from fedgist.errors import PrivacyError
from fedgist.exchange.gist import Answer, Duty, Merger, answer
from fedgist.method import Method
from fedgist.privacy.claim import Privacy
from fedgist.progress import Progress, Visit
from fedgist.run import upload_bytes
from fedgist.types import Images, Merged, Round, Task, Tensors

__all__ = ["LocalExchange"]

RECENT = 8  # rounds whose broadcasts are remembered


@dataclass
class LocalExchange:
    """Runs a method's client side on every site in turn.

    Attributes:
        method, task, privacy, sigma: as planned.
        sites: one loader per client; called once per round, its images dropped afterwards.
        names: one name per client, for messages.
        seed: the run's seed; with ``privacy.noise == "system"`` it decides no noise.
        observe: keep the un-noised sum in ``exact``, for the ceilings of a simulation.
        lost: places of clients that were invited and never answer.
        broadcasts: what the server sent to all in the last rounds; filled as the run goes on.
        visits: filled as the run goes on.
    """

    method: Method
    task: Task
    privacy: Privacy
    sigma: float
    sites: Sequence[Callable[[], Images]]
    names: Sequence[str]
    seed: int = 0
    progress: Progress = field(default_factory=Progress)
    observe: bool = False
    lost: Collection[int] = ()
    exact: Tensors = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)
    broadcasts: deque[Tensors] = field(default_factory=lambda: deque(maxlen=RECENT))
    memory: dict[int, Tensors] = field(default_factory=dict)

    @property
    def duty(self) -> Duty:
        """What all parties know."""
        parties = len(self.sites)
        return Duty(self.method, self.task, self.privacy, self.sigma, parties, self.seed)

    def round(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Visit every client; sum or pool what they send."""
        if self.observe and self.privacy.noise != "seeded":
            raise PrivacyError("exact sums must not be kept in a real release. Got observe = True")
        merger = Merger(self.duty, rnd)
        self.broadcasts.append(shared)
        for i in range(len(self.sites)):
            if i not in self.lost:
                merger.add(self._visit(i, r, rnd, shared), self.names[i])
        return merger.merged(r)

    def noised(self, r: int, rnd: Round, sums: Tensors) -> Tensors:
        """Add the server's noise of round ``r`` to exact sums, as under trust ``central``."""
        return self.duty.noised(rnd, sums, self.duty.noise(r, "server"))

    def _visit(self, i: int, r: int, rnd: Round, shared: Tensors) -> Tensors:
        started = time.perf_counter()
        memory = self.memory.setdefault(i, {})
        made = answer(self.duty, i, self.names[i], self.sites[i], r, rnd, shared, memory)
        for k, v in made.exact.items() if self.observe else ():
            self.exact[k] = self.exact[k] + v if k in self.exact else v.clone()
        self._note(i, made, rnd, shared, time.perf_counter() - started)
        return made.gist

    def _note(self, i: int, made: Answer, rnd: Round, shared: Tensors, seconds: float) -> None:
        planned = upload_bytes(rnd, self.task, self.privacy, self.sigma)
        up = _size(made.gist) if planned is None else planned
        visit = Visit(self.names[i], made.images, seconds, up, _size(shared), made.note)
        self.visits.append(visit)
        self.progress.client(i + 1, len(self.sites), visit)


def _size(tensors: Tensors) -> int:
    return sum(v.numel() * v.element_size() for v in tensors.values())
