"""Resizing: bilinear like everybody's, but exact."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.encoders import prepare
from fedgist.encoders.base import GRID


def random(n: int, c: int, h: int, w: int) -> Tensor:
    return torch.rand(n, c, h, w, generator=torch.Generator().manual_seed(h + w))


@pytest.mark.parametrize("size", [8, 28, 32, 33, 63, 96, 224])
def test_it_is_bilinear(size: int) -> None:
    x = random(3, 3, size, size)
    expected = F.interpolate(x, (64, 64), mode="bilinear", align_corners=False, antialias=size > 64)
    assert torch.allclose(prepare(x, 64), expected, atol=3e-4)


@pytest.mark.parametrize("size", [28, 50, 64, 130])
def test_pixels_are_on_the_grid_and_do_not_depend_on_the_batch(size: int) -> None:
    x = random(10, 3, size, size)
    y = prepare(x, 64)
    k = (y.double() * GRID).round()
    assert torch.equal((k / GRID).float(), y) and 0 <= float(k.min()) <= float(k.max()) <= GRID
    assert torch.equal(torch.cat([prepare(b, 64) for b in torch.split(x, [1, 2, 7])]), y)
    assert torch.equal(prepare(x.flip(0), 64).flip(0), y)


@pytest.mark.parametrize("levels", [255, 65_535])
def test_pixels_of_the_right_size_are_kept(levels: int) -> None:
    x = torch.arange(64 * 64).view(1, 1, 64, 64) % (levels + 1) / levels
    y = prepare(x, 64)
    assert y.shape == (1, 3, 64, 64) and y.stride(1) == 0
    assert torch.equal((y[:, :1] * levels).round(), (x * levels).round())


@pytest.mark.parametrize("size", [5, 28, 64, 100])
@pytest.mark.parametrize("value", [0.0, 128 / 255, 1.0])
def test_constant_images_stay_constant(size: int, value: float) -> None:
    y = prepare(torch.full((1, 1, size, size), value), 64)
    assert torch.equal(y, torch.full_like(y, round(value * GRID) / GRID))


def test_what_lies_outside_is_clamped_and_the_input_is_untouched() -> None:
    x = torch.tensor([-1.0, 2.0]).view(1, 1, 1, 2).expand(1, 1, 64, 2).repeat(1, 1, 1, 32)
    before = x.clone()
    assert set(prepare(x, 64).flatten().tolist()) == {0.0, 1.0}
    assert torch.equal(x, before)
