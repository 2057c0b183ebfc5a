"""Flower's switches that FedGist wants off: reports to its makers, installing code at run time."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

__all__ = ["SWITCHES", "warn_if_on"]

SWITCHES = {
    "FLWR_TELEMETRY_ENABLED": "0",
    "FLWR_DISABLE_UPDATE_CHECK": "1",
    "FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION": "1",
}


def warn_if_on(environment: Mapping[str, str] = os.environ) -> str | None:
    """Say in one line on stderr what should be off and is not; return the line, or None."""
    wrong = [f"{k}={v}" for k, v in SWITCHES.items() if environment.get(k) != v]
    if not wrong:
        return None
    line = f"fedgist: Flower must run with {' '.join(wrong)}. Got other settings: set them first"
    print(line, file=sys.stderr, flush=True)
    return line
