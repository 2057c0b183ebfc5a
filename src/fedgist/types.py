"""The nouns of FedGist: images, task, query, plan, state, outcome.

Everything here is data. Nothing here touches a file, a network or a random number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, TypeVar

import torch
from torch import Tensor

from fedgist.errors import ConfigError, DataError

__all__ = [
    "BATCH",
    "Adjacency",
    "Classifier",
    "Images",
    "Merged",
    "MomentsQuery",
    "Outcome",
    "Piece",
    "Query",
    "Round",
    "State",
    "SumQuery",
    "Task",
    "Tensors",
    "Trust",
    "Unit",
    "blocks_of",
    "prefixed",
]

V = TypeVar("V")
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
class SumQuery:
    """A sum over records of rows clipped to an L2 norm, then noised.

    Attributes:
        clip: L2 bound of one record's row, all its tensors joined.
        levels: integer radius: a row becomes integers of norm at most ``levels``.
        scale: noise multiplier of this query relative to the one calibrated for the whole plan.
        times: how often the query is asked.
        per_class: one block per class; a record touches its own only: the sensitivity of one.
        name: tells the queries of one round apart; put before the names of their blocks.
        shape: of what one record adds, its classes included, when the plan knows it (the bytes of
            a gist are then known in advance); empty otherwise.
        rates: Poisson sampling: each record is in with this public probability, one for all classes
            or one each, drawn anew whenever the query is asked. The noise is a rounded Gaussian,
            whose amplification by sampling is proved. Empty: every record, discrete Gaussian
            noise. (1.0,): every record, rounded noise, to stand beside sampled queries.
        whole: one row for the whole client, made from all of its images.
    """

    clip: float
    levels: int = 1024
    scale: float = 1.0
    times: int = 1
    per_class: bool = False
    name: str = ""
    shape: tuple[int, ...] = ()
    rates: tuple[float, ...] = ()
    whole: bool = False

    def __post_init__(self) -> None:
        _positive(clip=self.clip, scale=self.scale, levels=self.levels, times=self.times)
        if not all(0 < r <= 1 for r in self.rates):
            raise ConfigError(f"sampling rates must lie in (0, 1]. Got {list(self.rates)}")
        if self.whole and (self.rates or self.per_class):
            raise ConfigError("a whole client's row must be neither sampled nor per class")

    @property
    def rate(self) -> float:
        """The highest sampling rate: of the class that is protected least."""
        return max(self.rates, default=1.0)

    @property
    def row(self) -> int:
        """How many numbers one record adds; 0 when the plan does not know it."""
        return math.prod(self.shape[1:] if self.per_class else self.shape) if self.shape else 0

    def shapes(self, *, noised: bool) -> dict[str, tuple[int, ...]]:
        """Return the shape of the one block ``rows``; nothing when the plan does not know it."""
        return {"rows": self.shape} if self.shape else {}


@dataclass(frozen=True)
class MomentsQuery:
    """Per-class counts, sums and second moments of clipped codes: one joint Gaussian release.

    A record z of norm at most ``clip`` becomes an integer vector u of norm at most ``levels``. The
    release is (Σu, Σuuᵀ per class, Σuuᵀ over all classes, n); a block with share 0 is not sent.
    The shares divide the squared Gaussian-DP budget and sum to one: block k gets noise with
    standard deviation σ · (its largest norm) / √share (`reference`: joint sensitivity 1 under
    add/remove, attained at the clip radius).

    Attributes:
        clip: public radius R in code units.
        dim: code dimension d.
        classes: number of classes C; all are always sent, empty ones too.
        mean, second, pooled, count: budget shares of Σz, class Σzzᵀ, pooled Σzzᵀ and n.
        levels: integer radius.
        count_weight: integer that each record adds to the count, so that thin shares of
            distributed noise stay above three grid units.
        exact_counts: send n without noise. Sound only when labels are public
            (``replace-same-class``); under any other adjacency the claim is ε = inf.
        basic: calibrate mean and second moment apart, each at (ε/2, δ/2), as FedKT-CSD was
            published. For comparison only: the joint release needs less noise.
        times: how often the query is asked.
        scale: noise multiplier of this query relative to the one calibrated for the whole plan.
        name: tells the queries of one round apart; put before the names of their blocks.
    """

    clip: float
    dim: int
    classes: int
    mean: float = 0.5
    second: float = 0.3
    pooled: float = 0.18
    count: float = 0.02
    levels: int = 128
    count_weight: int = 1
    exact_counts: bool = False
    basic: bool = False
    times: int = 1
    scale: float = 1.0
    name: str = ""

    def __post_init__(self) -> None:
        _positive(clip=self.clip, dim=self.dim, classes=self.classes, levels=self.levels)
        _positive(count_weight=self.count_weight, times=self.times, scale=self.scale)
        shares = self.shares
        if not (min(shares.values()) >= 0 and abs(sum(shares.values()) - 1) <= 1e-9):
            raise ConfigError(f"budget shares must be >= 0 and sum to 1. Got {shares}")
        if self.mean == 0:
            raise ConfigError("the mean's budget share must be positive. Got 0")
        if self.exact_counts != (self.count == 0):
            raise ConfigError(
                "the count's budget share must be 0 exactly when counts are exact. "
                f"Got count = {self.count}, exact_counts = {self.exact_counts}"
            )

    @property
    def shares(self) -> dict[str, float]:
        """Budget share of each block."""
        return {
            "mean": self.mean,
            "second": self.second,
            "pooled": self.pooled,
            "count": self.count,
        }

    @property
    def triangle(self) -> int:
        """Numbers in the upper triangle of one second moment, diagonal included."""
        return self.dim * (self.dim + 1) // 2

    def shapes(self, *, noised: bool) -> dict[str, tuple[int, ...]]:
        """Return the shape of every block that is sent, the same for every client.

        The exact pooled block is the sum of the exact class blocks, so it travels only where there
        are none, or where it already carries noise of its own.
        """
        out: dict[str, tuple[int, ...]] = {
            "count": (self.classes,),
            "mean": (self.classes, self.dim),
        }
        if self.second:
            out["second"] = (self.classes, self.triangle)
        if self.pooled and (noised or not self.second):
            out["pooled"] = (self.triangle,)
        return out


Query = SumQuery | MomentsQuery


def prefixed(query: Query, blocks: Mapping[str, V]) -> dict[str, V]:
    """Return a query's blocks under the names they travel by."""
    return {f"{query.name}.{k}" if query.name else k: v for k, v in blocks.items()}


def blocks_of(query: Query, tensors: Tensors) -> Tensors:
    """Undo `prefixed`: return this query's blocks out of a gist that may hold several."""
    if not query.name:
        return tensors
    head = f"{query.name}."
    return {k.removeprefix(head): v for k, v in tensors.items() if k.startswith(head)}


@dataclass(frozen=True)
class Piece:
    """One tensor of a gist that is pooled: the same name, shape and dtype at every client."""

    name: str
    shape: tuple[int, ...]
    dtype: Literal["uint8", "int64", "float32"]

    @property
    def bits(self) -> int:
        """Of one number."""
        return {"uint8": 8, "int64": 64, "float32": 32}[self.dtype]


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
    """The server's memory between rounds. ``shared`` is broadcast and metered, ``server`` stays."""

    shared: Tensors = field(default_factory=dict)
    server: Any = None


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


def _positive(**values: float) -> None:
    for name, value in values.items():
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} must be positive and finite. Got {value}")
