"""The code of the documentation: pages run block by block; other commands are understood."""

from __future__ import annotations

import json
import re
import shlex

import click
import pytest
import typer

from fedgist.bench import read_lines
from fedgist.cli import app
from fedgist.cli.experiments import _sets
from fedgist.config import load
from guide_tools import ROOT, SHELL, blocks, run

DOCS = ROOT / "docs"
README = ROOT / "README.md"
PAGES = (
    "index.md",
    "tutorial.md",
    "howto/own-data.md",
    "howto/choosing-epsilon.md",
    "howto/comparing.md",
    "howto/own-encoder.md",
    "howto/own-method.md",
)
READ_ONLY = (README, *sorted(p for p in DOCS.glob("*.md") if p.name not in PAGES))


@pytest.fixture
def walk(tmp_path, quick_bin):
    """Run all blocks of a page in one shell, in order; return what they printed."""

    def walk(page):
        done = run("\n".join(b.script for b in blocks(page)), tmp_path, quick_bin)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    return walk


@pytest.mark.slow
def test_tutorial(walk, tmp_path):
    said = walk(DOCS / "tutorial.md")
    report = json.loads((tmp_path / "result" / "report.json").read_text())
    assert report["simulation"] is False and report["claim"]["seeded"] is False
    assert report["claim"]["trust"] == "local" and report["claim"]["epsilon"] == pytest.approx(8)
    assert sorted(c["client"] for c in report["clients"]) == ["north", "south"]
    assert "May this leave" in (tmp_path / "north" / "look" / "inspect.html").read_text()
    right = re.search(r"^(0\.\d+) of 200 right$", said, re.MULTILINE)
    assert right and float(right[1]) > 0.6
    assert "1 release of 1 data set, worst total ε = 8 " in said and "(cap 12)" in said
    assert (tmp_path / "result" / "synthetic" / "synthetic.npz").is_file()
    assert list((tmp_path / "shared").rglob("*.parquet"))
    simulated = json.loads((tmp_path / "demo" / "report.json").read_text())
    assert simulated["claim"]["seeded"] is True


@pytest.mark.slow
def test_own_data(walk, tmp_path):
    said = walk(DOCS / "howto" / "own-data.md")
    assert said.count("120 images: 60 benign, 60 malignant") == 2
    claim = json.loads((tmp_path / "person" / "report.json").read_text())["claim"]
    assert (claim["unit"], claim["records"]) == ("person", 2)
    sites = json.loads((tmp_path / "by-site" / "report.json").read_text())["clients"]
    assert [c["images"] for c in sites] == [120, 120]


@pytest.mark.slow
def test_choosing_epsilon(walk, tmp_path):
    said = walk(DOCS / "howto" / "choosing-epsilon.md")
    assert said.count("class means from") == 5
    curve = json.loads((tmp_path / "rehearsal" / "report.json").read_text())["curve"]
    assert [r["epsilon"] for r in curve["rows"] if r["own"]] == [3.0]
    assert "(cap 10)" in said


@pytest.mark.slow
def test_comparing(walk, tmp_path):
    said = walk(DOCS / "howto" / "comparing.md")
    page = (tmp_path / "tables" / "compare.md").read_text()
    assert page in said and "| statistics, ε = 3, split = iid |" in page
    results = tmp_path / "results"
    assert len(read_lines(results / "compare.jsonl")) == 6  # the second time nothing was run
    held_out = [r["config"]["data"]["held_out"] for r in read_lines(results / "choice.jsonl")]
    assert held_out == [0.2] * 4


@pytest.mark.slow
def test_own_encoder(walk, tmp_path):
    walk(DOCS / "howto" / "own-encoder.md")
    report = json.loads((tmp_path / "cosine" / "report.json").read_text())
    assert list(report["encoders"]) == ["mine.cosine:make"]
    assert report["heads"]["lda"]["accuracy"] > 0.3
    assert (tmp_path / "ours.safetensors").is_file()


@pytest.mark.slow
def test_own_method(walk, tmp_path):
    walk(DOCS / "howto" / "own-method.md")
    for name in ("centroids", "result"):
        report = json.loads((tmp_path / name / "report.json").read_text())
        assert report["heads"]["centroids"]["accuracy"] > 0.85
        assert report["claim"]["epsilon"] == pytest.approx(3)


@pytest.mark.slow
def test_index_and_the_python_of_the_readme(walk, tmp_path, quick_bin):
    said = walk(DOCS / "index.md")
    assert (tmp_path / "first" / "report.html").is_file() and "ε = 3, δ = 1e-05" in said
    script = "\n".join(b.script for b in blocks(README) if b.language == "python")
    done = run(script, tmp_path, quick_bin)
    assert done.returncode == 0, done.stderr
    assert "ε = 3, δ = 1e-05" in done.stdout


def fedgist_lines(page):
    """Return the words of every fedgist command of a page."""
    for block in (b for b in blocks(page) if b.language in SHELL and not b.title):
        for line in re.sub(r"\\\n\s*", " ", block.code).splitlines():
            command = line.split(" | ")[0].rstrip("&").strip()
            if command.startswith("fedgist "):
                yield shlex.split(command, comments=True)[1:]


def understood(words):
    """Let the command line read a command without doing it; resolve what a run is made of."""
    root = typer.main.get_command(app)
    with click.Context(root, info_name="fedgist") as context:
        command = root
        while isinstance(command, click.Group):
            name, command, words = command.resolve_command(context, list(words))
            context = click.Context(command, info_name=name, parent=context)
        params = command.make_context(name, list(words), parent=context.parent).params
    if name in ("run", "plan") and params["config"] is None:
        keys = ("data", "method", "clients", "partition", "epsilon", "head", "seed", "set_")
        given = {k: list(v) if isinstance(v, tuple) else v for k, v in params.items()}
        load(None, _sets(*(given[k] for k in keys)))


@pytest.mark.parametrize("page", READ_ONLY, ids=lambda p: p.name)
def test_commands_of_every_other_page_are_understood(page, monkeypatch):
    monkeypatch.setattr(click.Path, "convert", lambda self, value, param, ctx: value)
    for words in fedgist_lines(page):
        understood(words)


def test_the_readme_has_commands_and_its_targets_exist():
    assert len(list(fedgist_lines(README))) > 10
    makefile = (ROOT / "Makefile").read_text()
    shell = "\n".join(b.code for b in blocks(README) if b.language in SHELL)
    for target in re.findall(r"^make (\w+)", shell, re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


@pytest.mark.parametrize(
    "wrong",
    [
        "run --epsilom 1",
        "run --set privacy.epsilom=1",
        "run --method fedavgg",
        "joint --task a",
        "task show",
        "ledger cap",
    ],
)
def test_a_command_that_is_not_understood_is_seen(wrong):
    with pytest.raises(Exception, match=r"(?i)no such|unknown|one of|missing"):
        understood(shlex.split(wrong))
