"""Shared fixtures: tiny images, one thread, nothing from the network."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch

from fedgist.types import Images, Task

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")


@pytest.fixture(autouse=True, scope="session")
def _threads() -> None:
    # two workers side by side have a core each
    torch.set_num_threads(1 if "PYTEST_XDIST_WORKER" in os.environ else 2)


@pytest.fixture(scope="module")
def one_thread() -> Iterator[None]:
    """Networks this small lose more time to several threads than they win."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def task() -> Task:
    return Task("toy", ("a", "b", "c"), channels=1, size=8, max_images=500)


@pytest.fixture
def images(task: Task) -> Images:
    """60 images of three classes that differ in where they are bright."""
    rng = torch.Generator().manual_seed(7)
    labels = torch.arange(60) % 3
    pixels = torch.rand(60, 1, 8, 8, generator=rng) * 80
    for i, y in enumerate(labels.tolist()):
        pixels[i, 0, 2 * y : 2 * y + 3] += 150
    return Images(pixels.round().to(torch.uint8), labels, task.classes)
