"""Fixed transforms: names, means of cells, and Haar packets."""

from __future__ import annotations

import pytest
import torch

from fedgist.compress import CompressedNetwork
from fedgist.compress.fixed import build
from fedgist.compress.wavelet import grid_side, haar_packet, pooled_packet
from fedgist.errors import ConfigError
from fedgist.methods.dp_pix import cell_sums
from fedgist.train import Recipe, train
from fedgist.types import Images


@pytest.fixture
def x() -> torch.Tensor:
    rng = torch.Generator().manual_seed(3)
    return torch.randint(0, 256, (5, 3, 8, 8), generator=rng).to(torch.float32) / 255


@pytest.mark.parametrize(
    ("spec", "side"), [("bicubic:4", 4), ("area:3", 3), ("cells:3", 3), ("wavelet:2:2", 8)]
)
def test_every_transform_is_a_map_into_smaller_images(x, spec, side):
    y = build(spec)(x)
    assert y.shape == (5, 3, side, side) and y.dtype == torch.float32
    assert float(y.min()) >= 0 and float(y.max()) <= 1
    assert torch.equal(y, build(spec)(x))
    torch.testing.assert_close(y[2:3], build(spec)(x[2:3]))  # each image by itself


@pytest.mark.parametrize(
    "spec",
    [
        *("", "median:3", "bicubic", "bicubic:", "bicubic:x", "bicubic:0", "area:-1", "area:2.5"),
        *("cells:2:2", "wavelet:2", "wavelet:1:2:3", "area:99999", "area:٣", "area: 3", "area:+3"),
    ],
)
def test_bad_names_are_refused(spec):
    with pytest.raises(ConfigError, match="must be"):
        build(spec)


def test_a_classifier_behind_a_fixed_transform_is_rebuilt_by_name(x):
    images = Images((x * 255).to(torch.uint8), torch.arange(5) % 2, ("a", "b"))
    network = train(images, Recipe(width=4, steps=1), torch.Generator().manual_seed(0))
    for spec in ("bicubic:4", "area:2", "cells:3", "wavelet:1:2"):
        made = CompressedNetwork(network, build(spec), spec)
        again = CompressedNetwork.load(made.tensors(), made.meta())
        assert again.spec == spec
        assert torch.equal(again.predict(x), made.predict(x))
    with pytest.raises(ConfigError, match="must be followed by"):
        CompressedNetwork.load(made.tensors(), made.meta() | {"compressor": "area:x"})


def test_cells_at_the_edge_are_means_of_fewer_pixels(x):
    y = build("cells:3")(x)
    torch.testing.assert_close(y[..., 2, 2], x[..., 6:, 6:].mean((2, 3)))
    torch.testing.assert_close(y[..., 0, 2], x[..., :3, 6:].mean((2, 3)))
    sums, pixels = cell_sums(x, 3)
    assert pixels.tolist() == [[9, 9, 6], [9, 9, 6], [6, 6, 4]]
    torch.testing.assert_close(y, sums / (255 * pixels))


def test_areas_are_the_low_pass_band(x):
    torch.testing.assert_close(build("area:2")(x), haar_packet(x, 2)[:, :, 0, 0] / 4)


@pytest.mark.parametrize("levels", [1, 2, 3])
def test_the_packet_is_orthonormal(levels):
    every = torch.eye(64, dtype=torch.float64).reshape(64, 1, 8, 8)
    matrix = haar_packet(every, levels).reshape(64, 64)
    eye = torch.eye(64, dtype=torch.float64)
    torch.testing.assert_close(matrix @ matrix.T, eye)  # inverted by its transpose
    torch.testing.assert_close(matrix.T @ matrix, eye)


def test_one_level_by_hand():
    x = torch.tensor([[[[1.0, 2], [5, 9]]]])
    bands = haar_packet(x, 1).reshape(4).tolist()
    assert bands == [17 / 2, -5 / 2, -11 / 2, 3 / 2]


def test_stripes_lie_in_the_band_of_their_period_and_reach_its_bound():
    one = torch.tensor([1.0, 0]).repeat(4).expand(1, 1, 8, 8)  # period 2
    two = torch.tensor([1.0, 1, 0, 0]).repeat(2).expand(1, 1, 8, 8)  # period 4
    for stripes, band in ((one, (0, 2)), (two, (0, 1))):
        for x, at in ((stripes, band), (stripes.mT, band[::-1])):
            tiles = pooled_packet(x, 2, 2).reshape(4, 2, 4, 2).transpose(1, 2)
            expected = torch.zeros(4, 4, 2, 2)
            expected[0, 0] = 0.5
            expected[at] = 1.0  # no image in [0, 1] has more
            torch.testing.assert_close(tiles, expected, rtol=0, atol=2e-5)


def test_a_mirrored_image_has_mirrored_patches(x):
    a, b = (pooled_packet(v, 1, 4).reshape(5, 3, 2, 4, 2, 4) for v in (x, x.flip(3)))
    torch.testing.assert_close(a.flip(5), b)


def test_the_root_has_a_slope_everywhere(x):
    x = torch.cat([x, torch.zeros(1, 3, 8, 8), torch.ones(1, 3, 8, 8)]).requires_grad_()
    pooled_packet(x, 2, 2).sum().backward()
    assert x.grad is not None and bool(torch.isfinite(x.grad).all())
    assert float(x.grad.abs().sum()) > 0


def test_sides_that_do_not_divide(x):
    y = pooled_packet(x[..., :7, :7], 2, 1)
    padded = torch.nn.functional.pad(x[..., :7, :7], (0, 1, 0, 1), mode="replicate")
    torch.testing.assert_close(y, pooled_packet(padded, 2, 1))


@pytest.mark.parametrize("spec", ["wavelet:4:1", "wavelet:4096:1", "wavelet:1:5"])
def test_more_levels_or_patches_than_the_image_has(x, spec):
    with pytest.raises(ConfigError, match="2\\^levels times patches must be at most 8"):
        build(spec)(x)
    assert grid_side(8, 3, 1) == 8
