"""SplitFed: clients run the first block of a network, the server the rest. Not private.

Thapa et al., "SplitFed: When Federated Learning Meets Split Learning", AAAI 2022,
https://arxiv.org/abs/2004.12088, version 1, with the parts kept in step: copies of front and back
are averaged after every update, so that all clients together take one step of SGD on the joined
network. The paper averages once an epoch. One training step takes two rounds:

pool  every client draws a batch, runs the front, and sends activations, labels and a random tag;
sum   the server runs the back and broadcasts the gradients at the cut of all clients, with their
      tags; every client takes its own, goes back through the front, and sends that gradient.

What it costs: activations go up, ``batch`` · width · ⌈size/2⌉² numbers a step, and the gradients of
*all* clients come down to each, because a broadcast is the same for all: the number of clients
times as much. The weights of the front are small beside both.

What it hides: nothing. Labels are sent as they are, and images are read back from activations after
one block: FedSumUp's authors report more than 36 dB. `SFL.front` runs the front for such an attack.
The claim is ε = inf.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import vector_to_parameters

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._weights import (
    CENTRE,
    LOCAL,
    SPREAD,
    check,
    finite,
    fresh,
    network_of,
)
from fedgist.privacy.client import Client
from fedgist.train import Recipe
from fedgist.train.augment import augment
from fedgist.train.models import blank_model
from fedgist.types import Images, Merged, Outcome, Piece, Round, State, Task, Tensors

__all__ = ["SFL"]

CUT = 4  # layers of the front: convolution, normalisation, ReLU, pooling
MOST = 2**63 - 1  # of a tag
STEPS = replace(LOCAL, steps=150, batch=32, lr=0.02)
PADDING = -1  # the label of a row that holds no image


@dataclass(frozen=True)
class _Server:
    """What the server keeps: the joined weights, their velocity, the back's pending gradient."""

    weights: Tensor
    velocity: Tensor
    back: Tensor


@dataclass(frozen=True)
class SFL(Method):
    """A ConvNet-3 cut after its first block, trained for ``recipe.steps`` steps of two rounds.

    Attributes:
        recipe: model and training, by ``sgd``. ``batch`` is what each client draws for a step, so
            that all clients with so many images weigh the same; one with fewer sends them all.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    recipe: Recipe = STEPS

    def __post_init__(self) -> None:
        check(self.recipe, epochs=1)
        if self.recipe.model != "convnet3" or self.recipe.steps < 1:
            raise ConfigError(
                "method.recipe must have model = 'convnet3' and steps of at least 1. "
                f"Got '{self.recipe.model}' and {self.recipe.steps}"
            )

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan a raw pool and a raw sum for every step."""
        batch, side = self.recipe.batch, math.ceil(task.size / 2)
        ups = (
            Piece("activations", (batch, self.recipe.width, side, side), "float32"),
            Piece("labels", (batch,), "int64"),
            Piece("tag", (1,), "int64"),
        )
        backs = (
            Piece("gradient", (_front_size(task, self.recipe),), "float32"),
            Piece("images", (1,), "float32"),
        )
        step = [Round("pool", raw=True, sends=ups), Round("sum", raw=True, sends=backs)]
        return step * self.recipe.steps

    def front(self, task: Task, shared: Tensors) -> Callable[[Tensor], Tensor]:
        """Return the front as a function, with the weights that a round broadcast.

        It maps float32 ``[b, c, h, w]`` in [0, 1] to activations ``[b, width, ⌈h/2⌉, ⌈w/2⌉]``, row
        by row and differentiably: what an attack on activations needs.
        """
        module = _front(task, self.recipe, shared["front"]).requires_grad_(False)
        return lambda x: module(_normalised(x))

    @property
    def random(self) -> bool:
        """Whether the same image is sent differently every time; see `exposure`."""
        return False

    def used(self, images: Images) -> Images:
        """Return the images of a client that take part: all, batch by batch."""
        return images

    def uploaded(self, task: Task, shared: Tensors, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return the activations a >= 0 of ``x`` as a / (1 + a), which is within [0, 1]."""
        a = self.front(task, shared)(x)
        return a / (1 + a)

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast the front of a fresh network."""
        weights = fresh(task, self.recipe, rng)
        server = _Server(weights, torch.zeros_like(weights), weights[:0])
        return State({"front": weights[: _front_size(task, self.recipe)]}, server)

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Send the activations of a new batch, or go back through the front with the last one.

        Raises:
            ConfigError: training diverged.
        """
        return (
            self._forward(task, shared, client, rng)
            if r % 2 == 0
            else self._backward(task, shared, client)
        )

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Run the back forward and backward, or step the joined network.

        Raises:
            ConfigError: training diverged.
        """
        if r % 2 == 0:
            return self._at_the_cut(task, state, merged.tensors)
        s: _Server = state.server
        front = merged.tensors["gradient"] / merged.tensors["images"].clamp(min=1)
        gradient = torch.cat([front, s.back]) + self.recipe.weight_decay * s.weights
        velocity = self.recipe.momentum * s.velocity + gradient
        if self.recipe.momentum:  # Nesterov's, as everywhere in this package
            gradient = gradient + self.recipe.momentum * velocity
        weights = finite(s.weights - self.recipe.rate(r // 2) * gradient, self.recipe)
        shared = {"front": weights[: len(front)]}
        return State(shared, _Server(weights, velocity, weights[:0]))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return front and back joined."""
        network = network_of(task, self.recipe, state.server.weights)
        return Outcome(None, {"sfl": network}, {"seconds": {}})

    def _forward(
        self, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Tensors:
        """Draw a batch without replacement; rows beyond the client's images are padding."""
        images, batch = client.raw(), self.recipe.batch
        rows = torch.randperm(len(images), generator=rng)[:batch]
        tag = torch.randint(MOST, (1,), generator=rng)
        client.memory |= {"rows": rows, "tag": tag}
        side = math.ceil(task.size / 2)
        activations = torch.zeros(batch, self.recipe.width, side, side)
        labels = torch.full((batch,), PADDING)
        if len(rows):
            with torch.no_grad():
                got = self.front(task, shared)(self._batch(client))
            activations[: len(rows)] = finite(got, self.recipe)
            labels[: len(rows)] = images.labels[rows]
        return {"activations": activations, "labels": labels, "tag": tag}

    def _backward(self, task: Task, shared: Tensors, client: Client) -> Tensors:
        """Return the gradient of the summed loss for the front, and how many images it is of.

        A client that did not take part in the round before sends zeros.
        """
        tag = client.memory.get("tag", torch.tensor([-1]))  # no tag is negative
        found = (shared["tags"] == tag).nonzero()
        rows = client.memory["rows"] if len(found) else torch.zeros(0, dtype=torch.int64)
        gradient = torch.zeros_like(shared["front"])
        if len(rows):
            first = int(found[0]) * self.recipe.batch
            front = _front(task, self.recipe, shared["front"])
            activations = front(_normalised(self._batch(client)))
            at_cut = shared["gradients"][first : first + len(rows)]
            parts = torch.autograd.grad(activations, list(front.parameters()), at_cut)
            gradient = finite(torch.cat([g.flatten() for g in parts]), self.recipe)
        return {"gradient": gradient, "images": torch.tensor([float(len(rows))])}

    def _batch(self, client: Client) -> Tensor:
        """Return the remembered batch; the tag is the seed of its augmentation."""
        x = client.raw().floats(client.memory["rows"])
        rng = torch.Generator().manual_seed(int(client.memory["tag"]))
        return augment(x, self.recipe.augment, rng, flip=self.recipe.flip)

    def _at_the_cut(self, task: Task, state: State, sent: Tensors) -> State:
        """Broadcast the gradients of the summed loss at the cut; keep the back's mean gradient."""
        s: _Server = state.server
        network = network_of(task, self.recipe, s.weights)
        features, head = network.model.requires_grad_(True).children()
        back = nn.Sequential(*list(features.children())[CUT:], head)
        real = (sent["labels"] >= 0) & (sent["labels"] < len(task.classes))  # the rest is padding
        gradients = torch.zeros_like(sent["activations"])
        mean = torch.zeros(len(s.weights) - len(state.shared["front"]))
        if bool(real.any()):
            at_cut = sent["activations"][real].requires_grad_(True)
            loss = F.cross_entropy(
                back(at_cut),
                sent["labels"][real],
                label_smoothing=self.recipe.label_smoothing,
                reduction="sum",
            )
            first, *others = torch.autograd.grad(loss, [at_cut, *back.parameters()])
            gradients[real] = finite(first, self.recipe)
            mean = torch.cat([g.flatten() for g in others]) / real.sum()
        shared = {"front": state.shared["front"], "gradients": gradients, "tags": sent["tag"]}
        return State(shared, replace(s, back=mean))


def _blank_front(task: Task, recipe: Recipe) -> nn.Sequential:
    classes = len(task.classes)
    features = blank_model(recipe.model, task.channels, task.size, classes, recipe.width)[0]
    return nn.Sequential(*list(features.children())[:CUT])


def _front_size(task: Task, recipe: Recipe) -> int:
    return sum(p.numel() for p in _blank_front(task, recipe).parameters())


def _front(task: Task, recipe: Recipe, weights: Tensor) -> nn.Sequential:
    """Return the front with ``weights``, float32 ``[F]``, which it shares."""
    front = _blank_front(task, recipe).to_empty(device="cpu")
    vector_to_parameters(weights, front.parameters())
    return front


def _normalised(x: Tensor) -> Tensor:
    return (x - CENTRE) / SPREAD
