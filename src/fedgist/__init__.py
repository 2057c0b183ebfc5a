"""FedGist: one-shot, differentially private learning from images that may not move.

>>> from fedgist import execute, load
>>> run = load(None, ["data.source=digits", "method.heads=['lda']"])
>>> run.privacy.epsilon
10.0
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

__version__ = "0.1.0"

# Where each public name lives. Loaded on first use: importing everything takes seconds.
_HOME = {
    "Client": "fedgist.privacy.client",
    "Encoder": "fedgist.encoders",
    "FedGistError": "fedgist.errors",
    "Images": "fedgist.types",
    "LocalExchange": "fedgist.exchange.local",
    "Method": "fedgist.method",
    "MomentsQuery": "fedgist.queries",
    "Outcome": "fedgist.types",
    "Privacy": "fedgist.privacy.claim",
    "Recipe": "fedgist.train",
    "Round": "fedgist.types",
    "SumQuery": "fedgist.queries",
    "Task": "fedgist.types",
    "drive": "fedgist.run",
    "evaluate": "fedgist.train",
    "execute": "fedgist.experiment",
    "load": "fedgist.config",
    "load_classifier": "fedgist.report.export",
    "load_encoder": "fedgist.encoders",
    "open_source": "fedgist.data",
    "partition": "fedgist.data",
    "plan_of": "fedgist.run",
}

__all__ = ["__version__", *sorted(_HOME)]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'fedgist' has no attribute '{name}'")
    return getattr(import_module(_HOME[name]), name)


def __dir__() -> list[str]:
    return __all__
