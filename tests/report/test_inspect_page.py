"""The page before anything is sent: the right numbers beside the right images, loads nothing."""

from __future__ import annotations

import json
import re
import stat
from dataclasses import replace

import pytest
import torch
from test_report_page import Page
from typer.testing import CliRunner

from federation_tools import OPEN, federation
from fedgist.audit.similarity import psnr, ssim
from fedgist.cli import app
from fedgist.compress import enlarge
from fedgist.data import open_source
from fedgist.errors import Awaiting, ConfigError, DataError, ProtocolError
from fedgist.exchange.receipt import WithheldImages, image_hashes
from fedgist.exchange.review import Review
from fedgist.methods._uploads import chosen
from fedgist.report.inspect import Subject, names_of
from fedgist.report.inspect_page import render_inspection, write_inspection
from fedgist.setup import blocks
from fedgist.types import Images, Task

REVIEW = OPEN.model_copy(update={"review": True})
UPLOADS = ["method.name=downsample", "method.side=4", "method.recipe.steps=3"]
pytestmark = pytest.mark.usefixtures("one_thread")


class Apart:
    """A stand-in for a perceptual distance."""

    name = "absolute difference"

    def __call__(self, a, b):
        return (a - b).abs().mean((1, 2, 3))


@pytest.fixture(scope="module")
def sixteen():
    """90 images of 16 pixels, in an order in which classes are mixed."""
    rng = torch.Generator().manual_seed(3)
    labels = torch.randint(3, (90,), generator=rng)
    pixels = (torch.rand(90, 1, 16, 16, generator=rng) * 255).to(torch.uint8)
    pixels[41] = 90  # flat: a thumbnail shows all of it
    return Images(pixels, labels, ("a", "b <&>", "it's"))


def waiting(folder, images, sets, withheld=None):
    """Return the subject of one site whose first gist waits."""
    task = Task("toy", images.classes, channels=1, size=images.pixels.shape[-1], max_images=500)
    sets = ["privacy.trust=local", *sets]
    fed = federation(folder, task, [images, images], sets, policy=REVIEW, base=())
    site, a = fed.sites["site-0"], fed.agreement
    with pytest.raises(Awaiting):
        site.contribute()
    review = Review(site.folder, a, site.identity.public)
    left = blocks(a.plan, a.task, a.privacy)
    return site, Subject(a, site.identity, review, images, [], left, "fedgist inspect --task t")


@pytest.fixture(scope="module")
def uploads(tmp_path_factory, sixteen):
    folder = tmp_path_factory.mktemp("uploads")
    sets = [*UPLOADS, "method.share=0.6", "privacy.epsilon=inf"]
    site, subject = waiting(folder, sixteen, sets)
    return site, subject, subject.inspect(Apart())


def test_numbers_are_places_in_the_sites_own_data(uploads, sixteen):
    found = uploads[2]
    rows, w = found.rows, found.record["waiting"]
    assert 0 < len(rows) < 90 and w["kind"] == "uploads" and w["raw"]
    assert torch.equal(sixteen.take(rows).pixels, chosen(sixteen, 0.6).pixels)
    real, small = sixteen.floats(rows), found.gist["pixels"].float() / 255
    assert torch.equal(found.gist["labels"].long(), sixteen.labels[rows])
    likeness = ssim(real, enlarge(small, 16))
    best = int(likeness.argmax())
    top = w["closest"][0]
    assert top["number"] == int(rows[best]) + 1 == 42  # 41 would be counted from zero
    assert top["ssim"] == pytest.approx(float(likeness[best]))
    for c, row in enumerate(w["classes"]):
        mine = (sixteen.labels[rows] == c).nonzero().flatten()
        worst = mine[likeness[mine].argmax()]
        assert row["worst"]["number"] == int(rows[worst]) + 1
        assert row["worst"]["psnr"] == pytest.approx(
            float(psnr(real[worst : worst + 1], enlarge(small[worst : worst + 1], 16)))
        )
        assert row["held"] == int((sixteen.labels == c).sum()) and row["sent"] == len(mine)
        assert [p["number"] for p in row["first"]] == (rows[mine[:5]] + 1).tolist()


def test_the_page_is_whole_loads_nothing_and_says_what_to_do(uploads, tmp_path):
    _, subject, found = uploads
    html = render_inspection(subject, found)
    page = Page(html)
    assert not page.open, "tags must nest"
    assert "<script" not in html and not re.search(r"""(?:src|href)=["'](?!data:|#)""", html)
    assert "default-src 'none'" in html
    w = found.record["waiting"]
    for text in ("Nothing has been sent", "No privacy guarantee", w["gist"], "b &lt;&amp;&gt;"):
        assert text in html
    for option in ("--send", "--refuse", "--withhold ", "--withhold-class "):
        assert re.search(rf"--gist {w['gist'][:12]}.*{option}", html), option
    assert "b <&>" not in html and "42," in html
    pairs = html.count("What would be sent of it")
    assert pairs >= 12 + 3
    path = write_inspection(subject, found, tmp_path / "out")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_after_withholding_numbers_stay_those_of_the_data(tmp_path, sixteen):
    sets = ["method.name=fedsumup", "method.side=4", "method.rounds=2", "privacy.epsilon=inf"]
    task = Task("toy", sixteen.classes, channels=1, size=16, max_images=500)
    sets += [
        "method.share=1.0",
        "method.recipe.steps=2",
        "method.recipe.width=4",
        "method.improve.steps=1",
    ]
    fed = federation(tmp_path, task, [sixteen], ["privacy.trust=local", *sets], policy=REVIEW,
                     base=())  # fmt: skip
    site, a = fed.sites["site-0"], fed.agreement
    review = Review(site.folder, a, site.identity.public)
    left = blocks(a.plan, a.task, a.privacy)
    subject = Subject(a, site.identity, review, sixteen, [], left, "x")
    seen = []

    def patient(request, answer=site.answer):
        try:
            return answer(request)
        except Awaiting:
            seen.append(subject.inspect(Apart()))
            out = () if seen[1:] else (["it's"], [1, 42])
            subject.decide("send", *out)
            return answer(request)

    site.answer = patient
    fed.run()
    first, second = seen
    assert len(first.rows) == 90
    gone = WithheldImages(("it's",), tuple(image_hashes(sixteen.take(torch.tensor([0, 41])))))
    assert torch.equal(second.rows, gone.kept(sixteen).nonzero().flatten())
    assert second.record["waiting"]["withheld"] == {"classes": ["it's"], "images": 2}
    html = render_inspection(subject, second)
    assert "Withheld by an earlier decision" in html and "it&#39;s" in html
    assert [d["decision"] for d in second.record["decisions"]] == ["send"]


def test_other_gists_have_their_own_page(tmp_path, sixteen):
    noised = ["method.features=scattering:32", "method.heads=['lda']", "privacy.noise=system"]
    _, subject = waiting(tmp_path / "a", sixteen, noised)
    found = subject.inspect(Apart())
    w = found.record["waiting"]
    assert w["kind"] == "numbers" and not w["raw"] and w["bytes"] == len(subject._waiting().gist)
    assert all(p["noise"] for p in w["pieces"])
    html = render_inspection(subject, found)
    assert "no picture" in html and "grid units" in html and "No privacy guarantee" not in html
    assert not Page(html).open
    html = render_inspection(subject, replace(found, record=found.record | {
        "waiting": w | {"secure": True}}))  # fmt: skip
    assert "under masks" in html


def test_uploads_that_match_no_image_are_shown_alone(uploads):
    _, subject, found = uploads
    w = {k: v for k, v in found.record["waiting"].items() if k not in ("closest", "classes")}
    alone = replace(found, rows=None, record=found.record | {"waiting": w})
    html = render_inspection(subject, alone)
    assert "cannot be told for this method" in html and html.count("<img") > 20
    swapped = found.gist | {"labels": found.gist["labels"].flip(0)}
    assert subject._rows(subject._waiting(), swapped) is None


def test_decisions_by_number_and_class(uploads, sixteen):
    site, subject, _ = uploads
    with pytest.raises(ConfigError, match=r"must be one of .*Did you mean 'it's'"):
        subject.decide("send", ["its"])
    for n in (0, 91):
        with pytest.raises(ConfigError, match=r"must lie in 1\.\.90"):
            subject.decide("send", (), [n])
    with pytest.raises(ConfigError, match="use --refuse"):
        subject.decide("send", sixteen.classes)
    with pytest.raises(ProtocolError, match="look at it again"):
        subject.decide("send", gist="0123")
    other = replace(subject, images=sixteen.take(torch.arange(90).flip(0)))
    with pytest.raises(DataError, match="must be the images that the waiting gist"):
        other.inspect(Apart())
    receipt = subject.decide("send", ["a"], [42], subject._waiting().digest[:12])
    assert receipt.said["classes"] == ["a"]
    assert receipt.said["images"] == image_hashes(sixteen.take(torch.tensor([41])))
    assert "You have decided: send" in render_inspection(subject, subject.inspect(Apart()))
    assert site.contribute()
    assert subject.inspect(Apart()).record["waiting"] is None
    with pytest.raises(ProtocolError, match="must come before"):
        subject.decide("refuse")


def test_names_of_files():
    class File:
        name = "a/1.png"

    assert names_of([File(), File()]) == ["a/1.png", "a/1.png"]
    assert names_of(torch.zeros(2).numpy()) == [] == names_of([b"x"])


def test_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data = "fashion-mini@1/100"
    source = open_source(data)
    sets = ["privacy.trust=local", "privacy.epsilon=inf", *UPLOADS]
    images = source.prefer("train", source.task())
    fed = federation(tmp_path / "f", source.task(), [images], sets, policy=OPEN, base=())
    fed.members[0].save(tmp_path / "k.key")
    (tmp_path / "t.toml").write_text(fed.agreement.dumps())
    (tmp_path / "p.toml").write_text("raw = true\nmax_epsilon = inf\nseeded = true\n")
    ours = ["--task", "t.toml", "--key", "k.key", "--state", "s"]

    def run(*words, code=0):
        done = CliRunner().invoke(app, list(words))
        assert done.exit_code == code, done.output
        return done.output

    look = ["inspect", *ours, "--data", data]
    run(*look, code=1)  # nothing has been started
    give = ["contribute", data, *ours, "--out", "g", "--policy", "p.toml", "--ledger", "l"]
    said = run(*give, "--review")
    assert "fedgist inspect --task t.toml --key k.key --data fashion-mini@1/100 --state s" in said
    assert not (tmp_path / "g").exists()
    record = json.loads(run(*look, "--json", "--out", "page"))
    assert record["page"] == "page/inspect.html" and (tmp_path / "page/inspect.html").is_file()
    assert record["waiting"]["held"] == len(images)
    assert "--send --withhold 3,17" in run(*look)
    for wrong in (["--send", "--refuse"], ["--withhold", "3"], ["--send", "--withhold", "x"]):
        run(*look, *wrong, code=2)
    assert "Round 1: send" in run(*look, "--send", "--withhold", "3, 5")
    assert "Written to g" in run(*give)
    assert "Nothing waits" in run(*look) and (tmp_path / "g").is_file()
