"""Train a ``gist-ae`` codec on public images, on a CPU, in an hour or two.

The loss is the mean squared error; codes get a little noise on the way, because the decoder will
see Gaussian samples and not only codes of real images. Matrices are optimised by Muon (momentum
whose singular values are made equal, K. Jordan 2024), biases by Adam. (A start at principal
components, with networks for the rest, ends half a decibel above them, on a plateau.)
Every step's images, augmentation and noise depend on the seed and the step alone, so a training
that was stopped goes on as if it had not been.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F

from fedgist.encoders.gist_ae import GistNet, Shape
from fedgist.errors import ConfigError, DataError

__all__ = ["Log", "Schedule", "train_codec"]

Pixels = NDArray[np.uint8]
WARM = 50  # steps until the learning rate is full
ADAM = 2  # Muon's learning rate over Adam's
LOST = 3.0  # a running loss this many times its lowest will not come back
Log = Callable[[int, float], None]


@dataclass(frozen=True)
class Schedule:
    """How long and how to train.

    Attributes:
        images: how many images are shown in all (they may repeat).
        batch: images per step.
        lr: Muon's learning rate, as root mean square of one step; cosine to zero.
        noise: standard deviation of the noise on codes, whose own is near 1.
        average: decay of the running average of weights that is kept.
        seed: of weights, order, augmentation and noise.
    """

    images: int = 300_000
    batch: int = 48
    lr: float = 4e-3
    noise: float = 0.03
    average: float = 0.998
    seed: int = 0

    def __post_init__(self) -> None:
        if self.batch < 1 or self.images < self.batch:
            raise ConfigError(
                f"images must be at least one batch. Got {self.images} images, batch {self.batch}"
            )

    @property
    def steps(self) -> int:
        """Number of steps."""
        return self.images // self.batch


@final
class Muon(torch.optim.Optimizer):
    """Momentum made orthogonal by five Newton-Schulz iterations, for matrices.

    ``torch.optim.Muon`` iterates in bfloat16, which most CPUs only emulate, ten times slower.
    """

    def __init__(self, matrices: list[Tensor], momentum: float = 0.95) -> None:
        super().__init__(matrices, {"lr": 0.0, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Take one step; root mean square of the change is ``lr`` times 1/5."""
        for group in self.param_groups:
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p))
                m.lerp_(p.grad, 1 - group["momentum"])
                u = p.grad.lerp(m, group["momentum"])
                p.add_(_orthogonal(u), alpha=-0.2 * group["lr"] * max(u.shape) ** 0.5)


def _orthogonal(u: Tensor) -> Tensor:
    """Return u with its singular values moved to about 1 (0.7 .. 1.2).

    Every iterate is p(u uᵀ) u for some polynomial p, so the iteration runs on the small square
    matrices p and u uᵀ alone.
    """
    if len(u) > u.shape[1]:
        return _orthogonal(u.T).T
    u = u / (u.norm() + 1e-12)
    a = u @ u.T
    p = eye = torch.eye(len(u), dtype=u.dtype)
    for _ in range(5):
        b = 3.4445 * eye + (2.0315 * a - 4.7750 * eye) @ a
        p, a = b @ p, b @ a @ b  # they commute: all are polynomials in u uᵀ
    return p @ u


def train_codec(
    images: Pixels,
    schedule: Schedule,
    checkpoint: Path,
    log: Log,
    shape: Shape | None = None,
    keep_every: int = 300,
) -> GistNet:
    """Train on public images and return the averaged network.

    Args:
        images: uint8 ``[n, 3, 64, 64]``, possibly a memory map.
        schedule: how long and how.
        checkpoint: training goes on from it when it exists.
        log: called every 50 steps with (images shown, running PSNR in dB).
        shape: the architecture.
        keep_every: steps between two writings of the checkpoint.

    Raises:
        DataError: the images have another shape, or are too few.
        ConfigError: the checkpoint belongs to another schedule, shape or set of images, or the
            loss rises for good.
    """
    shape = shape or Shape()
    if images.ndim != 4 or images.shape[1:] != (3, 64, 64) or images.dtype != np.uint8:
        raise DataError(
            f"public images must be uint8 [n, 3, 64, 64]. Got {images.dtype} {images.shape}"
        )
    if len(images) < 2:
        raise DataError(f"public images must be at least 2. Got {len(images)}")
    run = _Run(images, schedule, shape)
    run.resume(checkpoint)
    loss = lowest = 0.0
    for step in range(run.step, schedule.steps):
        now = run.advance(step)
        loss = now if loss == 0 else 0.98 * loss + 0.02 * now
        lowest = loss if lowest == 0 else min(lowest, loss)
        if not loss < LOST * lowest:
            raise ConfigError(
                f"the loss must fall. Got {loss:.3g} after {lowest:.3g} at step {step + 1}: "
                "lower the learning rate"
            )
        last = step + 1 == schedule.steps
        if last or (step + 1) % 50 == 0:
            log((step + 1) * schedule.batch, -10 * math.log10(loss))
        if last or (step + 1) % keep_every == 0:
            run.keep(checkpoint)
    return run.averaged()


@final
class _Run:
    """Everything that changes while training."""

    def __init__(self, images: Pixels, schedule: Schedule, shape: Shape) -> None:
        self.images, self.schedule, self.step = images, schedule, 0
        self.identity = {
            "schedule": asdict(schedule),
            "shape": shape.meta(),
            "images": len(images),
        }
        self.shape = shape
        with torch.device("meta"):
            net = GistNet(shape)
        self.net = net.to_empty(device="cpu")
        self.net.initialise(schedule.seed)
        self.average = {k: v.clone() for k, v in self.net.state_dict().items()}
        parameters = list(self.net.parameters())
        self.muon = Muon([p for p in parameters if p.ndim == 2])
        rest = [p for p in parameters if p.ndim == 1]
        self.adam = torch.optim.Adam(rest, lr=0.0, betas=(0.9, 0.99))

    def advance(self, step: int) -> float:
        """Take one step and return its loss."""
        s = self.schedule
        rate = s.lr * min(1.0, (step + 1) / WARM) * (1 + math.cos(math.pi * step / s.steps)) / 2
        self.muon.param_groups[0]["lr"] = rate
        self.adam.param_groups[0]["lr"] = rate / ADAM
        g = torch.Generator().manual_seed(s.seed * 1_000_003 + step)
        x = augment(torch.from_numpy(self.images[self._rows(step)]), g)
        x = x.contiguous(memory_format=torch.channels_last)
        z = self.net.encode(x)
        z = z + s.noise * torch.randn(z.shape, generator=g)
        loss = F.mse_loss(self.net.decode(z), x)
        for optimiser in (self.muon, self.adam):
            optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        self.muon.step()
        self.adam.step()
        decay = min(s.average, (step + 1) / (step + 10))
        for k, v in self.net.state_dict().items():
            self.average[k].lerp_(v, 1 - decay)
        self.step = step + 1
        return float(loss.detach())

    def _rows(self, step: int) -> NDArray[np.int64]:
        """Return the rows of one step: each epoch in an order of its own."""
        per_epoch = max(1, len(self.images) // self.schedule.batch)
        epoch, i = divmod(step, per_epoch)
        order = np.random.default_rng([self.schedule.seed, epoch]).permutation(len(self.images))
        return np.sort(order[i * self.schedule.batch : (i + 1) * self.schedule.batch])

    def averaged(self) -> GistNet:
        """Return the network with averaged weights."""
        with torch.device("meta"):
            net = GistNet(self.shape)
        net.load_state_dict(self.average, assign=True)
        return net.eval().requires_grad_(False)

    def keep(self, path: Path) -> None:
        """Write a checkpoint aside and put it in place."""
        state = {
            "identity": repr(self.identity),
            "step": self.step,
            "net": self.net.state_dict(),
            "average": self.average,
            "muon": self.muon.state_dict(),
            "adam": self.adam.state_dict(),
        }
        aside = path.with_name(path.name + ".part")
        torch.save(state, aside)
        os.replace(aside, path)

    def resume(self, path: Path) -> None:
        """Go on from a checkpoint, if there is one."""
        if not path.is_file():
            return
        state = torch.load(path, weights_only=True)
        if state["identity"] != repr(self.identity):
            raise ConfigError(
                f"checkpoint '{path}' must belong to this training ({self.identity}). Got "
                f"{state['identity']}: delete it or name another"
            )
        self.net.load_state_dict(state["net"])
        self.average = state["average"]
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])
        self.step = state["step"]


def augment(pixels: Tensor, rng: torch.Generator) -> Tensor:
    """Mirror, invert and mix channels of some images; return float32 in [0, 1].

    Private images may be negatives, mirrored or of any hue: the codec must not have habits.
    """
    x = pixels.to(torch.float32).div_(255)
    mirror, invert, grey = torch.rand(3, len(x), generator=rng)
    x[mirror < 0.5] = x[mirror < 0.5].flip(3)
    x[invert < 0.2] = 1 - x[invert < 0.2]
    x[grey < 0.15] = x[grey < 0.15].mean(1, keepdim=True).expand(-1, 3, -1, -1)
    return x
