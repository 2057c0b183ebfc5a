"""The README's commands, run as they stand: offline, on little data, in a folder of their own.

Every line of its shell blocks is run or is named in `SKIPPED` with the reason. A line may get
options that make it small (`SMALLER`), and what has to be there before it (`BEFORE`).
"""

from __future__ import annotations

import json
import re

import numpy as np
import pytest
from PIL import Image

from guide_tools import ROOT, SHELL, blocks, run
from quick_methods import QUICK

README = ROOT / "README.md"
SKIPPED = {
    "make demo": "installs; .ci/run runs it, and `fedgist run` is run here in its place",
    "make test": "installs, and runs this test",
    "make docs": "installs; test_docs_site builds the site",
}
ELSEWHERE = {  # names that the README takes for granted -> what this folder has
    "--data fashion-mnist": "--data ./my-images",  # may have to be fetched
    "/share": "share",
}
LITTLE = ["data.limit=200", "evaluation.ceiling=false", "evaluation.codec_consistent=false"]
FEW = "method.features=scattering:32"
STATISTICS = [
    *(FEW, "method.synthetic_size=60", "method.recipe.steps=3", "method.recipe.width=8"),
]
SMALLER = {
    "fedgist run --data fashion-mnist --clients": [*LITTLE, *STATISTICS],
    "fedgist run --data ./my-images": [*LITTLE, *STATISTICS],
    "fedgist run --data fashion-mnist --method logistic": [*LITTLE, *QUICK["logistic"]],
    "fedgist run --data fashion-mnist --method ndpdc": [*LITTLE, *QUICK["ndpdc"]],
    "fedgist run --data fashion-mnist --method fedsumup": [
        *(
            *LITTLE,
            *QUICK["fedsumup"],
            "data.clients=2",
            "data.limit=40",
            "evaluation.decoder_steps=1",
        ),
    ],
    "fedgist task new": ["method.heads=['lda']", FEW, "privacy.missing=1"],
    "fedgist evaluate": "--model logistic --seeds 1",
    "fedgist audit": "--shadows 4 --trials 200",
    "fedgist encoder train": "--shown 50",
}
DEMO = [*LITTLE, *STATISTICS, "method.heads=['lda','decode']"]
BEFORE = {
    "fedgist evaluate": "fedgist run --out fedgist-demo" + "".join(f' --set "{s}"' for s in DEMO),
    "fedgist task new": "for name in lead south west; do fedgist keys new $name; done; mkdir share",
    # one site's line is shown; the others start it on machines of their own
    "fedgist join": """for name in south west; do
        HOME=$PWD/$name fedgist join --mailbox share --task task.toml --key $name.key \\
        --data ./images & done""",
    # a gist that waits for a decision, of a task of its own, in which a gist is one file
    "fedgist inspect --task": """fedgist task new --like ./images --coordinator lead.pub \
        --site north.pub --set privacy.trust=local --set "method.heads=['lda']"
        fedgist contribute ./images --task task.toml --key north.key --out north.gist --review""",
    "fedgist inspect north.gist": """fedgist inspect --task task.toml --key north.key \
        --data ./images --send
        fedgist contribute ./images --task task.toml --key north.key --out north.gist --review
        printf 'max_epsilon = 20\\n' > ours.toml""",
}
BEHIND = ("fedgist join",)  # it waits for the coordinator, whose line is the next


def lines(page=README):
    """Return the commands of the page's shell blocks, without what is said of them."""
    code = "".join(b.code for b in blocks(page) if b.language in SHELL)
    found = (re.sub(r"\s+#.*", "", s).strip() for s in code.replace("\\\n", " ").splitlines())
    return [s for s in found if s]


def of(line, table, otherwise):
    """Return the entry of a table whose key a line begins with: the longest of them."""
    keys = [k for k in table if line.startswith(k)]
    return table[max(keys, key=len)] if keys else otherwise


def script(line):
    """Return what is run for a line of the README."""
    more = of(line, SMALLER, "")
    if isinstance(more, list):
        more = "".join(f' --set "{s}"' for s in more)
    shown = line
    for name, here in ELSEWHERE.items():
        shown = shown.replace(name, here)
    end = " &" if line.startswith(BEHIND) else ""
    return f"{of(line, BEFORE, ':')}\necho '>> {line}' >&2\n{shown} {more}{end}\n"


def pictures(folder, classes, n, seed):
    """Write class folders of small grey images that differ in brightness."""
    rng = np.random.default_rng(seed)
    for label, name in enumerate(classes):
        (folder / name).mkdir(parents=True)
        for i in range(n):
            pixels = rng.integers(0, 100, (28, 28)) + 70 * label
            Image.fromarray(pixels.astype(np.uint8)).save(folder / name / f"{i}.png")


@pytest.fixture
def folder(tmp_path):
    """A folder with the images that the README takes for granted."""
    pictures(tmp_path / "images", ("left", "right"), 60, 0)
    pictures(tmp_path / "my-images" / "train", ("left", "right"), 60, 1)
    pictures(tmp_path / "my-images" / "test", ("left", "right"), 10, 2)
    pictures(tmp_path / "public-images", ("any",), 200, 3)
    return tmp_path


def test_every_line_is_run_or_skipped_for_a_reason():
    found = lines()
    assert len(found) > 20 and len(set(found)) == len(found)
    assert SKIPPED.keys() <= set(found)
    kept = [s for s in found if s not in SKIPPED]
    assert all(s.startswith("fedgist ") for s in kept)
    for key in (*SMALLER, *BEFORE, *BEHIND):
        assert any(s.startswith(key) for s in kept), f"the README has no line '{key}'"
    for name in ELSEWHERE:
        assert any(name in s for s in kept), name


@pytest.mark.slow
def test_the_commands_run(folder, quick_bin):
    kept = [s for s in lines() if s not in SKIPPED]
    done = run("\n".join(map(script, kept)) + "wait\n", folder, quick_bin, seconds=600)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    assert [s for s in done.stderr.splitlines() if s.startswith(">> ")] == [f">> {s}" for s in kept]
    assert (folder / "fedgist-demo" / "audit.html").is_file()
    assert list((folder / "shared").rglob("*.parquet"))
    assert (folder / "ours.safetensors").is_file()
    report = json.loads((folder / "result" / "report.json").read_text("utf-8"))
    assert report["simulation"] is False and len(report["clients"]) == 3
    assert "inside a secure sum" in report["claim"]["noise_by"]
    assert (folder / "north.gist.inspect.html").is_file()
    assert (folder / ".fedgist" / "ledger.sqlite").is_file()


@pytest.mark.parametrize("wrong", ["fedgist encoder inf scattering", "fedgist plan --epsilon much"])
def test_a_wrong_line_is_seen(wrong, tmp_path, quick_bin):
    assert run(script(wrong), tmp_path, quick_bin).returncode == 2
