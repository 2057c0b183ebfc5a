"""Committed benchmark files run, their short cut is exact, scripts read their results."""

from __future__ import annotations

import json
import sys
import tomllib
from pathlib import Path

import pytest
import tomli_w
import torch
from typer.testing import CliRunner

from fedgist.bench import Sums, as_settings, load_suite, planned
from fedgist.cli import app
from fedgist.config import load
from fedgist.experiment import execute

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = Path(__file__).parents[2] / "benchmarks"
FILES = sorted(FOLDER.glob("*.toml"))
# What other scripts run: benchmarks/audits.py and benchmarks/seconds.py.
OTHERS = {"audit_fashion", "seconds"}
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
    "evaluation.curve=false",
]


def test_kept_sums_give_what_a_run_gives():
    sums = Sums()
    for settings in (["seed=1"], ["seed=1", "privacy.epsilon=1"]):
        run = load(None, [*SETTINGS, *settings])
        whole, kept = execute(run).report, sums.report(run)
        assert kept["heads"] == whole["heads"]
        assert kept["bytes_up"] == whole["bytes_up"]


def test_sums_of_other_encoders_are_not_taken():
    sums = Sums()
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


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_every_case_of_every_file_is_a_run(path):
    """A file that nobody runs for months still names options that exist."""
    if path.stem not in OTHERS:
        todo = planned(load_suite(path))
        assert todo and all(p.run is not None for p in todo)
        assert planned(load_suite(path), quick=True)
        return
    spec = tomllib.loads(path.read_text())
    base = as_settings(spec.get("base", {}))
    for case in spec["case"]:
        load(None, [*base, *case["set"]])


@pytest.mark.slow
@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in OTHERS], ids=lambda p: p.stem)
def test_a_slice_of_every_file_runs(path, tmp_path):
    """The first case; ``fedgist bench FILE --quick`` runs all."""
    first = load_suite(path).cases[0].name
    words = ["bench", str(path), "--quick", "--only", first, "--out", str(tmp_path), "--json"]
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, done.stderr
    (row,) = json.loads(done.stdout)
    assert row["case"] == first and row["mean"]
    (line,) = (tmp_path / f"{path.stem}-quick.jsonl").read_text().splitlines()
    assert json.loads(line)["config"]["data"]["source"] == "fashion-mini"
