from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load, save

from fedgist.errors import ConfigError, DataError
from fedgist.train import MODELS, Network, Recipe, train
from fedgist.types import BATCH, Classifier


@pytest.mark.parametrize("name", MODELS)
def test_round_trip_is_exact(name, images, rng):
    network = train(images, Recipe(model=name, width=8, steps=2, batch=8), rng(0))
    written = save(network.tensors())
    again = Network.load(load(written), network.meta())
    assert torch.equal(again.predict(images.floats()), network.predict(images.floats()))
    assert save(again.tensors()) == written
    assert again.meta() == network.meta()
    assert again.classes == images.classes


def test_is_a_classifier(network, images):
    classifier: Classifier = network
    assert classifier.kind == "network"
    x = images.floats()
    p = classifier.predict(x)
    assert p.dtype == torch.float32 and not p.requires_grad
    assert torch.allclose(p.exp().sum(1), torch.ones(len(x)), atol=1e-5)
    assert all(isinstance(v, str) for v in classifier.meta().values())
    assert all(
        t.dtype == torch.float32 and t.is_contiguous() for t in classifier.tensors().values()
    )


def test_predict_takes_any_number_of_images(network, rng):
    x = torch.rand(BATCH + 3, 1, 8, 8, generator=rng(0))
    parts = torch.cat([network.predict(x[:BATCH]), network.predict(x[BATCH:])])
    assert torch.equal(network.predict(x), parts)
    assert network.predict(x[:0]).shape == (0, 3)


def test_logits_have_a_gradient_in_the_images(network, images):
    x = images.floats().requires_grad_(True)
    network.logits(x)[:, 0].sum().backward()
    assert x.grad is not None and x.grad.abs().sum() > 0
    assert all(p.grad is None for p in network.model.parameters())


def test_tensors_are_copies(network, images):
    before = network.predict(images.floats())
    for tensor in network.tensors().values():
        tensor.zero_()
    loaded = network.tensors()
    other = Network.load(loaded, network.meta())
    for tensor in loaded.values():
        tensor.zero_()
    assert torch.equal(network.predict(images.floats()), before)
    assert torch.equal(other.predict(images.floats()), before)


def test_other_shapes_are_refused(network):
    with pytest.raises(DataError, match=r"must have shape \[b, 1, 8, 8\]. Got \[2, 3, 8, 8\]"):
        network.predict(torch.zeros(2, 3, 8, 8))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mean": None}, r"tensor 'mean' .* must be torch.float32 \[1\]. Got none"),
        ({"std": torch.ones(2)}, r"tensor 'std' .* \[1\]. Got torch.float32 \[2\]"),
        ({"mean": torch.zeros(1, dtype=torch.float64)}, "Got torch.float64"),
        ({"more": torch.ones(1)}, "tensor 'more' of a convnet3 network must be none"),
    ],
)
def test_damaged_tensors_are_refused(change, message, network):
    tensors = {k: v for k, v in (network.tensors() | change).items() if v is not None}
    with pytest.raises(DataError, match=message):
        Network.load(tensors, network.meta())


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"width": "x"}, DataError, "meta of a network must hold model, width"),
        ({"width": "1000000"}, DataError, "must be torch.float32"),  # refused before any memory
        ({"classes": None}, DataError, "meta of a network must hold model, width"),
        ({"classes": "{}"}, DataError, "must be a JSON list of names. Got {}"),
        ({"classes": json.dumps(["a", "b"])}, DataError, "'model.head.bias'"),
        ({"model": "resnet"}, ConfigError, "Did you mean 'resnet18'"),
    ],
)
def test_damaged_meta_is_refused(change, error, message, network):
    meta = {k: v for k, v in (network.meta() | change).items() if v is not None}
    with pytest.raises(error, match=message):
        Network.load(network.tensors(), meta)
