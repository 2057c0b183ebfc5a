"""Benchmark files: what they may say, what is run, what is kept, what is told of it."""

from __future__ import annotations

import importlib
import json
import math
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from fedgist import bench
from fedgist.bench import Lines, load_suite, planned, read_lines, run_suite, unmet
from fedgist.bench import measure as measure_module
from fedgist.bench import suite as suite_module
from fedgist.bench.report import axes_of, curves, figure, markdown, records
from fedgist.cli import app
from fedgist.cli.bench import Teller
from fedgist.errors import ConfigError, DataError
from fedgist.report.record import to_json

BASE = """
name = "toy"
title = "A toy"
seeds = [0, 1]
[base]
data.source = "fashion-mini"
method.heads = ["lda"]
"""
TWO = BASE + '[[case]]\nname = "a"\n[[case]]\nname = "b"\nset = ["privacy.epsilon=1"]\n'


@pytest.fixture
def write(tmp_path):
    def written(text):
        path = tmp_path / "toy.toml"
        path.write_text(text)
        return path

    return written


def report_of(run, accuracy=0.5):
    return {
        "heads": {"lda": {"accuracy": accuracy, "per_class": (accuracy,) * 2, "ceiling": 0.9}},
        "claim": {"epsilon": run.privacy.epsilon, "line": f"ε = {run.privacy.epsilon:g}"},
        "membership": None,
        "timings": {"total": 1.0},
        "details": {"seconds": {"heads": 0.25, "train": 0.5}},
        "bytes_up": 2048,
        "bytes_down": 0,
        "clients": [{"seconds": 1.0}, {"seconds": None}, {"seconds": 2.0}],
    }


@pytest.fixture
def ran(monkeypatch):
    """Runs take no time and are counted; ``fail`` makes those of an ε fail, ``raises`` how."""
    seen = SimpleNamespace(runs=[], fail=None, raises=DataError("images must be there. Got none"))

    def execute(run):
        seen.runs.append((run.privacy.epsilon, run.seed))
        if run.privacy.epsilon == seen.fail:
            raise seen.raises
        return SimpleNamespace(report=report_of(run, 0.5 + 0.1 * run.seed))

    monkeypatch.setattr(suite_module, "execute", execute)
    return seen


def invoke(*words):
    return CliRunner().invoke(app, ["bench", *map(str, words)])


# What a file may say


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nam = 'x'\n", "unknown key nam. Did you mean 'name'"),
        (TWO.replace("[base]", "sweeps = 1\n[base]"), "unknown key sweeps. Did you mean 'sweep'"),
        (TWO + "sets = []\n", "case 2 'b': unknown key sets. Did you mean 'set'"),
        (TWO.replace('"b"', '"a"'), "names of cases must differ. Got 'a' twice"),
        (BASE, "must have a [[case]] or a [sweep]"),
        (TWO + '[[accuracy]]\nname = "c"\n', "[[case]] or [[accuracy]]. Got both"),
        (BASE + "[[case]]\nset = []\n", "case 1: name must be there"),
        (TWO.replace("[0, 1]", "[]"), "seeds is wrong"),
        (TWO.replace('"toy"', '"a/b"'), "name is wrong"),
        (TWO + "expect.lda = [0.1]\n", "case 2 'b': expect.lda.1"),
        (TWO + "[sweep]\nseed = [1, 2]\n", "seed must be given as seeds"),
        (TWO + "[sweep]\n'data.clients' = 3\n", "sweep.data.clients: values is wrong"),
        (TWO + "[sweep]\n'data.clients' = []\n", "sweep.data.clients: values is wrong"),
        (
            TWO + "[sweep]\n'data.clients' = {values = [1], lable = 'x'}\n",
            "unknown key lable. Did you mean 'label'",
        ),
        (
            TWO + "[sweep]\n'data.clients' = {values=[1], label='x'}\n"
            "'data.limit' = {values=[1], label='x'}\n",
            "sweep: labels must differ",
        ),
    ],
)
def test_what_is_wrong_in_a_file_is_named(write, text, message):
    with pytest.raises(ConfigError) as e:
        load_suite(write(text))
    assert message in str(e.value)


def test_a_wrong_setting_names_its_case_before_anything_runs(write, ran):
    suite = load_suite(write(TWO.replace("privacy.epsilon=1", "privacy.epsilom=1")))
    with pytest.raises(ConfigError, match=r"case 'b': unknown key privacy\.epsilom"):
        planned(suite)
    assert ran.runs == []


def test_cases_may_be_called_accuracy_and_other_parts_are_passed_over(write):
    same = TWO.replace("[[case]]", "[[accuracy]]") + "[cost]\nclients = [1]\n"
    assert load_suite(write(same)).cases == load_suite(write(TWO)).cases


def test_a_sweep_is_taken_with_every_case(write):
    text = TWO + (
        "[sweep]\n'data.clients' = [1, 10]\ndata.partition = {label='split', values=['iid']}\n"
        "'privacy.epsilon' = {label='ε', values=[0.5, inf]}\n"
    )
    cases = load_suite(write(text)).cases
    names = [
        f"{stem}, data.clients = {n}, split = iid, ε = {e}"
        for stem in "ab"
        for n in (1, 10)
        for e in (0.5, math.inf)
    ]
    # tables come after dotted keys only where they are written so: the order is the file's
    assert [c.name for c in cases] == names
    assert cases[3].set == ("data.clients=10", 'data.partition="iid"', "privacy.epsilon=inf")
    assert cases[3].sweep == {"data.clients": 10, "split": "iid", "ε": math.inf}
    run = planned(load_suite(write(text)))[-1].run
    assert (run.data.clients, run.data.partition) == (10, "iid")
    assert run.privacy.epsilon == math.inf  # the sweep is laid over the case, which has 1


def test_a_sweep_alone_is_a_benchmark(write):
    text = BASE + "[sweep]\n'method.name' = ['fedkt_csd']\n'data.clients' = [2]\n"
    (case,) = load_suite(write(text)).cases
    assert case.name == "method.name = fedkt_csd, data.clients = 2"


def test_equal_runs_have_equal_hashes(write):
    suite = load_suite(write(TWO))
    first, again = planned(suite), planned(suite)
    assert [p.hash for p in first] == [p.hash for p in again]
    assert len({p.hash for p in first}) == 4
    # however it is spelled: the default, and a number as text
    spelled = TWO.replace('name = "a"\n', 'name = "a"\nset = ["privacy.epsilon=1.0"]\n')
    a, _, b, _ = planned(load_suite(write(spelled)))
    assert a.hash == b.hash


def test_only_takes_an_exact_name_before_a_part_of_one(write):
    text = BASE + "".join(f'[[case]]\nname = "{n}"\n' for n in ("ε = 1", "ε = 10"))
    suite = load_suite(write(text))
    assert {p.case.name for p in planned(suite, only="ε = 1")} == {"ε = 1"}
    assert {p.case.name for p in planned(suite, only="= 1")} == {"ε = 1", "ε = 10"}
    with pytest.raises(ConfigError, match="--only"):
        planned(suite, only="x")


def test_quick_runs_are_small_and_of_the_first_seed(write):
    text = TWO.replace('name = "a"', 'name = "a"\nskip_quick = true') + (
        '[[case]]\nname = "c"\nonly_quick = true\n'
        "set = ['method.synthetic_size=9000', 'data.partition=natural', 'data.clients=3']\n"
    )
    suite = load_suite(write(text))
    assert {p.case.name for p in planned(suite)} == {"a", "b"}
    quick = planned(suite, quick=True)
    assert [(p.case.name, p.seed) for p in quick] == [("b", 0), ("c", 0)]
    run = quick[1].run
    assert (run.data.source, run.data.limit, run.data.clients) == ("fashion-mini", 200, 3)
    assert run.data.partition == "iid"
    assert run.method["synthetic_size"] == 60 and run.method["recipe"]["steps"] == 3
    assert quick[0].run.privacy.epsilon == 1
    assert quick[0].run.method["encoder"] == "pca"


# What is kept


def test_what_has_a_result_is_not_run_again(write, ran, tmp_path):
    todo, path = planned(load_suite(write(TWO))), tmp_path / "r" / "toy.jsonl"
    with Lines(path) as lines:
        first = run_suite(todo[:3], lines)
    assert len(ran.runs) == 3
    with Lines(path) as lines:
        steps = []
        found = run_suite(todo, lines, tell=steps.append)
    assert len(ran.runs) == 4 and [s.kept for s in steps] == [True, True, True, False]
    assert found[:3] == first
    assert read_lines(path) == found
    with Lines(path) as lines:
        run_suite(todo, lines, again=True)
    assert len(ran.runs) == 8 and len(read_lines(path)) == 8
    assert len(bench.by_case(read_lines(path))) == 2


def test_a_changed_setting_is_another_run(write, ran, tmp_path):
    path = tmp_path / "toy.jsonl"
    for epsilon, count in (("1", 4), ("2", 6), ("1", 6)):
        todo = planned(load_suite(write(TWO.replace("epsilon=1", f"epsilon={epsilon}"))))
        with Lines(path) as lines:
            run_suite(todo, lines)
        assert len(ran.runs) == count
        # the report speaks of the settings that were asked for last
        row = bench.by_case(read_lines(path))[1]
        assert row["set"] == [f"privacy.epsilon={epsilon}"]


def test_the_same_run_under_another_name_is_not_run_again(write, ran, tmp_path):
    path = tmp_path / "toy.jsonl"
    for text in (TWO, TWO.replace('"b"', '"new"')):
        with Lines(path) as lines:
            run_suite(planned(load_suite(write(text))), lines)
    assert len(ran.runs) == 4
    assert [r["case"] for r in read_lines(path)] == ["a", "a", "b", "b", "new", "new"]


def test_a_line_that_was_cut_short_is_overwritten(write, ran, tmp_path):
    todo, path = planned(load_suite(write(TWO))), tmp_path / "toy.jsonl"
    with Lines(path) as lines:
        found = run_suite(todo, lines)
    whole = path.read_bytes()
    cut = whole[: whole.rindex(b'"case"')]
    for tail in (cut, whole[:-1]):  # even where all but the end of the line is there
        path.write_bytes(tail)
        ran.runs.clear()
        assert len(read_lines(path)) == 3
        with Lines(path) as lines:
            run_suite(todo, lines)
        assert ran.runs == [(1.0, 1)]
        assert [(r["case"], r["seed"]) for r in read_lines(path)] == [
            (r["case"], r["seed"]) for r in found
        ]


def test_a_broken_line_in_the_middle_is_an_error(tmp_path):
    path = tmp_path / "toy.jsonl"
    good = json.dumps({"hash": "0", "case": "a", "seed": 0})
    for bad in ("{", "[]", "{}"):
        path.write_text(f"{good}\n{bad}\n{good}\n")
        with pytest.raises(DataError, match="line 2"):
            read_lines(path)


def test_one_process_writes_at_a_time(tmp_path):
    path = tmp_path / "toy.jsonl"
    with Lines(path), pytest.raises(ConfigError, match="one process"):
        Lines(path)
    Lines(path).__exit__()


def test_lines_are_on_disk_before_the_next_run(write, ran, tmp_path, monkeypatch):
    synced = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(len(ran.runs)))
    with Lines(tmp_path / "toy.jsonl") as lines:
        run_suite(planned(load_suite(write(TWO))), lines)
    assert synced == [1, 2, 3, 4]


def test_a_line_says_all_of_its_run(write, ran, tmp_path):
    text = TWO.replace("epsilon=1", "epsilon=inf")
    with Lines(tmp_path / "toy.jsonl") as lines:
        run_suite(planned(load_suite(write(text))), lines)
    line = read_lines(tmp_path / "toy.jsonl")[2]
    assert (line["case"], line["seed"], line["set"]) == ("b", 0, ["privacy.epsilon=inf"])
    assert line["claim"]["epsilon"] == math.inf == line["config"]["privacy"]["epsilon"]
    assert line["config"]["method"]["name"] == "fedkt_csd"
    assert line["heads"]["lda"]["per_class"] == [0.5, 0.5]
    assert line["client_seconds"] == 3.0 and line["bytes_up"] == 2048
    assert line["peak_memory_mib"] > 1 and line["versions"]["torch"] == torch.__version__
    assert {"commit", "created", "device", "threads", "exposure", "rounds"} <= line.keys()
    assert '"inf"' in (tmp_path / "toy.jsonl").read_text()  # strict JSON


def test_a_failure_is_noted_and_the_rest_goes_on(write, ran, tmp_path):
    todo, path = planned(load_suite(write(TWO))), tmp_path / "toy.jsonl"
    ran.fail = 10.0
    with Lines(path) as lines:
        found = run_suite(todo, lines)
    assert ["error" in r for r in found] == [True, True, False, False]
    assert unmet(todo, found)[0] == "a, seed 0: DataError: images must be there. Got none"
    assert [row["name"] for row in bench.by_case(found)] == ["b"]
    ran.fail = None
    ran.runs.clear()
    with Lines(path) as lines:
        found = run_suite(todo, lines)
    assert ran.runs == [(10.0, 0), (10.0, 1)]  # what failed is tried again, no more
    assert unmet(todo, found) == []
    assert "failed" not in markdown("x", read_lines(path))


def test_other_errors_are_not_swallowed(write, ran, tmp_path):
    ran.fail, ran.raises = 1.0, RuntimeError("a defect")
    with Lines(tmp_path / "toy.jsonl") as lines, pytest.raises(RuntimeError):
        run_suite(planned(load_suite(write(TWO))), lines)
    assert len(read_lines(tmp_path / "toy.jsonl")) == 2


def test_expectations_are_of_the_mean_over_seeds(write, ran):
    text = TWO + "expect.lda = [0.54, 0.56]\nexpect.lda_ceiling = [0.9, 1]\n"
    todo = planned(load_suite(write(text)))
    assert unmet(todo, run_suite(todo)) == []
    todo = planned(load_suite(write(text.replace("0.54", "0.555") + "expect.qda = [0, 1]\n")))
    found = run_suite(todo)
    assert unmet(todo, found) == [
        "b: lda must lie in [0.555, 0.56]. Got 0.55",
        "b: qda must lie in [0.0, 1.0]. Got none",
    ]
    assert unmet(todo, found, quick=True) == []


def test_kept_sums_want_one_round_and_noise_by_the_server(write):
    text = BASE.replace("method.heads = ['lda']", "") + '[[case]]\nname = "a"\nsums_once = true\n'
    logistic = text.replace('method.heads = ["lda"]', 'method.name = "logistic"')
    (line,) = run_suite(planned(load_suite(write(logistic)), quick=True))
    assert line["error"].startswith("ConfigError: sums_once must go with one round")


NETWORKS = """
name = "toy"
seeds = [0]
[base]
data.source = "fashion-mini"
data.limit = 120
data.clients = 3
privacy.epsilon = inf
method.epochs = 1
method.recipe.width = 2
evaluation.ceiling = false
[[case]]
name = "together"
set = ["method.name=ensemble"]
uploads_once = true
[[case]]
name = "distilled"
set = ["method.name=dense", "method.generate={epochs=2, steps=1, batch=8, width=2}"]
uploads_once = true
[[case]]
name = "longer"
set = ["method.name=ensemble", "method.epochs=2"]
uploads_once = true
"""


def test_networks_trained_once_give_what_each_run_would_give(write, monkeypatch):
    trained = []
    true = measure_module.LocalExchange.round
    monkeypatch.setattr(
        measure_module.LocalExchange,
        "round",
        lambda self, *a: trained.append(self.method) or true(self, *a),
    )
    kept = run_suite(planned(load_suite(write(NETWORKS))))
    assert [type(m).__name__ for m in trained] == ["EnsembleMethod", "EnsembleMethod"]
    alone = run_suite(planned(load_suite(write(NETWORKS.replace("uploads_once = true", "")))))
    assert len(trained) == 5
    for one, two in zip(kept, alone, strict=True):
        assert "error" not in one
        assert one["heads"] == two["heads"]
        same = ("claim", "bytes_up", "bytes_down", "hash")
        assert [one[k] for k in same] == [two[k] for k in same]
    assert kept[0]["client_seconds"] == kept[1]["client_seconds"] != kept[2]["client_seconds"]


def test_kept_networks_want_clients_that_train_once(write):
    text = BASE + '[[case]]\nname = "a"\nuploads_once = true\n'
    (line,) = run_suite(planned(load_suite(write(text)), quick=True))
    assert line["error"].startswith("ConfigError: uploads_once must go with a method whose clients")


def test_a_case_may_have_a_sweep_of_its_own_or_none(write):
    text = TWO + "sweep = {}\n" + '[[case]]\nname = "c"\n'
    text += '[case.sweep]\n"data.clients" = [7]\n'
    text += '[sweep]\n"privacy.epsilon" = [1, 2]\n'
    names = [c.name for c in load_suite(write(text)).cases]
    assert names == ["a, privacy.epsilon = 1", "a, privacy.epsilon = 2", "b", "c, data.clients = 7"]
    quick = [p.case.name for p in planned(load_suite(write(text)), quick=True)]
    assert quick == ["a, privacy.epsilon = 1", "b", "c, data.clients = 7"]  # first points


def test_the_commit_is_of_the_code_not_of_the_folder_one_is_in(tmp_path, monkeypatch):
    here = bench.provenance()["commit"]
    monkeypatch.chdir(tmp_path)
    assert bench.provenance()["commit"] == here
    stray = tmp_path / "fedgist" / "__init__.py"
    stray.parent.mkdir()
    stray.write_text("")
    monkeypatch.setattr(measure_module.fedgist, "__file__", str(stray))
    assert bench.provenance()["commit"].startswith("v")


# The command


def test_the_command_runs_resumes_and_checks(write, ran, tmp_path):
    file = write(TWO)
    first = invoke(file)
    assert first.exit_code == 0, first.output
    assert "55.0 ± 7.1" in first.stdout and "[1/4] a, seed 0: lda 50.0" in first.stderr
    path = tmp_path / "results" / "toy.jsonl"
    assert len(read_lines(path)) == 4
    again = invoke(file, "--json", "--only", "b")
    assert [r["case"] for r in json.loads(again.stdout)] == ["b"]
    assert "0 run, 2 kept" in again.stderr
    wrong = invoke(write(TWO + "expect.lda = [0.9, 1]\n"))
    assert wrong.exit_code == 1 and "NOT MET: b: lda must lie in" in wrong.stderr
    assert invoke(write(TWO + "expect.lda = [0.9, 1]\n"), "--quick").exit_code == 0
    assert len(read_lines(path)) == 4  # quick results go nowhere
    assert invoke(write(TWO), "--quick", "--out", tmp_path / "q").exit_code == 0
    assert len(read_lines(tmp_path / "q" / "toy-quick.jsonl")) == 2


def test_the_command_ends_with_1_where_a_run_failed_and_2_where_the_file_is_wrong(write, ran):
    ran.fail = 1.0
    done = invoke(write(TWO))
    assert done.exit_code == 1 and "NOT MET: b, seed 0: DataError" in done.stderr
    assert invoke(write("nam = 1\n")).exit_code == 2


def test_stopping_keeps_what_is_done_and_says_so(write, ran, tmp_path):
    ran.fail, ran.raises = 1.0, KeyboardInterrupt()
    done = invoke(write(TWO))
    assert done.exit_code == 130
    assert "stopped: 2 of 4 runs are done, kept in" in done.stderr
    assert len(read_lines(tmp_path / "results" / "toy.jsonl")) == 2


def test_a_dry_run_lists_what_is_there(write, ran, tmp_path):
    file = write(TWO)
    invoke(file, "--only", "a")
    ran.runs.clear()
    done = invoke(file, "--dry-run")
    rows = done.stdout.splitlines()
    assert rows[0].startswith("a, seed 0: there, of 20") and rows[2:] == [
        "b, seed 0: runs",
        "b, seed 1: runs",
    ]
    assert "4 runs, 2 of them to do" in done.stderr and ran.runs == []
    assert "4 of them to do" in invoke(file, "--dry-run", "--again").stderr


def test_progress_fits_100_columns_and_estimates_by_the_median():
    said = []
    tell = Teller(4, said.append)
    for i, seconds in enumerate((1, 2, 300)):
        heads = {f"a long name of a head {k}": {"accuracy": 0.5} for k in range(9 * i)}
        line = {"case": "c" * 60 * i, "seed": i, "heads": heads, "commit": "x"}
        tell(SimpleNamespace(line=line, seconds=seconds, kept=False))
    assert all(len(text) <= 100 for text in said)
    assert said[0].endswith("1 s, 3 s left") and said[2].endswith("5 min, 2 s left")


# The report


def line_of(case, seed, accuracy, **more):
    """Return a line as the command writes it, short."""
    sweep = more.pop("sweep", {})
    heads = {k: {"accuracy": v} for k, v in accuracy.items()}
    for k, v in more.pop("ceiling", {}).items():
        heads[k]["ceiling"] = v
    return {
        "hash": f"{case}{seed}",
        "case": case,
        "seed": seed,
        "stem": case.split(",")[0],
        "sweep": sweep,
        "set": [],
        "commit": "abc1234",
        "created": f"2026-01-0{seed + 1}T00:00:00Z",
        "versions": {"torch": "2.9"},
        "device": "cpu, 2 cores, x86_64",
        "threads": 2,
        "peak_memory_mib": 300.0,
        "heads": heads,
        "claim": {"epsilon": more.pop("epsilon", 1.0), "line": more.pop("claim", "ε = 1, δ = 0")},
        "bytes_up": 1536,
        "bytes_down": 0,
        "client_seconds": 2.5 + seed,
        "server_seconds": {"heads": 0.5},
    } | more


PAGE = """\
# Toy

Accuracy on real test images in %, mean ± standard deviation over seeds; the best of a column in \
bold. Bytes are of one client, seconds of all clients together.

| case | lda | qda | ε | claim | bytes up / down | client seconds |
|---|---|---|---|---|---|---|
| one | 80.0 ± 1.4 | **70.0 ± 0.0** | 1 | [1] | 1.5 KiB / 0.0 KiB | 3.0 |
| two | **85.0** | – | ∞ | [2] | 2.00 MiB / – | – |
| *no privacy* | 90.0 ± 0.0 | – |  |  |  |  |

- [1] ε = 1, δ = 0
- [2] ε = ∞

![Toy](toy.svg)

Runs that failed:

- three, seed 0: DataError: no

Measured 2026-01-01 to 2026-01-02 at commit abc1234, def; cpu, 2 cores, x86_64, 2 threads, \
torch 2.9; seeds 0, 1.
"""


def test_the_page_is_made_of_the_lines_alone(tmp_path):
    path = tmp_path / "toy.jsonl"
    exact = {"lda": 0.9}
    rows = [
        line_of("one", 0, {"lda": 0.1, "qda": 0.1}, commit="abc1234"),  # run again below
        line_of("one", 0, {"lda": 0.79, "qda": 0.7}, ceiling=exact),
        line_of("one", 1, {"lda": 0.81, "qda": 0.7}, ceiling=exact),
        line_of("two", 0, {"lda": 0.85}, epsilon=math.inf, claim="ε = ∞", commit="def",
                bytes_up=2**21, bytes_down=None, client_seconds=None),
        {k: v for k, v in line_of("three", 0, {}).items() if k not in ("heads", "claim")}
        | {"error": "DataError: no"},
    ]  # fmt: skip
    text = "".join(json.dumps(json.loads(to_json(r))) + "\n" for r in rows)
    path.write_text(text + '{"hash": "cut sho')
    assert markdown("Toy", read_lines(path), "toy.svg") == PAGE


def test_ceilings_that_differ_are_told_apart():
    rows = [
        line_of("one", 0, {"lda": 0.8}, ceiling={"lda": 0.9}),
        line_of("same sums", 0, {"lda": 0.7}, ceiling={"lda": 0.9}),
        line_of("other", 0, {"lda": 0.7}, ceiling={"lda": 0.95}),
    ]
    page = markdown("Toy", rows).splitlines()
    assert [r[:28] for r in page if "no privacy" in r] == [
        "| *no privacy: one* | 90.0 |",
        "| *no privacy: other* | 95.0",
    ]


def test_sweeps_over_numbers_are_drawn_the_same_every_time():
    lines = [
        line_of(f"lda, n = {n}, split = {s}", seed, {"lda": 0.5 + n / 100}, ceiling={"lda": 0.9},
                sweep={"n": n, "split": s, "one": 1})
        for n in (10, 1) for s in ("iid", "skewed") for seed in (0, 1)
    ]  # fmt: skip
    rows = records(lines)
    assert axes_of(rows) == ["n"]
    found = {(c.label, c.ceiling): c for c in curves(rows, "n")}
    assert set(found) == {
        (f"lda, split = {s}, one = 1", c) for s in ("iid", "skewed") for c in (False, True)
    }
    line = found["lda, split = iid, one = 1", False]
    assert line.x == (1, 10) and line.mean == pytest.approx((51, 60))
    drawn = figure(lines)
    assert drawn == figure(lines) and b"<dc:date>" not in drawn and b"<text" not in drawn
    assert figure(lines[:4]) is None  # one value is no sweep


def test_infinite_and_worded_values_are_no_places_on_an_axis():
    lines = [
        line_of(f"a{v}", 0, {"lda": 0.5}, sweep={"ε": v, "on": v == 1, "word": str(v)})
        for v in (1, 10, math.inf)
    ]
    rows = records(lines)
    assert axes_of(rows) == ["ε"]
    (line,) = curves(rows[:1], "ε")
    assert line.x == (1,)
    assert all(math.inf not in c.x for c in curves(rows, "ε"))


def test_the_report_command_writes_page_and_figure(write, ran, tmp_path):
    file = write(TWO + "[sweep]\n'data.clients' = [1, 4]\n")
    docs = tmp_path / "docs"
    missing = invoke(file, "--report", "--docs", docs)
    assert missing.exit_code == 2 and "run first" in missing.stderr
    invoke(file)
    done = invoke(file, "--report", "--docs", docs)
    assert done.stdout.split() == [str(docs / "toy.md"), str(docs / "toy.svg")]
    assert (docs / "toy.md").read_text().startswith("# A toy\n")
    rows = json.loads(invoke(file, "--report", "--json").stdout)
    assert rows[0]["mean"]["lda"] == pytest.approx(0.55) and rows[0]["seeds"] == [0, 1]
    assert rows[0]["server_seconds"] == 0.75


def test_scripts_take_the_suite_from_the_package(monkeypatch):
    folder = Path(__file__).parents[1] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    before = set(sys.modules)
    try:
        run, sections = importlib.import_module("run"), importlib.import_module("sections")
        sweeps, audits = importlib.import_module("sweeps"), importlib.import_module("audits")
    finally:
        for name in {p.stem for p in folder.glob("*.py")} - before:
            sys.modules.pop(name, None)
    assert run.run_suite is run_suite and run.provenance is audits.provenance is bench.provenance
    assert sweeps.table.__module__ == sections.cell.__module__ == "fedgist.bench.report"
    assert not any(hasattr(run, name) for name in ("Sums", "Kept", "pick", "summarise"))
