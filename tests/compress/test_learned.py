"""The learned compressor: shapes, ranges, cost, and a loss with gradients that stay finite."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F
from torchmetrics.functional.image import structural_similarity_index_measure

from fedgist.compress import (
    CompressedNetwork,
    build_compressor,
    dissimilarity,
    enlarge,
    multiply_adds,
    quantised,
)
from fedgist.compress.learned import FLOOR, LEAST_ERROR, ssim
from fedgist.errors import ConfigError
from fedgist.methods._weights import fresh, network_of
from fedgist.report.export import load_classifier, save_classifier
from fedgist.train import Recipe
from fedgist.types import Task


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def pictures(n=6, c=1, s=28, seed=0):
    return F.interpolate(torch.rand(n, c, 6, 6, generator=rng(seed)), (s, s), mode="bilinear")


@pytest.mark.parametrize("kind", ["light", "paper"])
@pytest.mark.parametrize(("channels", "size", "side"), [(1, 28, 8), (3, 32, 24), (3, 9, 9)])
def test_shape_range_and_rows_of_their_own(kind, channels, size, side):
    v = build_compressor(kind, channels, size, side, rng())
    x = pictures(4, channels, size)
    y = v(x).detach()
    assert y.shape == (4, channels, side, side)
    assert 0 <= float(y.min()) <= float(y.max()) <= 1
    assert torch.allclose(v(x[1:2]).detach(), y[1:2], atol=1e-5)
    assert float(y.std()) > 0.02, "a new compressor must show something"


def test_same_generator_same_bytes_and_the_global_one_untouched():
    before = torch.get_rng_state()
    a, b = (build_compressor("light", 1, 28, 8, rng(3)) for _ in range(2))
    assert all(torch.equal(x, y) for x, y in zip(a.parameters(), b.parameters(), strict=True))
    assert torch.equal(before, torch.get_rng_state())
    assert not list(a.buffers())


def test_light_is_at_least_four_times_lighter():
    for channels, size in ((1, 28), (3, 32), (3, 64)):
        light, paper = (multiply_adds(k, channels, size) for k in ("light", "paper"))
        assert 4 * light <= paper
    assert multiply_adds("paper", 3, 32) == pytest.approx(608e6, rel=0.01)  # counted by others


@pytest.mark.parametrize(
    ("options", "name"),
    [(("heavy", 1, 28, 8), "heavy"), (("light", 1, 28, 29), "29"), (("light", 1, 28, 1), "Got 1")],
)
def test_wrong_compressors_are_named(options, name):
    with pytest.raises(ConfigError, match=name):
        build_compressor(*options, rng())


def test_ssim_is_the_field_s():
    a, b = pictures(5, 3, 32), pictures(5, 3, 32, seed=1)
    expected = structural_similarity_index_measure(a, b, data_range=1.0, reduction="none")
    assert torch.allclose(ssim(a, b), expected, atol=1e-4)
    assert torch.allclose(ssim(a, a), torch.ones(5), atol=1e-5)
    assert bool((ssim(a, 1 - a) < 0).all()), "an inverted contrast reads as unlike"
    assert bool(ssim(pictures(2, 1, 4), pictures(2, 1, 4, seed=1)).isfinite().all())


def test_psnr_has_a_floor_and_no_pole():
    x = pictures()
    same = x.clone().requires_grad_()
    value = dissimilarity(same, x, beta=1.0)
    assert value.item() == pytest.approx(1 - 10 * math.log10(LEAST_ERROR), abs=1e-2)
    (gradient,) = torch.autograd.grad(value, same)
    assert bool(gradient.isfinite().all())
    black, white = torch.zeros(2, 1, 28, 28), torch.ones(2, 1, 28, 28, requires_grad=True)
    far = dissimilarity(black, white, beta=1.0) - ssim(black, white).mean()
    assert far.item() == FLOOR
    (gradient,) = torch.autograd.grad(far, white)
    assert bool((gradient == 0).all()), "images far enough apart are not pushed on"


def test_one_model_from_image_to_label_survives_a_file(tmp_path):
    task, recipe = Task("toy", ("a", "b", "c"), 1, 28), Recipe(width=4)
    network = network_of(task, recipe, fresh(task, recipe, rng()))
    for compress, spec in (
        (build_compressor("light", 1, 28, 8, rng()), ""),
        (
            lambda x: F.interpolate(x, (8, 8), mode="bicubic", antialias=True).clamp(0, 1),
            "bicubic:8",
        ),
    ):
        model = CompressedNetwork(network, compress, spec)
        x = pictures()
        by_hand = network.predict(enlarge(quantised(compress(x)).detach(), 28))
        assert torch.equal(model.predict(x), by_hand)
        save_classifier(model, tmp_path / "c.safetensors", {})
        assert torch.equal(load_classifier(tmp_path / "c.safetensors").predict(x), by_hand)
