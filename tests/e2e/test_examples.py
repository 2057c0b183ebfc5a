"""The examples: they run, are short, and the method of the how-to keeps every method's promises."""

from __future__ import annotations

import json
import re
import sys

import pytest
import torch

from federation_tools import OPEN, federation, outcome_bytes
from fedgist.errors import PrivacyError
from guide_tools import ROOT, run

EXAMPLES = ROOT / "examples"
SCRIPTS = ("own_method.py", "simulate.py", "two_hospitals.py")
NOTEBOOK = EXAMPLES / "tour.ipynb"
SAID = {
    "own_method.py": ("mine.centroids: ε = 3", "centroids: 0.9", "lda: 0.9"),
    "simulate.py": ("ε = 10", "decode: ", "loaded again: 0.", "200 synthetic images"),
    "two_hospitals.py": ("noise by each client, in full", "lda: 0.", "south: 1 release"),
}


def test_every_example_is_known_and_short():
    assert sorted(p.name for p in EXAMPLES.glob("*.py")) == sorted(SCRIPTS)
    for name in SCRIPTS:
        assert len((EXAMPLES / name).read_text().splitlines()) <= 60, name


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_scripts(name, tmp_path, quick_bin):
    done = run(f"python {EXAMPLES / name}", tmp_path, quick_bin)
    assert done.returncode == 0, done.stdout + done.stderr
    for words in SAID[name]:
        assert words in done.stdout, done.stdout


def cells():
    return json.loads(NOTEBOOK.read_text("utf-8"))["cells"]


def test_the_notebook_is_one_and_carries_no_output():
    book = json.loads(NOTEBOOK.read_text("utf-8"))
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    assert book["metadata"]["kernelspec"]["name"] == "python3"
    ids = [c["id"] for c in book["cells"]]
    assert len(set(ids)) == len(ids) and all(re.fullmatch(r"[\w-]{1,64}", i) for i in ids)
    for cell in book["cells"]:
        assert cell["cell_type"] in ("markdown", "code") and cell["metadata"] == {}
        assert all(s.endswith("\n") for s in cell["source"][:-1])
        if cell["cell_type"] == "code":
            assert cell["outputs"] == [] and cell["execution_count"] is None


@pytest.mark.slow
def test_the_notebook_runs(tmp_path, quick_bin):
    source = "\n".join("".join(c["source"]) for c in cells() if c["cell_type"] == "code")
    (tmp_path / "tour.py").write_text(source, "utf-8")
    done = run("python tour.py", tmp_path, quick_bin)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "noise multiplier 0.5" in done.stdout and "decode" in done.stdout


@pytest.fixture
def mine(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLES))
    yield "mine.centroids"
    for name in [n for n in sys.modules if n.split(".")[0] == "mine"]:
        del sys.modules[name]


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_a_method_of_ones_own_gives_the_same_between_sites(mine, trust, task, images, tmp_path):
    thirds = [images.take(torch.arange(len(images)) % 3 == i) for i in range(3)]
    base = [f"method.name={mine}", "method.features=scattering:32", "privacy.noise=seeded"]
    sets = [f"privacy.trust={trust}"]
    with pytest.raises(PrivacyError, match="methods = "):  # a site has to name it in its policy
        federation(tmp_path / "refused", task, thirds, sets=sets, base=base)
    allowed = OPEN.model_copy(update={"methods": (mine,)})
    fed = federation(tmp_path / "taken", task, thirds, sets=sets, base=base, policy=allowed)
    outcome, _ = fed.run()
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(thirds))
