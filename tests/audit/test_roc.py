"""ROC curves against closed forms, and limits that must be the right ones for a claim."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import pytest
import torch
from scipy import stats

from fedgist.audit.limits import limit_of
from fedgist.audit.membership import FPRS, claimed, measure
from fedgist.audit.roc import GRID, approximate_dp, area, closed_form, empirical
from fedgist.privacy.accounting import sigma_for
from fedgist.privacy.claim import Privacy, calibrate, claim_of
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Round

DELTA = 1e-5
MOMENTS = Round("sum", (MomentsQuery(clip=1.0, dim=4, classes=2),))


def claim(rounds, **terms):
    privacy = Privacy(**terms)
    return claim_of(rounds, privacy, calibrate(rounds, privacy), track="no public data")


def test_the_grid_has_ten_rates_a_decade():
    assert len(GRID) == 41 and GRID[0] == 1e-4 and GRID[-1] == 1
    assert {0.001, 0.01, 0.1} <= set(GRID)  # the rates of the tables
    ratios = [b / a for a, b in itertools.pairwise(GRID)]
    assert max(abs(r - 10**0.1) for r in ratios) < 1e-3


def test_one_gaussian_in_closed_form():
    for mu in (0.0, 0.7, 1.888):
        got = closed_form(mu)
        expected = stats.norm.cdf(stats.norm.ppf(GRID) + mu)
        assert got.fpr == GRID and max(abs(got.tpr - expected)) < 1e-12
    assert closed_form(math.inf).tpr == (1.0,) * len(GRID)


def test_several_records_have_the_mean_of_their_curves():
    """The curve of the mean strength is another, and higher at low rates here."""
    mu = torch.tensor([0.1, 3.0])
    both = closed_form(mu).tpr
    one, other = closed_form(0.1).tpr, closed_form(3.0).tpr
    assert both == pytest.approx([(a + b) / 2 for a, b in zip(one, other, strict=True)])
    assert abs(both[20] - closed_form(float(mu.mean())).tpr[20]) > 0.1


def test_scores_give_the_curve_that_they_come_from():
    rng = torch.Generator().manual_seed(0)
    members = torch.randn(40_000, generator=rng, dtype=torch.float64) + 1.5
    others = torch.randn(40_000, generator=rng, dtype=torch.float64)
    got, expected = empirical(members, others), closed_form(1.5)
    assert got.fpr == GRID
    gaps = [abs(a - b) for a, b in zip(got.tpr, expected.tpr, strict=True)]
    assert max(gaps) < 0.02 and max(gaps[10:]) < 0.012
    found = measure(members, others)  # the tables and the curve agree
    assert (found.roc.tpr[10], found.roc.tpr[20]) == found.tpr
    assert (found.roc.fpr[10], found.roc.fpr[20]) == FPRS


def test_rates_that_few_records_cannot_tell_are_left_out():
    members, others = torch.arange(50.0) + 0.5, torch.arange(99.0)
    got = empirical(members, others)
    assert got.fpr[0] == 0.01 and len(got.fpr) == 21 and got.tpr[-1] == 1.0
    assert empirical(members, others[:98]).fpr[0] > 0.01
    # every unused score lies above every used one: nothing is found below a rate of 1
    assert set(empirical(members - 100, others).tpr[:-1]) == {0.0}


def test_curves_are_plain_and_rounded():
    record = closed_form(0.3).record()
    assert json.loads(json.dumps(record)) == record
    assert all(v == round(v, 6) for v in record["tpr"])


def test_what_epsilon_and_delta_alone_allow():
    eps, delta = 1.0, 0.01
    got = dict(zip(GRID, approximate_dp(eps, delta).tpr, strict=True))
    assert got[0.001] == pytest.approx(math.e * 0.001 + 0.01)
    assert got[1.0] == 1
    a = GRID[-3]  # there the mirrored bound is the lower one
    assert got[a] == pytest.approx(1 - math.exp(-1) * (1 - 0.01 - a)) and got[a] < math.e * a
    # the exact trade-off of randomised response, which attains both lines where δ = 0
    assert area(eps, 0.0) == pytest.approx(math.e / (1 + math.e))
    x = torch.linspace(0, 1, 200_001, dtype=torch.float64)
    fine = torch.tensor(approximate_dp(eps, delta, x.tolist()).tpr)
    assert area(eps, delta) == pytest.approx(float(torch.trapezoid(fine, x)), abs=1e-6)
    assert area(0.0, 0.0) == pytest.approx(0.5) and area(2000.0, 0.0) == pytest.approx(1.0)


def test_it_is_never_tighter_than_the_gaussian_of_the_same_terms():
    for epsilon in (0.5, 2.0, 10.0):
        gaussian = closed_form(1 / sigma_for(epsilon, DELTA, "gaussian")).tpr
        alone = approximate_dp(epsilon, DELTA).tpr
        assert all(g <= a + 1e-9 for g, a in zip(gaussian, alone, strict=True))


def test_one_gaussian_has_its_trade_off_as_the_limit():
    for epsilon in (1.0, 10.0):
        limit = limit_of(claim([MOMENTS], epsilon=epsilon), [MOMENTS])
        mu = 1 / sigma_for(epsilon, DELTA, "discrete-gaussian")
        assert limit.bound == "gaussian" and limit.mu == pytest.approx(mu)
        assert limit.risk == claimed(epsilon, DELTA, "discrete-gaussian")
        assert limit.curve == closed_form(limit.mu)
    record = limit.record()
    assert json.loads(json.dumps(record)) == record and len(record["roc"]["fpr"]) == 41


def test_a_claim_that_states_less_has_a_lower_limit():
    """It is the stated ε that is attacked, whatever the noise."""
    made = claim([MOMENTS], epsilon=10.0)
    limit = limit_of(replace(made, epsilon=1.0), [MOMENTS])
    assert limit.risk.auc < limit_of(made, [MOMENTS]).risk.auc


def test_sampled_releases_have_no_gaussian_limit():
    rounds = [Round("sum", (SumQuery(1.0, times=20, rates=(0.2,)),))]
    made = claim(rounds, epsilon=2.0)
    limit = limit_of(made, rounds)
    assert limit.bound == "approximate" and limit.mu is None
    assert limit.curve == approximate_dp(made.epsilon, DELTA)
    assert limit.risk.auc > claimed(made.epsilon, DELTA, "gaussian").auc
    every = [Round("sum", (SumQuery(1.0, times=20, rates=(1.0,)),))]
    assert limit_of(claim(every, epsilon=2.0), every).bound == "gaussian"


def test_presence_is_bounded_by_the_reading_under_add_remove():
    made = claim([MOMENTS], epsilon=10.0, adjacency="replace-one")
    limit = limit_of(made, [MOMENTS])
    assert limit.epsilon == made.readings["add-remove"] < 10
    exact = MomentsQuery(
        clip=1.0, dim=4, classes=2, mean=0.5, second=0.5, pooled=0, count=0, exact_counts=True
    )
    rounds = [Round("sum", (exact,))]
    assert limit_of(claim(rounds, epsilon=5.0, adjacency="replace-same-class"), rounds) is None
    assert limit_of(claim([MOMENTS], epsilon=math.inf), [MOMENTS]) is None
