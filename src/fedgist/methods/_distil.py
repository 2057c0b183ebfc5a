"""Synthetic images: how they are stored, sent, pooled and trained on."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.compress import as_uint8
from fedgist.errors import ConfigError
from fedgist.train import Recipe, train_converged
from fedgist.types import Images, Outcome, Piece, Task, Tensors

__all__ = ["STUDENT", "Canvas", "Server", "check_options", "gist", "pieces", "pooled_images"]

ROWS = 25  # rows of tiles that are enlarged at once
DISTURBED = 0.1  # share of white noise in the start
STUDENT = Recipe(width=32, steps=800, batch=64, lr=3e-3, augment="flip")


@dataclass(frozen=True)
class Canvas:
    """How synthetic images are stored: free pixels, and the images that are formed from them.

    Multi-formation (Kim et al., ICML 2022, https://arxiv.org/abs/2205.14959): a stored image is cut
    into ``factor`` x ``factor`` tiles, each enlarged to a whole image, so that one takes the room
    of ``factor``².

    Attributes:
        per_class: stored images of each class.
        factor: tiles per side.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    per_class: int = 3
    factor: int = 2

    def __post_init__(self) -> None:
        for name in ("per_class", "factor"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be at least 1. Got {getattr(self, name)}")

    @property
    def formed(self) -> int:
        """Images that one class has in the end."""
        return self.per_class * self.factor**2

    def tile(self, task: Task) -> int:
        """Return the side of a tile in pixels."""
        return max(1, task.size // self.factor)

    def shape(self, task: Task) -> tuple[int, ...]:
        """Return the shape of one class's free pixels: ``[tiles, channels, tile, tile]``."""
        side = self.tile(task)
        return self.formed, task.channels, side, side

    def start(self, task: Task, rng: torch.Generator) -> Tensor:
        """Return random smooth images, float32 ``[C, tiles, channels, tile, tile]`` in [0, 1]."""
        count = len(task.classes) * self.formed
        coarse = torch.rand(count, task.channels, 4, 4, generator=rng)
        side = self.tile(task)
        smooth = F.interpolate(coarse, (side, side), mode="bilinear", align_corners=False)
        white = torch.rand(smooth.shape, generator=rng)
        free = (1 - DISTURBED) * smooth + DISTURBED * white
        return free.view(len(task.classes), *self.shape(task))

    def form(self, free: Tensor, task: Task) -> Tensor:
        """Enlarge tiles ``[..., channels, tile, tile]`` to ``[n, channels, size, size]``."""
        flat = free.reshape(-1, *free.shape[-3:])
        if flat.shape[-1] == task.size:
            return flat
        return F.interpolate(flat, (task.size, task.size), mode="bilinear", align_corners=False)

    def images(self, free: Tensor, labels: Tensor, task: Task) -> Images:
        """Form bytes of rows of tiles, float32 ``[k, tiles, ...]`` of classes ``labels [k]``."""
        formed = torch.cat([self.form(part, task) for part in torch.split(free, ROWS)])
        pixels = as_uint8(formed)
        return Images(pixels, labels.repeat_interleave(self.formed), task.classes)


def check_options(method: Any, *positive: str) -> None:
    """Raise `ConfigError` unless these fields are positive and finite, class sizes among them."""
    for name in positive:
        if not 0 < (got := getattr(method, name)) < math.inf:
            raise ConfigError(f"method.{name} must be positive. Got {got}")
    sizes = getattr(method, "class_size", (1,))
    if not sizes or min(sizes) < 1:
        raise ConfigError(f"method.class_size must be positive. Got {list(sizes)}")


def pieces(canvas: Canvas, task: Task) -> tuple[Piece, ...]:
    """Return what a client sends: tiles in the order of their classes, and noised counts."""
    tiles, *shape = canvas.shape(task)
    return (
        Piece("pixels", (len(task.classes) * tiles, *shape), "uint8"),
        Piece("counts", (len(task.classes),), "float32"),
    )


def gist(free: Tensor, counts: Tensor) -> Tensors:
    """Return what is sent, as `pieces` says."""
    pixels = as_uint8(free)
    return {"pixels": pixels.flatten(0, 1), "counts": counts.to(torch.float32)}


def pooled_images(tensors: Tensors, canvas: Canvas, task: Task, least: float) -> Images:
    """Form the images of all clients' gists.

    Args:
        tensors: joined `gist`s.
        canvas: how they are stored.
        task: what images look like.
        least: a client's images of a class of which it has fewer real ones, by the noised count,
            are left out: they are noise. If that leaves a class without any, all of it is kept.

    Returns:
        uint8 images, client by client and class by class.
    """
    classes = len(task.classes)
    counts = tensors["counts"].view(-1, classes)
    counts = torch.nan_to_num(counts, 0.0, 0.0, 0.0)
    kept = counts >= least
    kept |= ~kept.any(0)
    pixels = tensors["pixels"].view(-1, classes, canvas.formed, *tensors["pixels"].shape[1:])
    client, label = kept.nonzero().unbind(1)
    return canvas.images(pixels[client, label].to(torch.float32) / 255, label, task)


@dataclass(frozen=True)
class Server:
    """What the server does with pooled images.

    Attributes:
        recipe: how the network is trained on them.
        restarts: how often training may begin anew, see `train_converged`.
        least: a client's images of a class are left out where it has fewer real ones than this many
            times the number from which its sums say something (`_sums.signal_level`).
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    recipe: Recipe = STUDENT
    restarts: int = 1
    least: float = 1.0

    def outcome(
        self, tensors: Tensors, canvas: Canvas, task: Task, level: float, rng: torch.Generator
    ) -> Outcome:
        """Form, choose and train; ``level`` is that number of images."""
        started = time.perf_counter()
        images = pooled_images(tensors, canvas, task, self.least * level)
        network, scores = train_converged(images, self.recipe, rng, self.restarts)
        details = {
            "counts": tensors["counts"].view(-1, len(task.classes)).clamp(min=0).sum(0).tolist(),
            "kept": len(images),
            "restarts": scores,
            "level": level,
            "seconds": {"train": time.perf_counter() - started},
        }
        return Outcome(images, {"distilled": network}, details)
