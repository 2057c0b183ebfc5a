"""Shared by the training tests."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from fedgist.train import Network, Recipe, train
from fedgist.types import Images


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Run every module here on one thread."""


@pytest.fixture
def rng() -> Callable[[int], torch.Generator]:
    return lambda seed=0: torch.Generator().manual_seed(seed)


@pytest.fixture
def recipe() -> Recipe:
    """Seconds at most: a narrow network, few steps."""
    return Recipe(width=8, steps=6, batch=16, augment="none", flip=False)


@pytest.fixture
def network(images: Images, recipe: Recipe, rng: Callable[[int], torch.Generator]) -> Network:
    return train(images, recipe, rng(1))
