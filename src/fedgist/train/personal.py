"""Personalised learning: the shared classifier as pre-training for each client's own."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from fedgist.errors import ConfigError
from fedgist.train.evaluate import evaluate
from fedgist.train.loop import finetune, split
from fedgist.train.network import Network
from fedgist.train.recipe import Recipe
from fedgist.types import Images

__all__ = ["Personal", "personalise"]


@dataclass(frozen=True)
class Personal:
    """What fine-tuning the shared network gained for one client.

    Attributes:
        trained: images that the client fine-tuned on.
        tested: images that it held out.
        before: accuracy of the shared network on those held out; None if there are none.
        after: accuracy of the client's own network on the same images.
    """

    trained: int
    tested: int
    before: float | None
    after: float | None


def personalise(
    network: Network, clients: Iterable[Images], recipe: Recipe, seed: int, share: float = 0.2
) -> list[Personal]:
    """Fine-tune ``network`` on every client and test it on images that the client held out.

    A client's split and training depend on ``seed``, its position and its own images only. One
    client is held in memory at a time; the networks are not kept (`finetune` gives one).

    Args:
        network: the shared start; left as it is.
        clients: each one's images. Who cannot spare an image for the test gets no accuracy.
        recipe: of the fine-tuning; model and width are the network's own.
        seed: of splits and training.
        share: of every class that a client holds out for the test, in (0, 1).

    Raises:
        DataError: a client's images do not fit the network.
        ConfigError: a share that is not in (0, 1), or a loss that is not finite.
    """
    if not 0 < share < 1:
        raise ConfigError(f"share must lie in (0, 1). Got {share}")
    return [
        _one(network, images, recipe, _generator(seed, i), share)
        for i, images in enumerate(clients)
    ]


def _one(
    network: Network, images: Images, recipe: Recipe, rng: torch.Generator, share: float
) -> Personal:
    fit, held = split(images.labels, share, rng)
    if not len(held):
        return Personal(len(fit), 0, None, None)
    test = images.take(held)
    before = evaluate(network, test).accuracy
    own = finetune(network, images.take(fit), recipe, rng)
    return Personal(len(fit), len(held), before, evaluate(own, test).accuracy)


def _generator(seed: int, client: int) -> torch.Generator:
    """Return a generator of the client's own, unrelated to those of other seeds and clients."""
    digest = hashlib.sha256(f"personalise/{seed}/{client}".encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest[:8], "little"))
