"""The command line as a user meets it: real processes, exit codes, what is on disk afterwards."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

QUICK = [
    "--set",
    "data.limit=400",
    "--set",
    "method.synthetic_size=60",
    "--set",
    "method.recipe.steps=5",
    "--set",
    "method.recipe.width=8",
]


def fedgist(*args, cwd=None, timeout=300):
    command = [sys.executable, "-m", "fedgist", *map(str, args)]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=timeout)


def one_line_error(result, *words):
    assert result.returncode == 2, result.stderr
    lines = [s for s in result.stderr.splitlines() if s.startswith("fedgist:")]
    assert len(lines) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for word in words:
        assert word in lines[0], lines[0]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    result = fedgist("run", "--clients", 3, "--out", out, *QUICK)
    assert result.returncode == 0, result.stderr
    return out, result


@pytest.mark.slow
def test_run_prints_a_table_and_names_what_it_wrote(finished):
    out, result = finished
    text = " ".join(result.stdout.split())
    for word in ("qda", "lda", "decode", "without privacy", "add-remove", "the server"):
        assert word in text
    for word in ("ε = 10", "δ = 1e-05", "KiB per client", "server time"):
        assert word in text
    for name in (
        "classifier.safetensors",
        "report.json",
        "report.html",
        "samples.png",
        "partition.npz",
        "run.toml",
        "synthetic/synthetic.npz",
    ):
        assert (out / name).exists(), name
        assert name.split("/")[0] in result.stdout
    assert "round 1 of 1" in result.stderr
    assert not [p for p in out.rglob("*") if p.name.startswith(".")]


@pytest.mark.slow
def test_report_and_synthetic_set_read_back(finished):
    out, _ = finished
    report = json.loads((out / "report.json").read_text())
    assert report["claim"]["adjacency"] == "add-remove"
    assert report["claim"]["seeded"] is True
    assert set(report["heads"]) == {"lda", "qda", "decode"}
    assert sum(map(sum, report["partition"]["table"])) == 400
    with np.load(out / "synthetic" / "synthetic.npz", allow_pickle=False) as z:
        assert z["images"].shape == (60, 28, 28)
        assert np.bincount(z["labels"]).tolist() == [6] * 10
    files = list((out / "synthetic" / "train").rglob("*.png"))
    assert len(files) == 60
    with Image.open(files[0]) as image:
        assert image.size == (28, 28)


@pytest.mark.slow
def test_resolved_config_repeats_the_run_bit_for_bit(finished, tmp_path):
    out, _ = finished
    again = tmp_path / "again"
    assert fedgist("run", out / "run.toml", "--out", again).returncode == 0
    for name in ("classifier.safetensors", "classifier-decode.safetensors", "run.toml"):
        assert (out / name).read_bytes() == (again / name).read_bytes(), name


@pytest.mark.slow
def test_evaluate_agrees_with_the_report(finished):
    out, _ = finished
    result = fedgist("evaluate", out, "--test", "fashion-mini", "--json")
    assert result.returncode == 0, result.stderr
    scores = {s["head"]: s["accuracy"] for s in json.loads(result.stdout)["scores"]}
    report = json.loads((out / "report.json").read_text())
    for head, r in report["heads"].items():
        assert scores[head] == pytest.approx(r["accuracy"], abs=1e-9)


@pytest.mark.slow
def test_the_synthetic_set_is_a_data_source(finished, tmp_path):
    out, _ = finished
    data = out / "synthetic" / "synthetic.npz"
    result = fedgist(
        "run",
        "--data",
        data,
        "--clients",
        2,
        "--head",
        "lda",
        "--out",
        tmp_path / "o",
        "--set",
        "data.test=fashion-mini",
        "--epsilon",
        "inf",  # sixty images drown in any noise
        "--json",
    )
    assert result.returncode == 0, result.stderr
    assert json.loads(result.stdout)["heads"]["lda"]["accuracy"] > 0.1


@pytest.mark.slow
def test_plan_reads_no_image_and_shows_the_cost():
    result = fedgist("plan", "--data", "fashion-mini", "--epsilon", 1)
    assert result.returncode == 0, result.stderr
    text = " ".join(result.stdout.split())
    for word in ("no image has been read", "mean", "second", "noise", "odds", "replace-one ε ="):
        assert word in text


@pytest.mark.slow
def test_sites_with_data_of_their_own(tmp_path):
    rng = np.random.default_rng(0)
    for site in ("north", "south"):
        for name, value in (("cat", 40), ("dog", 180)):
            folder = tmp_path / site / name
            folder.mkdir(parents=True)
            for i in range(6):
                pixels = rng.integers(value - 30, value + 30, (12, 12, 3)).astype(np.uint8)
                Image.fromarray(pixels).save(folder / f"{i}.png")
    sites = json.dumps([str(tmp_path / "north"), str(tmp_path / "south")])
    out = tmp_path / "out"
    result = fedgist(
        "run",
        "--set",
        f"data.sites={sites}",
        "--set",
        f"data.test={tmp_path / 'north'}",
        "--set",
        "task.size=12",
        "--epsilon",
        "inf",
        "--head",
        "lda",
        "--out",
        out,
    )
    assert result.returncode == 0, result.stderr
    report = json.loads((out / "report.json").read_text())
    assert report["heads"]["lda"]["accuracy"] == 1.0
    assert [c["client"] for c in report["clients"]] == ["north", "south"]
    (tmp_path / "south" / "wolf").mkdir()
    Image.fromarray(pixels).save(tmp_path / "south" / "wolf" / "0.png")
    one_line_error(
        fedgist("run", "--set", f"data.sites={sites}", "--out", out), "south", "wolf", "dog"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--data", "fashion-mnits"], ["fashion-mnits"]),
        (["run", "--data", "/no/such/folder"], ["/no/such/folder"]),
        (["run", "--epsilon", "0"], ["epsilon must be positive", "Got 0"]),
        (["run", "--set", "privacy.delta=1"], ["delta", "Got 1"]),
        (["run", "--set", "method.radius=0"], ["radius must be positive"]),
        (["run", "--clients", "7000"], ["7000", "6000"]),
        (["run", "--set", "method.encoder_sha256=00ff"], ["00ff", "hash"]),
        (["run", "--set", "privacy.epsilom=3"], ["Did you mean 'epsilon'"]),
        (["run", "--head", "qdaa"], ["qdaa"]),
        (["run", "--out", "/proc/nothing"], ["/proc/nothing", "writable"]),
        (["evaluate", "/tmp", "--test", "digits"], ["classifier.safetensors", "/tmp"]),
        (["encoder", "info", "nothing"], ["nothing", "pca"]),
    ],
)
def test_wrong_use_gives_one_line_and_exit_code_2(args, words, tmp_path):
    if args[0] == "run" and "--out" not in args:
        args = [*args, "--out", str(tmp_path / "o")]
    one_line_error(fedgist(*args), *words)


@pytest.mark.slow
def test_ctrl_c_leaves_whole_files(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "fedgist", "run", "--out", str(out)]
    process = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # A shell's background job ignores ctrl-C, and so would every process that it starts.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.time() + 120
    while not (out / "run.toml").exists() and time.time() < deadline:
        time.sleep(0.05)
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    # As a shell counts it. With -m, Python itself dies of the signal where it came inside exec() of
    # a string, as every dataclass makes at import, though the interrupt was caught.
    code = process.returncode
    assert (code if code >= 0 else 128 - code) == 130, err
    assert "Traceback" not in err
    assert fedgist("plan", out / "run.toml").returncode == 0
    left = [p for p in out.rglob("*") if p.is_file()]
    assert all(p.name in ("run.toml",) or not p.name.startswith(".") for p in left)


@pytest.mark.slow
def test_debug_shows_the_traceback():
    result = fedgist("run", "--epsilon", "0", "--debug")
    assert result.returncode != 0
    assert "Traceback" in result.stderr


@pytest.mark.slow
def test_version_and_help():
    assert fedgist("--version").stdout.strip()
    for command in ("run", "plan", "evaluate", "encoder"):
        assert command in fedgist("--help").stdout
    env = os.environ | {"COLUMNS": "100"}
    assert (
        "--epsilon"
        in subprocess.run(
            [sys.executable, "-m", "fedgist", "run", "--help"],
            capture_output=True,
            text=True,
            env=env,
        ).stdout
    )


@pytest.mark.slow
def test_a_slice_of_the_benchmark_runs(tmp_path):
    root = Path(__file__).parents[2]
    command = [sys.executable, "benchmarks/run.py", "benchmarks/fedkt_csd_fashion.toml", "--quick"]
    result = subprocess.run(
        [*command, "--out", str(tmp_path / "r.json")],
        capture_output=True,
        text=True,
        cwd=root,
        timeout=900,
    )
    assert result.returncode == 0, result.stderr
    done = json.loads((tmp_path / "r.json").read_text())
    assert all(i["sums_identical"] and i["release_identical"] for i in done["invariance"])
    assert {row["name"] for row in done["accuracy"]} >= {"ε = 10", "ε = 1"}
    assert len(done["participation"]) == 3


@pytest.mark.slow
def test_readme_python_runs(tmp_path):
    readme = (Path(__file__).parents[2] / "README.md").read_text()
    code = re.search(r"```python\n(.*?)```", readme, re.DOTALL).group(1)
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path, timeout=200
    )
    assert result.returncode == 0, result.stderr
    accuracy, claim = result.stdout.strip().split(" ", 1)
    assert float(accuracy) > 0.5
    assert "ε = 3" in claim


@pytest.mark.slow
def test_personalised_fine_tuning_is_reported_per_client(tmp_path):
    out = tmp_path / "out"
    result = fedgist(
        "run",
        "--clients",
        3,
        "--head",
        "decode",
        "--out",
        out,
        *QUICK,
        "--set",
        "evaluation.personalise=true",
    )
    assert result.returncode == 0, result.stderr
    rows = json.loads((out / "report.json").read_text())["heads"]["decode"]["personalised"]
    assert len(rows["clients"]) == 3
    assert {"before", "after"} <= set(rows["clients"][0])


@pytest.mark.slow
def test_a_real_release_uses_system_noise_and_keeps_no_exact_sums(tmp_path):
    texts = []
    for i in range(2):
        out = tmp_path / str(i)
        result = fedgist(
            "run", "--head", "lda", "--out", out, *QUICK, "--set", "privacy.noise=system"
        )
        assert result.returncode == 0, result.stderr
        report = json.loads((out / "report.json").read_text())
        assert report["claim"]["seeded"] is False
        assert "ceiling" not in report["heads"]["lda"]
        texts.append((out / "classifier.safetensors").read_bytes())
    assert texts[0] != texts[1]


def test_readme_names_commands_that_exist():
    readme = Path(__file__).parents[2] / "README.md"
    from typer.main import get_command

    from fedgist.cli import app

    known = set(get_command(app).commands)
    for line in readme.read_text().splitlines():
        words = line.strip().split()
        if len(words) > 1 and words[0] == "fedgist":
            assert words[1] in known, line
