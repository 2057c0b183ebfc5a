"""Hooks of mkdocs: links that lead out of the documentation, and a site that asks no other host.

Material loads a few optional scripts from the web. None is needed here: the one that lets search
work in pages that were opened as files is replaced by `docs/assets/frame-worker.js`, the others
are never asked for, and their addresses are taken out, so that a test can say that there are none.
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

OUTWARD = re.compile(r"\[([^\]]+)\]\((?:\.\./)+((?:benchmarks|src|tests)[^)]*)\)")
SHIM = "https://unpkg.com/iframe-worker/shim"
OURS = "assets/frame-worker.js"
ELSEWHERE = re.compile(r"https://(?:unpkg\.com|api\.github\.com|gitlab\.com/api)/[^\"'`$]*")
UNUSED = ("assets/javascripts/lunr",)  # stemmers of other languages than English


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Turn links to files of the repository into their paths: the site is read without it."""
    return OUTWARD.sub(r"\1 (`\2`)", markdown)


def on_post_page(output: str, page: Any, config: Any) -> str:
    """Take our own script where Material names one on the web."""
    up = "../" * page.url.count("/")
    return output.replace(SHIM, up + OURS)


def on_post_build(config: Any) -> None:
    """Take out what is not used, and what would be asked of other hosts if it were."""
    site = Path(config["site_dir"])
    for name in UNUSED:
        shutil.rmtree(site / name, ignore_errors=True)
    for path in site.rglob("*.map"):
        path.unlink()
    for path in [*site.rglob("*.js"), site / "404.html"]:
        text = path.read_text("utf-8")
        made = ELSEWHERE.sub("about:blank#", text.replace(SHIM, OURS))
        made = re.sub(r"\n//# sourceMappingURL=\S*\s*$", "\n", made)
        if made != text:
            path.write_text(made, "utf-8")
