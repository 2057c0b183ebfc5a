"""FedAvg and FedProx: clients train the broadcast network, the server averages. Not private.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, https://arxiv.org/abs/1602.05629; with ``mu`` > 0 Li et al., "Federated Optimization
in Heterogeneous Networks", MLSys 2020, https://arxiv.org/abs/1812.06127. A comparison: weights
that were trained on images are read from those images without noise, so its claim is ε = inf.

Every client takes part in every round. The network has no buffers (GroupNorm), so its parameters
are all that is averaged; its inputs are normalised by public constants.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._weights import LOCAL, check, fresh, local_update, network_of, size_of
from fedgist.privacy.client import Client
from fedgist.train import Recipe
from fedgist.types import Merged, Outcome, Piece, Round, State, Task, Tensors

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(Method):
    """A network averaged over ``rounds``, each client weighted by its number of images.

    Attributes:
        rounds: how often clients train and the server averages.
        recipe: model and local training, by ``sgd``; momentum and schedule begin anew each round.
        epochs: a client's passes over its images in a round; 0 for ``recipe.steps`` updates.
        mu: weight of FedProx's proximal term mu/2 ‖w - w_t‖²; 0 is FedAvg.
        server_lr: the mean update is multiplied by it.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    rounds: int = 20
    recipe: Recipe = LOCAL
    epochs: float = 1.0
    mu: float = 0.0
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        check(self.recipe, self.epochs)
        if self.rounds < 1:
            raise ConfigError(f"method.rounds must be at least 1. Got {self.rounds}")
        if not (0 <= self.mu < math.inf and 0 < self.server_lr < math.inf):
            raise ConfigError(
                "method.mu must not be negative and method.server_lr must be positive. "
                f"Got {self.mu} and {self.server_lr}"
            )

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan ``rounds`` raw sums: of updates times images, and of images."""
        size = size_of(task, self.recipe)
        sends = (Piece("update", (size,), "float32"), Piece("images", (1,), "float32"))
        return [Round("sum", raw=True, sends=sends)] * self.rounds

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast a fresh network."""
        return State({"weights": fresh(task, self.recipe, rng)})

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Train on the images; send n (w - w_t) and n, zeros where there are none.

        Raises:
            ConfigError: training diverged.
        """
        images, weights = client.raw(), shared["weights"]
        update = torch.zeros_like(weights)
        if len(images):
            update = local_update(
                task, self.recipe, weights, images, rng, epochs=self.epochs, mu=self.mu
            )
        if not bool(update.isfinite().all()):
            raise ConfigError(
                f"local training must stay finite. Got NaN or Inf with learning rate "
                f"{self.recipe.lr:g}: use a smaller method.recipe.lr"
            )
        n = torch.tensor([float(len(images))])
        return {"update": n * update, "images": n}

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Add the weighted mean of the updates."""
        mean = merged.tensors["update"] / merged.tensors["images"].clamp(min=1)
        return State({"weights": state.shared["weights"] + self.server_lr * mean})

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the network."""
        network = network_of(task, self.recipe, state.shared["weights"])
        return Outcome(None, {"fedavg": network}, {"seconds": {}})
