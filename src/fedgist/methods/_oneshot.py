"""One upload of a trained network by every client, and a student of their ensemble.

From one common start each client trains as in FedAvg, once, and sends how far its weights moved and
how many images it has. The networks are normalised by groups (see `train.models`): no running
statistics are sent, so none can be averaged wrongly.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._weights import (
    LOCAL,
    check,
    finite,
    fresh,
    local_update,
    network_of,
    size_of,
)
from fedgist.privacy.client import Client
from fedgist.train import Network, Recipe
from fedgist.train.ensemble import Ensemble, Mix
from fedgist.types import Merged, Piece, Round, State, Task, Tensors

__all__ = ["EPOCHS", "Distil", "OneShot", "Student", "batches", "divergence", "positive"]

EPOCHS = 10.0  # a client trains once: more than in a round of many
LARGEST = 10.0  # norm of a student's gradient: a diverging KL must not end the run


def positive(where: str, settings: object, *names: str) -> None:
    """Raise `ConfigError` unless these fields of ``settings`` are positive and finite."""
    for name in names:
        if not 0 < (got := getattr(settings, name)) < math.inf:
            raise ConfigError(f"{where}.{name} must be positive. Got {got}")


@dataclass(frozen=True)
class OneShot(Method):
    """One round: every client trains the broadcast network and sends it; the server keeps each.

    Attributes:
        recipe: model and local training, by ``sgd``.
        epochs: a client's passes over its images; 0 for ``recipe.steps`` updates.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    recipe: Recipe = LOCAL
    epochs: float = EPOCHS

    def __post_init__(self) -> None:
        check(self.recipe, self.epochs)

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the claim must know besides."""
        return (
            "the server has each client's own network, which can be asked about that client's "
            "images, and how many images each has",
        )

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan one raw pool of updates and of numbers of images."""
        size = size_of(task, self.recipe)
        sends = (Piece("update", (1, size), "float32"), Piece("images", (1,), "float32"))
        return [Round("pool", raw=True, sends=sends)]

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast a fresh network."""
        return State({"weights": fresh(task, self.recipe, rng)})

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Train on the images; send w - w_0 and n, zeros where there are none.

        Raises:
            ConfigError: training diverged.
        """
        images, weights = client.raw(), shared["weights"]
        update = torch.zeros_like(weights)
        if len(images):
            moved = local_update(task, self.recipe, weights, images, rng, epochs=self.epochs)
            update = finite(moved, self.recipe)
        return {"update": update[None], "images": torch.tensor([float(len(images))])}

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Keep what came beside the network that it is relative to."""
        return State(state.shared, merged)

    def uploads(self, state: State) -> tuple[Tensor, Tensor]:
        """Return weights float32 ``[k, P]`` and images float32 ``[k]`` of clients that have any.

        Where nobody has, the one network is the untouched start, of one image.
        """
        got, start = state.server.tensors, state.shared["weights"]
        images: Tensor = got.get("images", torch.zeros(0))
        if not bool((images > 0).any()):
            return start[None], torch.ones(1)
        return start + got["update"][images > 0], images[images > 0]

    def ensemble(self, task: Task, state: State, mix: Mix = "logits") -> Ensemble:
        """Return the clients' networks, each counting alike."""
        weights, _ = self.uploads(state)
        members = tuple(network_of(task, self.recipe, w) for w in weights)
        return Ensemble(members, torch.full((len(members),), 1 / len(members)), mix)

    def average(self, task: Task, state: State) -> Network:
        """Return the network of mean weights, each client counting by its images."""
        weights, images = self.uploads(state)
        return network_of(task, self.recipe, images @ weights / images.sum())

    def student(
        self, task: Task, state: State, distil: Distil, steps: int, rng: torch.Generator
    ) -> Student:
        """Return a student that has learned nothing yet, of the clients' own model."""
        if distil.begin == "average":
            return Student(self.average(task, state), distil, steps)
        weights = fresh(task, self.recipe, rng)
        return Student(network_of(task, self.recipe, weights), distil, steps)


# --- distillation --------------------------------------------------------------------------------


def divergence(teacher: Tensor, student: Tensor, temperature: float = 1.0) -> Tensor:
    """Return T² KL(softmax(teacher / T) ‖ softmax(student / T)) of every row, ``[b]``.

    T² keeps gradients of one size for every T (Hinton et al., https://arxiv.org/abs/1503.02531).
    """
    p, q = ((z / temperature).log_softmax(1) for z in (teacher, student))
    return temperature**2 * (p.exp() * (p - q)).sum(1)


@dataclass(frozen=True)
class Distil:
    """How a student learns from the ensemble.

    Attributes:
        begin: from the clients' ``average``, or from ``fresh`` weights.
        steps: updates on a fixed set of images.
        passes: over the pool in each epoch, where images are generated.
        batch: images in an update.
        lr: highest learning rate; it falls to 0 along a cosine.
        optimiser: ``sgd`` with momentum 0.9, or ``adam``.
        temperature: of the softmax of both.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    begin: Literal["average", "fresh"] = "average"
    steps: int = 1000
    passes: int = 2
    batch: int = 128
    lr: float = 0.01
    optimiser: Literal["sgd", "adam"] = "sgd"
    temperature: float = 1.0

    def __post_init__(self) -> None:
        positive("method.distil", self, "steps", "passes", "batch", "lr", "temperature")


class Student:
    """A network that is moved towards what a teacher says."""

    def __init__(self, network: Network, distil: Distil, steps: int) -> None:
        """Begin at a network that may be changed; ``steps`` updates are planned."""
        self.network, self._distil, self._steps, self._done = network, distil, steps, 0
        self._parameters = list(network.model.requires_grad_(True).train().parameters())
        self._optimiser: torch.optim.Optimizer = (
            torch.optim.Adam(self._parameters, distil.lr)
            if distil.optimiser == "adam"
            else torch.optim.SGD(self._parameters, distil.lr, momentum=0.9)
        )

    def step(self, x: Tensor, teacher: Tensor) -> float:
        """Take a step on images ``[b, c, h, w]`` and the teacher's scores; return the loss."""
        for group in self._optimiser.param_groups:
            group["lr"] = self._distil.lr * (1 + math.cos(math.pi * self._done / self._steps)) / 2
        self._optimiser.zero_grad()
        logits = self.network.logits(x)
        loss = divergence(teacher, logits, self._distil.temperature).mean()
        torch.autograd.backward(loss)
        nn.utils.clip_grad_norm_(self._parameters, LARGEST)
        self._optimiser.step()
        self._done += 1
        return float(loss.detach())

    def finished(self) -> Network:
        """Return the network, to be read only."""
        self.network.model.requires_grad_(False).eval().zero_grad()
        return self.network


def batches(n: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield positions below n, once each, in a random order."""
    yield from torch.split(torch.randperm(n, generator=rng), size)
