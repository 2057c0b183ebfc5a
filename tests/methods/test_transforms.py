"""Comparisons that disturb images: laws of their noise, and what they truly promise."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedgist.compress.fixed import build
from fedgist.config import load, make_method
from fedgist.errors import ConfigError
from fedgist.methods._obfuscation import discrete_laplace, happens
from fedgist.methods.deepfixcx import DeepFixCX
from fedgist.methods.downsample import Downsample
from fedgist.methods.dp_pix import DPPix, cell_sums, noise_scale
from fedgist.methods.ldp_slicing import (
    LDPSlicing,
    allocation,
    estimates,
    flipped,
    squared_error,
)
from fedgist.privacy.claim import Privacy
from fedgist.run import generator, plan_of
from fedgist.types import Images, Task

GREY = Task("toy", ("a", "b", "c"), channels=1, size=8, max_images=500)
COLOUR = replace(GREY, channels=3)
TASKS = pytest.mark.parametrize("task", [GREY, COLOUR], ids=["grey", "RGB"])


# Discrete Laplace noise


@pytest.mark.parametrize("scale", [0.3, 2.0, 25.5])
def test_digits_of_a_geometric_number_are_independent(scale):
    """The law behind `discrete_laplace`, as exact products of the digits' probabilities."""
    q = math.exp(-1 / scale)
    digits = [q**2**j / (1 + q**2**j) for j in range(14)]
    for g in (0, 1, 2, 3, 10, 77, 500):
        p = math.prod(d if g >> j & 1 else 1 - d for j, d in enumerate(digits))
        assert p == pytest.approx((1 - q) * q**g, rel=1e-9, abs=1e-200)


@pytest.mark.parametrize("scale", [0.5, 3.0, 1000.0])
def test_noise_has_the_moments_and_the_frequencies_of_its_law(scale):
    n, q = 200_000, math.exp(-1 / scale)
    z = discrete_laplace(scale, (n,), generator(1)).numpy()
    variance = 2 * q / (1 - q) ** 2
    assert abs(z.mean()) < 5 * math.sqrt(variance / n)
    assert z.var() == pytest.approx(variance, rel=0.05)
    for k in (0, 1, -1, 4):
        p = (1 - q) / (1 + q) * q ** abs(k)
        assert abs((z == k).mean() - p) < 5 * math.sqrt(p / n) + 1e-5


def test_rare_events_stay_possible():
    drawn = happens(0.3, (100_000,), generator(0))
    assert abs(float(drawn.double().mean()) - 0.3) < 0.01
    assert bool(happens(1.0, (1000,), generator(0)).all())
    assert not bool(happens(1e-30, (1000,), generator(0)).any())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "random_", lambda self, *a, **k: self.zero_())
        assert bool(happens(0.0, (3,), generator(0)).all())  # one of 2^62 draws


# DP-Pix


def worst_loss(task, cell, m, scale):
    """Return the largest Σ|ΔS| / scale over neighbours: pixels taken in every way, 0 to 255."""
    size, worst = 4, 0.0
    black = torch.zeros(1, task.channels, size, size)
    for chosen in itertools.combinations(range(size**2), m):
        image = black.clone()
        image.flatten(2)[:, :, list(chosen)] = 1
        change = (cell_sums(image, cell)[0] - cell_sums(black, cell)[0]).abs().sum()
        worst = max(worst, float(change) / scale)
    return worst


@TASKS
@pytest.mark.parametrize("m", [1, 2, 3])
@pytest.mark.parametrize("cell", [1, 2, 3])
def test_the_loss_between_neighbours_is_epsilon_and_wrong_scales_exceed_it(task, cell, m):
    c, epsilon = task.channels, 0.7
    loss = worst_loss(task, cell, m, noise_scale(m, c, epsilon))
    assert loss == pytest.approx(epsilon)
    without_channels = 255 * m / epsilon
    per_cell = 255 * c / epsilon
    assert worst_loss(task, cell, m, without_channels) == pytest.approx(c * epsilon)
    assert worst_loss(task, cell, m, per_cell) == pytest.approx(m * epsilon)


def test_the_ratio_of_the_law_is_bounded_by_the_loss():
    t, shift = noise_scale(2, 1, 1.3), 255 * 2
    k = np.arange(-3000, 3000)
    log_p = -np.abs(k) / t
    log_shifted = -np.abs(k - shift) / t
    assert np.abs(log_p - log_shifted).max() == pytest.approx(1.3)


def assert_apart(y):
    """Means along each axis are as narrow as those of independent numbers."""
    mean, std = y.mean(), y.std()
    assert float((y.mean(0) - mean).abs().max()) < 6 * float(std) / math.sqrt(len(y))
    for axis in (1, 2, 3):
        spread = float(y.mean(axis).std() / std)
        assert spread == pytest.approx(y.shape[axis] ** -0.5, rel=0.1)


@TASKS
def test_images_carry_noise_of_that_scale(task):
    method = DPPix(cell=4, neighbourhood=3, epsilon=60.0)
    x = torch.full((3000, task.channels, 8, 8), 128 / 255)
    y = method.disturbed(task, x, generator(5)).double()
    t = noise_scale(3, task.channels, 60.0)
    assert y.shape == (3000, task.channels, 2, 2)
    assert float(y.mean()) == pytest.approx(128 / 255, abs=1e-3)
    assert float(y.std()) == pytest.approx(math.sqrt(2) * t / (255 * 16), rel=0.03)
    # Every number has noise of its own: of channels, of cells and of images.
    assert_apart(y)
    # the paper's scale on [0, 1]: m c / (b² ε)
    assert t / (255 * 16) == pytest.approx(3 * task.channels / (16 * 60))


def test_cell_sums_are_whole_numbers_of_bytes():
    x = torch.rand(2, 3, 7, 7, generator=generator(2))
    sums, _ = cell_sums(x, 3)
    assert sums.dtype == torch.int64
    raw = (x * 255).round().long()
    assert int(sums[1, 2, 1, 2]) == int(raw[1, 2, 3:6, 6:].sum())
    assert int(sums.sum()) == int(raw.sum())


# LDP-Slicing


@pytest.mark.parametrize("epsilon", [1e-3, 0.5, 4.0, 20.0, 100.0, 1000.0])
def test_the_allocation_spends_epsilon_and_nothing_better_is_near(epsilon):
    each = np.array(allocation(epsilon))
    assert each.sum() == pytest.approx(epsilon, rel=1e-12) and (each > 0).all()
    assert (np.diff(each) > 0).all()
    best = squared_error(each)
    assert best < squared_error(np.full(8, epsilon / 8))
    for i, j in itertools.permutations(range(8), 2):
        moved = each.copy()
        step = 1e-3 * min(each[i], each[j], 1.0)
        moved[[i, j]] += [step, -step]
        assert squared_error(moved) > best


def test_the_allocation_at_its_limits():
    little, much = np.array(allocation(1e-3)), np.array(allocation(200.0))
    np.testing.assert_allclose(little[1:] / little[:-1], 4 ** (1 / 3), rtol=1e-4)
    np.testing.assert_allclose(np.diff(much), math.log(4), rtol=1e-3)


def channel_matrix(epsilons):
    """Return P(received | sent), float64 [256, 256]."""
    kept = 1 / (1 + np.exp(-np.array(epsilons)))
    differ = (np.arange(256)[:, None] ^ np.arange(256))[..., None] >> np.arange(8) & 1
    return np.where(differ == 1, 1 - kept, kept).prod(2)


@pytest.mark.parametrize("epsilon", [0.8, 6.0])
def test_a_byte_is_epsilon_ldp_exactly(epsilon):
    p = channel_matrix(allocation(epsilon))
    np.testing.assert_allclose(p.sum(1), 1)
    ratio = np.log(p[:, None] / p[None]).max()  # over all pairs of bytes and all outputs
    assert ratio == pytest.approx(epsilon)


@pytest.mark.parametrize("epsilon", [0.8, 6.0, 30.0])
def test_estimates_are_unbiased_and_have_the_error_that_was_minimised(epsilon):
    each = allocation(epsilon)
    p, table = channel_matrix(each), estimates(each).numpy()
    np.testing.assert_allclose(p @ table, np.arange(256), atol=1e-6)
    variance = p @ table**2 - (p @ table) ** 2
    np.testing.assert_allclose(variance, squared_error(np.array(each)), rtol=1e-6)
    if epsilon < 10:
        received = p @ np.arange(256)  # taken as they are, bytes are drawn to the middle
        assert np.abs(received - np.arange(256)).max() > 10


def test_bits_are_flipped_as_often_as_planned():
    each = (0.1, 0.5, 1.0, 2.0, 3.0, 4.0, 6.0, 0.01)
    values = torch.randint(0, 256, (200_000,), generator=generator(1), dtype=torch.uint8)
    before = values.clone()
    changed = flipped(values, each, generator(2)) ^ values
    assert torch.equal(before, values)
    for k, epsilon in enumerate(each):
        p = 1 / (1 + math.exp(epsilon))
        assert abs(float((changed >> k & 1).double().mean()) - p) < 5 * math.sqrt(p / 200_000)


@TASKS
def test_epsilon_is_split_over_channels_and_undone_by_the_server(task):
    method = LDPSlicing(side=4, epsilon=9.0)
    x = torch.full((4000, task.channels, 8, 8), 100 / 255)
    sent = (method.disturbed(task, x, generator(1)) * 255).round().to(torch.uint8)
    top = float((sent >> 7).double().mean())  # bit 7 of 100 is 0
    assert top == pytest.approx(1 / (1 + math.exp(allocation(9.0 / task.channels)[7])), abs=0.006)
    assert_apart((sent >> 7).double())
    # Unclamped, the estimate is that of the image.
    table = estimates(allocation(9.0 / task.channels))
    spread = math.sqrt(squared_error(np.array(allocation(9.0 / task.channels))))
    mean = float(table[sent.long()].mean())
    assert abs(mean - 100) < 5 * spread / math.sqrt(sent.numel())
    got = method.received(Images(sent, torch.zeros(4000, dtype=torch.int64), task.classes))
    assert torch.equal(got.pixels, table.round().clamp(0, 255)[sent.long()].to(torch.uint8))


def test_with_a_large_epsilon_the_server_has_the_thumbnail():
    method = LDPSlicing(side=4, epsilon=400.0)
    x = torch.rand(20, 1, 8, 8, generator=generator(3))
    sent = (method.disturbed(GREY, x, generator(1)) * 255).round().to(torch.uint8)
    assert torch.equal(sent, (build(method.spec)(x) * 255).round().to(torch.uint8))
    labels = torch.zeros(20, dtype=torch.int64)
    assert torch.equal(method.received(Images(sent, labels, GREY.classes)).pixels, sent)


# What is promised


@pytest.mark.parametrize(
    ("method", "words"),
    [
        (DPPix(cell=2, neighbourhood=4, epsilon=3), ["ε = 3 holds", "at most 4 pixels", "s²/4"]),
        (LDPSlicing(side=5, epsilon=2), ["ε = 2 holds for one pixel", "5 x 5", "it is 50"]),
        (DeepFixCX(levels=1), ["no noise", "nothing is promised"]),
        (Downsample(side=4), ["nothing is promised"]),
    ],
    ids=lambda v: type(v).__name__,
)
def test_the_claim_states_what_holds(method, words):
    claim = plan_of(method, GREY, Privacy(epsilon=math.inf), notes=["more"]).claim
    assert math.isinf(claim.epsilon)
    assert any("labels" in n and "leave in clear" in n for n in claim.notes)
    assert any(all(w in n for w in words) for n in claim.notes)
    assert claim.notes[-1] == "more"
    noisy = isinstance(method, DPPix | LDPSlicing)
    assert any("not a release's" in n for n in claim.notes) == noisy


def test_whether_an_image_is_sent_does_not_depend_on_its_pixels_where_an_epsilon_is_stated():
    same = Images(
        torch.full((400, 1, 8, 8), 9, dtype=torch.uint8),
        torch.zeros(400, dtype=torch.int64),
        GREY.classes,
    )
    for method in (DPPix(share=0.5), LDPSlicing(share=0.5)):
        assert 140 < len(method.picked(same, generator(0))) < 260
        assert len(method.used(same)) == 400 and method.random
    assert len(Downsample(share=0.5).picked(same, generator(0))) in (0, 400)  # by their hash


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("dp_pix", "epsilon=0", r"method.epsilon must lie in \(0, 1000\]"),
        ("dp_pix", "epsilon=inf", "method.epsilon"),
        ("dp_pix", "cell=0", "method.cell must be at least 1"),
        ("dp_pix", "cell=9", "method.cell must be at most 8 .*Got 9"),
        ("dp_pix", "neighbourhood=65", "method.neighbourhood must be at most 64"),
        ("ldp_slicing", "side=0", "method.side must be at least 1"),
        ("ldp_slicing", "side=9", "method.side must be at most 8"),
        ("ldp_slicing", "epsilon=1e-9", "method.epsilon must be at least"),
        ("deepfixcx", "levels=0", "method.levels must be at least 1"),
        ("deepfixcx", "levels=3000", "must be at most 8"),
        ("deepfixcx", "patches=3", "must be at most 8"),
        ("deepfixcx", "share=0", "method.share must lie in"),
    ],
)
def test_wrong_settings_are_refused_before_any_image_is_read(name, setting, message):
    sets = [f"method.name={name}", f"method.{setting}"]
    if name == "ldp_slicing" and "side" not in setting:
        sets.append("method.side=4")
    with pytest.raises(ConfigError, match=message):
        make_method(load(None, sets)).plan(GREY)
