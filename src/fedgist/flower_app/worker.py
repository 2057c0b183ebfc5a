"""Answers one letter for a site; started by `fedgist.exchange.worker.answer_apart`."""

from __future__ import annotations

import sys

from fedgist.exchange.worker import Answering, Place, serve_one

__all__: list[str] = []


def _open(place: Place) -> Answering:
    from fedgist.federation import open_site  # loads PyTorch: only once the watch is set

    return open_site(place.task, place.key, place.data, place.state, place.policy, place.ledger)


if __name__ == "__main__":
    sys.exit(serve_one(_open))
