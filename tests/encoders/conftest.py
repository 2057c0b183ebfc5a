"""Shared by the encoder tests."""

import pytest


@pytest.fixture(autouse=True, scope="module")
def _one_thread(one_thread: None) -> None:
    """Run every module here on one thread."""
