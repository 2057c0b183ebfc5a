"""What several files of this folder run their commands with."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

from guide_tools import ROOT, warm


@pytest.fixture(scope="session")
def quick_bin() -> Iterator[Path]:
    """A folder with ``fedgist`` and ``python`` that have everything loaded."""
    with warm() as folder:
        yield folder


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], ModuleType]]:
    """Import scripts that import each other, as ``python benchmarks/NAME.py`` finds them."""
    folder = ROOT / "benchmarks"
    names = {p.stem for p in folder.glob("*.py")}
    monkeypatch.syspath_prepend(str(folder))
    yield importlib.import_module
    for name in names & sys.modules.keys():
        del sys.modules[name]
