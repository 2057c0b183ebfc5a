"""`benchmarks/audits.py` on one case and embedded images: what it writes has the table's shape."""

from __future__ import annotations

import json
import sys

import pytest

from guide_tools import ROOT

pytestmark = pytest.mark.usefixtures("one_thread")
FILE = ROOT / "benchmarks" / "audit_fashion.toml"
CASE = "FedKT-CSD, ε = 1"


@pytest.fixture
def audits(scripts, monkeypatch):
    """Return the script's `main`, called with words as from a command line, on one thread."""
    module = scripts("audits")

    def call(*words):
        said = ["audits.py", str(FILE), "--quick", "--threads", "1", *map(str, words)]
        monkeypatch.setattr(sys, "argv", said)
        return module.main()

    return call


@pytest.mark.slow
def test_a_slice_has_the_shape_that_pages_read(audits, tmp_path, monkeypatch):
    out = tmp_path / "audit.json"
    assert audits("--only", CASE, "--out", out) == 0
    found = json.loads(out.read_text("utf-8"))
    assert found["benchmark"] == "audit_fashion" and found["failures"] == []
    (row,) = found["cases"]
    assert (
        row["name"] == CASE
        and row["shadows"] == 4
        and row["state"] in (*("pass", "contradicted", "inconclusive"),)
    )
    assert row["trials"] == 200
    assert row["claim"]["epsilon"] == pytest.approx(1) and set(row["accuracy"]) == {
        "lda",
        "qda",
        "decode",
    }
    assert row["noise"] and all("state" in r for r in row["noise"])
    assert row["attacks"] and all({"attack", "state"} <= r.keys() for r in row["attacks"])
    assert not any("roc" in r for r in row["attacks"])  # curves are left to audit.json
    assert {"run", "audit"} == row["seconds"].keys() and "commit" in row

    def again(todo):
        raise AssertionError("what is there is not run again")

    monkeypatch.setattr(sys.modules["audits"], "audited", again)
    assert audits("--only", CASE, "--out", out) == 0
    assert json.loads(out.read_text("utf-8")) == found


def test_a_case_that_is_not_there_is_not_passed_over(audits, tmp_path):
    with pytest.raises(SystemExit, match="--only must be part of the name of a case"):
        audits("--only", "no such case", "--out", tmp_path / "audit.json")
    assert not (tmp_path / "audit.json").exists()
