"""SCAFFOLD: FedAvg with control variates against the drift of clients. Not private.

Karimireddy et al., "SCAFFOLD: Stochastic Controlled Averaging for Federated Learning", ICML 2020,
https://arxiv.org/abs/1910.06378, algorithm 1 with option II. From the broadcast weights x and
control c, client i takes K steps of plain SGD and keeps its own control c_i:

    y <- y - η (g_i(y) - c_i + c)            c_i+ = c_i - c + (x - y) / (K η)
    x <- x + server_lr mean(y - x)           c <- c + mean(c_i+ - c_i)

Differences from the paper: every client takes part in every round, and both means are weighted by
images. The paper's objective is the plain mean over clients; here it is the mean over images, as in
FedAvg. c must have the same weights: at a fixed point clients move by -K η c on average, which is
zero where c is the gradient of the objective and nowhere else. Weight decay is part of the loss, so
part of g_i. A round costs twice the bytes of FedAvg, in both directions. The claim is ε = inf.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._weights import (
    LOCAL,
    check,
    finite,
    fresh,
    in_steps,
    local_update,
    network_of,
    size_of,
)
from fedgist.privacy.client import Client
from fedgist.train import Recipe
from fedgist.types import Merged, Outcome, Piece, Round, State, Task, Tensors

__all__ = ["Scaffold"]

PLAIN = replace(LOCAL, momentum=0.0, lr=0.2)  # the step that momentum 0.9 makes of 0.02


@dataclass(frozen=True)
class Scaffold(Method):
    """A network averaged over ``rounds``, each client weighted by its number of images.

    Attributes:
        rounds: how often clients train and the server averages.
        recipe: model and local training: ``sgd`` without momentum at a constant rate.
        epochs: a client's passes over its images in a round; 0 for ``recipe.steps`` updates.
        server_lr: the mean update is multiplied by it.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    rounds: int = 20
    recipe: Recipe = PLAIN
    epochs: float = 1.0
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        check(self.recipe, self.epochs)
        recipe = self.recipe
        if recipe.momentum or recipe.warmup or recipe.schedule != "constant" or recipe.lr == 0:
            raise ConfigError(
                "method.recipe must have momentum = 0, warmup = 0, schedule = 'constant' and "
                "lr > 0: a control is the mean gradient of equal steps. Got "
                f"{recipe.momentum:g}, {recipe.warmup:g}, '{recipe.schedule}' and {recipe.lr:g}"
            )
        if self.rounds < 1 or not 0 < self.server_lr < math.inf:
            raise ConfigError(
                "method.rounds must be at least 1 and method.server_lr must be positive. "
                f"Got {self.rounds} and {self.server_lr}"
            )

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan ``rounds`` raw sums: of updates and controls times images, and of images."""
        size = size_of(task, self.recipe)
        sends = (
            Piece("update", (size,), "float32"),
            Piece("control", (size,), "float32"),
            Piece("images", (1,), "float32"),
        )
        return [Round("sum", raw=True, sends=sends)] * self.rounds

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast a fresh network and a control of zeros."""
        weights = fresh(task, self.recipe, rng)
        return State({"weights": weights, "control": torch.zeros_like(weights)})

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Train with corrected gradients; send n (y - x), n (c_i+ - c_i) and n, and keep c_i+.

        A client without images sends zeros.

        Raises:
            ConfigError: training diverged.
        """
        images, weights, control = client.raw(), shared["weights"], shared["control"]
        n = torch.tensor([float(len(images))])
        if not len(images):
            zeros = torch.zeros_like(weights)
            return {"update": zeros, "control": zeros, "images": n}
        own = client.memory.get("control", torch.zeros_like(weights))
        recipe = in_steps(self.recipe, self.epochs, len(images))
        moved = local_update(task, recipe, weights, images, rng, epochs=0, correction=control - own)
        change = -control - finite(moved, recipe) / (recipe.steps * recipe.lr)
        client.memory["control"] = own + change
        return {"update": n * moved, "control": n * change, "images": n}

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Add the weighted means of the updates and of the changes of the controls."""
        images = merged.tensors["images"].clamp(min=1)
        mean, change = (merged.tensors[k] / images for k in ("update", "control"))
        weights = state.shared["weights"] + self.server_lr * mean
        return State({"weights": weights, "control": state.shared["control"] + change})

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the network."""
        network = network_of(task, self.recipe, state.shared["weights"])
        return Outcome(None, {"scaffold": network}, {"seconds": {}})
