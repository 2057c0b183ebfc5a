"""Uploads of one small image for every image, with its label: what leaves, and what is made of it.

Labels leave in clear, and so does how many images a client has.
"""

from __future__ import annotations

import hashlib
import time
from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgist.compress import CompressedNetwork, as_uint8, enlarge
from fedgist.compress.fixed import build
from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.privacy.client import Client
from fedgist.train import Recipe, train
from fedgist.types import BATCH, Images, Outcome, Piece, Round, State, Task, Tensors

__all__ = [
    "STUDENT",
    "Transformed",
    "Uploading",
    "chosen",
    "enlarged",
    "pieces",
    "pooled",
    "upload",
]

STUDENT = Recipe(width=32, steps=1500, batch=64, lr=5e-3, augment="flip", label_smoothing=0.05)


def pieces(task: Task, side: int) -> tuple[Piece, ...]:
    """Return what a client sends: its small images and their labels, one row for each image."""
    return (
        Piece("pixels", (-1, task.channels, side, side), "uint8"),
        Piece("labels", (-1,), "uint8" if len(task.classes) <= 256 else "int64"),
    )


def chosen(images: Images, share: float) -> Images:
    """Return about ``share`` of every class (the data representation ratio ρ).

    Each image is in or out by a hash of its own pixels: the same in every round, whatever other
    images the client has or withholds, and however images are dealt out among clients.
    """
    if share >= 1 or not len(images):
        return images
    keep = []
    for x in torch.split(images.pixels, BATCH):
        raw = x if x.dtype == torch.uint8 else as_uint8(x)
        for row in raw.flatten(1).numpy():
            word = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
            keep.append(int.from_bytes(word, "big") < share * 2**64)
    return images.take(torch.tensor(keep))


def upload(images: Images, task: Task, compress: Callable[[Tensor], Tensor], side: int) -> Tensors:
    """Return the gist of `pieces`; ``compress`` maps images in [0, 1] to small ones in [0, 1]."""
    out = torch.empty(len(images), task.channels, side, side, dtype=torch.uint8)
    with torch.no_grad():
        for i, (x, _) in enumerate(images.batches()):
            out[i * BATCH : i * BATCH + len(x)] = as_uint8(compress(x))
    dtype = torch.uint8 if len(task.classes) <= 256 else torch.int64
    return {"pixels": out, "labels": images.labels.to(dtype)}


def pooled(tensors: Tensors, task: Task) -> Images:
    """Return the small images of all clients; labels that are no class are left out.

    If nobody has sent any there is one grey image of each class: nothing is learned from those.
    """
    pixels, labels = tensors["pixels"], tensors["labels"].to(torch.int64)
    fine = (labels >= 0) & (labels < len(task.classes))
    if not bool(fine.any()):
        labels = torch.arange(len(task.classes))
        return Images(pixels.new_full((len(labels), *pixels.shape[1:]), 128), labels, task.classes)
    return Images(pixels[fine], labels[fine], task.classes)


def enlarged(small: Images, size: int) -> Images:
    """Return uint8 images of ``size`` pixels a side: what the network is trained on."""
    out = [as_uint8(enlarge(x, size)) for x, _ in small.batches()]
    return Images(torch.cat(out), small.labels, small.classes)


class Uploading(Method):
    """A method whose clients send something of every image that takes part; see `Exposing`."""

    share: float  # of every class that takes part: a field of each subclass

    @property
    def random(self) -> bool:
        """Whether the same image is sent differently every time."""
        return False

    def used(self, images: Images) -> Images:
        """Return images of a client that may be among those sent."""
        return chosen(images, self.share)


@dataclass(frozen=True)
class Transformed(Uploading):
    """A comparison: each image through a fixed transform, once; the server enlarges and trains.

    Subclasses say what a client does to its images (`disturbed`), what the server makes of them
    (`received`), what the final classifier does without noise (`spec`) and what that promises
    (`statement`).

    Attributes:
        share: of every class that is sent.
        recipe: how the network is trained.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    share: float = 1.0
    recipe: Recipe = STUDENT

    def __post_init__(self) -> None:
        if not 0 < self.share <= 1:
            raise ConfigError(f"method.share must lie in (0, 1]. Got {self.share}")

    @property
    @abstractmethod
    def spec(self) -> str:
        """Name of the transform without noise, as `compress.fixed.build` reads it."""

    @abstractmethod
    def small_side(self, task: Task) -> int:
        """Return the side of what is sent, in pixels."""

    @property
    def statement(self) -> str:
        """What is promised about an image that is sent, whatever the claim's ε."""
        return "a fixed transform without noise: nothing is promised about an image that is sent"

    @property
    def notes(self) -> tuple[str, ...]:
        """What leaves in clear, and the method's own statement."""
        return ("labels, and how many images a client sends, leave in clear", self.statement)

    def picked(self, images: Images, rng: torch.Generator) -> Images:
        """Return the images that are sent: by a hash of their pixels, see `chosen`."""
        return chosen(images, self.share)

    def received(self, small: Images) -> Images:
        """Return what the server enlarges, of the small images of all clients."""
        return small

    def disturbed(self, task: Task, x: Tensor, rng: torch.Generator) -> Tensor:
        """Map images in [0, 1] to what is sent, in [0, 1], with the client's randomness."""
        return build(self.spec)(x)

    def uploaded(self, task: Task, shared: Tensors, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return what the server makes out of the upload of images ``x``."""
        if not self.random:
            return self.disturbed(task, x, rng)
        pixels = as_uint8(self.disturbed(task, x, rng))
        labels = torch.zeros(len(x), dtype=torch.int64)
        return self.received(Images(pixels, labels, task.classes)).floats()

    def plan(self, task: Task) -> Sequence[Round]:
        """One raw pool round."""
        return [Round("pool", raw=True, sends=pieces(task, self.small_side(task)))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Send every chosen image through the transform."""
        images = self.picked(client.raw(), rng)
        return upload(images, task, lambda x: self.disturbed(task, x, rng), self.small_side(task))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Enlarge, train."""
        started = time.perf_counter()
        small = self.received(pooled(state.server.tensors, task))
        network = train(enlarged(small, task.size), self.recipe, rng)
        classifier = CompressedNetwork(network, build(self.spec), self.spec)
        seconds = {"train": time.perf_counter() - started}
        return Outcome(None, {"uploads": classifier}, {"seconds": seconds, "images": len(small)})
