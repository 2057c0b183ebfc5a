"""What is promised: calibration, readings, trust, and what the claim says beside ε."""

import json
import math
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy.accounting import epsilon_of, sensitivity, sigma_for
from fedgist.privacy.claim import Claim, Privacy, calibrate, claim_of, summed_sigma
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Adjacency, Round

JOINT = MomentsQuery(3.0, 8, 10)
EXACT = MomentsQuery(3.0, 8, 10, 0.5, 0.3, 0.2, 0.0, exact_counts=True)
PAPER = MomentsQuery(3.0, 8, 10, 0.5, 0.5, 0.0, 0.0, exact_counts=True, basic=True)
ADJACENCIES = ("add-remove", "replace-one", "replace-same-class")


def made(*queries: Any, raw: bool = False, **terms: Any) -> tuple[list[Round], Privacy, Claim]:
    plan = [Round("sum" if len(queries) < 2 else "pool", queries, raw=raw)]
    privacy = Privacy(**terms)
    sigma = calibrate(plan, privacy)
    return plan, privacy, claim_of(plan, privacy, sigma, track="no public data")


@pytest.mark.parametrize("adjacency", ADJACENCIES)
@pytest.mark.parametrize("epsilon", [0.5, 1.0, 3.0, 10.0])
@pytest.mark.parametrize("records", [1, 5])
def test_the_claim_is_what_was_asked_for(
    adjacency: Adjacency, epsilon: float, records: int
) -> None:
    unit = "image" if records == 1 else "person"
    _, _, claim = made(JOINT, epsilon=epsilon, adjacency=adjacency, unit=unit, records=records)
    assert claim.epsilon == pytest.approx(epsilon, rel=1e-9)
    assert claim.epsilon <= epsilon * (1 + 1e-12)
    assert claim.readings[adjacency] == claim.epsilon
    assert claim.law == "discrete-gaussian" and "zCDP" in claim.accountant
    joint = records * sensitivity(JOINT, adjacency)
    assert claim.sensitivity == pytest.approx(joint)
    assert claim.sigma == pytest.approx(sigma_for(epsilon, 1e-5, "discrete-gaussian") * joint)


@settings(deadline=None, max_examples=25)
@given(st.floats(0.1, 30), st.integers(1, 4), st.sampled_from(ADJACENCIES), st.floats(0.3, 5))
def test_any_plan_is_calibrated_to_its_budget(
    epsilon: float, times: int, adjacency: Adjacency, scale: float
) -> None:
    queries = (JOINT, SumQuery(1.0, scale=scale, times=times), SumQuery(2.0, per_class=True))
    _, _, claim = made(*queries, epsilon=epsilon, adjacency=adjacency)
    assert claim.epsilon == pytest.approx(epsilon, rel=1e-9)


def test_replacement_readings_of_an_add_remove_release() -> None:
    _, _, claim = made(JOINT, epsilon=10)
    z = claim.sigma
    assert claim.readings["add-remove"] == pytest.approx(10)
    by_class = math.sqrt(2 * 0.48) + 0.5 / math.sqrt(2 * 0.48)
    assert claim.readings["replace-same-class"] == pytest.approx(
        epsilon_of(z / by_class, 1e-5, "discrete-gaussian")
    )
    assert claim.readings["replace-one"] > 1.5 * claim.readings["add-remove"]


@pytest.mark.parametrize(
    ("nominal", "add_remove", "same_class", "cross_class"),
    [(10, 7.27, 11.94, 11.1), (1, 0.70, 1.084, 1.02)],
)
def test_readings_of_the_published_mechanism(
    nominal: float, add_remove: float, same_class: float, cross_class: float
) -> None:
    _, _, claim = made(PAPER, epsilon=nominal, adjacency="replace-same-class")
    assert claim.epsilon == claim.readings["replace-same-class"]
    assert claim.epsilon == pytest.approx(same_class, abs=5e-3)
    assert claim.epsilon > claim.nominal  # it does not keep what it says
    assert claim.readings["add-remove"] == claim.readings["replace-one"] == math.inf
    assert epsilon_of(claim.sigma, 1e-5, "gaussian") == pytest.approx(add_remove, abs=5e-3)
    crossed = epsilon_of(claim.sigma / math.sqrt(2), 1e-5, "gaussian")
    assert crossed == pytest.approx(cross_class, abs=5e-3)
    (note,) = [n for n in claim.notes if "published mechanism" in n]
    assert f"nominal ε = {nominal:g}" in note and f"add-remove reads {add_remove:.2f}" in note
    assert "exact counts" in claim.mechanism and claim.law == "gaussian"
    _, _, default = made(PAPER, epsilon=nominal)
    assert default.epsilon == math.inf and "ε = ∞" in default.line()


@pytest.mark.parametrize(("epsilon", "saved"), [(10, 0.23), (1, 0.28)])
def test_a_joint_release_saves_noise_against_the_published_split(
    epsilon: float, saved: float
) -> None:
    _, _, paper = made(PAPER, epsilon=epsilon, adjacency="replace-same-class")
    joint = sigma_for(epsilon, 1e-5, "gaussian")
    assert 1 - joint / paper.sigma == pytest.approx(saved, abs=5e-3)


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one"])
def test_exact_counts_are_not_private(adjacency: Adjacency) -> None:
    with pytest.raises(
        PrivacyError, match=rf"^the plan must be private under {adjacency} for .*inf"
    ):
        made(EXACT, epsilon=3, adjacency=adjacency)
    plan = [Round("sum", (EXACT,))]
    claim = claim_of(plan, Privacy(epsilon=3, adjacency=adjacency), 5.0, track="t")
    assert claim.epsilon == math.inf and claim.readings["replace-same-class"] < math.inf
    _, _, public = made(EXACT, epsilon=3, adjacency="replace-same-class")
    assert public.epsilon == pytest.approx(3)


def test_raw_images_are_not_private() -> None:
    with pytest.raises(PrivacyError, match="releases something without noise"):
        made(JOINT, raw=True, epsilon=3)
    _, _, claim = made(raw=True, epsilon=math.inf)
    assert claim.epsilon == math.inf and claim.sigma == 0
    assert set(claim.readings.values()) == {math.inf}
    assert claim.noise_by == "nobody" and claim.record()["odds"].startswith("no bound")


def test_infinite_epsilon_is_printed_as_such() -> None:
    _, _, claim = made(JOINT, epsilon=math.inf)
    assert claim.sigma == 0 and claim.epsilon == math.inf and "ε = ∞" in claim.line()


def test_a_plan_without_queries_costs_nothing() -> None:
    _, _, claim = made(epsilon=3)
    assert claim.epsilon == 0 and claim.mechanism == "none"


@pytest.mark.parametrize(
    ("trust", "said"),
    [
        ("local", "each client, in full"),
        ("central", "the server, which sees the exact sums"),
        ("distributed", "each client, a share (up to 2 may be missing)"),
    ],
)
def test_the_claim_says_who_adds_noise(trust: str, said: str) -> None:
    _, privacy, claim = made(JOINT, epsilon=3, trust=trust, missing=2)
    assert claim.trust == trust and claim.noise_by == said and said in claim.line()
    assert claim.epsilon == pytest.approx(3)  # one multiplier, whoever adds it
    for parties in (3, 10):
        grown = {
            "local": math.sqrt(parties),
            "central": 1.0,
            "distributed": math.sqrt(parties / (parties - 2)),
        }[trust]
        assert summed_sigma(privacy, claim.sigma, parties) == pytest.approx(claim.sigma * grown)
    assert summed_sigma(privacy, claim.sigma, 1) == pytest.approx(claim.sigma)


def test_more_missing_clients_than_there_are() -> None:
    privacy = Privacy(trust="distributed", missing=3)
    for parties in (2, 3):
        with pytest.raises(ConfigError, match=f"below the number of clients, {parties}. Got 3"):
            summed_sigma(privacy, 1.0, parties)


def test_notes() -> None:
    _, _, seeded = made(JOINT, epsilon=3)
    assert seeded.seeded and any("from a seed" in n for n in seeded.notes)
    _, _, real = made(JOINT, epsilon=3, noise="system")
    assert not real.seeded and real.notes == ()
    _, _, person = made(JOINT, epsilon=3, noise="system", unit="person", records=4)
    assert any("one client only" in n for n in person.notes)
    assert "person (at most 4 images)" in person.line()
    extra = claim_of([Round("sum", (JOINT,))], Privacy(), 1.0, track="t", notes=["mine"])
    assert extra.notes[0] == "mine"


def test_a_claim_states_what_it_depends_on() -> None:
    _, _, claim = made(JOINT, epsilon=3, noise="system")
    for part in ("ε = 3", "δ = 1e-05", "one image", "add-remove", "the server", "no public data"):
        assert part in claim.line()
    record = claim.record()
    assert json.loads(json.dumps(record))["readings"] == claim.readings
    assert {
        "epsilon",
        "delta",
        "unit",
        "adjacency",
        "trust",
        "law",
        "accountant",
        "sigma",
        "sensitivity",
        "readings",
        "seeded",
        "odds",
        "line",
    } <= record.keys()


@pytest.mark.parametrize(
    ("terms", "message"),
    [
        ({"epsilon": 0}, "epsilon must be positive .* Got 0"),
        ({"epsilon": -2}, "epsilon must be positive .* Got -2"),
        ({"epsilon": math.nan}, "epsilon must be positive .* Got nan"),
        ({"delta": 0}, "delta must lie strictly between 0 and 1. Got 0"),
        ({"delta": 1}, "delta must lie strictly between 0 and 1. Got 1"),
        ({"delta": math.nan}, "delta must lie strictly between 0 and 1. Got nan"),
        ({"adjacency": "replace"}, "privacy.adjacency must be one of add-remove, .* Got 'replace'"),
        ({"unit": "patient"}, "privacy.unit must be one of image, person, client. Got 'patient'"),
        ({"trust": "none"}, "privacy.trust must be one of local, central, .* Got 'none'"),
        ({"noise": "System"}, "privacy.noise must be one of system, seeded. Got 'System'"),
        ({"unit": "person", "records": 0}, "privacy.records must be at least 1. Got 0"),
        ({"records": 3}, "privacy.records must be 1 for unit 'image'. Got 3: set unit to"),
        ({"missing": -1}, "privacy.missing must not be negative. Got -1"),
    ],
)
def test_bad_terms_are_refused(terms: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Privacy(**terms)
