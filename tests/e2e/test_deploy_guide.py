"""The deploy guide: its commands, run word for word."""

from __future__ import annotations

import json
from functools import partial

import pytest

from guide_tools import ROOT, run
from guide_tools import commands as commands_of

commands = partial(commands_of, ROOT / "docs" / "deploy.md")


@pytest.mark.slow
def test_three_sites_by_a_shared_folder_then_one_file_per_site(tmp_path):
    done = run(commands("Three sites, a shared folder"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "result" / "report.json").read_text())
    assert report["simulation"] is False
    assert sorted(c["client"] for c in report["clients"]) == ["north", "south", "west"]
    assert report["claim"]["epsilon"] == pytest.approx(3)
    assert "inside a secure sum" in report["claim"]["noise_by"]
    assert report["claim"]["seeded"] is False
    assert report["heads"]["lda"]["accuracy"] > 0.7
    assert (tmp_path / "result" / "classifier.safetensors").is_file()
    assert "finished with 3 of 3 sites" in done.stdout
    assert "1 release of 1 data set, worst total ε = 3 " in done.stdout
    page = (tmp_path / "result" / "report.html").read_text()
    assert "3 clients took part" in page and "A simulation" not in page

    status = run("fedgist serve --mailbox share --task task.toml --status --json", tmp_path)
    assert json.loads(status.stdout)["step"] == "end"
    late = run(
        "fedgist join --mailbox share --task task.toml --key keys/north.key --once "
        "--data fashion-mini@1/3 --ledger north/ledger.sqlite --state north",
        tmp_path,
    )
    assert late.returncode == 0 and "finished with 3 of 3 sites" in late.stdout

    done = run(commands("One file per site"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "combined" / "report.json").read_text())
    assert report["claim"]["trust"] == "local"
    assert (tmp_path / "combined" / "classifier.safetensors").is_file()
    ledger = run("fedgist ledger show --json --ledger north/ledger.sqlite", tmp_path)
    entries = json.loads(ledger.stdout)["entries"]
    assert [e["name"] for e in entries] == ["clothes", "fashion-mini"]


@pytest.mark.slow
def test_look_before_you_send(tmp_path):
    keys = "fedgist keys new coordinator --out keys; fedgist keys new north --out keys\n"
    done = run(keys + commands("Look before you send"), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "waits for your decision" in done.stdout and "Round 1: send" in done.stdout
    assert "May this leave" in (tmp_path / "look" / "inspect.html").read_text()
    (receipt,) = (tmp_path / "north").glob("*/review/decision-0.gist.json")
    said = json.loads(receipt.read_text())
    assert said["decision"]["classes"] == ["Bag"] and len(said["decision"]["images"]) == 2
    assert said["sent"]["gist"] != said["decision"]["gist"]
    assert (tmp_path / "small-result" / "classifier.safetensors").is_file()
