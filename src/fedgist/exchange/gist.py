"""One round at one client, and the sum of what clients send: the same under every exchange.

`answer` is the client's half, `Merger` the server's. Exchanges differ only in how the bytes of a
gist get from the one to the other.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable
from dataclasses import dataclass

import torch

from fedgist.errors import DataError, FedGistError, PrivacyError
from fedgist.exchange.letter import Spec, fits
from fedgist.method import Gist, Method
from fedgist.privacy.claim import Privacy, summed_sigma
from fedgist.privacy.client import Client, Sensitive, open_sensitive
from fedgist.privacy.noise import (
    Noise,
    SeededNoise,
    SystemNoise,
    noise_tensors,
)
from fedgist.privacy.statistics import complete
from fedgist.queries import MomentsQuery, blocks_of, prefixed
from fedgist.run import derive, generator
from fedgist.types import Images, Merged, Round, Task, Tensors

__all__ = ["Answer", "Duty", "Merger", "answer", "sent_specs"]


@dataclass(frozen=True)
class Duty:
    """What every party of a run knows in advance.

    Attributes:
        method, task, privacy, sigma: as planned.
        parties: clients that were invited, whether or not they answer.
        seed: public randomness; with ``privacy.noise == "system"`` it decides no noise and nothing
            that a client draws.
    """

    method: Method
    task: Task
    privacy: Privacy
    sigma: float
    parties: int
    seed: int = 0

    def noise(self, r: int, who: str) -> Noise:
        """Return the source of noise of one party in one round."""
        if self.privacy.noise == "system":
            return SystemNoise()
        return SeededNoise(derive(self.seed, "noise", r, who))

    def draws(self, r: int, i: int) -> torch.Generator:
        """Return the generator of what client ``i`` draws besides noise in one round."""
        if self.privacy.noise == "system":  # a sample that the server could redraw hides nobody
            return torch.Generator().manual_seed(secrets.randbits(63))
        return generator(self.seed, "client", i, r)

    def noised(self, rnd: Round, sums: Tensors, noise: Noise, parties: int = 1) -> Tensors:
        """Add all of the noise, or one of ``parties`` shares of it, to exact sums of a round."""
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


@dataclass(frozen=True)
class Answer:
    """What one client made in one round.

    Attributes:
        gist: what leaves: with its noise under trust ``local`` and ``distributed``.
        exact: sums without noise, for the ceilings of a simulation; they never leave.
        images: how many were used. Private.
        note: what could not be enforced.
    """

    gist: Tensors
    exact: Tensors
    images: int
    note: str | None


def answer(
    duty: Duty,
    i: int,
    name: str,
    load: Callable[[], Images],
    r: int,
    rnd: Round,
    shared: Tensors,
    memory: Tensors,
) -> Answer:
    """Do the client's part of a round.

    Args:
        duty: as planned; from the client's own copy of the task.
        i: the client's place among all that were invited.
        name: for messages.
        load: returns the client's images.
        r: number of the round.
        rnd: its declaration, from the client's own copy of the plan.
        shared: what the server broadcast.
        memory: the client's own between rounds; changed.

    Raises:
        DataError: the images are not the task's.
        PrivacyError: something would leave that must not.
    """
    images = load()
    if images.classes != duty.task.classes:
        raise DataError(
            f"{name}: classes must be the task's {list(duty.task.classes)}. "
            f"Got {list(images.classes)}"
        )
    noise = duty.noise(r, f"client {i}")
    client = Client(
        name,
        images,
        rnd,
        sigma=duty.sigma,
        noise=noise,
        contribution=duty.privacy.contribution,
        max_images=duty.task.max_images,
        memory=memory,
        seed=derive(duty.seed, "keep", i),
        exact=math.isinf(duty.privacy.epsilon),
    )
    try:
        sent = duty.method.summarize(r, duty.task, shared, client, duty.draws(r, i))
    except FedGistError as e:
        if name not in str(e):
            e.args = (f"{name}: {e}",)
        raise
    exact = gist = _open(name, rnd, sent)
    if rnd.noised and duty.privacy.trust != "central":
        parties = duty.parties if duty.privacy.trust == "distributed" else 1
        gist = duty.noised(rnd, exact, noise, parties)
    return Answer(gist, exact if rnd.noised else {}, client.used, client.note)


class Merger:
    """Adds or joins gists one by one; memory does not grow with the number of sums."""

    def __init__(self, duty: Duty, rnd: Round) -> None:
        self._duty, self._round = duty, rnd
        self._total: Tensors = {}
        self._pooled: list[Tensors] = []
        self._clients = 0

    def add(self, gist: Tensors, name: str) -> None:
        """Take in one client's gist.

        Raises:
            DataError: its names or shapes are not those of the others.
        """
        self._clients += 1
        if self._round.reduce == "pool":
            self._pooled.append(gist)
        elif self._clients == 1:
            self._total = {k: v.clone() for k, v in gist.items()}
        else:
            if {k: v.shape for k, v in gist.items()} != {
                k: v.shape for k, v in self._total.items()
            }:
                raise DataError(f"{name}: a gist must have the plan's shapes. Got others")
            for k, v in gist.items():
                self._total[k] += v

    def add_sum(self, sums: Tensors, clients: int) -> None:
        """Take in what a secure sum over several clients gave."""
        self._total, self._clients = sums, clients

    def merged(self, r: int) -> Merged:
        """Return the whole; under trust ``central`` the server's noise is added here.

        Raises:
            PrivacyError: so few clients answered that their noise shares do not add up.
        """
        duty = self._duty
        if self._round.reduce == "pool":
            joined = {
                k: torch.cat([g[k] for g in self._pooled])
                for k in (self._pooled[0] if self._pooled else {})
            }
            return Merged(joined, duty.sigma, self._clients)
        total = self._total
        if duty.privacy.trust == "central":
            total = duty.noised(self._round, total, duty.noise(r, "server"))
        sigma = summed_sigma(duty.privacy, duty.sigma, duty.parties, self._clients)
        return Merged(total, sigma, self._clients)


def sent_specs(rnd: Round) -> dict[str, Spec] | None:
    """Return what a pooled or raw gist must look like, or None if the plan cannot tell."""
    return {p.name: (getattr(torch, p.dtype), p.shape) for p in rnd.sends} or None


def _open(name: str, rnd: Round, sent: Gist) -> Tensors:
    """Return what may be merged: tensors of a pool round, exact sums of every query planned."""
    if isinstance(sent, dict):
        if rnd.reduce == "sum" and rnd.queries:
            # The exchange adds the noise of a sum: plain numbers would leave without any.
            raise PrivacyError(f"{name}: a gist to be summed must be Sensitive. Got tensors")
        want = sent_specs(rnd)
        got = {k: (v.dtype, tuple(v.shape)) for k, v in sent.items()}
        if want is not None and not fits(got, want):
            raise PrivacyError(f"{name}: a gist must hold what the plan says, {want}. Got {got}")
        return sent
    answers = (sent,) if isinstance(sent, Sensitive) else sent
    if rnd.reduce != "sum":
        raise PrivacyError("exact sums must be released before a pool round. Got Sensitive")
    if [a.query for a in answers] != list(rnd.queries):
        raise PrivacyError(
            f"{name}: a gist to be summed must answer the {len(rnd.queries)} queries "
            f"of its round, in order. Got {len(answers)} answers"
        )
    return {k: v for a in answers for k, v in prefixed(a.query, open_sensitive(a)).items()}
