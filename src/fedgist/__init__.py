"""FedGist: one-shot, differentially private learning from images that may not move."""

from __future__ import annotations

__all__ = ["__version__"]

__version__ = "0.1.0"
