"""Calibration against closed forms, and the wrong ways to measure it that must show."""

from __future__ import annotations

import math

import pytest
import torch
from torch.nn import functional as F

from fedgist.errors import DataError
from fedgist.train.accuracy import accuracies, agreement
from fedgist.train.calibration import BINS, calibration
from fedgist.types import Images


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def drawn(n, classes, seed=0, spread=2.0):
    """Probabilities and labels drawn from them: calibrated by construction."""
    g = rng(seed)
    p = (spread * torch.randn(n, classes, generator=g, dtype=torch.float64)).softmax(1)
    return p, torch.multinomial(p, 1, generator=g)[:, 0]


def test_four_images_by_hand():
    p = torch.tensor([[0.9, 0.1], [0.6, 0.4], [0.2, 0.8], [0.3, 0.7]], dtype=torch.float64)
    y = torch.tensor([0, 1, 1, 1])
    found = calibration(p.log(), y, rng())
    assert found.n == 4 and found.accuracy == 0.75
    assert found.nll == pytest.approx(-(math.log(0.9 * 0.4 * 0.8 * 0.7)) / 4)
    assert found.brier == pytest.approx(2 * (0.01 + 0.36 + 0.04 + 0.09) / 4)
    assert found.confidence == pytest.approx((0.9 + 0.6 + 0.8 + 0.7) / 4)
    # four bins of one image each: |1-.9|, |0-.6|, |1-.8|, |1-.7|
    assert found.ece == pytest.approx((0.1 + 0.6 + 0.2 + 0.3) / 4)
    # an outcome drawn from confidence c lies 2c(1-c) from it on average
    chance = sum(2 * c * (1 - c) for c in (0.9, 0.6, 0.8, 0.7)) / 4
    assert found.ece_expected == pytest.approx(chance, abs=0.03)
    assert [b.n for b in found.reliability] == [1] * 4
    assert found.top5 is None


def test_bins_hold_equal_shares_and_add_up():
    p, y = drawn(1501, 5)
    found = calibration(p.log(), y, rng())
    sizes = [b.n for b in found.reliability]
    assert len(sizes) == BINS and sum(sizes) == 1501 and max(sizes) - min(sizes) <= 1
    ece = sum(b.n * abs(b.accuracy - b.confidence) for b in found.reliability) / 1501
    assert found.ece == pytest.approx(ece)
    confidences = [b.confidence for b in found.reliability]
    assert confidences == sorted(confidences)


def test_perfect_probabilities_show_no_more_than_chance():
    within = []
    for seed in range(20):
        p, y = drawn(400, 5, seed)
        found = calibration(p.log(), y, rng(seed))
        assert found.ece > 0.01  # the plug-in alone would call a perfect classifier miscalibrated
        within.append(found.ece <= found.ece_high)
    assert sum(within) >= 16  # 95 % of 20; fewer than 16 has probability 0.0003


def test_chance_shrinks_with_the_root_of_the_images():
    few, many = (calibration(drawn(n, 5)[0].log(), drawn(n, 5)[1], rng()) for n in (400, 6400))
    assert few.ece_expected / many.ece_expected == pytest.approx(4, rel=0.25)


@pytest.mark.parametrize("power", [0.5, 3.0])
def test_the_temperature_undoes_a_power(power):
    p, y = drawn(6000, 5)
    found = calibration(power * p.log(), y, rng())
    assert found.ece > 4 * found.ece_expected and found.ece > found.ece_high
    t = found.tempered
    assert t.temperature == pytest.approx(power, rel=0.1) and t.n == 3000
    assert t.nll < t.nll_before and t.ece < 0.5 * t.ece_before
    assert t.ece < 2 * t.ece_expected


def test_the_temperature_is_judged_on_images_it_was_not_fitted_to():
    """Labels of pure chance: fitted and judged on the same images, T would always seem to help."""
    gains = []
    for seed in range(12):
        p, y = drawn(30, 3, seed)
        t = calibration(p.log(), y, rng(seed)).tempered
        gains.append(t.nll_before - t.nll)
    assert min(gains) < 0


def test_scores_need_not_be_normalised_and_order_is_nothing():
    p, y = drawn(500, 4)
    plain = calibration(p.log(), y, rng())
    shifted = calibration(p.log() + 7, y, rng())
    assert shifted.nll == pytest.approx(plain.nll) and shifted.ece == pytest.approx(plain.ece)
    turned = calibration(p.log().flip(0), y.flip(0), rng())
    assert turned.ece == pytest.approx(plain.ece)


def test_ties_share_a_bin_whatever_the_order():
    """Bins cut by rank alone would put all misses of a tie into one bin here."""
    p = torch.tensor([0.8, 0.2], dtype=torch.float64).repeat(100, 1)
    y = torch.cat([torch.zeros(80), torch.ones(20)]).long()
    found = calibration(p.log(), y, rng())
    assert len(found.reliability) == 1 and found.ece == pytest.approx(0, abs=1e-9)


def test_classes_ruled_out():
    scores = torch.tensor([[0.0, -math.inf, 0.0], [0.0, -math.inf, -math.inf]] * 4)
    y = torch.tensor([1, 0] * 4)
    found = calibration(scores, y, rng())
    assert found.nll == pytest.approx((-math.log(1e-12)) / 2)
    assert found.tempered is not None and math.isfinite(found.tempered.nll)


def test_top_five_of_many_classes():
    scores = torch.arange(11.0).repeat(11, 1)
    assert calibration(scores, torch.arange(11), rng()).top5 == pytest.approx(5 / 11)
    flat = calibration(torch.zeros(11, 11), torch.arange(11), rng())
    assert flat.top5 == 0  # a tie is no hit


def test_same_seed_same_result_and_the_scores_stay():
    p, y = drawn(200, 3)
    scores = p.log()
    before = scores.clone()
    assert calibration(scores, y, rng(5)) == calibration(scores, y, rng(5))
    assert torch.equal(scores, before)


@pytest.mark.parametrize(
    ("scores", "labels"),
    [
        (torch.zeros(0, 3), torch.zeros(0, dtype=torch.int64)),
        (torch.zeros(2, 3), torch.zeros(3, dtype=torch.int64)),
        (torch.full((2, 3), math.nan), torch.zeros(2, dtype=torch.int64)),
        (torch.full((2, 3), math.inf), torch.zeros(2, dtype=torch.int64)),
        (torch.full((2, 3), -math.inf), torch.zeros(2, dtype=torch.int64)),
        (torch.zeros(2, 3), torch.tensor([0, 3])),
        (torch.zeros(2, 3, dtype=torch.int64), torch.tensor([0, 1])),
    ],
)
def test_what_cannot_be_measured_is_refused(scores, labels):
    with pytest.raises(DataError, match="must"):
        calibration(scores, labels, rng())


def test_agreement_by_hand_and_by_scikit_learn():
    from sklearn.metrics import cohen_kappa_score

    g = rng(1)
    one, own, truth = (torch.randint(0, 4, (300,), generator=g) for _ in range(3))
    own = torch.where(torch.rand(300, generator=g) < 0.5, one, own)
    found = agreement([one], own, truth)
    assert found["same"] == pytest.approx(float((one == own).double().mean()))
    assert found["kappa"] == pytest.approx(cohen_kappa_score(one.numpy(), own.numpy()))
    right = float((one == truth).double().mean()), float((own == truth).double().mean())
    both = 1 - found["both_wrong"] - found["only_own_right"] - found["only_it_right"]
    assert both + found["only_it_right"] == pytest.approx(right[0])
    assert both + found["only_own_right"] == pytest.approx(right[1])
    constant = torch.zeros(300, dtype=torch.int64)
    assert agreement([constant], constant, truth)["kappa"] is None


def test_accuracies_weigh_classes_equally_where_asked():
    y = torch.tensor([0] * 8 + [1] * 2)
    images = Images(torch.zeros(10, 1, 8, 8), y, ("a", "b", "none"))
    row = accuracies(F.one_hot(torch.zeros(10, dtype=torch.int64), 3).double(), images)
    assert row["accuracy"] == 0.8 and row["balanced_accuracy"] == 0.5
    assert row["per_class"] == [1.0, 0.0, None]
    # Wilson: (p + z²/2n ± z sqrt(p(1-p)/n + z²/4n²)) / (1 + z²/n)
    z, n = 1.959964, 10
    root = z * math.sqrt(0.16 / n + z**2 / (4 * n**2))
    want = [(0.8 + z**2 / (2 * n) + s * root) / (1 + z**2 / n) for s in (-1, 1)]
    assert row["interval"] == pytest.approx(want, abs=1e-5)
