"""Accuracy at other ε from the sums of one run, and how the budget is divided."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from fedgist.config import load
from fedgist.evaluation import EPSILONS, _renoised, epsilon_curve, exact_outcome
from fedgist.experiment import execute
from fedgist.heads.linear import Coded
from fedgist.privacy.claim import calibrate
from fedgist.privacy.noise import noise_scales
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.report.record import read_json
from fedgist.run import budget, drive
from fedgist.setup import open_exchange, open_sites, prepare_run
from fedgist.setup import test_images as unused_images
from fedgist.train import evaluate
from fedgist.types import Round

SETS = [
    "data.limit=400",
    "data.clients=2",
    "data.partition=iid",
    "method.features=scattering:32",
    "method.heads=['lda','qda']",
    "privacy.epsilon=8",
]

pytestmark = pytest.mark.usefixtures("one_thread")


class Ran:
    """A run with its exact sums at hand."""

    def __init__(self, *sets):
        self.made = prepare_run(load(None, [*SETS, *sets]))
        sites, self.test = open_sites(self.made), unused_images(self.made)
        self.exchange = open_exchange(self.made, sites, observe=True)
        plan = self.made.plan.rounds
        seed = self.made.run.seed
        self.outcome = drive(self.made.method, self.made.task, self.exchange, plan, seed)
        self.exact = exact_outcome(self.made, self.exchange)

    def curve(self):
        return epsilon_curve(self.made, self.exchange, self.outcome, self.exact, self.test)


@pytest.fixture(scope="module")
def ran():
    return Ran()


def test_the_curve_of_a_run(ran):
    curve = ran.curve()
    assert [row["epsilon"] for row in curve["rows"]] == sorted([*EPSILONS, 8.0])
    assert [row["own"] for row in curve["rows"]].index(True) == 3
    assert curve["images"] == curve["of"] == 1000
    for row in curve["rows"]:
        terms = replace(ran.made.run.privacy, epsilon=row["epsilon"])
        assert row["sigma"] == calibrate(ran.made.plan.rounds, terms)
        assert set(row["heads"]) == {"lda", "qda"}
    sigmas = [row["sigma"] for row in curve["rows"]]
    assert sigmas == sorted(sigmas, reverse=True)
    own = curve["rows"][3]["heads"]  # the run's own heads, on the same images
    for name, classifier in ran.outcome.classifiers.items():
        assert own[name] == pytest.approx(evaluate(classifier, ran.test).accuracy)
        exact = ran.exact.classifiers[name]
        assert curve["without"][name] == pytest.approx(evaluate(exact, ran.test).accuracy)
    first, last = (curve["rows"][i]["heads"] for i in (0, -1))
    assert first["qda"] < last["qda"] and abs(last["qda"] - curve["without"]["qda"]) < 0.1


def test_noise_is_that_of_the_other_epsilon(ran):
    """Bias at the run's own σ, or none at all, must not pass for another ε's."""
    terms = replace(ran.made.run.privacy, epsilon=1.0)
    sigma = calibrate(ran.made.plan.rounds, terms)
    seen = {}

    class Spy:
        def ceiling(self, task, merged, rng):
            seen["merged"] = merged
            return ran.exact

    _renoised(replace(ran.made, method=Spy()), ran.exchange, sigma, 1.0)
    query = next(q for q in ran.made.plan.rounds[0].queries if q.name == "codes")
    merged = seen["merged"]
    assert merged.sigma == sigma  # trust is central
    noise = merged.tensors["codes.mean"] - ran.exchange.exact["codes.mean"]
    ratio = float(noise.double().std()) / noise_scales(query, sigma)["mean"][0]
    assert 0.92 < ratio < 1.08  # 1,280 numbers: a deviation of 2 %
    local = Ran("privacy.trust=local")
    _renoised(replace(local.made, method=Spy()), local.exchange, sigma, 1.0)
    assert seen["merged"].sigma == pytest.approx(sigma * math.sqrt(2))


def test_many_test_images_are_cut(ran, monkeypatch):
    monkeypatch.setattr("fedgist.evaluation.JUDGED", 100)
    curve = ran.curve()
    assert (curve["images"], curve["of"]) == (100, 1000)
    assert ran.curve() == curve  # every draw comes from the seed


def test_where_there_is_no_curve(ran):
    assert Ran("privacy.epsilon=inf").curve() is None
    assert epsilon_curve(ran.made, ran.exchange, ran.outcome, None, ran.test) is None
    assert epsilon_curve(ran.made, ran.exchange, ran.outcome, ran.exact, None) is None
    exact_counts = Ran("method.parity=paper", "method.heads=['lda']")
    assert exact_counts.curve() is None  # no ε holds for it
    two = replace(ran.made, plan=replace(ran.made.plan, rounds=ran.made.plan.rounds * 2))
    assert epsilon_curve(two, ran.exchange, ran.outcome, ran.exact, ran.test) is None


@pytest.mark.parametrize(
    ("more", "there"),
    [
        ([], True),
        (["evaluation.curve=false"], False),
        (["evaluation.ceiling=false"], False),
        (["privacy.noise=system"], False),
    ],
)
def test_the_report_holds_it(tmp_path, more, there):
    report = execute(load(None, [*SETS, "method.heads=['lda']", *more]), tmp_path).report
    assert (report["curve"] is not None) is there
    assert ("curve" in report["timings"]) is there
    page = (tmp_path / "report.html").read_text()
    assert ("What another ε would have given" in page) is there
    assert read_json(tmp_path / "report.json")["limit"]["bound"] == "gaussian"
    assert sum(row["share"] for row in report["budget"]) == pytest.approx(1)
    card = (tmp_path / "privacy-card.json").read_text()
    assert "curve" not in card


def test_images_are_encoded_once_for_each_space(ran, monkeypatch):
    coded, calls = Coded(ran.test), []
    kind = type(ran.made.method.space)
    before = kind.clipped
    monkeypatch.setattr(kind, "clipped", lambda self, x: calls.append(len(x)) or before(self, x))
    scores = [coded.scores(c) for c in ran.exact.classifiers.values()]
    assert sum(calls) == 2 * len(ran.test)  # features for one head, codes for the other
    again = [coded.scores(c) for c in ran.outcome.classifiers.values()]
    assert sum(calls) == 2 * len(ran.test) and len(again) == 2
    monkeypatch.undo()
    direct = [
        torch.cat([c.predict(x) for x, _ in ran.test.batches()])
        for c in ran.exact.classifiers.values()
    ]
    assert all(torch.allclose(a, b) for a, b in zip(scores, direct, strict=True))


# The budget


def test_shares_are_what_a_record_at_the_radius_shows():
    """Its squared distance, block by block over the noise, is the whole budget's 1/σ²."""
    first = MomentsQuery(clip=1.0, dim=4, classes=3, scale=1.3, name="a")
    second = MomentsQuery(
        clip=2.0, dim=8, classes=3, mean=0.7, second=0, pooled=0.28, count=0.02, scale=0.9, name="b"
    )
    rows = budget([Round("sum", (first, second))])
    sigma, found = 0.7, {}
    for q in (first, second):
        norms = {"mean": q.levels, "second": q.levels**2, "pooled": q.levels**2, "count": 1}
        for block, (s, _) in noise_scales(q, sigma).items():
            found[q.name, block] = (norms[block] / s) ** 2
    total = sum(found.values())
    assert {(r["view"], r["block"]): r["share"] for r in rows} == pytest.approx(
        {k: v / total for k, v in found.items()}
    )
    assert {r["round"] for r in rows} == {1}


def test_the_budget_of_rounds_and_of_what_has_none():
    q = SumQuery(1.0, times=2)
    once = replace(q, times=1, scale=2.0)
    rows = budget([Round("sum", (q,)), Round("sum"), Round("sum", (once,))])
    assert [(r["round"], r["block"]) for r in rows] == [(1, "rows"), (3, "rows")]
    assert [r["share"] for r in rows] == pytest.approx([8 / 9, 1 / 9])
    assert budget([]) == budget([Round("sum")]) == []
    assert budget([Round("sum", (q,)), Round("pool", raw=True)]) == []
    rated = [Round("sum", (replace(q, rates=(r,)),)) for r in (0.1, 0.2)]
    assert budget(rated) == [] and len(budget(rated[:1] * 3)) == 3
