"""All clients in one process, one after the other: simulation, tests, benchmarks.

Memory does not grow with the number of clients: each is loaded, summed and dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch

from fedgist.errors import DataError, FedGistError, PrivacyError
from fedgist.method import Gist, Method
from fedgist.privacy.claim import Privacy, summed_sigma
from fedgist.privacy.client import Client, Sensitive, open_sensitive
from fedgist.privacy.noise import Noise, SeededNoise, SystemNoise, noise_tensors
from fedgist.privacy.statistics import complete
from fedgist.progress import Progress, Visit
from fedgist.run import derive, generator, upload_bytes
from fedgist.types import (
    Images,
    Merged,
    MomentsQuery,
    Round,
    Task,
    Tensors,
    blocks_of,
    prefixed,
)

__all__ = ["LocalExchange"]


@dataclass
class LocalExchange:
    """Runs a method's client side on every site in turn.

    Attributes:
        method, task, privacy, sigma: as planned.
        sites: one loader per client; called once per round, its images dropped afterwards.
        names: one name per client, for messages.
        seed: the run's seed; with ``privacy.noise == "system"`` it decides no noise.
        observe: keep the un-noised sum in ``exact``, for the ceilings of a simulation.
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
    exact: Tensors = field(default_factory=dict)
    visits: list[Visit] = field(default_factory=list)
    memory: dict[int, Tensors] = field(default_factory=dict)

    def round(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Visit every client; sum or pool what they send."""
        if self.observe and self.privacy.noise != "seeded":
            raise PrivacyError("exact sums must not be kept in a real release. Got observe = True")
        total: Tensors = {}
        pooled: list[Tensors] = []
        for i in range(len(self.sites)):
            gist = self._visit(i, r, rnd, shared)
            if rnd.reduce == "pool":
                pooled.append(gist)
            elif not total:
                total = {k: v.clone() for k, v in gist.items()}
            else:
                _add(total, gist, self.names[i])
        parties = len(self.sites)
        if rnd.reduce == "pool":
            joined = {k: torch.cat([g[k] for g in pooled]) for k in pooled[0]} if pooled else {}
            return Merged(joined, self.sigma, parties)
        if self.privacy.trust == "central":
            total = self.noised(r, rnd, total)
        return Merged(total, summed_sigma(self.privacy, self.sigma, parties), parties)

    def noised(self, r: int, rnd: Round, sums: Tensors) -> Tensors:
        """Add the server's noise of round ``r`` to exact sums, as under trust ``central``."""
        return self._noised(rnd, sums, self._noise(r, "server"), 1)

    def _visit(self, i: int, r: int, rnd: Round, shared: Tensors) -> Tensors:
        started = time.perf_counter()
        noise = self._noise(r, f"client {i}")
        client = Client(
            self.names[i],
            self._load(i),
            rnd,
            sigma=self.sigma,
            noise=noise,
            contribution=self.privacy.contribution,
            max_images=self.task.max_images,
            memory=self.memory.setdefault(i, {}),
            seed=derive(self.seed, "keep", i),
        )
        rng = generator(self.seed, "client", i, r)
        try:
            sent = self.method.summarize(r, self.task, shared, client, rng)
        except FedGistError as e:
            if self.names[i] not in str(e):
                e.args = (f"{self.names[i]}: {e}",)
            raise
        gist = self._open(i, rnd, sent)
        if rnd.reduce == "sum":
            if self.observe:
                self._observe(gist)
            if self.privacy.trust != "central":
                parties = len(self.sites) if self.privacy.trust == "distributed" else 1
                gist = self._noised(rnd, gist, noise, parties)
        self._note(i, client, gist, rnd, shared, time.perf_counter() - started)
        return gist

    def _open(self, i: int, rnd: Round, sent: Gist) -> Tensors:
        """Return what may be merged: tensors of a pool round, exact sums of every query planned."""
        if isinstance(sent, dict):
            if rnd.reduce == "sum" and rnd.queries:
                # The exchange adds the noise of a sum: plain numbers would leave without any.
                raise PrivacyError(
                    f"{self.names[i]}: a gist to be summed must be Sensitive. Got tensors"
                )
            return sent
        answers = (sent,) if isinstance(sent, Sensitive) else sent
        if rnd.reduce != "sum":
            raise PrivacyError("exact sums must be released before a pool round. Got Sensitive")
        if [a.query for a in answers] != list(rnd.queries):
            raise PrivacyError(
                f"{self.names[i]}: a gist to be summed must answer the {len(rnd.queries)} queries "
                f"of its round, in order. Got {len(answers)} answers"
            )
        return {k: v for a in answers for k, v in prefixed(a.query, open_sensitive(a)).items()}

    def _noised(self, rnd: Round, sums: Tensors, noise: Noise, parties: int) -> Tensors:
        out: Tensors = {} if rnd.queries else sums
        missing = self.privacy.missing if parties > 1 else 0
        for query in rnd.queries:
            exact = blocks_of(query, sums)
            if isinstance(query, MomentsQuery):
                exact = complete(query, exact)
            if self.sigma > 0:
                drawn = noise_tensors(
                    query, self.sigma, noise, exact, parties=parties, missing=missing
                )
                exact = {k: v + drawn[k] for k, v in exact.items()}
            out |= prefixed(query, exact)
        return out

    def _observe(self, sums: Tensors) -> None:
        for k, v in sums.items():
            self.exact[k] = self.exact[k] + v if k in self.exact else v.clone()

    def _load(self, i: int) -> Images:
        images = self.sites[i]()
        if images.classes != self.task.classes:
            raise DataError(
                f"{self.names[i]}: classes must be the task's {list(self.task.classes)}. "
                f"Got {list(images.classes)}"
            )
        return images

    def _noise(self, r: int, who: str) -> Noise:
        if self.privacy.noise == "system":
            return SystemNoise()
        return SeededNoise(derive(self.seed, "noise", r, who))

    def _note(
        self, i: int, client: Client, gist: Tensors, rnd: Round, shared: Tensors, seconds: float
    ) -> None:
        planned = upload_bytes(rnd, self.task, self.privacy, self.sigma)
        up = (
            sum(v.numel() * v.element_size() for v in gist.values()) if planned is None else planned
        )
        down = sum(v.numel() * v.element_size() for v in shared.values())
        visit = Visit(self.names[i], client.used, seconds, up, down, client.note)
        self.visits.append(visit)
        self.progress.client(i + 1, len(self.sites), visit)


def _add(total: Tensors, gist: Tensors, name: str) -> None:
    """Add in place: one accumulator however many clients there are."""
    if {k: v.shape for k, v in gist.items()} != {k: v.shape for k, v in total.items()}:
        raise DataError(f"{name}: a gist must have the plan's shapes. Got others")
    for k, v in gist.items():
        total[k] += v
