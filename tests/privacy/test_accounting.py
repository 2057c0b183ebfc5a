"""Accounting against closed forms, dp_accounting, OpenDP and values computed to 40 digits."""

import math
import re
from pathlib import Path

import dp_accounting as dpa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import fedgist
from fedgist.errors import ConfigError
from fedgist.privacy.accounting import (
    Law,
    check_budget,
    delta_gaussian,
    dp_event,
    epsilon_event,
    epsilon_gaussian,
    epsilon_of,
    epsilon_zcdp,
    odds,
    plan_multiplier,
    sigma_for,
    sigma_gaussian,
)
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Adjacency, Round

SIGMAS = [  # ε, δ, exact σ, the classic sqrt(2 ln(1.25/δ))/ε
    (10, 1e-5, 0.499888619709),
    (8, 1e-5, 0.600229072199),
    (5, 1e-5, 0.891868264952),
    (3, 1e-5, 1.39059345667),
    (1, 1e-5, 3.73063163482),
    (0.5, 1e-6, 8.05761848073),
    (1, 1e-6, 4.22467888933),
    (10, 1e-6, 0.541086831818),
    (0.1, 1e-8, 45.937360185),
]
EPSILONS = [
    (1, 1e-5, 4.37717809568),
    (2, 1e-5, 1.99309140442),
    (0.5, 1e-5, 9.99725614643),
    (5, 1e-5, 0.725521750858),
    (1, 1e-6, 4.88655411746),
    (10, 1e-6, 0.396857377644),
    (0.7, 1e-5, 6.65248788994),
]
DELTAS = [
    (1, 1, 0.126936737507),
    (1, 0, 0.382924922548),
    (2, 0.5, 0.0524403232877),
    (5, 1, 1.7546333319e-8),
    (0.5, 10, 9.94020281612e-6),
    (1, 5, 5.79372169192e-7),
]
COMPOSED = [
    (1, 1, 1e-5, 6.57297006703),
    (2, 2, 1e-5, 2.9432252398),
    (1, 2, 1e-5, 4.98330640597),
    (4, 3, 1e-6, 1.84608272301),
    (5, 5, 1e-5, 1.06078975542),
]
SAMPLED = [  # q, σ, T, RDP, PLD
    (0.01, 2, 1000, 0.686185, 0.622049),
    (0.01, 1, 1000, 2.101367, 1.828244),
    (1, 10, 100, 4.728507, 4.377179),
]


def classic(epsilon: float, delta: float) -> float:
    return math.sqrt(2 * math.log(1.25 / delta)) / epsilon


def plan_of(*queries: SumQuery | MomentsQuery) -> list[Round]:
    return [Round("pool", queries)]


@pytest.mark.parametrize(("epsilon", "delta", "sigma"), SIGMAS)
def test_sigma_of_the_analytic_gaussian(epsilon: float, delta: float, sigma: float) -> None:
    assert sigma_gaussian(epsilon, delta) == pytest.approx(sigma, rel=1e-10)
    assert sigma_for(epsilon, delta, "gaussian") == sigma_gaussian(epsilon, delta)
    assert sigma_gaussian(epsilon, delta) == pytest.approx(
        dpa.get_sigma_gaussian(epsilon, delta), rel=1e-8
    )


@pytest.mark.parametrize(("sigma", "delta", "epsilon"), EPSILONS)
def test_epsilon_of_the_analytic_gaussian(sigma: float, delta: float, epsilon: float) -> None:
    assert epsilon_gaussian(sigma, delta) == pytest.approx(epsilon, rel=1e-10)
    assert epsilon_gaussian(sigma, delta) == pytest.approx(
        dpa.get_epsilon_gaussian(sigma, delta), rel=1e-8
    )


@pytest.mark.parametrize(("sigma", "epsilon", "delta"), DELTAS)
def test_delta_of_the_analytic_gaussian(sigma: float, epsilon: float, delta: float) -> None:
    assert delta_gaussian(sigma, epsilon) == pytest.approx(delta, rel=1e-10)


@pytest.mark.parametrize(("first", "second", "delta", "epsilon"), COMPOSED)
def test_two_gaussians_compose_to_one(
    first: float, second: float, delta: float, epsilon: float
) -> None:
    plan = plan_of(SumQuery(1.0, scale=first), SumQuery(2.0, scale=second))
    joint = plan_multiplier(plan, "add-remove")
    assert 1 / joint == pytest.approx((first**-2 + second**-2) ** -0.5, rel=1e-12)
    assert epsilon_gaussian(1 / joint, delta) == pytest.approx(epsilon, rel=1e-8)
    event = dpa.ComposedDpEvent([dpa.GaussianDpEvent(first), dpa.GaussianDpEvent(second)])
    assert epsilon_event(event, delta) > epsilon  # RDP: valid, looser


def test_repeats_compose() -> None:
    plan = plan_of(SumQuery(1.0, scale=5.0, times=10))
    assert epsilon_gaussian(1 / plan_multiplier(plan, "add-remove"), 1e-5) == pytest.approx(
        2.5943833805, rel=1e-8
    )
    twice = plan_of(SumQuery(1.0, times=2))
    joint = plan_multiplier(twice, "add-remove")
    assert sigma_gaussian(10, 1e-5) * joint == pytest.approx(0.706949265668, rel=1e-8)
    assert sigma_gaussian(1, 1e-5) * joint == pytest.approx(5.27590985417, rel=1e-8)


def test_rounds_compose_like_queries() -> None:
    a, b = SumQuery(1.0, scale=2.0), SumQuery(3.0, scale=3.0)
    together = plan_multiplier([Round("pool", (a, b))], "add-remove")
    assert together == plan_multiplier([Round("sum", (a,)), Round("pool", (b,))], "add-remove")


@pytest.mark.parametrize(("epsilon", "sigma"), [(10, 0.529598), (3, 1.493206), (1, 4.045130)])
def test_sigma_of_the_discrete_gaussian(epsilon: float, sigma: float) -> None:
    assert sigma_for(epsilon, 1e-5, "discrete-gaussian") == pytest.approx(sigma, abs=1e-6)
    assert epsilon_of(sigma, 1e-5, "discrete-gaussian") == pytest.approx(epsilon, rel=1e-5)
    other = epsilon_event(dpa.ZCDpEvent(0.5 / sigma**2), 1e-5)
    assert epsilon <= other + 1e-5 and other == pytest.approx(epsilon, rel=1e-4)


@pytest.mark.parametrize("delta", [1e-3, 1e-5, 1e-9])
@pytest.mark.parametrize("sigma", [0.3, 1.0, 7.0, 40.0])
def test_zcdp_conversion_is_opendps(sigma: float, delta: float) -> None:
    import opendp.prelude as dp

    dp.enable_features("contrib")
    space = dp.atom_domain(T="i64"), dp.absolute_distance(T=float)
    noise = dp.m.make_gaussian(*space, scale=sigma)
    oracle = dp.c.make_fix_delta(dp.c.make_zCDP_to_approxDP(noise), delta=delta)
    assert epsilon_of(sigma, delta, "discrete-gaussian") == pytest.approx(
        oracle.map(1.0)[0], rel=1e-5
    )


def test_zcdp_conversion_is_never_below_the_gaussian_it_bounds() -> None:
    for sigma in (0.3, 0.5, 1.0, 3.0, 10.0, 100.0):
        for delta in (1e-2, 1e-5, 1e-10):
            loose = epsilon_of(sigma, delta, "discrete-gaussian")
            assert loose >= epsilon_of(sigma, delta, "gaussian")
            textbook = 0.5 / sigma**2 + math.sqrt(2 * math.log(1 / delta)) / sigma
            assert loose <= textbook


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "replace-same-class"])
@pytest.mark.parametrize("records", [1, 4])
def test_the_event_of_a_plan_reads_like_the_claim(adjacency: Adjacency, records: int) -> None:
    plan = [
        Round("pool", (MomentsQuery(2.0, 8, 3), SumQuery(1.0, scale=3.0, times=5))),
        Round("pool", (SumQuery(1.0, scale=1.5, per_class=True),)),
    ]
    sigma = sigma_for(3, 1e-5, "discrete-gaussian") * plan_multiplier(plan, adjacency, records)
    event = dp_event(plan, sigma, adjacency, records)
    ours = epsilon_of(sigma / plan_multiplier(plan, adjacency, records), 1e-5, "discrete-gaussian")
    assert ours == pytest.approx(3, rel=1e-9)
    assert ours <= epsilon_event(event, 1e-5) * (1 + 1e-9)
    assert epsilon_event(event, 1e-5) == pytest.approx(3, rel=1e-4)


def test_events_of_raw_exact_and_empty_plans() -> None:
    exact = MomentsQuery(1.0, 4, 2, mean=0.5, second=0.5, pooled=0, count=0, exact_counts=True)
    for plan in ([Round("pool", raw=True)], plan_of(exact)):
        event = dp_event(plan, 1.0, "add-remove")
        assert isinstance(event, dpa.NonPrivateDpEvent)
        assert epsilon_event(event, 1e-5) == math.inf
    assert epsilon_event(dp_event(plan_of(exact), 3.0, "replace-same-class"), 1e-5) < 4
    assert epsilon_event(dp_event([Round("sum")], 1.0, "add-remove"), 1e-5) == 0
    assert epsilon_event(dp_event(plan_of(SumQuery(1.0)), 0.0, "add-remove"), 1e-5) == math.inf


@pytest.mark.parametrize(("q", "sigma", "times", "by_rdp", "by_pld"), SAMPLED)
def test_subsampled_gaussians(
    q: float, sigma: float, times: int, by_rdp: float, by_pld: float
) -> None:
    one = dpa.PoissonSampledDpEvent(q, dpa.GaussianDpEvent(sigma))
    event = dpa.SelfComposedDpEvent(one, times)
    assert epsilon_event(event, 1e-5, "rdp") == pytest.approx(by_rdp, rel=1e-4)
    assert epsilon_event(event, 1e-5, "pld") == pytest.approx(by_pld, rel=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("q", "sigma", "times", "by_rdp", "by_pld"),
    [
        (0.01, 1, 1, 0.955549, 0.199450),
        (0.1, 1, 100, 7.903850, 7.046603),
        (0.05, 1.5, 500, 4.143776, 3.784698),
    ],
)
def test_more_subsampled_gaussians(
    q: float, sigma: float, times: int, by_rdp: float, by_pld: float
) -> None:
    test_subsampled_gaussians(q, sigma, times, by_rdp, by_pld)


def test_the_accountants_agree_on_one_gaussian() -> None:
    event = dpa.GaussianDpEvent(2.0)
    tight = epsilon_gaussian(2.0, 1e-5)
    assert epsilon_event(event, 1e-5, "pld") == pytest.approx(tight, rel=1e-4)
    assert tight < epsilon_event(event, 1e-5, "rdp") < 1.1 * tight


def test_group_privacy_multiplies_the_distance() -> None:
    sigma = sigma_gaussian(1, 1e-5)
    for records, epsilon in ((2, 2.1547), (10, 14.43), (100, 472.6)):
        joint = plan_multiplier(plan_of(SumQuery(1.0)), "add-remove", records)
        assert epsilon_gaussian(sigma / joint, 1e-5) == pytest.approx(epsilon, rel=2e-4)


def test_replacement_is_read_by_the_sensitivity_not_by_an_accountant() -> None:
    plan = plan_of(SumQuery(1.0))
    sigma = 2.0 / plan_multiplier(plan, "replace-one")  # dp_accounting's RDP would ignore this
    assert epsilon_gaussian(sigma, 1e-5) == pytest.approx(4.37717809568, rel=1e-8)


@pytest.mark.parametrize("epsilon", [9, 10, 12, 20])
def test_the_classic_formula_would_be_unsound_and_is_not_used(epsilon: float) -> None:
    for law in ("gaussian", "discrete-gaussian"):
        assert sigma_for(epsilon, 1e-5, law) > classic(epsilon, 1e-5)
    assert delta_gaussian(classic(epsilon, 1e-5), epsilon) > 1e-5


def test_no_source_file_holds_the_classic_formula_or_an_unsound_accountant() -> None:
    for path in Path(fedgist.__file__).parent.rglob("*.py"):
        text = path.read_text()
        assert not re.search(r"1\.25\s*/|opacus|GaussianAccountant", text), path


@settings(deadline=None, max_examples=60)
@given(
    st.floats(0.05, 60),
    st.floats(-12, -1.5),
    st.sampled_from(["gaussian", "discrete-gaussian"]),
)
def test_sigma_and_epsilon_are_inverse_and_monotone(
    epsilon: float, exponent: float, law: Law
) -> None:
    delta = 10**exponent
    sigma = sigma_for(epsilon, delta, law)
    assert epsilon_of(sigma, delta, law) == pytest.approx(epsilon, rel=1e-8)
    assert epsilon_of(sigma, delta, law) <= epsilon * (1 + 1e-12)  # rounded to the safe side
    assert epsilon_of(sigma * 1.01, delta, law) < epsilon < epsilon_of(sigma / 1.01, delta, law)
    assert sigma_for(epsilon, delta / 2, law) > sigma


@pytest.mark.parametrize("epsilon", [0, -1, math.nan, -math.inf])
def test_epsilon_must_be_positive(epsilon: float) -> None:
    for ask in (lambda: check_budget(epsilon, 1e-5), lambda: sigma_gaussian(epsilon, 1e-5)):
        with pytest.raises(ConfigError, match=r"^epsilon must be positive .* Got"):
            ask()
    with pytest.raises(ConfigError, match="epsilon must be positive"):
        sigma_for(epsilon, 1e-5, "discrete-gaussian")


@pytest.mark.parametrize("delta", [0, -1e-5, 1, 1.5, math.nan, math.inf])
def test_delta_must_lie_between_0_and_1(delta: float) -> None:
    for law in ("gaussian", "discrete-gaussian"):
        with pytest.raises(ConfigError, match=r"^delta must lie strictly between 0 and 1\. Got"):
            sigma_for(1.0, delta, law)


@pytest.mark.parametrize("law", ["gaussian", "discrete-gaussian"])
def test_what_is_unknown_or_extreme_promises_nothing(law: Law) -> None:
    assert epsilon_of(math.nan, 1e-5, law) == math.inf
    assert epsilon_of(0.0, 1e-5, law) == math.inf
    assert epsilon_of(-1.0, 1e-5, law) == math.inf
    assert epsilon_of(math.inf, 1e-5, law) == 0.0
    assert epsilon_of(1e-4, 1e-5, law) > 4e7  # μ²/2; no cap may hide it
    assert sigma_for(math.inf, 1e-5, law) == 0.0
    with pytest.raises(ConfigError, match="multiplier up to"):
        sigma_for(1e-7, 1e-12, law)
    with pytest.raises(ConfigError, match="rho must not be negative"):
        epsilon_zcdp(math.nan, 1e-5)


def test_odds_are_readable() -> None:
    assert "2.72 to 1" in odds(1)
    assert "22,000 to 1" in odds(10)
    assert "10^434 to 1" in odds(1000)
    assert odds(math.inf).startswith("no bound")
