"""The documentation site: it builds without a warning, lacks nothing, and asks no other host."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

pytest.importorskip("mkdocs")
pytest.importorskip("material")
pytest.importorskip("mkdocstrings")

import fedgist
from fedgist.audit.membership import claimed
from fedgist.method import method_names
from fedgist.privacy.claim import LAW
from guide_tools import ROOT, blocks
from methods_page import PAGE, current, row

DOCS = ROOT / "docs"
REQUESTING = ("src", "srcset", "poster", "action", "data", "background")
OUTSIDE = re.compile(r"^\s*(?:https?:)?//", re.IGNORECASE)
IN_CSS = re.compile(r"(?:url\(\s*['\"]?|@import\s+['\"])((?:https?:)?//[^'\")]+)", re.IGNORECASE)
IN_JS = re.compile(r"[\"'`](https?://(?!www\.w3\.org/)[^\"'`]+)[\"'`]")
COMMENT = re.compile(r"/\*.*?\*/", re.DOTALL)
GITLAB = "https://${e}/api/v4/projects/${encodeURIComponent(t)}"  # asked with a repo_url only


class Requests(HTMLParser):
    """Collects what a page would ask other hosts for; links in the text are for the reader."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            asks = name in REQUESTING or (name == "href" and tag not in ("a", "area"))
            if asks and OUTSIDE.match(value or ""):
                self.found.append(f"<{tag} {name}={value}>")
            if name == "style":
                self.found += IN_CSS.findall(value or "")


def requests(path: Path) -> list[str]:
    """Return what a built file would ask other hosts for."""
    text = path.read_text("utf-8")
    if path.suffix == ".html":
        page = Requests()
        page.feed(text)
        style = "".join(re.findall(r"<style[^>]*>(.*?)</style>", text, re.DOTALL))
        script = "".join(re.findall(r"<script(?![^>]*json)[^>]*>(.*?)</script>", text, re.DOTALL))
        return page.found + IN_CSS.findall(style) + IN_JS.findall(script)
    if path.suffix == ".css":
        return IN_CSS.findall(COMMENT.sub("", text))
    return [u for u in IN_JS.findall(COMMENT.sub("", text)) if u != GITLAB]


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    out = tmp_path_factory.mktemp("site") / "site"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(out)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return out


@pytest.mark.slow
def test_every_page_is_built_and_none_asks_another_host(site):
    built = [p for s in ("html", "css", "js") for p in site.rglob(f"*.{s}")]
    pages = {p.relative_to(DOCS).with_suffix(".html") for p in DOCS.rglob("*.md")}
    assert pages <= {p.relative_to(site) for p in built}
    found = {p.relative_to(site): f for p in built if "search_index" not in p.name
             for f in [requests(p)] if f}  # fmt: skip
    assert found == {}


@pytest.mark.slow
def test_pages_opened_as_files_can_be_searched(site):
    for page, up in (("index.html", ""), ("howto/own-data.html", "../")):
        assert f'<script src="{up}assets/frame-worker.js">' in (site / page).read_text()
    assert (site / "assets" / "frame-worker.js").is_file()
    assert "Choosing" in (site / "search" / "search_index.js").read_text()


@pytest.mark.slow
def test_the_reference_shows_what_docstrings_say(site):
    text = (site / "reference" / "queries.html").read_text()
    for words in ("SumQuery", "budget shares of", "one joint Gaussian release"):
        assert words in text
    assert "Raises" in (site / "reference" / "run.html").read_text()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.html", '<script src="https://cdn.example/x.js"></script>'),
        ("a.html", '<link rel="stylesheet" href="//fonts.example/css">'),
        ("a.html", '<p style="background: url(https://a.example/b.png)">'),
        ("a.html", '<script>fetch("https://a.example/count")</script>'),
        ("a.css", "@import 'https://a.example/b.css';"),
        ("a.css", "p { background: url(https://a.example/b.png) }"),
        ("a.js", "import(`https://unpkg.com/mermaid@11`)"),
    ],
)
def test_a_request_to_another_host_is_seen(name, text, tmp_path):
    (tmp_path / name).write_text(text)
    assert requests(tmp_path / name)
    (tmp_path / "b.html").write_text('<a href="https://arxiv.org/abs/1602.05629">a paper</a>')
    assert requests(tmp_path / "b.html") == []


def test_every_page_is_in_the_navigation():
    text = (ROOT / "mkdocs.yml").read_text("utf-8").split("\nnav:\n")[1]
    named = re.findall(r"([\w/-]+\.md)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert set(named) == {p.relative_to(DOCS).as_posix() for p in DOCS.rglob("*.md")}


def test_methods_page_has_every_method_as_its_plan_says():
    text = PAGE.read_text("utf-8")
    assert text == current(text), "run python tests/methods_page.py --write"
    headings = re.findall(r"^### (\w+)$", text, re.MULTILINE)
    assert sorted(headings) == method_names()
    for name in headings:
        about = text.split(f"\n### {name}\n")[1].split("\n#")[0]
        assert "Cost: " in " ".join(about.split()), f"{name}: what it costs must be said"
    assert "PARS" in text and "DFLNet-SM" in text


def test_the_methods_table_tells_methods_apart():
    rows = {name: row(name) for name in ("fedkt_csd", "ndpdc", "fedavg", "downsample")}
    assert rows["fedkt_csd"][4:] == ["any", "server, shares, or each client"]
    assert rows["ndpdc"][4:] == ["any", "each client, in full"]
    assert rows["fedavg"][4:] == rows["downsample"][4:] == ["∞", "nobody"]
    assert rows["downsample"][3] == "65 an image"  # 8 x 8 bytes and a label


def test_the_reference_lists_every_public_name():
    text = (DOCS / "reference" / "index.md").read_text("utf-8")
    for name, home in fedgist._HOME.items():
        (page,) = re.findall(rf"^\| \[`{name}`\]\((\w+)\.md\) \| `{home}` \|", text, re.MULTILINE)
        assert (DOCS / "reference" / f"{page}.md").is_file()


def test_the_method_of_the_how_to_is_the_example():
    shown = {b.title: b.code for b in blocks(DOCS / "howto" / "own-method.md") if b.title}
    example = (ROOT / "examples" / "mine" / "centroids.py").read_text("utf-8")
    assert shown["mine/centroids.py"] == example


def test_the_odds_of_choosing_epsilon():
    text = " ".join((DOCS / "howto" / "choosing-epsilon.md").read_text("utf-8").split())
    low, high = (100 * claimed(e, 1e-5, LAW).tpr[1] for e in (3, 10))  # at 1 % false alarms
    assert f"can come to {math.exp(3):.0f} to 1 in the worst case" in text
    assert f"finds about {low:.0f} % of the used images at 1 % false alarms" in text
    assert f"ε = 10: {round(math.exp(10), -3):,.0f} to 1, and a third" in text and 30 < high < 36
