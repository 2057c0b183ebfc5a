"""Shared by the training tests."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch

from fedgist.train import Network, Recipe, train
from fedgist.types import Images


@pytest.fixture(autouse=True, scope="package")
def one_thread() -> Iterator[None]:
    """Networks this small lose more time to several threads than they win."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
