"""A gist file looked at before it is carried away: what it must be, says, and is decided."""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import numpy as np
import pytest
import torch
from page_tools import check_phone, screenshot
from test_report_page import Page
from typer.testing import CliRunner

from federation_tools import OPEN, federation
from fedgist.cli import app
from fedgist.errors import ConfigError, PrivacyError, ProtocolError
from fedgist.exchange.handed import Handed
from fedgist.exchange.letter import write_letter
from fedgist.exchange.receipt import Receipt
from fedgist.exchange.wire import promise
from fedgist.inspection import open_gist
from fedgist.policy import Policy, Rule
from fedgist.privacy.accounting import odds
from fedgist.privacy.ledger import Ledger
from fedgist.report.inspect_page import render_inspection
from fedgist.report.inspect_words import rule_rows
from fedgist.types import Images, Task

pytestmark = pytest.mark.usefixtures("one_thread")
LOCAL = ["privacy.trust=local", "privacy.epsilon=6", "privacy.noise=system", "method.features="]
LOCAL += ["method.heads=['qda','decode']"]


@pytest.fixture(scope="module")
def images():
    rng = torch.Generator().manual_seed(0)
    pixels = (torch.rand(60, 1, 16, 16, generator=rng) * 255).to(torch.uint8)
    return Images(pixels, torch.arange(60) % 3, ("a", "b <&>", "c"))


@pytest.fixture(scope="module")
def made(tmp_path_factory, images):
    """Return (folder, federation): one site has contributed to ``site-0.gist``."""
    folder = tmp_path_factory.mktemp("handed")
    task = Task("toy", images.classes, channels=1, size=16, max_images=200)
    fed = federation(folder / "f", task, [images, images], LOCAL, policy=OPEN, base=())
    (folder / "task.toml").write_text(fed.agreement.dumps())
    fed.members[0].save(folder / "site-0.key")
    fed.members[1].save(folder / "site-1.key")
    (folder / "site-0.gist").write_bytes(fed.sites["site-0"].contribute())
    return folder, fed


def subject_of(made, images, policy=None):
    folder, fed = made
    found = open_gist(folder / "site-0.gist", key=folder / "site-0.key")
    return replace(found, images=images, policy=policy, ledger=fed.sites["site-0"].ledger)


def test_the_task_beside_it_is_found_and_another_refused(made, tmp_path, monkeypatch):
    folder, fed = made
    assert open_gist(folder / "site-0.gist").agreement.digest == fed.agreement.digest
    monkeypatch.chdir(tmp_path)
    alone = tmp_path / "g"
    alone.write_bytes((folder / "site-0.gist").read_bytes())
    with pytest.raises(ConfigError, match=f"--task must name .* {fed.agreement.digest[:12]}"):
        open_gist(alone)
    (tmp_path / "x").write_bytes(b"no gist")
    with pytest.raises(ProtocolError, match="must be a gist file"):
        open_gist(tmp_path / "x")
    with pytest.raises(ProtocolError, match="must be readable"):
        open_gist(tmp_path / "nothing")


def test_a_changed_file_is_refused(made, tmp_path):
    folder, fed = made
    data = bytearray((folder / "site-0.gist").read_bytes())
    for at in (50, 200, len(data) - 1):
        worse = bytearray(data)
        worse[at] ^= 1
        (tmp_path / "g").write_bytes(worse)
        with pytest.raises(ProtocolError):
            Handed.open(tmp_path / "g", fed.agreement)


def forged(made, tmp_path, tensors=None, **header):
    """Return a gist that the site itself has signed, with other content."""
    folder, fed = made
    a, me = fed.agreement, fed.members[0]
    kept = Handed.open(folder / "site-0.gist", a).letter.tensors() if tensors is None else tensors
    more = promise(a) | header
    path = tmp_path / "forged.gist"
    letter = write_letter(me, a.digest, "0.gist", a.leader.name, "reply", kept, asked="", **more)
    path.write_bytes(letter)
    return path


def test_what_it_says_of_itself_is_compared(made, tmp_path, images):
    path = forged(made, tmp_path, epsilon="1.0")
    subject = replace(subject_of(made, images), review=Handed.open(path, made[1].agreement))
    rules = {r["rule"]: r for r in subject.inspect().record["waiting"]["rules"]}
    assert not rules["statement"]["kept"] and rules["statement"]["got"] == "1.0"
    with pytest.raises(PrivacyError, match="Got 'statement'"):
        subject.decide("send")
    assert subject.decide("refuse").said["decision"] == "refuse"


def test_another_shape_is_no_gist_of_the_task(made, tmp_path):
    path = forged(made, tmp_path, {"count": torch.zeros(3, dtype=torch.uint8)})
    with pytest.raises(ProtocolError, match="what the task's plan says"):
        Handed.open(path, made[1].agreement)


def test_the_whole_of_an_inspection(made, images):
    subject = subject_of(made, images)
    found = subject.inspect()
    w, claim = found.record["waiting"], found.record["claim"]
    assert w["kind"] == "numbers" and w["held"] == w["used"] == 60
    assert all(rule["kept"] for rule in w["rules"]), w["rules"]
    assert {b["state"] for b in w["evidence"]["noise"].values()} == {"as planned"}
    assert w["ledger"]["before"] == 0 and w["ledger"]["recorded"]
    assert w["ledger"]["after"] == pytest.approx(6, rel=1e-6)
    assert w["encoders"][0]["name"] == "pca" and w["encoders"][0]["shipped"]
    assert w["asked"][0]["radius"] > 1 and sum(w["asked"][0]["shares"].values()) == 1
    assert found.decoded is not None and found.decoded.pixels.shape[1:] == (1, 16, 16)
    html = render_inspection(subject, found)
    assert not Page(html).open and "<script" not in html and "b &lt;&amp;&gt;" in html
    for text in ("It lies in the file", "Who sees what", "adds all of the noise itself",
                 odds(6.0)[1:40], "zCDP", "openclipart", "Not protected", w["gist"],
                 "--refuse --ask-epsilon 3"):  # fmt: skip
        assert text in html, text
    assert html.count("<img") > 3 * 5 and claim["sigma"] > 0


def test_without_images_what_can_be_said_is_said(made):
    folder, _ = made
    subject = open_gist(folder / "site-0.gist")
    found = subject.inspect()
    w = found.record["waiting"]
    assert w["held"] is None and w["ledger"] is None and w["evidence"]["noise"] == {}
    html = render_inspection(subject, found)
    assert not Page(html).open and "Real images of this site are" not in html
    with pytest.raises(ConfigError, match="must be signed"):
        subject.decide("send")


def test_rules_of_the_policy_and_of_the_ledger(made, images, tmp_path):
    strict = subject_of(made, images, Policy(max_epsilon=2.0))
    kept = {r["rule"]: r["kept"] for r in strict.inspect().record["waiting"]["rules"]}
    assert not kept["max_epsilon"] and kept["max_delta"]
    with pytest.raises(PrivacyError, match=r"'max_epsilon': 6.* allowed: 2"):
        strict.decide("send")
    book = Ledger(tmp_path / "l.sqlite")
    book.cap(5.0)
    capped = replace(subject_of(made, images), ledger=book)
    with pytest.raises(PrivacyError, match="'ledger'"):
        capped.decide("send")
    seen = capped.inspect().record["waiting"]["ledger"]
    assert not seen["recorded"] and seen["cap"]["epsilon"] == 5 and not book.show()["entries"]
    html = render_inspection(capped, capped.inspect())
    assert "A rule is broken" in html and "Total ε after it" in html


def test_rules_read_well():
    rules = [Rule("max_epsilon", math.inf, 3.0, True), Rule("max_epsilon", 10.0, math.inf, False)]
    told = [(r["limit"], r["got"]) for r in rule_rows([rule.record() for rule in rules])]
    assert told == [("at most 10", "∞"), ("no limit", "3")]


def test_decisions_are_signed_by_the_site_and_lie_beside_the_file(made, images):
    folder, fed = made
    subject = subject_of(made, images)
    with pytest.raises(ConfigError, match="must be sent or kept as it is"):
        subject.decide("send", ["a"])
    other = open_gist(folder / "site-0.gist", key=folder / "site-1.key")
    with pytest.raises(ConfigError, match="must be that of site-0"):
        other.decide("refuse")
    receipt = subject.decide("refuse", asked=2.5)
    place = folder / "site-0.gist.decision.json"
    read = Receipt.read(place.read_bytes(), fed.agreement.roster[0])
    assert read.said == receipt.said and read.said["asked_epsilon"] == 2.5
    assert subject.decide("refuse", asked=2.5).said["time"] == receipt.said["time"]
    assert subject.decide("send").said["decision"] == "send"
    changed = json.loads(place.read_text())
    changed["decision"]["decision"] = "refuse"
    place.write_text(json.dumps(changed))
    with pytest.raises(ProtocolError, match="that this site signed"):
        subject.inspect()
    place.unlink()


def test_the_command_line(made, tmp_path, monkeypatch):
    folder, _ = made
    monkeypatch.chdir(folder)
    monkeypatch.setenv("HOME", str(tmp_path))

    def run(*words, code=0):
        done = CliRunner().invoke(app, ["inspect", *words])
        assert done.exit_code == code, done.output
        return done.output

    (tmp_path / "p.toml").write_text("max_epsilon = 5\n")
    (tmp_path / "q.toml").write_text("max_epsilon = 6\n")
    record = json.loads(run("site-0.gist", "--json"))
    assert record["page"].endswith("site-0.gist.inspect.html")
    beside = json.loads((folder / "site-0.gist.inspect.json").read_text())
    assert beside["waiting"]["gist"] == record["waiting"]["gist"]
    said = run("site-0.gist", "--policy", str(tmp_path / "p.toml"), code=1)
    assert "broken" in said and "allowed: at most 5" in said
    assert "rules kept" in run("site-0.gist", "--policy", str(tmp_path / "q.toml"))
    run("site-0.gist", "--key", "site-0.key", "--ask-epsilon", "2", code=2)
    run(
        "site-0.gist", "--key", "site-0.key", "--send", "--policy", str(tmp_path / "p.toml"), code=2
    )
    said = run("site-0.gist", "--key", "site-0.key", "--refuse", "--ask-epsilon", "2")
    assert "would take part at ε = 2" in said and "decision.json" in said
    run(code=2)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize("dark", [False, True])
def test_chromium_shows_the_page(made, images, tmp_path, dark):
    subject = subject_of(made, images, Policy(max_epsilon=2.0))
    html = render_inspection(subject, subject.inspect())
    pixels = screenshot(tmp_path, html, 1000, dark=dark)
    back = pixels[2, 2]
    assert (np.abs(pixels - back).sum(2) > 60).mean() > 0.02  # something is drawn
    assert (pixels[:, -8:] == back).all()  # and nothing runs over the right edge
    red = np.abs(pixels[:500] - ([58, 26, 28] if dark else [253, 236, 236])).sum(2) < 6
    assert red.sum() > 5000  # the banner: a rule is broken


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_chromium_on_a_phone(made, images, tmp_path):
    subject = subject_of(made, images)
    check_phone(tmp_path, render_inspection(subject, subject.inspect()))
