"""The tables of docs/audit.md are those of the committed results, and its pictures are there."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_tables_are_made_from_the_results(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    page = importlib.import_module("audit_page")
    text = page.PAGE.read_text(encoding="utf-8")
    assert page.filled(text) == text, "run `python benchmarks/audit_page.py`"
    assert "<!-- noise -->\n|" in text and "<!-- tstr -->\n|" in text


def test_the_pictures_are_there():
    text = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8")
    names = re.findall(r"\]\((figures/[^)]+)\)", text)
    assert len(names) == 5 and all((ROOT / "docs" / name).is_file() for name in names)
