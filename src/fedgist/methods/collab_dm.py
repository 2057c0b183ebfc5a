"""Class sums of embeddings under shared random networks, once; the server distils.

The additive form of distribution matching: what a client's images are to T public random networks
is a sum, so sums over clients need noise once for the whole federation, under a secure sum; no
client distils, and the server matches for as long as it wants (`heads.match`, post-processing).
CollabDM (Godet et al., https://arxiv.org/abs/2408.02266) sends such means without privacy and
averages clients without weights; here sums and counts are one noised release.

With all records in T releases of sensitivity 1 the whole is one Gaussian mechanism: no sampling,
no accounting over rounds, and the signal (Σ over networks of its square over the noise's) does not
depend on T.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgist.encoders import RandomConv
from fedgist.errors import ConfigError
from fedgist.heads.match import Matching, match, net_means
from fedgist.method import Gist, Method
from fedgist.methods._distil import STUDENT, Canvas, Server
from fedgist.methods._start import Beginning, Start
from fedgist.privacy.client import Client
from fedgist.queries import Query, SumQuery, blocks_of
from fedgist.train import train_converged
from fedgist.types import Merged, Outcome, Round, State, Task, Tensors

__all__ = ["CollabDM"]

CANVAS = Canvas(25)
MATCHING = Matching(steps=600, group=25, lr=0.05)
SERVER = Server(replace(STUDENT, width=64))  # one set for all: worth more training


@dataclass(frozen=True)
class CollabDM(Method):
    """One sum round; head ``distilled``.

    Attributes:
        canvas: images per class and how they are stored.
        nets: T shared networks.
        width: channels of the networks. Few were best for clothes, 32 for digits.
        levels: integer radius of a record's embedding. A number of it, of 16 · nets · width, is
            ``levels`` over the root of their count: below 1 most are rounded to 0.
        start_at: draws from noised Gaussians of the classes, in the same release, or noise.
        matching: how the server moves images; the canvas decides its factor.
        server: how the network is trained on them.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    nets: int = 4
    width: int = 8
    levels: int = 128
    start_at: Start = "gaussian"
    matching: Matching = MATCHING
    server: Server = SERVER

    def __post_init__(self) -> None:
        if min(self.nets, self.width) < 1:
            raise ConfigError(
                f"method.nets and width must be at least 1. Got {self.nets}, {self.width}"
            )

    @property
    def track(self) -> str:
        """Random networks have seen no data."""
        return "no public data"

    @cached_property
    def networks(self) -> RandomConv:
        """The shared networks: public, the same at every site."""
        return RandomConv(0, self.nets, self.width)

    def plan(self, task: Task) -> Sequence[Round]:
        """One sum round: what images begin with, and sums of embeddings of norm 1."""
        return [Round("sum", (*self._beginning(task).queries, self._embeddings(task)))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """One forward pass through every network."""
        query = self._embeddings(task)
        embedded = client.sum(lambda x, y: {"rows": self.networks.rows(x)}, query)
        return (*self._beginning(task).ask(client), embedded)

    def records(self, task: Task) -> list[tuple[Query, Callable[[Tensor], Tensor]]]:
        """Return each query with what it makes of images: float64 rows, not yet clipped."""
        begin = self._beginning(task)

        def wide(rows: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
            return lambda x: rows(x).flatten(1).to(torch.float64)

        first = [(q, wide(begin.rows(q))) for q in begin.queries]
        return [*first, (self._embeddings(task), wide(self.networks.rows))]

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Match images to the released means and train on them."""
        merged: Merged = state.server
        begin, query = self._beginning(task), self._embeddings(task)
        started = time.perf_counter()
        first = {q.name: blocks_of(q, merged.tensors)["rows"] for q in begin.queries}
        counts, free = begin.draw(first, merged.sigma, rng)
        release = net_means(blocks_of(query, merged.tensors)["rows"], counts, query, merged.sigma)
        labels = torch.arange(len(task.classes))
        start = self.canvas.images(free, labels, task)
        how = replace(self.matching, factor=self.canvas.factor)
        done = match(release, self.networks, start, how, rng)
        matched = time.perf_counter()
        server = self.server
        network, scores = train_converged(done.images, server.recipe, rng, server.restarts)
        details = {
            "counts": [round(n, 1) for n in counts.tolist()],
            "restarts": scores,
            "match": {"history": done.history, "noise": done.noise},
            "seconds": {"match": matched - started, "train": time.perf_counter() - matched},
        }
        return Outcome(done.images, {"distilled": network}, details)

    def _beginning(self, task: Task) -> Beginning:
        return Beginning.beside(task, self.canvas, self.start_at)

    def _embeddings(self, task: Task) -> SumQuery:
        return SumQuery(
            1.0,
            self.levels,
            self._beginning(task).whole,
            per_class=True,
            name="match",
            shape=(len(task.classes), self.nets, self.networks.features),
        )
