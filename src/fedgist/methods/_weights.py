"""The weights of a network as one vector, and local training from it: what FedAvg is made of."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.train import Network, Recipe, build_model, train
from fedgist.train.models import blank_model
from fedgist.types import Images, Task

__all__ = ["LOCAL", "check", "flat", "fresh", "local_update", "network_of", "size_of"]

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

    Returns:
        float32 ``[P]``, w - w_t; not finite where training diverged.
    """
    if epochs:
        batch = min(recipe.batch, len(images))
        recipe = replace(recipe, steps=max(1, round(epochs * len(images) / batch)))
    start = network_of(task, recipe, weights)
    try:
        network = train(images, recipe, rng, start=start, proximal=mu)
    except ConfigError:  # the loss is not finite: callers differ in what they make of it
        return torch.full_like(weights, math.nan)
    return flat(network.model) - weights


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
