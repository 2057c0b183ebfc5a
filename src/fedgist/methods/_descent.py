"""Synthetic images that move along noised gradients: the client's half of distillation under DP.

Distribution matching (Zhao and Bilen, WACV 2023, https://arxiv.org/abs/2110.04181) moves a few
synthetic images per class until a network sees in them, on average, what it sees in the real ones.
With features ψ of an image and S_c the synthetic images of class c, a record x of that class has

    L(x) = ‖ψ(x) - ψ̄(S_c)‖²        ∇_S L(x) = J_cᵀ v(x)        v(x) = 2 (ψ̄(S_c) - ψ(x))

Its gradient, or v(x) itself, is bounded by a `Rule`, summed over a Poisson sample, noised once, and
used. What follows a release is post-processing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedgist.encoders import RandomConv
from fedgist.methods._distil import Canvas
from fedgist.methods._gradients import Gradients, by_copies
from fedgist.methods._siamese import Policy, siamese
from fedgist.methods._sums import noised_means
from fedgist.privacy.client import Client
from fedgist.queries import SumQuery
from fedgist.types import Task, Tensors

__all__ = [
    "Descent",
    "Features",
    "Rule",
    "View",
    "bounded_query",
    "descend",
    "follow",
    "gradient_query",
    "matching_gradient",
    "random_view",
]

DECAY = (0.9, 0.99)  # of the descent's moments
GAMMA = 1e-3  # of a normalised gradient: one this short keeps half of its share
TELL = 0.5  # weight of "my norm is below the clip" beside a clipped gradient
QUICKEN = 0.3  # how fast a quantile clip moves
STEP = 50  # real images that go through a network at once

Features = Callable[[Tensor, Tensor], Tensor]  # ([b, c, h, w], int64 [b]) -> [b, F]


class View:
    """One round's look at images, real and synthetic alike: features after one augmentation."""

    def __init__(
        self, features: Features, canvas: Canvas, task: Task, policy: Policy, rng: torch.Generator
    ) -> None:
        """Draw the augmentation.

        Args:
            features: differentiable; row by row.
            canvas: how synthetic images are stored.
            task: what images look like.
            policy: see `siamese`.
            rng: source of the augmentation.
        """
        self._features, self._canvas, self._task = features, canvas, task
        self._augment = siamese(policy, rng)
        self._seen: tuple[Tensor, Tensor] | None = None

    def means(self, free: Tensor, labels: Tensor) -> Tensor:
        """Return mean features of rows of free images ``[k, tiles, ...]``: ``[k, F]``."""
        x = self._augment(self._canvas.form(free, self._task))
        z = self._features(x, labels.repeat_interleave(free.shape[1]))
        return z.view(len(free), -1, z.shape[1]).mean(1)

    def real(self, x: Tensor, y: Tensor) -> Tensor:
        """Return features of records, float32 ``[b, c, h, w]``, without a graph: ``[b, F]``."""
        pairs = zip(torch.split(x, STEP), torch.split(y, STEP), strict=True)
        with torch.no_grad():
            return torch.cat([self._features(self._augment(part), of) for part, of in pairs])

    def seen(self, free: Tensor) -> Tensor:
        """Return ψ̄(S_c) of every class without a graph, ``[C, F]``; the same images once."""
        if self._seen is None or self._seen[0] is not free:
            with torch.no_grad():
                every = [self.means(f[None], torch.tensor([c])) for c, f in enumerate(free)]
            self._seen = free, torch.cat(every)
        return self._seen[1]

    def residuals(self, free: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return ψ̄(S_c) - ψ(x) of records of classes c, ``[b, F]``."""
        return self.seen(free)[y] - self.real(x, y)

    def cotangents(self, free: Tensor, x: Tensor, y: Tensor) -> Tensor:
        """Return v of records, ``[b, F]``."""
        return 2 * self.residuals(free, x, y)


def random_view(
    canvas: Canvas,
    task: Task,
    policy: Policy,
    rng: torch.Generator,
    *,
    width: int,
    strided: bool = False,
) -> View:
    """Draw a fresh random network and an augmentation."""
    seed = int(torch.randint(2**31, (), generator=rng))
    nets = RandomConv(seed, 1, width, strided=strided)
    return View(lambda x, y: nets.embed(x)[:, 0], canvas, task, policy, rng)


@dataclass(frozen=True)
class Rule:
    """How what a record adds is bounded to norm 1, from public numbers and released ones alone.

    Attributes:
        kind: of a record's g, ``normalised``: g / (‖g‖ + γ) (automatic clipping, Bu et al.,
            NeurIPS 2023, https://arxiv.org/abs/2206.07136), nothing to tune. ``fixed``:
            g / max(‖g‖, C) with a public C. ``quantile``: the same, C following a quantile of the
            norms by noised counts of the records below it, part of the same release (Andrew et
            al., NeurIPS 2021, https://arxiv.org/abs/1905.03871).
        clip: C in the first round.
        decay: factor on a fixed C from round to round.
        quantile: share of norms that a quantile C is to be above.
    """

    kind: Literal["normalised", "fixed", "quantile"] = "normalised"
    clip: float = 0.1
    decay: float = 1.0
    quantile: float = 0.5

    @property
    def told(self) -> int:
        """Numbers that a row carries besides its gradient."""
        return int(self.kind == "quantile")

    @property
    def norm(self) -> float:
        """The longest row."""
        return math.hypot(1.0, TELL / 2) if self.told else 1.0

    def rows(self, g: Tensor, bound: Tensor) -> Tensor:
        """Bound g of records, float32 ``[b, P]``; ``bound``: C of each, ``[b]``."""
        norms: Tensor = g.norm(dim=1)
        if self.kind == "normalised":
            normalised: Tensor = g / (norms + GAMMA)[:, None]
            return normalised
        clipped: Tensor = g / torch.maximum(norms, bound)[:, None]
        if not self.told:
            return clipped
        below = (norms <= bound).to(g.dtype) - 0.5
        return torch.cat([clipped, TELL * below[:, None]], dim=1)

    def length(self, mean: Tensor, seen: Tensor, bounds: Tensor) -> Tensor:
        """Return how long the residuals ψ̄(S_c) - ψ(x) are that were bounded, ``[C]``.

        Embeddings have norm 1, so where residuals of a class were all normalised, their length ρ
        follows from their mean direction h: the mean embedding is ψ̄ - ρh, and the mean of ρ² is
        1 + ‖ψ̄‖² - 2ψ̄(ψ̄ - ρh), a quadratic equation. It is exact where all are of one length.

        Args:
            mean: h of each class, the released mean of bounded residuals, float32 ``[C, F]``.
            seen: ψ̄(S_c), ``[C, F]``.
            bounds: C of each class, ``[C]``: the length that a clip leaves as 1.
        """
        if self.kind != "normalised":
            return bounds
        along = (seen * mean).sum(1)
        inside = (1 - seen.square().sum(1)).clamp(min=0)
        return (along + (along.square() + inside).sqrt()).clamp(0, 2)

    def next(self, bounds: Tensor, told: Tensor) -> Tensor:
        """Return the next C of each class; ``told``: means of what rows told, noised."""
        if self.kind == "quantile":
            share = (told / TELL + 0.5).clamp(0, 1)
            return bounds * torch.exp(-QUICKEN * (share - self.quantile))
        return bounds * self.decay


def gradient_query(
    task: Task, canvas: Canvas, rule: Rule, rates: tuple[float, ...], times: int
) -> SumQuery:
    """Return the query for sums of bounded gradients with respect to one class's images."""
    return bounded_query("gradient", math.prod(canvas.shape(task)), task, rule, rates, times)


def bounded_query(
    name: str, numbers: int, task: Task, rule: Rule, rates: tuple[float, ...], times: int
) -> SumQuery:
    """Return the query for class sums of ``numbers`` that a rule bounds for every record."""
    return SumQuery(
        rule.norm,
        levels=1024,
        times=times,
        per_class=True,
        name=name,
        shape=(len(task.classes), numbers + rule.told),
        rates=rates,
    )


def descend(
    client: Client,
    query: SumQuery,
    rule: Rule,
    descent: Descent,
    counts: Tensor,
    view_of: Callable[[], View],
    gradients: Gradients = by_copies,
) -> None:
    """Ask ``query`` as often as planned, each time under a new view, and move the images.

    Args:
        client: the guard.
        query: of `gradient_query`.
        rule: how gradients are bounded.
        descent: the images; moved.
        counts: noised images of each class, float32 ``[C]``.
        view_of: draws the next view.
        gradients: how per-record gradients are computed.
    """
    bounds = torch.full_like(counts, rule.clip)
    numbers = descent.free[0].numel()

    def rows(view: View, free: Tensor, x: Tensor, y: Tensor) -> Tensors:
        v = view.cotangents(free, x, y)
        return {"rows": rule.rows(gradients(view.means, free, y, v).flatten(1), bounds[y])}

    for _ in range(query.times):
        made = client.sum(partial(rows, view_of(), descent.free), query)
        mean, std = noised_means(client, made, query, counts)
        descent.step(mean[:, :numbers].reshape(descent.free.shape), std)
        bounds = rule.next(bounds, mean[:, numbers:].sum(1))


def follow(
    descent: Descent, times: int, passes: int, ask: Callable[[], tuple[View, Tensor, Tensor]]
) -> None:
    """Ask ``times`` for a target, a step after each, and go through all of them again.

    Args:
        descent: the images; moved.
        times: releases.
        passes: steps with every release: further ones cost no privacy.
        ask: returns a view, released means under it and their noise, as `matching_gradient` has
            them.
    """
    kept: list[tuple[View, Tensor, Tensor]] = []
    for i in range(times * passes):
        if i < times:
            kept.append(ask())
        view, target, std = kept[i % times]
        descent.step(matching_gradient(view, target, descent.free, std), 0.0)


def matching_gradient(view: View, target: Tensor, free: Tensor, std: Tensor) -> Tensor:
    """Return the gradient of Σ_c ‖ψ̄(S_c) - target_c‖² / 2 at the images.

    Args:
        view: this step's features.
        target: float32 ``[C, F]``.
        free: the images, float32 ``[C, tiles, ...]``.
        std: float32 ``[C]``, noise in every number of a class's target: the residual is shrunk by
            it (James and Stein, 1961).
    """
    out = []
    for c, (one, mean, noise) in enumerate(zip(free, target, std.tolist(), strict=True)):
        pixels = one[None].clone().requires_grad_()
        seen = view.means(pixels, torch.tensor([c]))[0]
        residual = seen.detach() - mean
        energy = float(residual.square().sum())
        share = max(0.0, 1 - len(residual) * noise**2 / max(energy, 1e-30))
        (gradient,) = torch.autograd.grad(seen, pixels, share * residual)
        out.append(gradient[0])
    return torch.stack(out)


class Descent:
    """Steps along noised gradients of known noise: filter, momentum, one size per class.

    All of it is post-processing of what was released. A gradient's energy lies in low spatial
    frequencies, the noise's in all alike: in every band of frequencies of a class the observed
    energy less the known noise is the signal, and the band keeps that share (Wiener). A step is
    divided by the root mean square of the filtered gradients so far, so that its length is the
    learning rate, whatever the number of images behind it.
    """

    def __init__(self, free: Tensor, lr: float, steps: int) -> None:
        """Begin at ``free``, float32 ``[C, tiles, channels, tile, tile]``."""
        self.free = free
        self._lr, self._steps, self._done = lr, steps, 0
        self._first = torch.zeros_like(free)
        self._second = torch.zeros(len(free))

    def step(self, gradient: Tensor, std: float | Tensor) -> None:
        """Move against ``gradient``, whose every number carries noise of deviation ``std``."""
        a, b = DECAY
        self._done += 1
        self._first = a * self._first + (1 - a) * gradient
        # moments of the same weights: what is left of the noise in the running mean
        left = (1 - a) / (1 + a) * (1 - a ** (2 * self._done))
        kept = _wiener(self._first, torch.as_tensor(std) ** 2 * left)
        mean = kept / (1 - a**self._done)
        self._second = b * self._second + (1 - b) * mean.square().mean((1, 2, 3, 4))
        size = (self._second / (1 - b**self._done)).sqrt().clamp(min=1e-20)
        rate = self._lr * (1 + math.cos(math.pi * (self._done - 1) / self._steps)) / 2
        self.free = (self.free - rate * mean / size[:, None, None, None, None]).clamp(0, 1)


def _wiener(g: Tensor, noise: Tensor) -> Tensor:
    """Filter ``[C, tiles, channels, h, w]`` by bands; ``noise`` is the variance of a number."""
    if float(noise.max()) == 0:
        return g
    spectrum = torch.fft.rfft2(g, norm="ortho")
    h, w = g.shape[-2:]
    radius = (torch.fft.fftfreq(h)[:, None] * h) ** 2 + (torch.fft.rfftfreq(w) * w)[None, :] ** 2
    band = radius.sqrt().round().long().flatten()
    energy = spectrum.abs().square().mean((1, 2)).flatten(1)  # [C, cells]
    count = torch.bincount(band).to(energy.dtype)
    mean = torch.zeros(len(g), len(count)).index_add_(1, band, energy) / count
    share = (1 - noise.reshape(-1, 1) / mean.clamp(min=1e-30)).clamp(0, 1)
    gain = share[:, band].view(len(g), 1, 1, *spectrum.shape[-2:])
    filtered: Tensor = torch.fft.irfft2(spectrum * gain, s=(h, w), norm="ortho")
    return filtered
