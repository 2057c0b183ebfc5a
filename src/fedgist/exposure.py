"""What uploads of single images expose: a simulation mounts the attacks that a server could.

For methods whose clients send something of every image (`Exposing`). The attacker is the server: it
has every upload with its label, every compressor, and images of its own of the same kind; here
those are the test images, so that the figures are of a well-informed attacker.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedgist.audit.decoder import train_decoder
from fedgist.audit.inversion import Attack, invert, rows
from fedgist.audit.similarity import Perceptual, similarity
from fedgist.audit.threshold import loss_threshold
from fedgist.exchange.local import LocalExchange
from fedgist.method import Exposing
from fedgist.run import generator
from fedgist.setup import Prepared, Sites
from fedgist.types import Images, Outcome, Task, Tensors

__all__ = ["exposed"]

PER_CLASS = 10  # images of each class that are attacked, as in the FedSumUp paper
AUXILIARY = 5000  # images of the attacker's own, at most
LOSSES = 2000  # images on either side of the loss threshold


def exposed(
    made: Prepared,
    exchange: LocalExchange,
    outcome: Outcome,
    sites: Sites,
    test: Images | None,
) -> tuple[dict[str, Any], dict[str, Tensor]] | None:
    """Attack what clients have sent.

    Returns:
        What `audit.inversion.invert` returns, without its pictures but with ``membership`` (a row
        of the table of such attacks: the loss threshold on the final classifier) and ``attacked``
        (how many images); and pictures by name, float32 ``[classes, c, s, s]``, one image of each
        class, originals first. None for a method that sends nothing of single images, or without
        test images.
    """
    method, task = made.method, made.task
    raw = any(r.raw for r in made.plan.rounds)  # else only noised sums have left
    if not isinstance(method, Exposing) or not raw or test is None or not exchange.broadcasts:
        return None
    rng, decoder_steps = generator(made.run.seed, "exposure"), made.run.evaluation.decoder_steps
    victims = _by_class(method.used(sites.together()), rng)
    own = test.take(torch.randperm(len(test), generator=rng)[:AUXILIARY])
    through = [partial(_sent, method, task, shared, rng) for shared in exchange.broadcasts]
    x, distance = victims.floats(), Perceptual()
    with torch.no_grad():
        seen = [compress(x) for compress in through]
    if seen[-1].shape[1] == task.channels:
        found = invert(
            x,
            victims.labels,
            through,
            seen,
            own,
            distance,
            rng,
            differentiable=not method.random,
            fresh=method.random,
            decoder_steps=decoder_steps,
        )
    else:
        found = _features(
            x, victims.labels, through[-1], seen[-1], own, distance, rng, decoder_steps
        )
    pictures: dict[str, Tensor] = {"original": x} | found.pop("pictures")
    held = sorted(set(victims.labels.tolist()))
    first = [int((victims.labels == c).nonzero()[0]) for c in held]
    found |= {"attacked": len(victims), "membership": _losses(outcome, method, sites, test, rng)}
    return found, {name: images[first] for name, images in pictures.items()}


def _sent(method: Exposing, task: Task, shared: Tensors, rng: torch.Generator, x: Tensor) -> Tensor:
    """Return what becomes of images in one round."""
    return method.uploaded(task, shared, x, rng)


def _by_class(images: Images, rng: torch.Generator) -> Images:
    """Draw `PER_CLASS` images of each class."""
    order = torch.randperm(len(images), generator=rng)
    rows_of = [order[images.labels[order] == c][:PER_CLASS] for c in range(len(images.classes))]
    return images.take(torch.cat(rows_of))


def _features(
    x: Tensor,
    labels: Tensor,
    compress: Callable[[Tensor], Tensor],
    seen: Tensor,
    own: Images,
    distance: Perceptual,
    rng: torch.Generator,
    steps: int,
) -> dict[str, Any]:
    """Attack activations, which are no images: only a trained decoder applies."""
    decoder = train_decoder(compress, own, rng, steps, labelled=True)
    rebuilt = decoder(seen, labels)
    sees = "the activations, their label, the layers before them and images of its own"
    attack = Attack("decoder", sees, similarity(x, rebuilt, distance))
    said = (
        f"A trained decoder recovers PSNR {attack.similarity.psnr:.1f} dB, "
        f"SSIM {attack.similarity.ssim:.2f} from the activations."
    )
    return {
        "rows": rows([attack]),
        "headline": said,
        "distance": distance.name,
        "identified": None,
        "pictures": {"decoder": rebuilt},
    }


def _losses(
    outcome: Outcome, method: Exposing, sites: Sites, test: Images, rng: torch.Generator
) -> dict[str, Any]:
    """Tell members from others by the loss of the final classifier."""
    classifier = next(iter(outcome.classifiers.values()))
    draw = partial(_some, rng=rng)
    found = loss_threshold(classifier, draw(method.used(sites.together())), draw(test))
    return {
        "attack": "loss threshold",
        "sees": "the final classifier",
        "auc": found.auc,
        "low": found.low,
        "high": found.high,
        "cap": None,
        "tpr_at_1pct": found.tpr[1],
        "records": found.members + found.others,
        "roc": found.roc.record(),
    }


def _some(images: Images, rng: torch.Generator) -> Images:
    return images.take(torch.randperm(len(images), generator=rng)[:LOSSES])
