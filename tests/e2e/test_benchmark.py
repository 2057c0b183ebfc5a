"""The benchmark's short cut gives what a whole run gives."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch

from fedgist.config import load
from fedgist.experiment import execute

FOLDER = Path(__file__).parents[2] / "benchmarks"
FILE = FOLDER / "run.py"
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


@pytest.fixture
def scripts(monkeypatch):
    """Import scripts that import each other, as ``python benchmarks/NAME.py`` finds them."""
    names = {p.stem for p in FOLDER.glob("*.py")}
    monkeypatch.syspath_prepend(str(FOLDER))
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]


def case(name, *accuracies, ceiling=None, head="lda"):
    scores = [{"accuracy": a} | ({"ceiling": ceiling} if ceiling else {}) for a in accuracies]
    return {"name": name, "runs": [{"heads": {head: s}} for s in scores]}


def test_points_of_a_sweep_are_its_own(scripts):
    sweeps = scripts("sweeps")
    rows = [
        case("dimension = 512, ε = 10", 0.86, 0.88, ceiling=0.9),
        case("dimension = 32, ε = 10", 0.75),
        case("dimension = 32, ε = 1", 0.5),
        case("qda, images a class = 100, ε = 10", 0.6, head="qda"),
        case("images a class = 100, ε = 10", 0.7),
        case("normalised records, ε = 1", 0.4),
        case("anything else, ε = 10", 0.1),
    ]
    line = sweeps.series(rows, "dimension", "lda", "10")
    assert [(p.x, round(p.mean, 9), p.low, p.high) for p in line] == [
        (32, 75, 75, 75),
        (512, 87, 86, 88),
    ]
    assert [p.x for p in sweeps.series(rows, "dimension", "lda", "10", "ceiling")] == [512]
    for head, mean in (("lda", 70), ("qda", 60)):
        (point,) = sweeps.series(rows, "images a class", head, "10")
        assert point.mean == pytest.approx(mean)
    assert sweeps.normalised(rows, "lda", "1").mean == 40
    assert sweeps.normalised(rows, "lda", "10") is None
    assert sweeps.sweep(rows, "dimension", "lda").splitlines()[2:] == [
        "| no privacy | 90.0 |",
        "| ε = 10 | 75.0 | 87 |",
        "| ε = 1 | 50.0 |",
    ]


def test_every_case_of_the_sweep_files_is_drawn(scripts):
    sweeps, plot = scripts("sweeps"), scripts("plot")
    drawn = {(p.what, p.head) for line in plot.PANELS for p in line}
    for name in sweeps.FILES:
        spec = tomllib.loads((FOLDER / f"{name}.toml").read_text())
        for c in spec["accuracy"]:
            load(None, c["set"])  # its keys exist
            m = sweeps.CASE.fullmatch(c["name"])
            if m is None:
                assert sweeps.NORMALISED.fullmatch(c["name"])
            else:
                assert (m["what"], m["head"] or "lda") in drawn
                assert m["eps"] in plot.COLOURS


def test_a_plot_is_the_same_bytes_with_letters_as_paths(scripts, tmp_path):
    plot = scripts("plot")
    rows = [case(f"dimension = {d}, ε = 1", 0.7, 0.8) for d in (32, 512)]
    first = plot.svg(rows)
    assert first == plot.svg(rows)
    assert b"<text" not in first and b"<dc:date>" not in first
    assert first != plot.svg(rows[:1])


def test_seconds_are_measured_for_client_and_server(scripts, tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "set_num_threads", lambda n: None)
    spec = {
        "name": "seconds",
        "repeats": 1,
        "base": {
            "data.source": "fashion-mini",
            "data.limit": 200,
            "data.clients": 1,
            "method.heads": ["lda"],
            "method.features": "scattering:32",
        },
        "case": [
            {"name": "lda", "set": []},
            {"name": "logistic", "set": ["method={name='logistic', features='scattering:32'}"]},
        ],
    }
    file, out = tmp_path / "spec.toml", tmp_path / "out.json"
    file.write_text(tomli_w.dumps(spec))
    monkeypatch.setattr(sys, "argv", ["seconds.py", str(file), "--out", str(out)])
    assert scripts("seconds").main() == 0
    lda, logistic = json.loads(out.read_text())["cases"]
    for row in (lda, logistic):
        assert row["images"] == 200
        assert row["encode"] > 0 and row["client"] > 0 and row["server"] > 0
        assert row["client_over_encode"] == pytest.approx(row["client"] / row["encode"])
    assert lda["rounds"] == 1 < logistic["rounds"]
    assert lda["bytes_up"] < logistic["bytes_up"]


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.toml")), ids=lambda p: p.stem)
def test_every_case_of_every_file_is_a_run(benchmark, path):
    """A file that nobody runs for months still names options that exist."""
    spec = tomllib.loads(path.read_text())
    base = benchmark.settings(spec.get("base", {}))
    for case in spec.get("accuracy", []):
        load(None, [*base, *case["set"]])
