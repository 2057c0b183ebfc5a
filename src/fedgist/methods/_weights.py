"""The weights of a network as one vector, local training from it, and rounds that average it.

`Averaging` is what FedAvg, FedProx and FedAdam share; they differ in what the server does with the
mean update. Every client takes part in every round. The network has no buffers (GroupNorm), so its
parameters are all that is averaged; its inputs are normalised by public constants.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.privacy.client import Client
from fedgist.train import Network, Recipe, build_model, train
from fedgist.train.models import blank_model
from fedgist.types import Images, Merged, Outcome, Piece, Round, State, Task, Tensors

__all__ = [
    "CENTRE",
    "LOCAL",
    "SPREAD",
    "Averaging",
    "check",
    "finite",
    "flat",
    "fresh",
    "in_steps",
    "local_update",
    "network_of",
    "size_of",
]

# The settings of many comparisons: plain SGD with momentum, weight decay 5e-4, constant rate.
LOCAL = Recipe(
    batch=64,
    lr=0.02,
    optimiser="sgd",
    weight_decay=5e-4,
    schedule="constant",
    warmup=0.0,
    label_smoothing=0.0,
)
CENTRE = SPREAD = 0.5  # of pixels in [0, 1]: a client's own statistics are private


def check(recipe: Recipe, epochs: float) -> None:
    """Raise `ConfigError` unless ``recipe`` and ``epochs`` describe local SGD."""
    if recipe.optimiser != "sgd" or recipe.choose != "last":
        raise ConfigError(
            "method.recipe must have optimiser = 'sgd' and choose = 'last'. "
            f"Got '{recipe.optimiser}' and '{recipe.choose}'"
        )
    if not 0 <= epochs < math.inf or (epochs == 0 and recipe.steps == 0):
        raise ConfigError(
            "method.epochs must be positive and finite, or 0 for method.recipe.steps updates. "
            f"Got {epochs} with {recipe.steps} steps"
        )


def size_of(task: Task, recipe: Recipe) -> int:
    """Return how many parameters the recipe's model has."""
    classes = len(task.classes)
    blank = blank_model(recipe.model, task.channels, task.size, classes, recipe.width)
    return sum(p.numel() for p in blank.parameters())


def fresh(task: Task, recipe: Recipe, rng: torch.Generator) -> Tensor:
    """Return the weights of a new model, float32 ``[P]``."""
    classes = len(task.classes)
    model = build_model(recipe.model, task.channels, task.size, classes, recipe.width, rng)
    return flat(model)


def network_of(task: Task, recipe: Recipe, weights: Tensor) -> Network:
    """Return a network with a copy of ``weights``, float32 ``[P]``; its inputs are in [-1, 1]."""
    classes = len(task.classes)
    model = blank_model(recipe.model, task.channels, task.size, classes, recipe.width)
    model = model.to_empty(device="cpu").requires_grad_(False).eval()
    parameters = list(model.parameters())
    parts = torch.split(weights, [p.numel() for p in parameters])
    for parameter, part in zip(parameters, parts, strict=True):
        parameter.copy_(part.view_as(parameter))
    mean, std = torch.full((task.channels,), CENTRE), torch.full((task.channels,), SPREAD)
    return Network(
        model, recipe.model, recipe.width, task.channels, task.size, task.classes, mean, std
    )


def local_update(
    task: Task,
    recipe: Recipe,
    weights: Tensor,
    images: Images,
    rng: torch.Generator,
    *,
    epochs: float,
    mu: float = 0.0,
    correction: Tensor | None = None,
) -> Tensor:
    """Train on one client's images; return how far the weights moved.

    Args:
        task: of the images.
        recipe: how; SGD with fresh momentum. Its schedule runs anew in every round.
        weights: float32 ``[P]``, w_t: where to begin.
        images: one or more.
        rng: source of order and augmentation.
        epochs: passes over the images, of one update at least; 0 for the recipe's steps.
        mu: weight of FedProx's proximal term, see `train.train`.
        correction: float32 ``[P]``, added to every gradient (SCAFFOLD).

    Returns:
        float32 ``[P]``, w - w_t; not finite where training diverged.
    """
    recipe, start = in_steps(recipe, epochs, len(images)), network_of(task, recipe, weights)
    try:
        network = train(images, recipe, rng, start=start, proximal=mu, correction=correction)
    except ConfigError:  # the loss is not finite: callers differ in what they make of it
        return torch.full_like(weights, math.nan)
    return flat(network.model) - weights


def in_steps(recipe: Recipe, epochs: float, n: int) -> Recipe:
    """Return the recipe with the steps of ``epochs`` passes over n >= 1 images; as is for 0."""
    if not epochs:
        return recipe
    return replace(recipe, steps=max(1, round(epochs * n / min(recipe.batch, n))))


def flat(model: torch.nn.Module) -> Tensor:
    """Return all parameters as one vector, float32 ``[P]``."""
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def finite(value: Tensor, recipe: Recipe) -> Tensor:
    """Return ``value`` as it is.

    Raises:
        ConfigError: NaN or Inf in it: training diverged.
    """
    if not bool(value.isfinite().all()):
        raise ConfigError(
            f"local training must stay finite. Got NaN or Inf with learning rate "
            f"{recipe.lr:g}: use a smaller method.recipe.lr"
        )
    return value


@dataclass(frozen=True)
class Averaging(Method):
    """A network averaged over ``rounds``, each client weighted by its number of images.

    Attributes:
        rounds: how often clients train and the server averages.
        recipe: model and local training, by ``sgd``; momentum and schedule begin anew each round.
        epochs: a client's passes over its images in a round; 0 for ``recipe.steps`` updates.
        mu: weight of FedProx's proximal term mu/2 ‖w - w_t‖²; 0 for none.
        server_lr: learning rate of the server's step.
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

    @abstractmethod
    def step(self, state: State, mean: Tensor) -> State:
        """Take the server's step: ``mean`` is float32 ``[P]``, the weighted mean of w - w_t."""

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
        n = torch.tensor([float(len(images))])
        return {"update": n * finite(update, self.recipe), "images": n}

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Take a step along the weighted mean of the updates."""
        return self.step(state, merged.tensors["update"] / merged.tensors["images"].clamp(min=1))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the network, under the method's name."""
        name = type(self).__module__.rpartition(".")[2]
        network = network_of(task, self.recipe, state.shared["weights"])
        return Outcome(None, {name: network}, {"seconds": {}})
