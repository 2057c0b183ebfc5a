from __future__ import annotations

import itertools
import math
import re
import shutil
from html.parser import HTMLParser

import numpy as np
import pytest
import sample_report as s
from page_tools import check_phone, screenshot
from PIL import Image

from fedgist.errors import ConfigError
from fedgist.report.figures import class_samples, heat_map, samples_png, spectrum
from fedgist.report.page import render_page, write_page
from fedgist.types import Images

VOID = {"meta", "img", "br", "line", "circle", "polyline"}
EMPTY = {
    "budget": [],
    "limit": None,
    "curve": None,
    "heads": {},
    "details": {},
    "membership": None,
    "files": [],
    "timings": {},
    "partition": None,
    "versions": {},
    "chosen": None,
    "left": [],
}


class Page(HTMLParser):
    """Checks that tags nest, and collects what the tests ask for."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(html)
        self.close()
        assert not self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if not self.open or self.open[-1] != "style":
            self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attrs for name, attrs in self.tags if name == tag]


def older(report: dict) -> dict:
    """A report as it was before there were curves."""
    kept = {k: v for k, v in report.items() if k not in ("budget", "limit", "curve")}
    rows = [{k: v for k, v in row.items() if k != "roc"} for row in report["membership"]]
    return kept | {"membership": rows}


def variants() -> dict[str, tuple[dict, Images | None]]:
    long = s.classes_100()
    sparse = s.report(
        heads={"lda": {}, "own": {"accuracy": 0.5, "ceiling": None}},
        details={"spectra": {"released": [-1.0, -2.0], "shrunk": [], "noise_edge": 0.0}},
        membership=[{"attack": "mine", "epsilon": e, "auc": 0.5, "x": {}} for e in (1.0, math.inf)],
        timings={"server": 1.0},
    )
    return {
        "usual": (s.report(), s.images()),
        "no privacy": (s.report(claim_record=s.claim(math.inf)), s.images()),
        "published mechanism": (s.report(claim_record=s.claim(parity=True)), None),
        "one client, for real": (
            s.report(
                clients=1,
                simulation=False,
                partition=None,
                claim_record=s.claim(trust="local", noise="system"),
            ),
            s.images(),
        ),
        "distributed": (s.report(claim_record=s.claim(trust="distributed")), None),
        "1000 clients": (s.report(clients=1000), s.images()),
        "1500 clients": (s.report(clients=1500), None),
        "100 classes": (s.report(long, 40), s.images(long, 2, size=64, channels=3)),
        "no test images": (s.report(heads={"qda": {}, "decode": {}}), s.images()),
        "bare": (s.report(**EMPTY), None),
        "of an older version": (older(s.report()), s.images()),
        "sparse": (sparse, None),
        "no image": (s.report(), s.images().take(s.images().labels < 0)),
    }


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    return {name: render_page(report, samples) for name, (report, samples) in variants().items()}


@pytest.mark.parametrize("name", list(variants()))
def test_every_shape_of_report_makes_a_sound_page(pages, name):
    html = pages[name]
    page = Page(html)
    assert len(html.encode("utf-8", "replace")) < 2_000_000
    levels = [int(t[1]) for t, _ in page.tags if re.fullmatch("h[1-6]", t)]
    assert levels[0] == 1 and levels.count(1) == 1
    assert all(b - a <= 1 for a, b in itertools.pairwise(levels))
    ids = [a["id"] for _, a in page.tags if "id" in a]
    assert len(ids) == len(set(ids))
    targets = {(a["href"] or "")[1:] for a in page.all("a")} | {
        a["aria-labelledby"] for a in page.all("section")
    }
    assert targets <= set(ids)
    assert all("alt" in a for a in page.all("img"))
    assert len(page.all("table")) == len(page.all("caption"))
    assert "None" not in page.text and "nan" not in page.text.lower().split()


@pytest.mark.parametrize("name", list(variants()))
def test_the_page_loads_nothing_and_runs_nothing(pages, name):
    page = Page(pages[name])
    assert not re.search(r"https?://", pages[name])
    assert not {"script", "link", "iframe", "object", "embed", "form", "base"} & {
        tag for tag, _ in page.tags
    }
    for tag, attrs in page.tags:
        for key, value in attrs.items():
            assert not key.startswith("on")
            if key in ("src", "srcset", "data", "action", "xlink:href"):
                assert (value or "").startswith("data:image/png;base64,"), tag
            if key == "href":
                assert (value or "").startswith("#")
    assert "url(" not in pages[name] and "@import" not in pages[name]
    policy = [a["content"] for a in page.all("meta") if "http-equiv" in a]
    assert policy == ["default-src 'none'; img-src data:; style-src 'unsafe-inline'"]


def test_names_are_escaped_and_never_run_as_templates(pages):
    html = pages["100 classes"]
    assert "<script" not in html and "&lt;script&gt;" in html
    text = Page(html).text
    for name in s.HOSTILE:
        assert name in text  # {{ 7 * 7 }} included: shown, not computed


def test_every_field_is_escaped():
    evil = "<img src=x onerror=alert(1)>"
    report = s.report(
        title=evil,
        device=evil,
        files=[{"path": evil, "what": evil, "bytes": 1}],
        versions={evil: evil},
        config={evil: {evil: evil}},
        chosen=evil,
    )
    report["clients"][0] |= {"client": evil, "note": evil}
    report["claim"] |= {"line": evil, "odds": evil, "notes": [evil], "track": evil}
    report["left"][0]["block"] = evil
    report["heads"][evil] = {"accuracy": 0.1, "per_class": [0.1] * 10}
    report["membership"].append(
        {"attack": evil, "auc": 0.5, "sees": evil, "note": evil, "epsilon": 1.0, evil: evil}
    )
    report["timings"][evil] = 1.0
    report["task"]["name"] = evil
    report["partition"]["spec"] = evil
    assert "<img src=x" not in render_page(report, None)


def test_figures_are_there_and_say_what_they_are_made_of(pages):
    page = Page(pages["usual"])
    text = " ".join(page.text.split())
    assert len([a for a in page.all("svg") if a.get("role") == "img"]) == 4
    assert "judged on 2,000 test images of 10,000" in text
    assert "the curve over ε, made from exact sums" in text
    assert "Not covered by the claim" in text and "made from the exact sums" in text
    assert "single Gaussian with μ = 1.89" in text
    assert "fedgist audit" in text
    roc = text[text.index("How many are found") :]
    assert "likelihood ratio" in roc
    # similarity is no attack: it has no curve beside the limit
    assert "closest" not in roc[: roc.index("Membership attacks")]
    old = Page(pages["of an older version"])
    assert len(old.all("svg")) == 1 and "Not covered by the claim" not in old.text


def test_a_real_release_has_no_curve_and_nothing_to_audit(pages):
    text = Page(render_page(s.report(simulation=False, curve=None))).text
    assert "another ε" not in text and "fedgist audit" not in text


def test_rounds_that_share_evenly_are_said_and_not_drawn():
    rows = [{"round": r + 1, "view": "", "block": "rows", "share": 0.02} for r in range(50)]
    text = Page(render_page(s.report(budget=rows))).text
    assert "divided evenly over 50 rounds" in text and "Where the privacy budget went" not in text


def test_the_summary_comes_first_and_says_what_matters(pages):
    text = " ".join(Page(pages["usual"]).text.split())
    summary = text[: text.index("The claim in full")]
    for fact in (
        "10 clients together hold",
        "81.3\u00a0%".replace("\u00a0", " "),
        "83.1 % without privacy",
        "75.4 %",
        "ε = 10",
        "δ = 10⁻⁵",
        "odds of 22,000 to 1",
        "noise by the server, which sees the exact sums",
        "A simulation, not fit for release",
        "synthetic/",
        "KiB",
    ):
        assert fact in summary, fact


def test_no_privacy_is_red_and_a_real_release_has_no_banner(pages):
    def banner_levels(html: str) -> list[str]:
        return re.findall(r'class="banner (\w+)"', html)

    assert banner_levels(pages["no privacy"]) == ["red", "amber"]
    assert banner_levels(pages["published mechanism"]) == ["red", "amber"]
    assert banner_levels(pages["usual"]) == ["amber"]
    assert banner_levels(pages["one client, for real"]) == []


def test_fine_tuning_is_summed_up_over_images(pages):
    text = " ".join(Page(pages["usual"]).text.split())
    assert "decode80.0 %86.7 %1 of 2" in text.replace("\u00a0", " ")


def test_without_test_images_nothing_is_claimed(pages):
    text = Page(pages["no test images"]).text
    assert "nothing was measured" in text and "Best classifier" not in text


def test_many_clients_are_folded_and_cut(pages):
    assert "the first 1,000 of 1,500" in pages["1500 clients"]
    assert "<summary>Every client" in pages["1000 clients"]
    assert "<summary>Every client" not in pages["usual"]


def test_clients_with_a_note_come_first():
    report = s.report(clients=30)
    report["clients"][29]["note"] = "kept 5 of 9 images"
    text = Page(render_page(report)).text
    assert text.index("kept 5 of 9 images") < text.index("client 0")


def test_the_page_is_written_whole(tmp_path):
    write_page(s.report(title="surrogate \udc80"), None, tmp_path / "report.html")
    assert "surrogate ?" in (tmp_path / "report.html").read_text(encoding="utf-8")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"file/report\.html"):
        write_page(s.report(), None, tmp_path / "file" / "report.html")


def test_the_report_is_not_changed():
    report, copy = s.report(), s.report()
    render_page(report, s.images())
    assert report == copy


def test_spectrum_draws_what_a_log_axis_can_show():
    svg = str(spectrum(s.spectra()))
    positive = sum(v > 0 for v in s.spectra()["released"])
    assert svg.count("<circle") == positive
    assert svg.count("<polyline") == 2 and svg.count('class="edge"') == 1
    assert spectrum({"released": [-1.0], "shrunk": []}) is None
    flat = str(spectrum({"released": [0.5], "shrunk": [0.5], "noise_edge": 0.0}))
    assert 'class="edge"' not in flat


def test_heat_map_has_one_pixel_a_cell_with_square_root_strength():
    import base64
    import io

    uri = heat_map([[0, 1, 4], [2, 0, 0]])
    alpha = np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.split(",")[1]))))[..., 3]
    assert alpha.tolist() == [[0, 180], [128, 0], [255, 0]]


def test_samples_are_the_first_of_each_class_and_fit_the_page():
    few = class_samples(s.images())
    assert [len(c.uris) for c in few] == [10] * 9 + [0]
    assert [c.total for c in few] == [12] * 9 + [0]
    assert few[0].width == 56
    many = class_samples(s.images(s.classes_100(), 2, size=96, channels=3))
    assert len(many) == 100 and {len(c.uris) for c in many} == {1, 0} and many[0].width == 64


@pytest.mark.parametrize(("size", "channels", "cell"), [(28, 1, 56), (8, 3, 56), (160, 3, 128)])
def test_samples_png_enlarges_without_smoothing(tmp_path, size, channels, cell):
    images = s.images(size=size, channels=channels)
    samples_png(images, tmp_path / "samples.png", per_class=3)
    sheet = np.asarray(Image.open(tmp_path / "samples.png"))
    assert sheet.shape[0] == 32 + 10 * (cell + 4) + 22
    if size < 128:
        first = images.pixels[0].numpy().repeat(cell // size, 1).repeat(cell // size, 2)
        first = np.broadcast_to(first, (3, cell, cell)).transpose(1, 2, 0)
        row = sheet[16 : 16 + cell]
        starts = [x for x in range(row.shape[1] - cell) if (row[:, x : x + cell] == first).all()]
        assert len(starts) == 1


def test_samples_png_takes_any_name_and_a_float_image(tmp_path):
    names = ("line\nbreak", "\udc80", *s.HOSTILE)
    images = s.images(names, 2, size=16)
    samples_png(Images(images.floats(), images.labels, names), tmp_path / "samples.png")
    assert (tmp_path / "samples.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
@pytest.mark.parametrize(
    ("name", "width"), [("usual", 1000), ("100 classes", 1000), ("usual", 500)]
)
def test_chromium_shows_the_page(tmp_path, pages, name, width):
    pixels = screenshot(tmp_path, pages[name], width)
    back = pixels[2, 2]
    assert (np.abs(pixels - back).sum(2) > 60).mean() > 0.02  # something is drawn
    assert (pixels[:, -8:] == back).all()  # and nothing runs over the right edge
    amber = np.abs(pixels[:400] - [255, 245, 223]).sum(2) < 6
    assert amber.sum() > 5000  # the style sheet is in force


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("chromium") is None, reason="needs chromium")
def test_chromium_on_a_phone(tmp_path, pages):
    check_phone(tmp_path, pages["usual"])
