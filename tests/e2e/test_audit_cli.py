"""``fedgist audit`` on folders that runs left: what it prints, writes, refuses and returns."""

from __future__ import annotations

import json
import shutil

import pytest
import typer
from typer.testing import CliRunner

from fedgist.auditing import _state
from fedgist.cli.audit import add_audit
from fedgist.config import load
from fedgist.experiment import execute
from fedgist.setup import prepare_run

SETS = [
    "data.limit=300",
    "data.clients=2",
    "data.partition=iid",
    "method.features=scattering:32",
    "method.heads=['lda']",
    "evaluation.ceiling=false",
]

pytestmark = pytest.mark.usefixtures("one_thread")


def app():
    made = typer.Typer()
    add_audit(made)
    made.command("other")(lambda: None)  # with one command alone its name would be left out
    return made


def audit(*args):
    return CliRunner().invoke(app(), ["audit", *map(str, args)])


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("run") / "out"
    execute(load(None, SETS), out)
    return out


def copied(finished, tmp_path, **changed):
    out = tmp_path / "copy"
    shutil.copytree(finished, out)
    report = json.loads((out / "report.json").read_text())
    report |= changed
    (out / "report.json").write_text(json.dumps(report))
    return out


def refused(result, *words):
    assert result.exit_code == 2, result.output
    lines = [s for s in result.output.splitlines() if s.startswith("fedgist:")]
    assert len(lines) == 1 and all(w in lines[0] for w in words), result.output


def test_a_run_that_keeps_its_claim(finished):
    result = audit(finished, "--shadows", 8, "--trials", 20000)
    assert result.exit_code == 0, result.output
    record = json.loads((finished / "audit.json").read_text())
    assert record["state"] == "pass" and "pass" in result.output
    (claim, blocks) = record["noise"]
    assert 8.5 < claim["epsilon_low"] < 10 == claim["epsilon"]
    assert claim["sees"] == "the noised sum; all other images"
    assert blocks["blocks"]["pooled"]["small"] is False
    names = [row["attack"] for row in record["attacks"]]
    assert names[0] == "likelihood ratio"
    assert names[1:] == ["loss threshold, lda", "LiRA (offline), lda", "RMIA (offline), lda"]
    for row in record["attacks"]:
        assert row["state"] == "within" and row["sees"] and row["auc"] <= row["claim_cap"]
        assert len(row["roc"]["fpr"]) == len(row["roc"]["tpr"]) > 10
        assert row["roc"]["fpr"][-1] == row["roc"]["tpr"][-1] == 1
    assert record["similarity"] == [] and record["exposure"] is None
    limit = record["limit"]
    assert limit["bound"] == "gaussian" and limit["mu"] == claim["mu_claimed"]
    # the optimal attack on every record stays below the curve of the claim
    best = record["attacks"][0]["roc"]["tpr"]
    assert all(a <= b + 2e-6 for a, b in zip(best, limit["roc"]["tpr"], strict=True))


def test_the_page_is_written_and_named(finished, tmp_path):
    out = copied(finished, tmp_path)
    result = audit(out, "--shadows", 4, "--trials", 20000, "--head", "lda")
    assert result.exit_code == 0 and f"{out}/audit.html" in result.output.replace("\n", "")
    page = (out / "audit.html").read_text()
    assert "Passed: no attack here got past the claim" in page
    assert "fedgist audit copy --shadows 4 --trials 20000 --head lda" in page
    assert str(tmp_path) not in page  # where the folder lies is nobody's business
    assert "fedgist audit" in (out / "report.html").read_text()


def test_a_report_that_promises_too_much(finished, tmp_path):
    report = json.loads((finished / "report.json").read_text())
    out = copied(finished, tmp_path, claim=report["claim"] | {"epsilon": 5.0})
    result = audit(out, "--shadows", 0, "--trials", 5000, "--json")
    assert result.exit_code == 1, result.output
    record = json.loads(result.stdout)
    assert record["state"] == "contradicted"
    assert record["limit"]["mu"] < 1.2  # of the ε that is stated, not of the noise that is there
    page = (out / "audit.html").read_text()
    assert "Refuted: more leaks than is claimed" in page and "banner green" not in page


def test_too_few_trials_are_not_a_pass(finished, tmp_path):
    result = audit(copied(finished, tmp_path), "--shadows", 0, "--trials", 100)
    assert result.exit_code == 0 and "inconclusive" in result.output
    assert "too weak to count as a pass" in (tmp_path / "copy" / "audit.html").read_text()


def test_what_cannot_be_audited_is_refused(finished, tmp_path):
    refused(audit(tmp_path), "must be a folder that `fedgist run` wrote")
    out = copied(finished, tmp_path, simulation=False)
    refused(audit(out), "must be a simulation")
    shutil.rmtree(out)
    out = copied(finished, tmp_path)
    config = (out / "run.toml").read_text()
    (out / "run.toml").write_text(config.replace('"fashion-mini"', '"/gone/images"'))
    refused(audit(out), "/gone/images")
    shutil.rmtree(out)
    out = copied(finished, tmp_path)
    refused(audit(out, "--head", "qda", "--trials", 100), "--head", "qda")


def test_presence_is_not_what_a_replacement_claim_hides():
    """Exact counts betray who was there; under replace-same-class they are public anyway."""
    found = {"auc": 1.0, "low": 0.99, "claim_cap": 0.95}
    states = []
    for adjacency in ("add-remove", "replace-same-class"):
        run = load(None, ["data.source=digits", f"privacy.adjacency={adjacency}"])
        states.append(_state(found, prepare_run(run).plan.claim))
    assert states == ["contradicted", "outside the claim"]


def test_too_few_shadows_are_refused_before_anything_is_computed(finished):
    result = audit(finished, "--shadows", 2)
    assert result.exit_code == 2
    assert "--shadows must be 0, for none, or at least 4" in " ".join(result.output.split())
