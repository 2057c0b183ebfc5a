"""Plans asked of Poisson samples: accounting, the claim, the guard."""

from __future__ import annotations

import math

import pytest
import torch

from fedgist.errors import ConfigError, DataError, PrivacyError, UnplannedQuery
from fedgist.privacy.accounting import (
    dp_event,
    epsilon_event,
    epsilon_gaussian,
    is_sampled,
    plan_multiplier,
    sampled_epsilon,
    sampled_sigma,
    sensitivity,
)
from fedgist.privacy.claim import Privacy, calibrate, claim_of
from fedgist.privacy.client import Client, open_sensitive
from fedgist.privacy.noise import SeededNoise, SystemNoise, noise_tensors
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Images, Round

MOMENTS = MomentsQuery(1.0, 4, 3)


def plan(*queries: SumQuery) -> list[Round]:
    return [Round("pool", queries)]


def sampled(rate: float, times: int, scale: float = 1.0) -> SumQuery:
    return SumQuery(1.0, times=times, scale=scale, rates=(rate,))


@pytest.mark.parametrize(("images", "epsilon"), [(5421, 6.11), (6000, 5.44), (5000, 6.71)])
def test_ndpdc_reads_what_its_class_sizes_say(images: int, epsilon: float) -> None:
    """σ = 1, 50 records of a class expected, 10,000 steps, δ = 1e-5, Rényi accounting."""
    steps = plan(sampled(50 / images, 10_000))
    event = dp_event(steps, 1.0, "add-remove")
    assert epsilon_event(event, 1e-5) == pytest.approx(epsilon, abs=0.01)
    assert sampled_epsilon(steps, 1.0, 1e-5, accountant="rdp") == pytest.approx(epsilon, abs=0.01)
    assert sampled_epsilon(steps, 1.0, 1e-5) < 0.95 * epsilon


@pytest.mark.parametrize(
    ("rate", "sigma", "times", "epsilon"),
    [(0.01, 1.0, 1000, 1.828244), (0.1, 1.0, 100, 7.046603), (0.05, 1.5, 500, 3.784698)],
)
def test_loss_distributions_meet_the_table(
    rate: float, sigma: float, times: int, epsilon: float
) -> None:
    assert sampled_epsilon(plan(sampled(rate, times)), sigma, 1e-5) == pytest.approx(
        epsilon, abs=1e-3
    )


def test_rate_one_is_the_plain_gaussian() -> None:
    steps = plan(sampled(1.0, 4, scale=2.0))
    joint = plan_multiplier(steps, "add-remove")
    assert joint == pytest.approx(1.0)
    got = sampled_epsilon(steps, 1.0, 1e-5)
    assert got == pytest.approx(epsilon_gaussian(1.0, 1e-5), rel=1e-3)


def test_the_class_that_is_sampled_most_decides() -> None:
    by_class = SumQuery(1.0, times=50, per_class=True, rates=(0.01, 0.2, 0.05))
    assert sampled_epsilon(plan(by_class), 1.0, 1e-5) == sampled_epsilon(
        plan(sampled(0.2, 50)), 1.0, 1e-5
    )


@pytest.mark.parametrize("epsilon", [1.0, 8.0])
def test_calibration_meets_the_budget_and_wastes_little(epsilon: float) -> None:
    steps = plan(sampled(1.0, 1, scale=8.0), sampled(0.1, 20))
    sigma = sampled_sigma(steps, epsilon, 1e-5)
    assert 0.998 * epsilon <= sampled_epsilon(steps, sigma, 1e-5) <= epsilon
    assert sampled_epsilon(steps, sigma * 0.99, 1e-5) > epsilon


def test_groups_cost_more_and_stay_finite() -> None:
    steps = plan(sampled(0.05, 30))
    one, two = (sampled_epsilon(steps, 1.5, 1e-5, group) for group in (1, 2))
    assert 2 * one < two < math.inf
    # without amplification a group of two is a sensitivity of two
    plain = plan(sampled(1.0, 1))
    assert sampled_epsilon(plain, 3.0, 1e-5, 2) == pytest.approx(
        epsilon_gaussian(1.5, 1e-5), rel=1e-3
    )


def test_a_mixed_plan_is_refused() -> None:
    with pytest.raises(PrivacyError, match="all have sampling rates or none"):
        is_sampled([Round("pool", (sampled(0.1, 1), SumQuery(1.0)))])
    with pytest.raises(PrivacyError):
        calibrate([Round("pool", (sampled(0.1, 1), MOMENTS))], Privacy(epsilon=1))


def test_a_claim_names_its_sampling_and_both_accountants() -> None:
    steps, privacy = plan(sampled(0.1, 20)), Privacy(epsilon=2)
    sigma = calibrate(steps, privacy)
    claim = claim_of(steps, privacy, sigma, track="no public data")
    assert 1.99 < claim.epsilon <= 2 and claim.law == "gaussian"
    assert claim.trust == "local" and claim.noise_by == "each client, in full"
    assert "probability 0.1, 20 times" in claim.sampling
    assert any("Rényi accounting" in n for n in claim.notes)
    assert claim.readings["replace-one"] > 2 * claim.epsilon


def test_noise_on_the_mean_is_a_multiplier_of_batch_times_sigma() -> None:
    """The published rule adds σC to a mean whose sensitivity is C/|B|: |B| times too much."""
    batch, sigma = 64, 1.0
    clipped = torch.eye(batch)  # records of norm C = 1
    moved = (clipped.sum(0) / batch - clipped[1:].sum(0) / batch).norm()
    assert sigma / float(moved) == pytest.approx(sigma * batch)
    honest = sampled_epsilon(plan(sampled(0.1, 40)), sigma * batch, 1e-5)
    assert honest < 0.03 < 3 < sampled_epsilon(plan(sampled(0.1, 40)), sigma, 1e-5)


@pytest.mark.parametrize(
    ("unit", "adjacency", "value"),
    [
        ("client", "add-remove", 1.0),
        ("client", "replace-one", 2.0),
        ("image", "add-remove", 2.0),
        ("person", "add-remove", 2.0),
    ],
)
def test_a_row_of_a_whole_client_moves_in_its_ball(unit, adjacency, value) -> None:
    query = SumQuery(1.0, whole=True, shape=(3,))
    assert sensitivity(query, adjacency, 7, unit) == value


def images_of(n: int) -> Images:
    pixels = torch.arange(n, dtype=torch.uint8).view(n, 1, 1, 1).expand(n, 1, 4, 4).contiguous()
    return Images(pixels, torch.arange(n) % 3, ("a", "b", "c"))


def client_of(n: int, *queries: SumQuery, noise=None, sigma=1.0, exact=False) -> Client:
    rnd = Round("pool", queries)
    noise = noise or SeededNoise(0)
    return Client("c", images_of(n), rnd, sigma=sigma, noise=noise, max_images=500, exact=exact)


def ones(x: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"rows": torch.ones(len(x), 1)}


@pytest.mark.parametrize("noise", [SeededNoise(3), SystemNoise()])
def test_samples_are_fresh_and_follow_the_rates(noise) -> None:
    query = SumQuery(1.0, levels=1, times=60, per_class=True, rates=(0.1, 0.5, 1.0), shape=(3, 1))
    guard = client_of(240, query, noise=noise)
    got = torch.cat([open_sensitive(guard.sum(ones, query))["rows"].T for _ in range(60)])
    assert bool((got[:, 2] == 80).all())  # rate 1: everyone
    assert len(set(got[:, 1].tolist())) > 5
    mean = got.double().mean(0)
    assert abs(mean[0] - 8) < 4 * math.sqrt(7.2 / 60) and abs(mean[1] - 40) < 4 * math.sqrt(20 / 60)
    with pytest.raises(UnplannedQuery):
        guard.sum(ones, query)


def test_an_empty_sample_is_a_sum_of_zero() -> None:
    query = SumQuery(1.0, rates=(1e-9,), shape=(1,))
    exact = open_sensitive(client_of(50, query).sum(ones, query))
    assert exact["rows"].tolist() == [0]


def test_rates_must_fit_the_classes() -> None:
    query = SumQuery(1.0, rates=(0.1, 0.2))
    with pytest.raises(DataError, match="one for each of 3 classes"):
        client_of(9, query).sum(ones, query)
    with pytest.raises(ConfigError, match="rates"):
        SumQuery(1.0, rates=(0.0,))
    with pytest.raises(ConfigError, match="neither sampled nor per class"):
        SumQuery(1.0, rates=(0.5,), whole=True)


def test_sampled_noise_is_a_rounded_gaussian_and_is_never_shared() -> None:
    query = SumQuery(1.0, levels=40, rates=(0.1,))
    like = {"rows": torch.zeros(20_000, dtype=torch.int64)}
    for noise in (SeededNoise(0), SystemNoise()):
        drawn = noise_tensors(query, 0.5, noise, like)["rows"].double()
        assert float(drawn.std()) == pytest.approx(20.0, rel=0.03)
    with pytest.raises(PrivacyError, match="must not be shared"):
        noise_tensors(query, 0.5, SeededNoise(0), like, parties=3)


def test_a_release_without_noise_needs_an_infinite_claim() -> None:
    query = SumQuery(1.0, rates=(1.0,), shape=(1,))
    guard = client_of(5, query, sigma=0.0)
    with pytest.raises(PrivacyError, match="noise"):
        guard.release(guard.sum(ones, query))
    free = client_of(5, query, sigma=0.0, exact=True)
    assert free.release(free.sum(ones, query))["rows"].tolist() == [5 * query.levels]


def test_a_row_of_a_client_is_clipped_and_planned() -> None:
    query = SumQuery(2.0, levels=1000, whole=True, shape=(3,))
    row = client_of(4, query).row(lambda images: torch.tensor([30.0, 40.0, 0.0]), query)
    assert open_sensitive(row)["rows"].tolist() == [600, 800, 0]
    nobody = client_of(0, query).row(lambda images: torch.ones(3) / 0, query)
    assert open_sensitive(nobody)["rows"].tolist() == [0, 0, 0]
    plain = SumQuery(2.0, shape=(3,))
    with pytest.raises(UnplannedQuery, match="whole"):
        client_of(4, plain).row(lambda images: torch.ones(3), plain)
