"""DOSFL: clients send, once, data that teach one known network. Not private.

Zhou et al., "Distilled One-Shot Federated Learning", 2020, https://arxiv.org/abs/2009.07999. All
start from one public network θ_0. A client learns S small batches of inputs, soft labels and rates
(dataset distillation: Wang et al. 2018, https://arxiv.org/abs/1811.10959; soft labels: Sucholutsky
and Schonlau 2019, https://arxiv.org/abs/1910.02551) such that S steps of gradient descent on them
lower the loss of its real images; the gradient goes through all S steps (`_unroll`). The server
takes the steps of all clients one after another, from θ_0: by default the first step of each, then
the second, which does better on skewed splits than client by client.

At the server a client's steps begin where another's ended. A client prepares for that: with *soft
resets* it begins each iteration at θ_0 plus noise, and with *random masking* it leaves a random
part of its steps out.

Differences from the paper: networks are normalised by groups, their inputs by public constants; a
masked step is left out; a cosine takes Adam's rate to 0; rates are learned as logarithms, so stay
positive; numbers of steps and sizes are our own. Inputs look like noise, have no fixed range, and
teach little to other networks: there is no synthetic set to pass on. They follow from records
without noise: the claim is ε = inf.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._distil import check_options
from fedgist.methods._unroll import (
    Steps,
    fit_of,
    learned,
    loss_of,
    pieces,
    replay,
    steady,
    uploads,
)
from fedgist.methods._weights import fresh, network_of
from fedgist.privacy.client import Client
from fedgist.train import Recipe
from fedgist.types import Images, Merged, Outcome, Round, State, Task, Tensors

__all__ = ["DOSFL"]


@dataclass(frozen=True)
class DOSFL(Method):
    """Batches that teach a known network, from every client, once; head ``distilled``.

    Attributes:
        model, width: of the network, see `train.build_model`.
        steps: S, batches that a client sends.
        batch: inputs in each.
        passes: over the S batches, at the client and at the server.
        iterations: of learning them.
        real: real images that judge an iteration.
        lr: highest rate of Adam; falls to 0 along a cosine.
        rate: every step's own rate in the beginning.
        reset: soft resets: standard deviation of the noise on every weight of θ_0, whose own
            deviation is about (2 / fan-in)^½.
        masked: share of the steps that is left out at random in an iteration.
        order: the server takes all steps of a client, then those of the next (``clients``), or the
            first step of every client, then the second (``steps``).
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    model: str = "convnet3"
    width: int = 32
    steps: int = 10
    batch: int = 5
    passes: int = 1
    iterations: int = 200
    real: int = 128
    lr: float = 0.1
    rate: float = 0.02
    reset: float = 0.05
    masked: float = 0.1
    order: Literal["clients", "steps"] = "steps"

    def __post_init__(self) -> None:
        check_options(self, "steps", "batch", "passes", "iterations", "real", "lr", "rate")
        if not (0 <= self.reset < math.inf and 0 <= self.masked < 1):
            raise ConfigError(
                "method.reset must not be negative and method.masked must lie in [0, 1). "
                f"Got {self.reset} and {self.masked}"
            )
        assert self.recipe  # its own errors

    @property
    def recipe(self) -> Recipe:
        """Of the network; it is trained by the clients' own steps."""
        return Recipe(model=self.model, width=self.width)

    @property
    def unfit(self) -> str:
        """Why real data must not be given to it."""
        return "dosfl: inputs, labels and rates follow from records without noise"

    def plan(self, task: Task) -> Sequence[Round]:
        """One raw pool round."""
        return [Round("pool", raw=True, sends=pieces(task, self.steps, self.batch))]

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast θ_0."""
        return State({"weights": fresh(task, self.recipe, rng)})

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Learn the steps; send such as change nothing where there are no images.

        Raises:
            ConfigError: learning diverged.
        """
        images = client.raw()
        if not len(images):
            return Steps.nothing(task, self.steps, self.batch).gist()
        return self._learned(task, shared["weights"], images, rng).gist()

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Keep what came beside the network that it is meant for."""
        return State(state.shared, merged)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Take all steps of all clients, from θ_0."""
        started = time.perf_counter()
        loss, weights = loss_of(task, self.recipe), state.shared["weights"]
        sent = uploads(state.server.tensors, self.steps, self.batch)
        for part, s in self._sequence(len(sent)):
            weights = replay(loss, weights, sent[part], [s])[-1]
        network = network_of(task, self.recipe, steady(weights))
        return Outcome(
            None,
            {"distilled": network},
            {
                "steps": len(sent) * self.passes * self.steps,
                "seconds": {"train": time.perf_counter() - started},
            },
        )

    def _sequence(self, clients: int) -> list[tuple[int, int]]:
        """Return (client, step) in the order in which the server goes through them."""
        once = list(range(self.steps)) * self.passes
        if self.order == "steps":
            return [(i, s) for s in once for i in range(clients)]
        return [(i, s) for i in range(clients) for s in once]

    def _learned(self, task: Task, start: Tensor, images: Images, rng: torch.Generator) -> Steps:
        loss, held = loss_of(task, self.recipe), (images.counts() > 0).nonzero()[:, 0]
        begun = Steps.noise(task, self.steps, self.batch, self.rate, held, rng)

        def draw() -> tuple[Tensor, list[int]]:
            near = start + self.reset * torch.randn(start.shape, generator=rng)
            return near, self._unmasked(rng)

        aim = fit_of(loss, images, self.real, rng)
        return learned(loss, begun, aim, draw, lr=self.lr, iterations=self.iterations)

    def _unmasked(self, rng: torch.Generator) -> list[int]:
        """Draw the steps that an iteration takes: all, less some; one at least."""
        kept = torch.rand(self.steps, generator=rng) >= self.masked
        kept[torch.randint(self.steps, (), generator=rng)] |= not bool(kept.any())
        return kept.nonzero()[:, 0].tolist() * self.passes
