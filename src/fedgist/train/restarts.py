"""Training that begins anew until a new beginning is no better.

The server's loop of one-shot federated learning (Algorithm 1, lines 12 to 17, of the paper that
`fedgist.methods.anis` cites): draw a network, train it on the pooled images, stop at convergence.
Convergence is judged on a part of those images that is held out, never on real ones.
"""

from __future__ import annotations

from dataclasses import replace

import torch

from fedgist.errors import ConfigError
from fedgist.train.evaluate import evaluate
from fedgist.train.loop import split, train
from fedgist.train.network import Network
from fedgist.train.recipe import Recipe
from fedgist.types import Images

__all__ = ["train_converged"]


def train_converged(
    images: Images, recipe: Recipe, rng: torch.Generator, restarts: int = 1
) -> tuple[Network, list[float]]:
    """Train up to ``restarts`` fresh networks; keep the one that is most often right.

    Within a run the best of ten checkpoints is kept, on the same held-out images; a run that does
    not better the best one so far is the last. With one restart nothing is held out: the recipe is
    followed as it stands.

    Args:
        images: the training set; left as it is.
        recipe: of every run; ``holdout`` is the share of images that judge.
        rng: source of the split, the networks and the order.
        restarts: how many runs at most.

    Returns:
        The network, and the held-out accuracy of every run (none with one restart).

    Raises:
        ConfigError: no restart, or nothing held out to judge by.
    """
    if restarts < 1:
        raise ConfigError(f"restarts must be at least 1. Got {restarts}")
    if restarts == 1:
        return train(images, recipe, rng), []
    kept, held = split(images.labels, recipe.holdout, rng)
    if not len(held):
        raise ConfigError(
            f"restarts must have images held out to judge by. Got holdout = {recipe.holdout:g} of "
            f"{len(images)} images: raise it, or use restarts = 1"
        )
    fit, judge, scores = images.take(kept), images.take(held), list[float]()
    best: Network | None = None
    for _ in range(restarts):
        network = train(fit, replace(recipe, choose="holdout"), rng)
        score = evaluate(network, judge).accuracy
        better = best is None or score > max(scores)
        scores.append(score)
        if not better:
            break
        best = network
    assert best is not None
    return best, scores
