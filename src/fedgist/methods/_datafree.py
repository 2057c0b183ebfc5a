"""Distillation on images that the server generates: the loop that DENSE and Co-Boosting share.

The server has the clients' networks and no image. In every epoch a generator is trained against
their ensemble, what it makes joins a growing pool, and the student learns, on the whole pool, what
the ensemble says of it. The two methods differ in the generator's loss, in how much each client
counts, and in what the student sees of the pool.
"""

from __future__ import annotations

import math
import time
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.compress import as_uint8
from fedgist.errors import ConfigError
from fedgist.methods._oneshot import Distil, OneShot, Student, batches, positive
from fedgist.train.ensemble import Ensemble, Mix, mixed
from fedgist.train.models import initialise
from fedgist.types import BATCH, Classifier, Outcome, State, Task

__all__ = ["DataFree", "Generate", "Generator", "Pool", "generated", "new_generator"]

DISTIL = Distil()


@dataclass(frozen=True)
class Generate:
    """How images are generated at the server.

    Attributes:
        epochs: how often a batch is generated and the student trained.
        steps: updates of the generator in each.
        batch: images that are generated in each; 2 or more.
        latent: length of the generator's input.
        width: of the generator's last layers.
        lr: of Adam, for the generator and its inputs.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    epochs: int = 20
    steps: int = 15
    batch: int = 128
    latent: int = 100
    width: int = 16
    lr: float = 1e-3

    def __post_init__(self) -> None:
        positive("method.generate", self, "epochs", "steps", "latent", "width", "lr")
        if self.batch < 2:  # its normalisation is over the batch
            raise ConfigError(f"method.generate.batch must be at least 2. Got {self.batch}")


class Generator(nn.Module):
    """Maps ``[b, latent]`` to images ``[b, channels, size, size]`` in [0, 1].

    A linear layer, then twice: enlarge, convolve. Normalisation is over the batch at hand, without
    running averages.
    """

    def __init__(self, channels: int, size: int, latent: int, width: int) -> None:
        super().__init__()
        self.sides = math.ceil(size / 4), math.ceil(size / 2), size
        self.first = nn.Linear(latent, 2 * width * self.sides[0] ** 2)
        self.convs = nn.ModuleList(
            nn.Conv2d(i, o, 3, padding=1) for i, o in ((2 * width, 2 * width), (2 * width, width))
        )
        self.last = nn.Conv2d(width, channels, 3, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        """Make images."""
        h = _normalised(self.first(z).unflatten(1, (-1, self.sides[0], self.sides[0])))
        for side, conv in zip(self.sides[1:], self.convs, strict=True):
            h = F.leaky_relu(_normalised(conv(F.interpolate(h, size=(side, side)))), 0.2)
        return torch.sigmoid(_normalised(self.last(h)))


def _normalised(h: Tensor) -> Tensor:
    return F.batch_norm(h, None, None, training=True)


def new_generator(task: Task, settings: Generate, rng: torch.Generator) -> Generator:
    """Draw a generator of images of a task."""
    with torch.device("meta"):  # layers would otherwise draw from the global generator
        made = Generator(task.channels, task.size, settings.latent, settings.width)
    made = made.to_empty(device="cpu")
    initialise(made, rng)
    return made


def generated(
    generator: Generator, z: Tensor, loss: Callable[[Tensor], Tensor], settings: Generate
) -> Tensor:
    """Train a generator and its inputs on a loss of its images; return these, without a graph."""
    z = z.clone().requires_grad_(True)
    free = [*generator.parameters(), z]
    optimiser = torch.optim.Adam(free, settings.lr, betas=(0.5, 0.999))
    for _ in range(settings.steps):
        # of these alone: the student's own gradients are not wanted
        for p, g in zip(free, torch.autograd.grad(loss(generator(z)), free), strict=True):
            p.grad = g
        optimiser.step()
    with torch.no_grad():
        images: Tensor = generator(z)
    return images


@dataclass(frozen=True)
class Pool:
    """Images made so far.

    Attributes:
        pixels: uint8 ``[n, c, s, s]``.
        labels: int64 ``[n]``, what each was made to be.
        each: float32 ``[k, n, classes]``, the members' logits.
    """

    pixels: Tensor
    labels: Tensor
    each: Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def floats(self, rows: Tensor) -> Tensor:
        """Return float32 images in [0, 1]."""
        return self.pixels[rows].to(torch.float32) / 255

    def more(self, x: Tensor, labels: Tensor, ensemble: Ensemble) -> Pool:
        """Return a pool with images in [0, 1] added."""
        pixels = as_uint8(x)
        with torch.no_grad():
            parts = [ensemble.each(p.to(torch.float32) / 255) for p in torch.split(pixels, BATCH)]
        return Pool(
            torch.cat([self.pixels, pixels]),
            torch.cat([self.labels, labels]),
            torch.cat([self.each, *parts], dim=1),
        )


@dataclass(frozen=True)
class DataFree(OneShot):
    """A student distilled from the ensemble on images that a generator makes from noise.

    Attributes:
        recipe, epochs: as in `OneShot`.
        generate: how images are made.
        distil: how the student learns.
        adversarial: weight of the disagreement of ensemble and student in the generator's loss.
        mix: whether the ensemble's ``logits`` are averaged, as published, or ``probabilities``, of
            which a network that is overly sure cannot outvote all others.
    """

    generate: Generate = Generate()
    distil: Distil = DISTIL
    adversarial: float = 1.0
    mix: Mix = "logits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.adversarial < math.inf:
            raise ConfigError(f"method.adversarial must not be negative. Got {self.adversarial}")

    @abstractmethod
    def loss(self, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """Return the generator's loss, from scores ``[b, classes]`` of both."""

    def reweighted(self, weights: Tensor, pool: Pool, epoch: int, rng: torch.Generator) -> Tensor:
        """Return the members' new weights, float32 ``[k]`` >= 0; here those that they have."""
        return weights

    def seen(
        self, pool: Pool, rows: Tensor, ensemble: Ensemble, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Return what the student sees of the pool, and the ensemble's scores of it."""
        return pool.floats(rows), mixed(pool.each[:, rows], ensemble.shares, ensemble.mix)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Generate, reweigh, distil, in turn; return the student and the ensemble."""
        started, g, d = time.perf_counter(), self.generate, self.distil
        ensemble = self.ensemble(task, state, self.mix)
        weights = ensemble.shares
        student = self.student(task, state, d, self._updates(), rng)
        generator = new_generator(task, g, rng)
        k, classes = len(weights), len(task.classes)
        pool = Pool(
            torch.zeros(0, task.channels, task.size, task.size, dtype=torch.uint8),
            torch.zeros(0, dtype=torch.int64),
            torch.zeros(k, 0, classes),
        )
        for epoch in range(g.epochs):
            labels = torch.randint(classes, (g.batch,), generator=rng)
            x = self._made(generator, ensemble, student, labels, rng)
            pool = pool.more(x, labels, ensemble)
            weights = self.reweighted(weights, pool, epoch, rng)
            ensemble = replace(ensemble, shares=weights / weights.sum())
            for _ in range(d.passes):
                for rows in batches(len(pool), d.batch, rng):
                    student.step(*self.seen(pool, rows, ensemble, rng))
        name = type(self).__module__.rpartition(".")[2]
        details = {"seconds": {"server": time.perf_counter() - started}}
        shares = {"shares": ensemble.shares.tolist(), "images": len(pool)}
        heads: dict[str, Classifier] = {name: student.finished(), "ensemble": ensemble}
        return Outcome(None, heads, details | shares)

    def _updates(self) -> int:
        g, d = self.generate, self.distil
        return d.passes * sum(math.ceil(e * g.batch / d.batch) for e in range(1, g.epochs + 1))

    def _made(
        self,
        generator: Generator,
        ensemble: Ensemble,
        student: Student,
        labels: Tensor,
        rng: torch.Generator,
    ) -> Tensor:
        z = torch.randn(self.generate.batch, self.generate.latent, generator=rng)

        def loss(x: Tensor) -> Tensor:
            return self.loss(ensemble.logits(x), student.network.logits(x), labels)

        return generated(generator, z, loss, self.generate)
