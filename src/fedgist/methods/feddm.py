"""Distribution matching around the global network, in several rounds: FedDM.

Xiong et al., "FedDM: Iterative Distribution Matching for Communication-Efficient Federated
Learning", CVPR 2023, https://arxiv.org/abs/2207.09653. In every round the server broadcasts its
network; clients move synthetic images until networks near it give them the mean embedding and the
mean logits of the real images; the server trains on all clients' images, from where it was.

With a finite ε, per-record gradients are bounded, sampled and noised as in `anis`, the budget
shared by all rounds. The published start from real images would leak them whatever the noise: here
images start from noise, and each round goes on from the last one's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._descent import Descent, Features, Rule, View, descend, gradient_query
from fedgist.methods._distil import (
    STUDENT,
    Canvas,
    Server,
    check_options,
    gist,
    pieces,
    pooled_images,
)
from fedgist.methods._siamese import Policy
from fedgist.methods._start import Beginning
from fedgist.methods._sums import rates_of, signal_level
from fedgist.methods._weights import flat, fresh, network_of
from fedgist.privacy.client import Client
from fedgist.queries import SumQuery
from fedgist.train import Network, Recipe, train
from fedgist.types import Merged, Outcome, Round, State, Task, Tensors

__all__ = ["FedDM"]

CANVAS = Canvas()
SERVER = Server(replace(STUDENT, steps=250))


@dataclass(frozen=True)
class FedDM(Method):
    """Rounds of distilled images; head ``distilled``.

    Attributes:
        canvas: images per class and how they are stored.
        rounds: how often the server broadcasts.
        steps: gradients that are released in a round.
        batch, class_size: the sampling rate is ``batch / class_size``, as in `anis`.
        lr: the highest step, root mean square over a class's pixels.
        radius: ρ: clients match under networks drawn at this distance from the global one.
        strategy: how a record's gradient is bounded.
        clip: C of ``fixed``. Public.
        augment: `_siamese.siamese`; the paper has none.
        server: how pooled images are chosen and trained on, in every round.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    rounds: int = 3
    steps: int = 10
    batch: float = 32.0
    class_size: tuple[int, ...] = (600,)
    lr: float = 0.15
    radius: float = 5.0
    strategy: Literal["normalised", "fixed"] = "normalised"
    clip: float = 1.0
    augment: Policy = "none"
    server: Server = SERVER

    def __post_init__(self) -> None:
        check_options(self, "rounds", "steps", "batch", "lr", "clip")
        if not 0 <= self.radius < math.inf:
            raise ConfigError(f"method.radius must not be negative. Got {self.radius}")
        if self.recipe.model != "convnet3":
            raise ConfigError(
                f"method.server.recipe.model must be 'convnet3'. Got '{self.recipe.model}'"
            )

    @property
    def recipe(self) -> Recipe:
        """Of the global network."""
        return self.server.recipe

    @property
    def rule(self) -> Rule:
        """How a record's gradient is bounded."""
        return Rule(self.strategy, self.clip)

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan pool rounds of noised counts (the first only) and noised gradients."""
        sends, gradient = pieces(self.canvas, task), self._gradient(task)
        first = Round("pool", (*self._beginning(task).queries, gradient), sends=sends)
        return [first, *[Round("pool", (gradient,), sends=sends)] * (self.rounds - 1)]

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast a fresh network."""
        return State({"weights": fresh(task, self.recipe, rng)})

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Move the images under networks near the broadcast one."""
        if r == 0:
            begun = self._beginning(task).begin(client, rng)
            client.memory["counts"], client.memory["free"] = begun
        counts = client.memory["counts"]
        descent = Descent(client.memory["free"], self.lr, self.steps)
        query = self._gradient(task)

        def view() -> View:
            near = _near(shared["weights"], self.radius, rng)
            features = _features(network_of(task, self.recipe, near))
            return View(features, self.canvas, task, self.augment, rng)

        descend(client, query, self.rule, descent, counts, view)
        client.memory["free"] = descent.free
        return gist(descent.free, counts)

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Train the global network on the pooled images, from where it was."""
        level = signal_level(self._gradient(task), merged.sigma)
        least = self.server.least * level / math.sqrt(r + 1)  # all rounds so far moved the images
        images = pooled_images(merged.tensors, self.canvas, task, least)
        before = network_of(task, self.recipe, state.shared["weights"])
        network = train(images, self.recipe, rng, start=before)
        return State({"weights": flat(network.model)}, (images, network))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the last images and the network."""
        images, network = state.server
        return Outcome(images, {"distilled": network}, {"kept": len(images), "seconds": {}})

    def _beginning(self, task: Task) -> Beginning:
        return Beginning(task, self.canvas, "noise", rates=(1.0,))

    def _gradient(self, task: Task) -> SumQuery:
        rates = rates_of(self.batch, self.class_size, task)
        return gradient_query(task, self.canvas, self.rule, rates, self.steps)


def _near(weights: Tensor, radius: float, rng: torch.Generator) -> Tensor:
    """Return weights at distance ``radius`` in a random direction."""
    away = torch.randn(weights.shape, generator=rng)
    near: Tensor = weights + radius * away / away.norm()
    return near


def _features(network: Network) -> Features:
    """Return the map from images to their embedding and logits, joined."""
    body, head = network.model.get_submodule("features"), network.model.get_submodule("head")

    def features(x: Tensor, y: Tensor) -> Tensor:
        z = body((x - network.mean[:, None, None]) / network.std[:, None, None])
        return torch.cat([z, head(z)], dim=1)

    return features
