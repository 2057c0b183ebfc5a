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
from fedgist.methods._distil import Canvas, Server
from fedgist.methods._sums import COUNT
from fedgist.privacy.client import Client
from fedgist.queries import Query, SumQuery, blocks_of
from fedgist.train import train_converged
from fedgist.types import Merged, Outcome, Round, State, Task, Tensors

__all__ = ["CollabDM"]

CANVAS, SERVER = Canvas(), Server()
MATCHING = Matching(steps=600, lr=0.05)


@dataclass(frozen=True)
class CollabDM(Method):
    """One sum round; head ``distilled``.

    Attributes:
        canvas: images per class and how they are stored.
        nets: T shared networks.
        width: channels of the networks.
        levels: integer radius of a record's embedding.
        matching: how the server moves images; the canvas decides its factor.
        server: how the network is trained on them.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    nets: int = 4
    width: int = 32
    levels: int = 128
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
        """One sum round: counts and sums of embeddings of norm 1."""
        return [Round("sum", self._queries(task))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """One forward pass through every network."""
        count, sums = self._queries(task)
        return (
            client.sum(lambda x, y: {"rows": torch.ones(len(x), 1)}, count),
            client.sum(lambda x, y: {"rows": self.networks.rows(x)}, sums),
        )

    def records(self, task: Task) -> list[tuple[Query, Callable[[Tensor], Tensor]]]:
        """Return each query with what it makes of images: float64 rows, not yet clipped."""
        count, sums = self._queries(task)
        return [
            (count, lambda x: torch.ones(len(x), 1, dtype=torch.float64)),
            (sums, lambda x: self.networks.rows(x).flatten(1).to(torch.float64)),
        ]

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Match images to the released means and train on them."""
        merged: Merged = state.server
        count, sums = self._queries(task)
        counts = blocks_of(count, merged.tensors)["rows"][:, 0] / count.levels
        started = time.perf_counter()
        release = net_means(blocks_of(sums, merged.tensors)["rows"], counts, sums, merged.sigma)
        free, labels = self.canvas.start(task, rng), torch.arange(len(task.classes))
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

    def _queries(self, task: Task) -> tuple[SumQuery, SumQuery]:
        classes = len(task.classes)
        # 1/σ² = 1/(scale σ)² summed over both: together they have the whole budget
        whole = (1 + COUNT**-2) ** 0.5
        shape = (classes, self.nets, self.networks.features)
        return (
            SumQuery(1.0, 64, COUNT * whole, per_class=True, name="count", shape=(classes, 1)),
            SumQuery(1.0, self.levels, whole, per_class=True, name="match", shape=shape),
        )
