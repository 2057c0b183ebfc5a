"""FedDF, once: the ensemble distilled into the average on unlabelled images. Not private.

Lin et al., "Ensemble Distillation for Robust Model Fusion in Federated Learning", NeurIPS 2020,
https://arxiv.org/abs/2006.07242. The student begins at the mean of the clients' weights (by images)
and descends, by Adam along a cosine, on

    KL(softmax(mean_k f_k(x)) ‖ softmax(f(x)))        x unlabelled, at the server

Differences from the paper: one round instead of many (as other one-shot methods compare with it);
a fixed number of steps instead of stopping early on a validation set, which nobody has here; a
temperature may be set, which is 1 in the paper. The images are public ones that are named, or
smooth noise. Labels of named images are not looked at.

Each client's own weights reach the server without noise: the claim is ε = inf.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count, islice

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.compress import as_uint8
from fedgist.data import open_source
from fedgist.errors import ConfigError
from fedgist.methods._oneshot import Distil, OneShot, batches
from fedgist.train.ensemble import Mix
from fedgist.types import BATCH, Outcome, Round, State, Task

__all__ = ["FedDF"]

NOISE = "noise"
DISTIL = Distil(lr=1e-3, optimiser="adam")


@dataclass(frozen=True)
class FedDF(OneShot):
    """Heads ``feddf`` and ``ensemble``.

    Attributes:
        recipe, epochs: as in `OneShot`.
        public: ``noise``, or a named set or path (see `data.open_source`) of images that are not
            private, in the task's format after conversion.
        images: how many of them are used, at most.
        distil: how the student learns; ``passes`` has no effect.
        mix: of the ensemble: ``logits`` as published, or ``probabilities``.
    """

    public: str = NOISE
    images: int = 5000
    distil: Distil = DISTIL
    mix: Mix = "logits"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.images < 1:
            raise ConfigError(f"method.images must be at least 1. Got {self.images}")

    @property
    def track(self) -> str:
        """Which public data have been used."""
        return "no public data" if self.public == NOISE else "public images"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the claim must know besides."""
        used = () if self.public == NOISE else (f"unlabelled public images of {self.public}",)
        return (*super().notes, *used)

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan one raw pool, as every one-shot method.

        Raises:
            ConfigError: the public set is the private one.
        """
        if self.public == task.name:
            raise ConfigError(
                f"method.public must be other images than the task's. Got {task.name}"
            )
        return super().plan(task)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Ask the ensemble about every image once, then distil."""
        started = time.perf_counter()
        ensemble = self.ensemble(task, state, self.mix)
        x = self._public(task, rng)
        with torch.no_grad():
            asked = [ensemble.logits(p.to(torch.float32) / 255) for p in torch.split(x, BATCH)]
        teacher = torch.cat(asked)
        student = self.student(task, state, self.distil, self.distil.steps, rng)
        every = (rows for _ in count() for rows in batches(len(x), self.distil.batch, rng))
        for rows in islice(every, self.distil.steps):
            student.step(x[rows].to(torch.float32) / 255, teacher[rows])
        details = {"seconds": {"server": time.perf_counter() - started}, "images": len(x)}
        return Outcome(None, {"feddf": student.finished(), "ensemble": ensemble}, details)

    def _public(self, task: Task, rng: torch.Generator) -> Tensor:
        """Return unlabelled images, uint8 ``[n, c, s, s]``."""
        if self.public == NOISE:
            side = math.ceil(task.size / 4)
            coarse = torch.rand(self.images, task.channels, side, side, generator=rng)
            return as_uint8(F.interpolate(coarse, size=(task.size, task.size), mode="bilinear"))
        source = open_source(self.public)
        images = source.images("train", replace(task, classes=source.classes))
        rows = torch.randperm(len(images), generator=rng)[: self.images]
        return as_uint8(images.floats(rows))
