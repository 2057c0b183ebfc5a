"""Training that begins anew until it is no better."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from fedgist.errors import ConfigError
from fedgist.train import Recipe, evaluate, train, train_converged

RECIPE = Recipe(model="mlp", width=8, steps=20, batch=16, lr=1e-2, holdout=0.2)


def rng():
    return torch.Generator().manual_seed(3)


def same(a, b):
    return all(torch.equal(x, y) for x, y in zip(a.tensors().values(), b.tensors().values()))  # noqa: B905


def test_one_restart_is_plain_training(images):
    network, scores = train_converged(images, RECIPE, rng())
    assert scores == [] and same(network, train(images, RECIPE, rng()))


def test_it_stops_when_a_new_beginning_is_no_better_and_keeps_the_best(images):
    network, scores = train_converged(images, RECIPE, rng(), restarts=50)
    assert 2 <= len(scores) < 50
    assert scores[-1] <= max(scores[:-1])
    assert all(b > a for a, b in pairwise(scores[:-1]))
    assert evaluate(network, images).accuracy > 0.5
    again, more = train_converged(images, RECIPE, rng(), restarts=50)
    assert more == scores and same(network, again)


def test_bad_restarts_are_named(images):
    with pytest.raises(ConfigError, match="restarts must be at least 1"):
        train_converged(images, RECIPE, rng(), restarts=0)
    few = images.take(torch.arange(2))
    with pytest.raises(ConfigError, match="held out"):
        train_converged(few, RECIPE, rng(), restarts=2)
