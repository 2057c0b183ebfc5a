from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom

from fedgist.audit import one_run
from fedgist.audit.one_run import (
    OneRun,
    audit_gists,
    canaries,
    canary_scores,
    epsilon_low,
    judge,
    row,
    with_canaries,
)
from fedgist.encoders.random_conv import RandomConv
from fedgist.errors import ConfigError, DataError
from fedgist.heads.match import Matching, NetMeans, match
from fedgist.privacy.accounting import epsilon_gaussian
from fedgist.report.page import render_page
from fedgist.types import Images

pytestmark = pytest.mark.usefixtures("one_thread")

DELTA = 1e-5
# m, guesses, right, delta, ε refuted at 95 %
ORACLE = [
    (1000, 200, 195, 1e-5, 2.89943),
    (1000, 200, 195, 0.0, 2.90629),
    (1000, 1000, 900, 1e-5, 2.02065),
    (1000, 1000, 600, 1e-5, 0.29723),
    (100, 100, 100, 0.0, 3.49297),
    (5000, 500, 400, 1e-5, 1.19522),
]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def coins(m: int, seed: int) -> torch.Tensor:
    return torch.rand(m, generator=rng(seed)) < 0.5


def smooth(n: int, classes: int = 4, seed: int = 0, side: int = 28) -> Images:
    """Images of soft blobs whose brightness depends on the class."""
    coarse = torch.rand(n, 1, 4, 4, generator=rng(seed))
    labels = torch.arange(n) % classes
    coarse = 0.6 * coarse + 0.4 * (labels / classes)[:, None, None, None]
    x = torch.nn.functional.interpolate(coarse, (side, side), mode="bicubic").clamp(0, 1)
    names = tuple(f"class {c}" for c in range(classes))
    return Images((x * 255).to(torch.uint8), labels, names)


# The bound


def meets_the_oracle() -> bool:
    return all(abs(epsilon_low(*case) - bound) < 1e-4 for *case, bound in ORACLE)


def test_the_bound_meets_the_oracle():
    assert meets_the_oracle()


original = one_run._probability


def exclusive(epsilon, m, r, v, delta):  # P[W > v]
    return original(epsilon, m, r, v + 1, delta) if v < r else 0.0


def lower_tail(epsilon, m, r, v, delta):  # P[W <= v]
    return 1 - original(epsilon, m, r, v + 1, delta) if v < r else 1.0


def of_guesses(epsilon, m, r, v, delta):  # δ for the canaries guessed only
    return original(epsilon, r, r, v, delta)


def without_delta(epsilon, m, r, v, delta):
    return original(epsilon, m, r, v, 0.0)


@pytest.mark.parametrize("wrong", [exclusive, lower_tail, of_guesses, without_delta])
def test_the_oracle_catches_a_wrong_tail(wrong, monkeypatch):
    monkeypatch.setattr(one_run, "_probability", wrong)
    assert not meets_the_oracle()


@given(
    st.integers(1, 60),
    st.floats(0, 6),
    st.sampled_from([0.0, 1e-5, 1e-2]),
    st.data(),
)
@settings(max_examples=60, deadline=None)
def test_the_probability_is_that_of_the_theorem(m, epsilon, delta, data):
    r = data.draw(st.integers(0, m))
    v = data.draw(st.integers(0, r))
    w = binom(r, 1 / (1 + math.exp(-epsilon)))
    beta = w.sf(v - 1)
    alpha = max(sum(w.pmf(k) for k in range(max(0, v - i), v)) / i for i in range(1, m + 1))
    expected = beta + 2 * m * delta * alpha
    assert original(epsilon, m, r, v, delta) == pytest.approx(expected, rel=1e-9, abs=1e-12)


def test_the_bound_grows_with_right_guesses_and_falls_with_confidence_and_delta():
    bounds = [epsilon_low(100, 60, v, DELTA) for v in range(61)]
    assert bounds == sorted(bounds) and bounds[30] == 0 < bounds[45] < bounds[60]
    assert epsilon_low(100, 60, 60, 0.0, 0.99) < epsilon_low(100, 60, 60, 0.0, 0.95)
    assert epsilon_low(100, 60, 60, 1e-3) < epsilon_low(100, 60, 60, 1e-5)
    assert epsilon_low(100, 60, 60, 0.0) == pytest.approx(-math.log(0.05 ** (-1 / 60) - 1))
    assert epsilon_low(10, 0, 0, 0.0) == 0
    assert epsilon_low(100, 100, 100, 0.9) == 0  # such a δ allows anything


@pytest.mark.parametrize(
    "arguments",
    [(10, 11, 5, 0.0), (10, 5, 6, 0.0), (10, 5, -1, 0.0), (10, 5, 5, -0.1), (10, 5, 5, 1.0)],
)
def test_arguments_of_the_bound_are_checked(arguments):
    with pytest.raises(ConfigError, match="must"):
        epsilon_low(*arguments)
    with pytest.raises(ConfigError, match="confidence must be"):
        epsilon_low(10, 5, 5, 0.0, 1.0)


# Mechanisms of known ε


def gaussian(m: int, sigma: float, seed: int) -> OneRun:
    """Add orthogonal unit canaries up, with noise: what is seen of each is its coin + noise."""
    inserted = coins(m, seed)
    noise = sigma * torch.randn(m, generator=rng(1000 + seed), dtype=torch.float64)
    return judge(inserted + noise, inserted, DELTA)


@pytest.mark.parametrize("epsilon_about", [1, 4, 10])
def test_the_bound_stays_below_the_true_epsilon_of_gaussian_noise(epsilon_about):
    sigma = {1: 3.73, 4: 1.08, 10: 0.5}[epsilon_about]
    true = epsilon_gaussian(sigma, DELTA)
    assert true == pytest.approx(epsilon_about, rel=0.02)
    bounds = [gaussian(400, sigma, seed).epsilon_low for seed in range(40)]
    assert sum(bound > true for bound in bounds) <= 2
    least = {1: 0.0, 4: 0.3, 10: 1.5}[epsilon_about]
    assert min(bounds) >= least


def test_noise_that_is_far_too_small_is_found_out():
    claim = epsilon_gaussian(2.0, DELTA)  # 1.99
    assert gaussian(400, 0.2, 0).epsilon_low > claim
    assert gaussian(400, 2.0, 0).epsilon_low < claim


def refuted(epsilon: float, runs: int = 1000, m: int = 100) -> float:
    """Return how often randomised response, exactly (ε, 0)-DP, is said to exceed its ε.

    Which canaries the attacker is sure of has nothing to do with whether it is right: the several
    numbers of guesses are several chances.
    """
    right = 1 / (1 + math.exp(-epsilon))
    count = 0
    for seed in range(runs):
        draw = rng(seed)
        inserted = torch.rand(m, generator=draw) < 0.5
        truthful = torch.rand(m, generator=draw) < right
        sure = torch.rand(m, generator=draw) + 0.1
        scores = torch.where(inserted == truthful, sure, -sure)
        count += judge(scores, inserted, 0.0).epsilon_low > epsilon
    return count / runs


@pytest.mark.parametrize("epsilon", [0.0, 1.0])
def test_a_true_claim_is_refuted_in_one_run_of_twenty_at_most(epsilon):
    assert refuted(epsilon) <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_without_the_correction_a_true_claim_is_refuted_too_often(monkeypatch):
    def uncorrected(m, guesses, right, delta, confidence):
        return epsilon_low(m, guesses, right, delta)

    monkeypatch.setattr(one_run, "epsilon_low", uncorrected)
    assert refuted(1.0) > 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_guesses_are_right_when_the_highest_are_in_and_the_lowest_out():
    scores = torch.tensor([9.0, 8, 7, 6, 5, 4, 3, 2])
    inserted = torch.tensor([1, 1, 0, 1, 0, 1, 0, 0]).bool()
    got = {k: judge(scores, inserted, 0.0, [k]) for k in (4, 5, 8)}
    assert [(g.guesses, g.right) for g in got.values()] == [(4, 4), (4, 4), (8, 6)]
    assert got[4].epsilon_low == pytest.approx(epsilon_low(8, 4, 4, 0.0))
    both = judge(scores, inserted, 0.0, [4, 8])
    assert both.epsilon_low == pytest.approx(epsilon_low(8, 4, 4, 0.0, 0.975))
    assert (both.canaries, both.inserted, both.auc) == (8, 4, 13 / 16)
    assert judge(-scores, inserted, 0.0).epsilon_low == 0


def test_ties_say_nothing():
    bounds = [judge(torch.zeros(200), coins(200, s), 0.0).epsilon_low for s in range(100)]
    assert sum(b > 0 for b in bounds) <= 10


def test_what_cannot_be_judged_is_refused():
    inserted = coins(20, 0)
    for scores in (torch.zeros(19), torch.full((20,), math.nan), torch.zeros(20, 1)):
        with pytest.raises(DataError, match="scores must be"):
            judge(scores, inserted, 0.0)
    with pytest.raises(DataError, match="bools"):
        judge(torch.zeros(20), inserted.long(), 0.0)
    with pytest.raises(DataError, match="two or more"):
        judge(torch.zeros(20), torch.ones(20).bool(), 0.0)
    for guesses in ([], [1], [21]):
        with pytest.raises(ConfigError, match="guesses must be"):
            judge(torch.zeros(20), inserted, 0.0, guesses)


# Canaries


def test_canaries_have_the_format_of_the_images_and_are_all_different():
    images = smooth(8, classes=3)
    made = canaries(images, 90, rng())
    assert made.pixels.dtype == torch.uint8 and made.pixels.shape[1:] == images.pixels.shape[1:]
    assert made.pixels.unique().tolist() == [0, 255]
    assert made.counts().tolist() == [30, 30, 30] and made.classes == images.classes
    assert len(made.pixels.flatten(1).unique(dim=0)) == 90
    again = canaries(images, 90, rng())
    assert torch.equal(made.pixels, again.pixels)
    with pytest.raises(ConfigError, match="canaries must be"):
        canaries(images, 0, rng())


def test_half_of_the_canaries_are_inserted():
    images = smooth(10)
    made = canaries(images, 1000, rng())
    every, inserted = with_canaries(images, made, rng(1))
    assert abs(int(inserted.sum()) - 500) < 60 and len(every) == 10 + int(inserted.sum())
    both = torch.cat([images.pixels, made.pixels[inserted]]).flatten(1)
    order = torch.cat([images.labels, made.labels[inserted]])
    expected, got = (
        sorted(zip(map(bytes, p.numpy()), y.tolist(), strict=True))
        for p, y in ((both, order), (every.pixels.flatten(1), every.labels))
    )
    assert expected == got


def test_a_canary_is_a_person_of_its_own_and_takes_the_images_dtype():
    images = smooth(10)
    images = replace(images, pixels=images.floats(), groups=torch.arange(10) // 2)
    made = canaries(images, 30, rng())
    every, inserted = with_canaries(images, made, rng())
    assert every.pixels.dtype == torch.float32 and float(every.pixels.max()) == 1
    assert every.groups is not None and len(every.groups.unique()) == 5 + int(inserted.sum())


# Whole audits


@pytest.fixture
def few_networks(monkeypatch):
    monkeypatch.setattr(one_run, "NETS", 2)
    monkeypatch.setattr(one_run, "WIDTH", 16)


def copies(images: Images) -> dict[str, torch.Tensor]:
    return {"pixels": images.pixels, "labels": images.labels}


def test_a_client_that_sends_its_images_is_found_out(few_networks):
    got = audit_gists(copies, smooth(200), 200, DELTA, rng())
    assert got.auc > 0.9 and got.epsilon_low > 2 and got.canaries == 200


def test_a_client_that_ignores_its_images_is_not(few_networks):
    bounds = []
    for seed in range(10):
        constant = copies(smooth(40, seed=100 + seed))
        got = audit_gists(lambda _, c=constant: c, smooth(20), 60, DELTA, rng(seed))
        bounds.append(got.epsilon_low)
    assert sum(b > 0 for b in bounds) <= 2 and max(bounds) < 0.5


def matched(images: Images, noise: float = 0.0) -> dict[str, torch.Tensor]:
    """Distil ten images per class by distribution matching, of means with or without noise."""
    nets = RandomConv(5, nets=4, width=16)
    z = nets.rows(images.floats())
    mean = torch.zeros(len(images.classes), *z.shape[1:]).index_add_(0, images.labels, z)
    mean /= images.counts()[:, None, None]
    mean += noise * torch.randn(mean.shape, generator=rng(6))
    start = smooth(40, seed=9)
    how = Matching(steps=60, lr=0.05)
    out = match(NetMeans(mean, torch.zeros(len(mean))), nets, start, how, rng(7)).images
    return {"pixels": out.pixels, "labels": out.labels, "more": mean}


def test_distribution_matching_gives_canaries_away_and_noise_hides_them(few_networks):
    images = smooth(80)
    open_, noised = (
        audit_gists(lambda x, s=s: matched(x, s), images, 80, DELTA, rng(1)) for s in (0.0, 1.0)
    )
    assert open_.auc > 0.65 and open_.epsilon_low > 0.3
    assert noised.low < 0.5 < noised.high and noised.epsilon_low < open_.epsilon_low


def test_what_is_known_and_the_class_matter(few_networks):
    images = smooth(100)
    made = canaries(images, 80, rng())
    every, inserted = with_canaries(images, made, rng(1))
    scores = canary_scores(every, made, images, rng(2))
    assert scores.dtype == torch.float64 and torch.equal(
        scores, canary_scores(every, made, images, rng(2))
    )
    for c in range(4):
        assert abs(float(scores[made.labels == c].sum())) < 1e-9  # canaries of a class compete
    some = canary_scores(every.take(every.labels == 1), made, images, rng(2))
    assert torch.equal(some != 0, made.labels == 1)
    assert torch.allclose(some[made.labels == 1], scores[made.labels == 1])
    nobody = images.take(torch.zeros(0, dtype=torch.int64))
    blind = judge(canary_scores(every, made, nobody, rng(2)), inserted, DELTA)
    assert blind.auc < judge(scores, inserted, DELTA).auc


def test_a_gist_without_images_is_refused():
    for wrong in ({"rows": torch.zeros(3)}, {"pixels": smooth(9).pixels}):
        with pytest.raises(DataError, match="must hold 'pixels'"):
            audit_gists(lambda _, w=wrong: w, smooth(20), 20, DELTA, rng())


def test_a_gist_without_labels_is_in_the_order_of_classes(few_networks):
    def in_order(images: Images) -> dict[str, torch.Tensor]:
        rows = [(images.labels == c).nonzero()[:10, 0] for c in range(4)]
        small = torch.nn.functional.avg_pool2d(images.floats(torch.cat(rows)), 2)  # 14x14 tiles
        return {"pixels": (small * 255).to(torch.uint8), "counts": torch.zeros(4)}

    def labelled(images: Images) -> dict[str, torch.Tensor]:
        return in_order(images) | {"labels": torch.arange(4).repeat_interleave(10)}

    images = smooth(40)
    implied, said = (audit_gists(f, images, 40, DELTA, rng(3)) for f in (in_order, labelled))
    assert implied == said and implied.auc > 0.6


# The row


def test_a_row_is_plain_json_and_the_page_shows_it(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[1] / "report")
    import sample_report

    result = judge(torch.arange(40.0), torch.arange(40) >= 20, DELTA)
    what = "the distilled images of one client, all its other images"
    ok, bad, none = (row(result, claim, what) for claim in (10.0, 0.5, math.inf))
    assert json.loads(json.dumps(ok)) == ok
    assert (ok["records"], ok["guesses"], ok["right"]) == (40, 40, 40)
    bound = f"95 % lower bound on ε: {result.epsilon_low:.2f}"
    assert ok["note"] == f"{bound} (claim: 10)"
    assert bad["note"] == f"{bound} (claim: 0.5); the claim is refuted"
    assert none["note"] == f"{bound} (claim: none)"
    report = sample_report.report()
    assert {k for k in report["membership"][0] if "claim_cap" not in k} <= ok.keys()
    report["membership"] = [ok]
    page = render_page(report)
    assert "one-run audit, 40 canaries" in page and bound in page
