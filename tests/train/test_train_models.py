from __future__ import annotations

import pytest
import torch

from fedgist.errors import ConfigError
from fedgist.train import MODELS, build_model

SHAPES = [(1, 8), (3, 9), (1, 28), (3, 33), (3, 64)]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(("channels", "size"), SHAPES)
def test_every_model_takes_every_size(name, channels, size, rng):
    model = build_model(name, channels, size, 5, 8, rng(0))
    x = torch.rand(2, channels, size, size, generator=rng(1))
    logits = model(x)
    assert logits.shape == (2, 5)
    assert logits.isfinite().all()
    assert torch.allclose(model(x[:1]), logits[:1], atol=1e-5), "a row depends on its own image"
    assert torch.equal(model.head(model.features(x)), logits)
    logits.sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize("name", MODELS)
def test_parameters_come_from_the_generator_alone(name, rng):
    before = torch.get_rng_state()
    states = [build_model(name, 1, 8, 3, 8, rng(seed)).state_dict() for seed in (0, 0, 1)]
    assert torch.equal(torch.get_rng_state(), before)
    assert all(
        torch.equal(a, b) for a, b in zip(states[0].values(), states[1].values(), strict=True)
    )
    assert not torch.equal(states[0]["head.weight"], states[2]["head.weight"])
    assert not list(build_model(name, 1, 8, 3, 8, rng(0)).buffers())


def test_published_sizes(rng):
    def count(name, channels, size, width):
        model = build_model(name, channels, size, 10, width, rng(0))
        return sum(p.numel() for p in model.parameters())

    assert count("convnet3", 3, 32, 128) == 320_010  # the distillation literature
    assert count("resnet18", 3, 32, 64) == 11_173_962  # ResNet-18 for CIFAR-10
    assert build_model("convnet3", 1, 28, 10, 128, rng(0)).head.in_features == 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"name": "convnet"}, "model must be one of .* Got 'convnet'. Did you mean 'convnet3'"),
        ({"size": 7}, "size of model 'mlp' must be at least 8. Got 7"),
        ({"width": 0}, "width of model 'mlp' must be at least 1. Got 0"),
        ({"classes": 0}, "classes of model 'mlp' must be at least 1. Got 0"),
    ],
)
def test_bad_models_are_refused(change, message, rng):
    options = {"name": "mlp", "channels": 1, "size": 8, "classes": 2, "width": 4} | change
    with pytest.raises(ConfigError, match=message):
        build_model(**options, rng=rng(0))
