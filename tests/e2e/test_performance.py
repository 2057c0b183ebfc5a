"""benchmarks/performance.py: code lengths, growth, ratios, commits, and a quick run's bytes."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tomli_w
import torch

from fedgist.bench import load_suite
from fedgist.privacy.noise import SeededNoise

FOLDER = Path(__file__).parents[2] / "benchmarks"


# Code lengths


@pytest.mark.parametrize("scale", [0.3, 1.0, 1.9, 2.0, 2.1, 50.0])
def test_noise_has_the_entropy_of_the_discrete_gaussian(scripts, scale):
    k = np.arange(-2000, 2001)
    p = np.exp(-0.5 * (k / scale) ** 2)
    p = p[p > 1e-200] / p.sum()
    found = scripts("code_length").noise_bits(scale)
    assert found == pytest.approx(float(-(p * np.log2(p)).sum()), abs=1e-9)


def test_exact_integers_cost_what_a_code_for_their_law_would(scripts):
    """Both the entropy of 40,000 values that are all distinct and plain widths would be caught."""
    code, n = scripts("code_length"), 40_000
    for scale in (300.0, 1e6):
        values = SeededNoise(3).sample(scale, n)
        need = n * code.noise_bits(scale)
        assert need < code.value_bits(values) < 1.03 * need
    mixed = torch.cat([SeededNoise(1).sample(1e7, 400), SeededNoise(2).sample(1e3, n)])
    need = 400 * code.noise_bits(1e7) + n * code.noise_bits(1e3)
    assert code.value_bits(mixed) < 1.05 * need  # one scale for all would take a tenth more


def test_few_values_pixels_and_weights(scripts):
    code = scripts("code_length")
    labels = torch.arange(1000) % 10
    assert code.value_bits(labels) == pytest.approx(1000 * math.log2(10))
    every = torch.arange(256).repeat(64).to(torch.uint8)
    assert code.value_bits(every) == 8 * 64 * 256
    assert code.value_bits(torch.zeros(500, dtype=torch.uint8)) == 0
    weights = torch.randn(20_000, generator=torch.Generator().manual_seed(0)) / 10
    bits = code.value_bits(weights) / 20_000
    assert 25 < bits < 29  # sign, three or four bits of exponent, 23 of mantissa
    assert code.value_bits(weights.to(torch.bfloat16).float()) / 20_000 < 13
    assert code.entropy(np.array([])) == 0


def test_the_entropy_of_a_small_sample_is_corrected(scripts):
    rng = np.random.default_rng(0)
    draws = [rng.integers(0, 64, 200) for _ in range(50)]
    mean = np.mean([scripts("code_length").entropy(d) for d in draws])
    assert mean == pytest.approx(6, abs=0.1)  # 5.78 without Miller's term


# Growth and ratios


def row(name, **values):
    keys = ("client", "server", "bytes_up", "bytes_up_all", "memory")
    return {"name": name} | dict.fromkeys(keys, 1.0) | values


def test_exponents_are_slopes_of_logarithms(scripts):
    performance = scripts("performance")
    rows = [row(f"a, b, d = {d}", client=3 * d**2, server=1 + d**3) for d in (512, 64, 128)]
    rows += [row("a, b, clients = 4"), {"name": "x, d = 1", "error": "no"}, row("plain")]
    (found,) = performance.growth(rows)
    assert (found["stem"], found["axis"], found["values"]) == ("a, b", "d", [64, 128, 512])
    exponents = found["exponents"]
    assert exponents["client"] == pytest.approx({"all": 2, "last": 2})
    assert exponents["memory"] == pytest.approx({"all": 0, "last": 0})
    half = [row("s, d = 10", server=100 + 10), row("s, d = 100", server=100 + 100)]
    assert performance.growth(half)[0]["exponents"]["server"]["last"] < 0.3
    assert performance.exponent_row(found)[:2] == ["a, b, d 64, 128, 512", "2.00  2.00"]


def of_version(client, bytes_up=100, memory=10.0):
    repeats = [{"client": c, "over_bare": c / 2, "server": 0.5} for c in client]
    rest = {"bytes_up": bytes_up, "bytes_over_code": 1.5, "memory": memory, "repeats": repeats}
    return {"client": sorted(client)[1], "over_bare": 1.0, "server": 0.5} | rest


def test_a_ratio_is_marked_beyond_the_noise_only(scripts):
    ratios = scripts("performance").ratios
    old = of_version([1.0, 2.0, 4.0])
    same = ratios(old, old)
    assert not any(r["marked"] for r in same.values()) and same["client"]["median"] == 1
    slower = ratios(old, of_version([1.3, 2.4, 5.2]))["client"]  # pairs in time, not medians
    assert slower["marked"] and slower["median"] == pytest.approx(1.3)
    assert not ratios(old, of_version([1.3, 2.6, 3.9]))["client"]["marked"]  # one says less
    assert not ratios(old, of_version([1.1, 2.2, 4.4]))["client"]["marked"]  # too near
    assert ratios(old, of_version([0.5, 1.0, 2.0]))["client"]["marked"]
    assert ratios(old, of_version([1, 2, 4], bytes_up=101))["bytes_up"]["marked"]
    assert not ratios(old, of_version([1, 2, 4], memory=11))["memory"]["marked"]
    unknown = of_version([1, 2, 4]) | {"bytes_over_code": None}
    assert "bytes_over_code" not in ratios(old, unknown)


def test_a_comparison_fails_over_its_limit(scripts, capsys):
    performance = scripts("performance")
    old, new = of_version([1.0, 2.0, 4.0]), of_version([1.5, 3.0, 6.0])
    case = {"name": "a", "versions": [old, new], "ratios": performance.ratios(old, new)}
    lacking = {"name": "b", "error": "no such method", "lacks": True}
    results = {"against": "abc", "commit": "def", "cases": [case, lacking]}
    status = {
        limit: performance.compared(results, SimpleNamespace(fail_over=limit))
        for limit in (1.3, 1.6, math.inf)
    }
    assert status == {1.3: 1, 1.6: 0, math.inf: 0}
    said = capsys.readouterr().out
    assert "NOT IN abc b: no such method" in said and "OVER 1.3 a, client, s: 1.50 times" in said
    (line,) = {r for r in said.splitlines() if r.startswith("a ") and " client, s " in r}
    assert line.split()[-5:] == ["1.500", "1.50", "to", "1.50", "more"] or "more" in line
    results["cases"][1]["lacks"] = False
    assert performance.compared(results, SimpleNamespace(fail_over=math.inf)) == 1


class Fake:
    """Stands in for a process with one version."""

    def __init__(self, name, log, error=None):
        self.name, self.log, self.error = name, log, error

    def ask(self, do, **more):
        self.log.append((self.name, do))
        if do == "prepare" and self.error:
            raise self.error
        sizes = {"images": 10, "bytes_up": 100, "code_bytes": 50.0, "idle_mib": 5, "peak_mib": 8}
        return sizes if do == "finish" else {"bare": 1.0, "client": 2.0, "server": 3.0}


def test_two_versions_take_turns(scripts):
    performance, log = scripts("performance"), []
    case = SimpleNamespace(name="a", set=())
    args = SimpleNamespace(repeats=3, quick=False)
    found = performance.measured(case, (), [Fake("old", log), Fake("new", log)], args)
    order = [name for name, do in log if do == "repeat"]
    assert order == ["old", "new", "new", "old", "old", "new"]
    assert found["ratios"]["over_bare"]["median"] == 1
    (alone,) = [performance.measured(case, (), [Fake("new", log)], args)]
    assert alone["bytes_over_code"] == 2 and alone["client_by_image"] == 0.2
    assert alone["memory"] == 3 and alone["over_bare"] == 2


def test_who_lacks_a_case_is_told_and_the_other_lets_go(scripts):
    performance, log = scripts("performance"), []
    case, args = SimpleNamespace(name="a", set=()), SimpleNamespace(repeats=1, quick=False)
    no = performance.CaseError("unknown")
    old = performance.measured(case, (), [Fake("old", log, no), Fake("new", log)], args)
    assert old["lacks"] and old["error"] == "unknown" and log == [("old", "prepare")]
    new = performance.measured(case, (), [Fake("old", log), Fake("new", log, no)], args)
    assert not new["lacks"] and log[-1] == ("old", "finish")


def test_a_commit_is_checked_out_beside_the_repository(scripts, tmp_path, monkeypatch):
    performance = scripts("performance")
    repository = tmp_path / "r"
    (repository / "benchmarks").mkdir(parents=True)

    def git(*words):
        who = ("-c", "user.name=a", "-c", "user.email=a@b")
        done = subprocess.run(
            ["git", "-C", repository, *who, *words], capture_output=True, text=True, check=True
        )
        return done.stdout.strip()

    git("init", "-q")
    for text in ("one", "two"):
        (repository / "f").write_text(text)
        git("add", "f")
        git("commit", "-qm", text)
    (repository / "f").write_text("not committed")
    before = git("status", "--porcelain", "--branch"), git("worktree", "list")
    monkeypatch.setattr(performance, "HERE", repository / "benchmarks")
    sha, clone = performance.checked_out("HEAD~1", tmp_path / "old")
    assert (clone / "f").read_text() == "one" and git("rev-parse", "HEAD~1").startswith(sha)
    assert (git("status", "--porcelain", "--branch"), git("worktree", "list")) == before
    assert (repository / "f").read_text() == "not committed"
    with pytest.raises(SystemExit, match="COMMIT must be one of this repository"):
        performance.checked_out("nonesuch", tmp_path / "other")


# A run

CASES = [
    {"name": "lda, clients = 2", "set": ["data.clients=2", "privacy.trust=local"]},
    {"name": "no such", "set": ["method.name=nonesuch"]},
    {
        "name": "weights, clients = 3",
        "set": [
            "data.clients=3",
            "method={name='oneshot_fedavg', epochs=1}",
            "privacy.epsilon=inf",
        ],
    },
]


@pytest.mark.slow
def test_a_quick_run_measures_and_counts_bytes(scripts, tmp_path, monkeypatch, capsys):
    performance, page = scripts("performance"), scripts("performance_page")
    base = {"method": {"heads": ["lda"], "features": "scattering:32"}, "data": {"partition": "iid"}}
    file, out = tmp_path / "p.toml", tmp_path / "p.json"
    file.write_text(tomli_w.dumps({"name": "p", "base": base, "case": CASES}))
    words = ["--quick", "--file", str(file), "--repeats", "2", "--out", str(out)]
    monkeypatch.setattr(sys, "argv", ["performance.py", *words])
    assert performance.main() == 0
    results = json.loads(out.read_text())
    lda, none, weights = results["cases"]
    # 10 counts, 10 x 32 means, 32 x 33 / 2 second moments, in bits for 65,535 images at 256 levels
    # and noise; ConvNet-3 of width 4: 36 + 4 + 8, twice 144 + 4 + 8, 64 x 10 + 10; and a count
    assert weights["bytes_up"] == 4 * (48 + 2 * 156 + 650 + 1)
    assert (lda["images"], lda["clients"], lda["rounds"]) == (200, 2, 1)
    assert lda["bytes_up_all"] == 2 * lda["bytes_up"]
    assert lda["bytes_up"] == (10 * 18 + 7) // 8 + 320 * 26 // 8 + 528 * 34 // 8
    assert 1 < lda["bytes_over_code"] < 5 and 1 < weights["bytes_over_code"] < 1.5
    assert lda["bare"] > 0 and lda["client"] > 0 and len(lda["repeats"]) == 2
    assert none["error"].startswith("ConfigError") and "client" not in none
    assert results["threads"] == 1 and results["seed"] == 0 and results["versions"]["torch"]
    said = capsys.readouterr().out.splitlines()
    assert [r.split("  ")[0] for r in said[:3]] == ["case", lda["name"], weights["name"]]
    assert len({len(r) for r in said[:3]}) == 1 and said[-1].startswith("NOT MEASURED no such")
    section = page.performance_table(results)
    assert section.count("\n| ") == 3 and "Not measured: no such." in section


def test_points_of_growth_share_all_but_their_axis(scripts):
    performance = scripts("performance")
    curves = {}
    for case in load_suite(FOLDER / "performance.toml").cases:
        if m := performance.POINT.fullmatch(case.name):
            says = {
                "clients": "data.clients={}",
                "classes": "data.source=classes-{}.npz",
                "d": "method.features=scattering:{}",
            }[m["axis"]].format(m["value"])
            own = [s for s in case.set if s != says]
            assert len(own) == len(case.set) - 1
            curves.setdefault((m["stem"], m["axis"]), []).append((int(m["value"]), own))
    assert {axis for _, axis in curves} == {"clients", "classes", "d"}
    for points in curves.values():
        assert len(points) > 1 and all(own == points[0][1] for _, own in points)


def test_made_sets_have_their_classes(scripts, tmp_path):
    performance = scripts("performance")
    cases = [SimpleNamespace(set=("data.source=classes-50.npz",)), SimpleNamespace(set=("x=1",))]
    performance.make_sets(tmp_path, cases)
    (path,) = tmp_path.iterdir()
    with np.load(path) as z:
        assert z["images"].shape == (2000, 28, 28) and z["images"].dtype == np.uint8
        assert np.bincount(z["labels"]).tolist() == [40] * 50
