"""The nouns of FedGist: images, task, query, plan, state, outcome.

Everything here is data. Nothing here touches a file, a network or a random number.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from fedgist.errors import ConfigError, DataError
from fedgist.queries import Query

__all__ = [
    "BATCH",
    "Adjacency",
    "Classifier",
    "Images",
    "Merged",
    "Outcome",
    "Piece",
    "Round",
    "State",
    "Task",
    "Tensors",
    "Trust",
    "Unit",
]

Tensors = dict[str, Tensor]
Adjacency = Literal["add-remove", "replace-one", "replace-same-class"]
Unit = Literal["image", "person", "client"]
Trust = Literal["local", "central", "distributed"]

BATCH = 250  # images per step: what stays in the cache of a small CPU


@dataclass(frozen=True)
class Images:
    """Labelled images of one size.

    Attributes:
        pixels: uint8 ``[n, c, h, w]`` in 0..255, or float32 in [0, 1]; c is 1 or 3.
        labels: int64 ``[n]``, positions in ``classes``.
        classes: the task's class names. A client that holds none of a class still lists it.
        groups: int64 ``[n]``, who each image belongs to (a person, a site), or None when unknown.
    """

    pixels: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    groups: Tensor | None = None

    def __post_init__(self) -> None:
        p, y = self.pixels, self.labels
        if p.ndim != 4 or p.shape[1] not in (1, 3):
            raise DataError(f"images must have shape [n, 1 or 3, h, w]. Got {list(p.shape)}")
        if p.dtype not in (torch.uint8, torch.float32):
            raise DataError(f"images must be uint8 or float32. Got {p.dtype}")
        if y.shape != (len(p),) or y.dtype != torch.int64:
            raise DataError(f"labels must be int64 [{len(p)}]. Got {y.dtype} {list(y.shape)}")
        if len(y) and not 0 <= int(y.min()) <= int(y.max()) < len(self.classes):
            raise DataError(
                f"labels must lie in 0..{len(self.classes) - 1}. Got {int(y.min())}..{int(y.max())}"
            )
        if self.groups is not None and self.groups.shape != y.shape:
            raise DataError(f"groups must have shape [{len(y)}]. Got {list(self.groups.shape)}")

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, rows: Tensor) -> Images:
        """Return the images at ``rows`` (int64 or bool), in that order."""
        groups = None if self.groups is None else self.groups[rows]
        return Images(self.pixels[rows], self.labels[rows], self.classes, groups)

    def floats(self, rows: slice | Tensor = slice(None)) -> Tensor:
        """Return float32 ``[b, c, h, w]`` in [0, 1]."""
        x = self.pixels[rows]
        return x.to(torch.float32).div_(255) if x.dtype == torch.uint8 else x.clone()

    def batches(self, size: int = BATCH) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield (float32 images in [0, 1], labels), ``size`` at a time, in order."""
        for i in range(0, len(self), size):
            yield self.floats(slice(i, i + size)), self.labels[i : i + size]

    def counts(self) -> Tensor:
        """Return int64 ``[classes]``: how many images of each class. Private; never leaves."""
        return torch.bincount(self.labels, minlength=len(self.classes))


@dataclass(frozen=True)
class Task:
    """Public facts that all sites agree on before anyone looks at an image.

    Attributes:
        name: short name, used in reports.
        classes: class names in order; the label of an image is a position in it.
        channels: 1 (grey) or 3 (RGB): what every image is converted to.
        size: height and width in pixels that every image is converted to.
        fit: how an image that is not square is made so.
        max_images: public upper bound on the images of one client: it sets the width of integers
            on the wire. A client that holds more is refused.
    """

    name: str
    classes: tuple[str, ...]
    channels: Literal[1, 3] = 3
    size: int = 64
    fit: Literal["stretch", "crop", "pad"] = "stretch"
    max_images: int = 65_535

    def __post_init__(self) -> None:
        if len(self.classes) < 2 or len(set(self.classes)) != len(self.classes):
            raise ConfigError(
                f"task.classes must be two or more distinct names. Got {list(self.classes)}"
            )
        if self.size < 4:
            raise ConfigError(f"task.size must be at least 4 pixels. Got {self.size}")
        if self.max_images < 1:
            raise ConfigError(f"task.max_images must be positive. Got {self.max_images}")


@dataclass(frozen=True)
class Piece:
    """One tensor of a gist that is pooled: the same name, shape and dtype at every client.

    A first size of -1 is one row for each image that a client sends: its length tells how many.
    """

    name: str
    shape: tuple[int, ...]
    dtype: Literal["uint8", "int64", "float32"]

    @property
    def bits(self) -> int:
        """Of one number."""
        return {"uint8": 8, "int64": 64, "float32": 32}[self.dtype]

    @property
    def by_image(self) -> bool:
        """Whether it has one row for each image that a client sends."""
        return self.shape[:1] == (-1,)


@dataclass(frozen=True)
class Round:
    """One exchange, declared before any data is seen.

    Attributes:
        reduce: ``sum`` (only the sum over clients is used) or ``pool`` (gists stay apart).
        queries: the noised queries that the method will ask of each client. In a pool round a
            client releases the answers to itself, in full.
        raw: the method reads images without noise; the claim is then ε = inf.
        sends: all that a client sends in a pool or raw round; empty where that is not known.
    """

    reduce: Literal["sum", "pool"]
    queries: tuple[Query, ...] = ()
    raw: bool = False
    sends: tuple[Piece, ...] = ()

    @property
    def noised(self) -> bool:
        """Whether the exchange adds up the answers and sees to their noise."""
        return self.reduce == "sum" and bool(self.queries)

    def __post_init__(self) -> None:
        # Their blocks travel together and are told apart by name.
        names = [q.name for q in self.queries]
        if (
            self.reduce == "sum"
            and len(names) > 1
            and (len(set(names)) < len(names) or "" in names)
        ):
            raise ConfigError(f"queries of one sum round must have names of their own. Got {names}")


@dataclass(frozen=True)
class Merged:
    """What an exchange hands to the server after one round.

    Attributes:
        tensors: for a sum round, noised int64 sums in grid units, by block; for a pool round, the
            gists of all clients joined along the first axis.
        sigma: the multiplier of the noise that is really in the sums (under trust ``local`` it
            grows with the square root of the number of clients).
        clients: how many clients contributed.
    """

    tensors: Tensors
    sigma: float
    clients: int


@dataclass(frozen=True)
class State:
    """The server's memory between rounds. ``shared`` is broadcast and metered, ``server`` stays.

    ``done`` says that no further round of the plan is needed.
    """

    shared: Tensors = field(default_factory=dict)
    server: Any = None
    done: bool = False


class Classifier(Protocol):
    """What predicts labels from images in the task's own format."""

    @property
    def kind(self) -> str:
        """Name of the class of model, enough with ``meta`` and ``tensors`` to rebuild it."""

    def predict(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, h, w]`` in [0, 1] to float ``[b, classes]`` scores (log scale)."""

    def tensors(self) -> Tensors:
        """Return the parameters."""

    def meta(self) -> Mapping[str, str]:
        """Return what else is needed to rebuild it, as strings."""


@dataclass(frozen=True)
class Outcome:
    """What the server ends with.

    Attributes:
        synthetic: images that all may share, or None.
        classifiers: head name -> classifier; the first is the one to use.
        details: numbers and arrays for the report (spectra, noisy counts, seconds by stage).
    """

    synthetic: Images | None = None
    classifiers: Mapping[str, Classifier] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
