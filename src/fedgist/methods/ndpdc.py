"""Distribution matching with noise on class sums of embeddings, distilled on every client.

Zheng and Li, "Differentially Private Dataset Condensation", AISCC at NDSS 2024 (NDPDC). In every
round a fresh random network embeds a Poisson sample of the records; the sum of each class is noised
once, and the class's synthetic images move towards it. The matching loss is linear in the records'
embeddings, so nothing else of them is needed, and a step costs one backward pass through the
synthetic images, whatever the number of records.

It is never worse than noise on clipped gradients of the same loss (`anis` can do that): those are
Jᵀv(x) with a public Jacobian J. A bound that holds for all records without looking at them is
‖J‖·‖v‖; noise of that size in every pixel has covariance ‖J‖² I, and noise on the embeddings,
pulled back, JᵀJ <= it.

Differences from the published code: embeddings have norm 1, so nothing is clipped; the noise counts
the clip; the rate is public and a sum is divided by rate times a noised count; a residual is shrunk
by its known noise (James and Stein) before it pulls; ``passes`` > 1 uses every release again, at no
cost in privacy (after "Dosser", ICCV 2025, https://arxiv.org/abs/2508.01749, whose public code
draws new noise for sums that it kept, which is not private).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgist.method import Gist, Method
from fedgist.methods._descent import Descent, Rule, View, bounded_query, follow, random_view
from fedgist.methods._distil import Canvas, Server, check_options, gist, pieces
from fedgist.methods._siamese import Policy
from fedgist.methods._start import Beginning, Start
from fedgist.methods._sums import noised_means, rates_of, signal_level
from fedgist.privacy.client import Client
from fedgist.queries import SumQuery
from fedgist.types import Outcome, Round, State, Task, Tensors

__all__ = ["NDPDC"]

CANVAS, SERVER = Canvas(), Server()
UNIT = Rule()  # embeddings have norm 1 as they are


@dataclass(frozen=True)
class NDPDC(Method):
    """Distilled images from every client, once; head ``distilled``.

    Attributes:
        canvas: images per class and how they are stored.
        rounds: class sums that are released, each under a fresh network.
        passes: steps with every release.
        batch, class_size: the sampling rate is ``batch / class_size``, as in `anis`.
        lr: the highest step, root mean square over a class's pixels; falls to 0 along a cosine.
        start_at: draws from noised Gaussians of the classes, a release of their own, or noise.
        width: channels of the random networks.
        augment: `_siamese.siamese`; ``shift`` where a mirrored image means something else.
        server: how pooled images are chosen and trained on.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    rounds: int = 60
    passes: int = 4
    batch: float = 64.0
    class_size: tuple[int, ...] = (600,)
    lr: float = 0.05
    start_at: Start = "gaussian"
    width: int = 16
    augment: Policy = "flip"
    server: Server = SERVER

    def __post_init__(self) -> None:
        check_options(self, "rounds", "passes", "batch", "lr", "width")

    @property
    def track(self) -> str:
        """Random networks have seen no data."""
        return "no public data"

    def plan(self, task: Task) -> Sequence[Round]:
        """One pool round: noised counts, then ``rounds`` noised class sums of embeddings."""
        queries = (*self._beginning(task).queries, self._sums(task))
        return [Round("pool", queries, sends=pieces(self.canvas, task))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Release noised class sums; move the images towards them for as long as wanted."""
        counts, free = self._beginning(task).begin(client, rng)
        query = self._sums(task)
        descent = Descent(free, self.lr, self.rounds * self.passes)

        def ask() -> tuple[View, Tensor, Tensor]:
            view = random_view(self.canvas, task, self.augment, rng, width=self.width)
            made = client.sum(lambda x, y: {"rows": view.real(x, y)}, query)
            return view, *noised_means(client, made, query, counts)

        follow(descent, self.rounds, self.passes, ask)
        return gist(descent.free, counts)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Pool the images and train on them."""
        level = signal_level(self._sums(task), state.server.sigma)
        return self.server.outcome(state.server.tensors, self.canvas, task, level, rng)

    def _beginning(self, task: Task) -> Beginning:
        return Beginning(task, self.canvas, self.start_at, rates=(1.0,))

    def _sums(self, task: Task) -> SumQuery:
        rates = rates_of(self.batch, self.class_size, task)
        return bounded_query("embedding", 16 * self.width, task, UNIT, rates, self.rounds)
