"""What several files of this folder run their commands with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from guide_tools import warm


@pytest.fixture(scope="session")
def quick_bin() -> Iterator[Path]:
    """A folder with ``fedgist`` and ``python`` that have everything loaded."""
    with warm() as folder:
        yield folder
