"""The one supervised loop that every method, head and report trains with.

It sees the set it is given and nothing else: whatever it chooses, it chooses on a split of that
set, never on test images.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.errors import ConfigError, DataError
from fedgist.train.augment import augment
from fedgist.train.models import build_model
from fedgist.train.network import Network
from fedgist.train.recipe import Recipe
from fedgist.types import BATCH, Images

__all__ = ["finetune", "split", "train"]

CHECKS = 10  # how often a run with choose = "holdout" is judged


def train(
    images: Images,
    recipe: Recipe,
    rng: torch.Generator,
    *,
    soft_labels: Tensor | None = None,
    start: Network | None = None,
    extra: Images | None = None,
    proximal: float = 0.0,
    correction: Tensor | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Network:
    """Train a network on ``images``.

    Args:
        images: the training set; left as it is.
        recipe: how.
        rng: source of the parameters, the split, the order and the augmentation. On one machine
            and one number of threads the same seed gives the same bytes.
        soft_labels: float ``[n, classes]``, class probabilities to use instead of the labels.
        start: network to begin from, left as it is; its input statistics are kept.
        extra: more images (for instance a synthetic set), trained on but never held out.
        proximal: μ: adds μ/2 ‖w - w_0‖² to the loss, w_0 the parameters at the beginning (FedProx:
            Li et al., MLSys 2020, equation 2).
        correction: float32 ``[P]``, in the order of the parameters: added to the gradient of every
            update (SCAFFOLD: Karimireddy et al., ICML 2020, algorithm 1).
        progress: called after every update with (updates done, updates in all).

    Raises:
        DataError: no image, images that are not square, pixels or soft labels that are not
            finite, an ``extra`` or a ``start`` for other images.
        ConfigError: the recipe names another model than ``start``, or the loss is not finite.
    """
    pool = _Pool.of(images, extra, soft_labels)
    network = _begin(pool, recipe, rng, start)
    rows = torch.arange(len(pool))
    held = rows[:0]
    if recipe.choose == "holdout":
        fit, held = split(images.labels, recipe.holdout, rng)
        rows = torch.cat([fit, rows[len(images) :]])
    best, kept = -1, network.model.state_dict()
    for done in _descend(network, pool, rows, recipe, rng, proximal, correction):
        if progress is not None:
            progress(done, recipe.steps)
        if len(held) and (done * CHECKS // recipe.steps > (done - 1) * CHECKS // recipe.steps):
            right = _right(network, pool, held)
            if right >= best:  # of equals the later: it has seen more
                best, kept = right, copy.deepcopy(network.model.state_dict())
    if len(held) and recipe.steps:
        network.model.load_state_dict(kept)
    network.model.requires_grad_(False).eval().zero_grad()  # gradients would double its memory
    return network


def finetune(network: Network, images: Images, recipe: Recipe, rng: torch.Generator) -> Network:
    """Train a copy of ``network`` further on one holder's images.

    ``recipe.model`` and ``recipe.width`` are the network's own, whatever they say. Raises as
    `train`.
    """
    recipe = replace(recipe, model=network.name, width=network.width)
    return train(images, recipe, rng, start=network)


def split(labels: Tensor, share: float, rng: torch.Generator) -> tuple[Tensor, Tensor]:
    """Split positions into (kept, held), with about ``share`` of every class held.

    The total held is n · share rounded to a whole number; it is never all of them.

    Args:
        labels: int64 ``[n]``.
        share: in [0, 1).
        rng: source of the draw.

    Returns:
        Two int64 vectors of positions, in increasing order.
    """
    n = len(labels)
    shuffled = torch.randperm(n, generator=rng)
    by_class = shuffled[labels[shuffled].argsort(stable=True)]
    marks = (torch.arange(n + 1, dtype=torch.float64) * share + 0.5).floor()
    held = torch.zeros(n, dtype=torch.bool)
    held[by_class[marks[1:] > marks[:-1]]] = True
    if bool(held.all()):
        held[:] = False
    return (~held).nonzero()[:, 0], held.nonzero()[:, 0]


@dataclass(frozen=True)
class _Pool:
    """The images to draw from, without a copy of them: rows of ``images``, then of ``extra``.

    ``targets`` are labels, int64 ``[n]``, or class probabilities, float32 ``[n, classes]``.
    """

    images: Images
    extra: Images | None
    targets: Tensor

    @staticmethod
    def of(images: Images, extra: Images | None, soft: Tensor | None) -> _Pool:
        if not len(images):
            raise DataError("training needs at least one image. Got 0")
        if images.pixels.shape[2] != images.pixels.shape[3]:
            raise DataError(f"training images must be square. Got {list(images.pixels.shape[2:])}")
        targets = images.labels if soft is None else _probabilities(soft, images)
        if extra is None:
            return _Pool(images, None, targets)
        for what, mine, theirs in (
            ("shape", list(images.pixels.shape[1:]), list(extra.pixels.shape[1:])),
            ("classes", list(images.classes), list(extra.classes)),
        ):
            if mine != theirs:
                raise DataError(f"extra must have the {what} of the images: {mine}. Got {theirs}")
        more = extra.labels
        if soft is not None:
            more = F.one_hot(more, len(images.classes)).to(torch.float32)
        return _Pool(images, extra, torch.cat([targets, more]))

    def __len__(self) -> int:
        return len(self.targets)

    def draw(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return (float32 images in [0, 1], targets) of ``rows``, those of ``extra`` last."""
        if self.extra is None:
            return self.images.floats(rows), self.targets[rows]
        n = len(self.images)
        own, more = rows[rows < n], rows[rows >= n]
        x = torch.cat([self.images.floats(own), self.extra.floats(more - n)])
        return x, self.targets[torch.cat([own, more])]

    def statistics(self) -> tuple[Tensor, Tensor]:
        """Return the mean and the standard deviation of every channel, float32 ``[c]``."""
        sums = torch.zeros(2, self.images.pixels.shape[1], dtype=torch.float64)
        for rows in torch.split(torch.arange(len(self)), BATCH):
            x = self.draw(rows)[0].to(torch.float64)
            sums += torch.stack([x.sum((0, 2, 3)), x.square().sum((0, 2, 3))])
        mean, square = sums / (len(self) * self.images.pixels[0, 0].numel())
        if not bool(mean.isfinite().all()):
            raise DataError("pixels of training images must be finite. Got NaN or Inf")
        std = (square - mean.square()).clamp(min=1e-6).sqrt()  # constant images: no division by 0
        return mean.to(torch.float32), std.to(torch.float32)


def _probabilities(soft: Tensor, images: Images) -> Tensor:
    want = (len(images), len(images.classes))
    if soft.shape != want or not soft.is_floating_point():
        raise DataError(
            f"soft_labels must be float {list(want)}. Got {soft.dtype} {list(soft.shape)}"
        )
    soft = soft.detach().to(torch.float32)
    if not bool((soft >= 0).all() and ((soft.sum(1) - 1).abs() < 1e-3).all()):
        raise DataError(
            "rows of soft_labels must be >= 0 and sum to 1. Got sums "
            f"{float(soft.sum(1).min()):g} .. {float(soft.sum(1).max()):g}, smallest value "
            f"{float(soft.min()):g}: use softmax on logits"
        )
    return soft


def _begin(pool: _Pool, recipe: Recipe, rng: torch.Generator, start: Network | None) -> Network:
    """Return a network of its own to train: fresh, or a copy of ``start``."""
    channels, size = pool.images.pixels.shape[1:3]
    classes = pool.images.classes
    if start is None:
        model = build_model(recipe.model, channels, size, len(classes), recipe.width, rng)
        return Network(
            model, recipe.model, recipe.width, channels, size, classes, *pool.statistics()
        )
    if (recipe.model, recipe.width) != (start.name, start.width):
        raise ConfigError(
            f"the recipe of a warm start must name its model, {start.name} of width {start.width}. "
            f"Got {recipe.model} of width {recipe.width}"
        )
    if (channels, size, classes) != (start.channels, start.size, start.classes):
        raise DataError(
            f"images of a warm start must be {start.channels} x {start.size} x {start.size} of "
            f"classes {list(start.classes)}. Got {channels} x {size} x {size} of {list(classes)}"
        )
    return replace(start, model=copy.deepcopy(start.model).requires_grad_(True).train())


def _descend(
    network: Network,
    pool: _Pool,
    rows: Tensor,
    recipe: Recipe,
    rng: torch.Generator,
    proximal: float,
    correction: Tensor | None,
) -> Iterator[int]:
    """Update the network in place, yielding the number of updates done."""
    parameters = list(network.model.parameters())
    anchors = [p.detach().clone() for p in parameters] if proximal else []
    sizes = [p.numel() for p in parameters]
    shifts = [] if correction is None else torch.split(correction, sizes)
    optimiser = _optimiser(parameters, recipe)
    batches = _batches(rows, recipe.batch, rng)
    for step in range(recipe.steps):
        rate = recipe.rate(step)
        for group in optimiser.param_groups:
            group["lr"] = rate
        x, target = pool.draw(next(batches))
        x = augment(x, recipe.augment, rng, flip=recipe.flip)
        optimiser.zero_grad()
        loss = F.cross_entropy(network.logits(x), target, label_smoothing=recipe.label_smoothing)
        if not math.isfinite(loss.item()):
            raise ConfigError(
                f"the training loss must be finite. Got {loss.item()} at step {step + 1} of "
                f"{recipe.steps} with learning rate {rate:g}: use a smaller lr"
            )
        torch.autograd.backward(loss)
        for p, anchor in zip(parameters if anchors else (), anchors, strict=True):
            assert p.grad is not None
            p.grad.add_(p.detach() - anchor, alpha=proximal)
        for p, shift in zip(parameters if shifts else (), shifts, strict=True):
            assert p.grad is not None
            p.grad.add_(shift.view_as(p))
        optimiser.step()
        yield step + 1


def _optimiser(parameters: list[nn.Parameter], recipe: Recipe) -> torch.optim.Optimizer:
    if recipe.optimiser == "adamw":
        return torch.optim.AdamW(
            parameters, recipe.lr, weight_decay=recipe.weight_decay, fused=True
        )
    return torch.optim.SGD(
        parameters,
        recipe.lr,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.momentum > 0,
        fused=True,
    )


def _batches(rows: Tensor, size: int, rng: torch.Generator) -> Iterator[Tensor]:
    """Yield batches of one size for ever: every epoch a new order, its remainder left out."""
    size = min(size, len(rows))
    while True:
        order = rows[torch.randperm(len(rows), generator=rng)]
        yield from torch.split(order[: len(rows) // size * size], size)


def _right(network: Network, pool: _Pool, rows: Tensor) -> int:
    """Count the rows whose most likely target is predicted."""
    total = 0
    for part in torch.split(rows, BATCH):
        x, target = pool.draw(part)
        truth = target if target.ndim == 1 else target.argmax(1)
        total += int((network.predict(x).argmax(1) == truth).sum())
    return total
