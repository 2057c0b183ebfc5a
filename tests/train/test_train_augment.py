from __future__ import annotations

import pytest
import torch

from fedgist.errors import ConfigError
from fedgist.train import POLICIES, Policy, augment


@pytest.fixture
def x():
    return torch.rand(40, 3, 11, 11, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("channels", [1, 3])
def test_keeps_shape_range_and_input(policy, channels, x, rng):
    x = x[:, :channels]
    kept, before = x.clone(), torch.get_rng_state()
    y = augment(x, policy, rng(0))
    assert y.shape == x.shape and y.dtype == torch.float32
    assert y.min() >= 0 and y.max() <= 1
    assert torch.equal(x, kept)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(y, augment(x, policy, rng(0)))
    assert torch.equal(y, x) == (policy == "none")


def test_flip_mirrors_about_half_and_only_when_allowed(x, rng):
    y = augment(x, "flip", rng(0))
    mirrored = (y == x.flip(3)).all(3).all(2).all(1)
    assert ((y == x).all(3).all(2).all(1) ^ mirrored).all()
    assert 10 < mirrored.sum() < 30
    assert torch.equal(augment(x, "flip", rng(0), flip=False), x)


def test_geometry_without_movement_is_identity_or_mirror(x, rng, monkeypatch):
    monkeypatch.setitem(POLICIES, "still", Policy(rotate=1e-6))
    y = augment(x, "still", rng(0))
    same = ((y - x).abs() < 1e-3).flatten(1).all(1)
    mirrored = ((y - x.flip(3)).abs() < 1e-3).flatten(1).all(1)
    assert (same ^ mirrored).all() and same.any() and mirrored.any()


def test_every_image_draws_its_own(x, rng):
    y = augment(x[:1].expand(40, -1, -1, -1), "light", rng(0), flip=False)
    assert len({t.numpy().tobytes() for t in y}) == 40


def test_shift_stays_within_its_bound(rng, monkeypatch):
    monkeypatch.setitem(POLICIES, "shift", Policy(flip=False, shift=0.2))
    spot = torch.zeros(200, 1, 20, 20)
    spot[:, :, 10, 10] = 1
    at = torch.arange(20.0)
    y = augment(spot, "shift", rng(0))
    right, down = (y.sum((1, 2)) @ at) - 10, (y.sum((1, 3)) @ at) - 10
    for moved in (right, down):
        assert moved.abs().max() <= 4 + 1e-3  # 0.2 of 20 pixels
        assert moved.abs().max() > 3 and abs(moved.mean()) < 0.7


def test_cutout_blanks_a_square_with_the_mean(x, rng, monkeypatch):
    monkeypatch.setitem(POLICIES, "cut", Policy(flip=False, cutout=0.5))
    y = augment(x, "cut", rng(0))
    changed = (y != x).any(1)
    area = changed.sum((1, 2))
    assert area.min() > 0 and area.max() <= 36  # at most 6 x 6: half of 11 pixels, rounded up
    mean = x.mean((1, 2, 3))[:, None, None, None].expand_as(y)
    assert torch.equal(y[(y != x)], mean[(y != x)])


def test_constant_images_survive(rng):
    for value in (0.0, 1.0):
        x = torch.full((4, 1, 8, 8), value)
        assert torch.allclose(augment(x, "light", rng(0)), x, atol=1e-6)


def test_unknown_policy(x, rng):
    with pytest.raises(ConfigError, match=r"augment must be one of .* Did you mean 'light'"):
        augment(x, "lite", rng(0))
