from __future__ import annotations

from dataclasses import asdict, replace

import pytest
import torch
from safetensors.torch import save

from fedgist.errors import ConfigError
from fedgist.train import Personal, Recipe, personalise, train


@pytest.fixture
def clients(images):
    """Two clients; the second calls every class by the next one's name."""
    return [images, replace(images, labels=(images.labels + 1) % 3)]


def test_fine_tuning_helps_the_client_that_differs(images, clients, rng):
    recipe = Recipe(width=8, steps=40, batch=20, lr=5e-3, augment="none")
    shared = train(images, recipe, rng(0))
    before = save(shared.tensors())
    rows = personalise(shared, clients, recipe, seed=0)
    assert (rows[0].trained, rows[0].tested) == (48, 12)
    assert rows[0].before > 0.95 and rows[0].after > 0.95
    assert rows[1].before < 0.05 and rows[1].after > 0.9
    assert rows == personalise(shared, iter(clients), recipe, seed=0)
    assert save(shared.tensors()) == before


def test_a_client_depends_on_its_own_images_only(network, images, clients, recipe):
    alone = personalise(network, [images], recipe, seed=5)
    assert personalise(network, clients, recipe, seed=5)[0] == alone[0]


def test_clients_with_next_to_nothing(network, images, recipe):
    few = [images.take(torch.arange(n)) for n in (0, 1, 3)]
    rows = personalise(network, few, recipe, seed=0)
    assert rows[0] == Personal(0, 0, None, None)
    assert rows[1] == Personal(1, 0, None, None)
    assert (rows[2].trained, rows[2].tested) == (2, 1)
    assert set(asdict(rows[2])) == {"trained", "tested", "before", "after"}


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_share(share, network, images, recipe):
    with pytest.raises(ConfigError, match=r"share must lie in \(0, 1\). Got"):
        personalise(network, [images], recipe, seed=0, share=share)
