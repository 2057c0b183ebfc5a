"""The weights of a network as one vector, and local training from it: what FedAvg is made of."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError
from fedgist.train import Network, Recipe, augment, build_model
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

    The loop is that of `train.train` and gives the same bytes; its gradient may have a proximal
    term besides: that of mu/2 ‖w - w_t‖² (FedProx: Li et al., MLSys 2020, equation 2).

    Args:
        task: of the images.
        recipe: how; SGD with fresh momentum. Its schedule runs anew in every round.
        weights: float32 ``[P]``, w_t: where to begin.
        images: one or more.
        rng: source of order and augmentation.
        epochs: passes over the images, of one update at least; 0 for the recipe's steps.
        mu: weight of the proximal term.

    Returns:
        float32 ``[P]``, w - w_t; not finite where training diverged.
    """
    if epochs:
        batch = min(recipe.batch, len(images))
        recipe = replace(recipe, steps=max(1, round(epochs * len(images) / batch)))
    network = network_of(task, recipe, weights)
    parameters = list(network.model.requires_grad_(True).train().parameters())
    start = [p.detach().clone() for p in parameters]
    optimiser = torch.optim.SGD(
        parameters,
        recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.momentum > 0,
        fused=True,
    )
    batches = _batches(len(images), recipe.batch, rng)
    for step in range(recipe.steps):
        optimiser.param_groups[0]["lr"] = recipe.rate(step)
        rows = next(batches)
        x = augment(images.floats(rows), recipe.augment, rng, flip=recipe.flip)
        optimiser.zero_grad()
        smoothing = recipe.label_smoothing
        loss = F.cross_entropy(network.logits(x), images.labels[rows], label_smoothing=smoothing)
        torch.autograd.backward(loss)
        if mu:
            with torch.no_grad():
                for p, anchor in zip(parameters, start, strict=True):
                    assert p.grad is not None
                    p.grad.add_(p - anchor, alpha=mu)
        optimiser.step()
    return flat(network.model) - weights


def _batches(n: int, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of positions for ever: every epoch a new order, its remainder left out."""
    size = min(size, n)
    while True:
        yield from torch.split(torch.randperm(n, generator=rng)[: n // size * size], size)


def flat(model: torch.nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])
