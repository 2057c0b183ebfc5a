"""The benchmark's short cut gives what a whole run gives."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

from fedgist.config import load
from fedgist.experiment import execute

FILE = Path(__file__).parents[2] / "benchmarks" / "run.py"
SETTINGS = [
    "data.source=fashion-mini",
    "data.limit=200",
    "data.clients=3",
    "method.features=scattering:32",
    "method.heads=['lda','decode']",
    "method.synthetic_size=60",
    "method.recipe.steps=3",
    "method.recipe.width=8",
    "evaluation.membership=false",
    "evaluation.codec_consistent=false",
]


@pytest.fixture(scope="module")
def benchmark():
    spec = importlib.util.spec_from_file_location("benchmark_run", FILE)
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmark_run"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["benchmark_run"]


def test_kept_sums_give_what_a_run_gives(benchmark):
    sums = benchmark.Sums()
    for settings in (["seed=1"], ["seed=1", "privacy.epsilon=1"]):
        run = load(None, [*SETTINGS, *settings])
        whole, kept = execute(run).report, sums.report(run)
        assert kept["heads"] == whole["heads"]
        assert kept["bytes_up"] == whole["bytes_up"]


def test_sums_of_other_encoders_are_not_taken(benchmark):
    sums = benchmark.Sums()
    heads = []
    for features in ("scattering:32", "scattering:64"):
        run = load(None, [*SETTINGS, f"method.features={features}", "method.heads=['lda']"])
        heads.append(sums.report(run)["heads"]["lda"])
    again = [*SETTINGS, "method.features=scattering:32", "method.heads=['lda']"]
    assert sums.report(load(None, again))["heads"]["lda"] == heads[0]
    other = [*SETTINGS, "method.features=", "method.whitening=0.5", "method.heads=['qda']"]
    plain = [*SETTINGS, "method.features=", "method.heads=['qda']"]
    a, b = (sums.report(load(None, s))["heads"]["qda"] for s in (other, plain))
    assert a != b
