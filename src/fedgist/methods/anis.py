"""One-shot dataset distillation on clients, each under its own differential privacy.

Li et al., "Secure and Efficient One-Shot Federated Learning Based on Dataset Distillation",
Journal of Southwest University 2026, doi 10.13718/j.cnki.xdzk.2026.04.011, Algorithms 1 and 2
(ANIS, adaptive noise injection). Every client moves a few synthetic images per class until fresh
random networks see in them what they see in its real images; what a record adds to a step is
bounded, summed and noised. It sends the images once; the server pools them and trains.

As published the guarantee does not hold. The clip of the next round, and with it the scale of the
noise, is the mean norm of the last gradients *before* noise: neighbouring data sets get noise of
different scale, so no finite ε covers it, and the clip can only shrink (it is at most the mean of
its last three values). Sound rules here, all with noise on the sum and a public sampling rate:

* ``normalised`` (the default): what a record adds is divided by its own norm
  (Bu et al., NeurIPS 2023, https://arxiv.org/abs/2206.07136); there is no clip to tune;
* ``fixed``: a public clip, ``clip · decay^r`` in round r;
* ``quantile``: the clip follows a quantile of the norms, by noised counts of the records below it
  that are part of the same release (Andrew et al., NeurIPS 2021,
  https://arxiv.org/abs/1905.03871).

A record's gradient is Jᵀv(x): J is public and v(x) = ψ̄(S_c) - ψ(x), a residual of embeddings, is
all that is private (`_descent`). Where J stretches all residuals about alike, as it does here
(`benchmarks/record_gradients.py`), a bound on the residual is one on the gradient, and noise falls
on as many numbers as an embedding has, not on every pixel. ``bounded = "residual"``, the default,
does that: one backward pass pulls the noised sum back for all records, and as a released mean is a
target under its network whatever the images have become, it serves ``passes`` steps.
``bounded = "gradient"`` noises the gradients themselves, as the paper does, once each.

``parity = "paper"`` runs Algorithm 2 to the letter, from raw images: its ε is infinite.

Other differences from the paper: the sum is noised with a multiplier that is calibrated, where the
paper adds σC to the mean, |B| times what its own accounting asks for; sampling is Poisson at a rate
that does not follow a client's counts, which are private; a release is filtered by its known noise
before it moves an image (`_descent`); images are stored as tiles (multi-formation).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._descent import (
    Descent,
    Rule,
    View,
    bounded_query,
    descend,
    follow,
    gradient_query,
    random_view,
)
from fedgist.methods._distil import Canvas, Server, check_options, gist, pieces
from fedgist.methods._gradients import by_copies
from fedgist.methods._siamese import Policy
from fedgist.methods._start import Beginning, Start
from fedgist.methods._sums import noised_means, rates_of, signal_level
from fedgist.privacy.client import Client
from fedgist.queries import SumQuery
from fedgist.types import Images, Outcome, Round, State, Task, Tensors

__all__ = ["ANIS"]

CANVAS, SERVER = Canvas(), Server()
HISTORY = 3  # rounds that Algorithm 2 averages norms over


@dataclass(frozen=True)
class ANIS(Method):
    """Distilled images from every client, once; head ``distilled``.

    Attributes:
        canvas: images per class and how they are stored.
        rounds: R, sums that are released, each under a fresh network.
        passes: steps with every released sum of residuals.
        batch: expected records of a class in a round, for a class of ``class_size`` images.
        class_size: images per class that a client is thought to hold, a public number or a guess,
            for all classes or one each: the sampling rate is ``batch / class_size``. A class with
            more or fewer images is sampled at the same rate.
        lr: η_s: the highest step, root mean square over a class's pixels, in units of [0, 1];
            falls to 0 along a cosine.
        start_at: draws from noised Gaussians of the classes, a release of their own, or noise.
        bounded: what of a record is bounded and noised: its residual, or its gradient.
        strategy: how it is bounded.
        clip: the clip in the first round: of ``fixed`` and ``quantile``, and of ``parity``. Public.
            Residuals are shorter than 2, mostly about 0.9; gradients are about a tenth of that.
        decay: factor on the ``fixed`` clip from round to round. Public.
        quantile: share of norms that the ``quantile`` clip is to be above.
        width: channels of the random networks.
        augment: `_siamese.siamese`; ``shift`` where a mirrored image means something else.
        server: how pooled images are chosen and trained on.
        parity: ``paper`` for Algorithm 2 to the letter.
        paper_sigma: σ of Algorithm 2.
        paper_lr: η_s of Algorithm 2, of plain gradient steps.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    rounds: int = 60
    passes: int = 4
    batch: float = 32.0
    class_size: tuple[int, ...] = (600,)
    lr: float = 0.05
    start_at: Start = "gaussian"
    bounded: Literal["residual", "gradient"] = "residual"
    strategy: Literal["normalised", "fixed", "quantile"] = "normalised"
    clip: float = 1.0
    decay: float = 1.0
    quantile: float = 0.5
    width: int = 16
    augment: Policy = "flip"
    server: Server = SERVER
    parity: Literal["none", "paper"] = "none"
    paper_sigma: float = 1.0
    paper_lr: float = 10.0

    def __post_init__(self) -> None:
        positive = ("rounds", "passes", "batch", "lr", "clip", "decay", "width")
        check_options(self, *positive, "paper_sigma", "paper_lr")
        if not 0 < self.quantile < 1:
            raise ConfigError(f"method.quantile must lie between 0 and 1. Got {self.quantile}")

    @property
    def rule(self) -> Rule:
        """How what a record adds is bounded."""
        return Rule(self.strategy, self.clip, self.decay, self.quantile)

    @property
    def track(self) -> str:
        """Random networks have seen no data."""
        return "no public data"

    @property
    def unfit(self) -> str:
        """Why real data must not be given to it; empty when nothing speaks against it."""
        return "" if self.parity == "none" else PAPER

    def plan(self, task: Task) -> Sequence[Round]:
        """One pool round: what images begin with, then ``rounds`` noised sums."""
        sends = pieces(self.canvas, task)
        if self.parity == "paper":
            return [Round("pool", raw=True, sends=sends)]
        queries = (*self._beginning(task).queries, self._asked(task))
        return [Round("pool", queries, sends=sends)]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Distil: release a noised sum, move the images, again."""
        if self.parity == "paper":
            return self._paper(client.raw(), task, self.canvas.start(task, rng), rng)
        counts, free = self._beginning(task).begin(client, rng)
        if self.bounded == "residual":
            return gist(self._follow(task, client, free, counts, rng), counts)
        descent, query = Descent(free, self.lr, self.rounds), self._asked(task)
        descend(client, query, self.rule, descent, counts, lambda: self._view(task, rng))
        return gist(descent.free, counts)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Pool the images and train on them."""
        level = 0.0
        if self.parity == "none":
            level = signal_level(self._asked(task), state.server.sigma)
        return self.server.outcome(state.server.tensors, self.canvas, task, level, rng)

    def _beginning(self, task: Task) -> Beginning:
        return Beginning(task, self.canvas, self.start_at, rates=(1.0,))

    def _view(self, task: Task, rng: torch.Generator) -> View:
        """Draw a round's network and augmentation."""
        strided = self.bounded == "gradient" or self.parity == "paper"  # a quarter of the work
        return random_view(self.canvas, task, self.augment, rng, width=self.width, strided=strided)

    def _asked(self, task: Task) -> SumQuery:
        rates = rates_of(self.batch, self.class_size, task)
        if self.bounded == "gradient":
            return gradient_query(task, self.canvas, self.rule, rates, self.rounds)
        return bounded_query("residual", 16 * self.width, task, self.rule, rates, self.rounds)

    def _follow(
        self, task: Task, client: Client, free: Tensor, counts: Tensor, rng: torch.Generator
    ) -> Tensor:
        """Release noised sums of bounded residuals, follow the class means that they give."""
        query, rule = self._asked(task), self.rule
        descent = Descent(free, self.lr, self.rounds * self.passes)
        bounds = torch.full_like(counts, self.clip)

        def ask() -> tuple[View, Tensor, Tensor]:
            nonlocal bounds
            view, images, bound = self._view(task, rng), descent.free, bounds
            made = client.sum(
                lambda x, y: {"rows": rule.rows(view.residuals(images, x, y), bound[y])}, query
            )
            mean, std = noised_means(client, made, query, counts)
            seen = view.seen(images)
            pull, told = mean[:, : seen.shape[1]], mean[:, seen.shape[1] :]
            length = rule.length(pull, seen, bound)
            bounds = rule.next(bound, told.sum(1))
            return view, seen - length[:, None] * pull, length * std

        follow(descent, self.rounds, self.passes, ask)
        return descent.free

    def _paper(self, images: Images, task: Task, free: Tensor, rng: torch.Generator) -> Tensors:
        """Algorithm 2 to the letter. Not private: see the module's text."""
        classes = len(task.classes)
        clip = torch.full((classes,), self.clip)
        norms = [clip.clone() for _ in range(HISTORY - 1)]
        many = min(len(images), round(self.batch * classes))
        for _ in range(self.rounds):
            view = self._view(task, rng)
            batch = images.take(torch.randperm(len(images), generator=rng)[:many])
            x, y = batch.floats(), batch.labels
            g = by_copies(view.means, free, y, view.cotangents(free, x, y)).flatten(1)
            g = g / (g.norm(dim=1) / clip[y]).clamp(min=1)[:, None]
            held = torch.bincount(y, minlength=classes)
            mean = torch.zeros(classes, g.shape[1]).index_add_(0, y, g) / held.clamp(min=1)[:, None]
            noise = torch.randn(mean.shape, generator=rng) * self.paper_sigma * clip[:, None]
            seen = (held > 0)[:, None]  # a class that is not in the batch is left alone
            free = free - self.paper_lr * ((mean + noise) * seen).view(free.shape)
            norms.append(mean.norm(dim=1))
            clip = torch.where(held > 0, torch.stack(norms[-HISTORY:]).mean(0), clip)
        return gist(free, images.counts().to(torch.float32))


PAPER = (
    "ANIS as published: the clip, and so the noise, of a round follows from gradients without "
    "noise, so that no finite ε holds; this mode is for comparisons only"
)
