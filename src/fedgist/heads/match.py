"""Move images until they look to random networks as the private classes do: the `match` head.

Released are the class means of `RandomConv` embeddings, one noisy vector per class and network
(distribution matching: Zhao and Bilen, WACV 2023, https://arxiv.org/abs/2110.04181; noised once and
then optimised for free: Zheng et al., ICCV 2025, https://arxiv.org/abs/2508.01749). The server
starts from images that it has, usually decoded samples of the same release, and descends on

    Σ_c Σ_t ‖mean embedding of the images of class c under network t - released mean‖²

A residual is filtered before it pulls (`_Filter`): what its size and the known noise say is noise
does not move an image, and a class drowned in noise keeps its images. A large set is matched in
groups, each by itself: a step moves all images of a group, so its class means are exact. (Means
over random batches would draw the images of a class together, and remembered embeddings overshoot.)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.encoders.random_conv import RandomConv
from fedgist.errors import ConfigError, DataError
from fedgist.queries import SumQuery
from fedgist.types import Images

__all__ = ["Matched", "Matching", "NetMeans", "match", "net_means", "ranks"]

DECAY = (0.9, 0.99)  # of Adam's moments; the second is one number per image
SPREAD = 0.1  # part of the prior that expects a residual in every direction alike
CHECKS = 10  # entries of the history


@dataclass(frozen=True)
class NetMeans:
    """Released class means of embeddings.

    Attributes:
        mean: float32 ``[C, T, e]``.
        std: float32 ``[C]``, standard deviation of the noise in every number of a class.
    """

    mean: Tensor
    std: Tensor


def net_means(sums: Tensor, counts: Tensor, query: SumQuery, sigma: float) -> NetMeans:
    """Turn noised sums into means.

    Args:
        sums: int64 ``[C, T, e]``, grid units, of `RandomConv.rows` under ``query``.
        counts: float ``[C]``, images per class, noised or not; taken as at least 1.
        query: what was asked.
        sigma: the multiplier of the noise that is in the sums.
    """
    unit = query.clip / query.levels
    n = counts.to(torch.float64).clamp(min=1)
    # A record is rounded to whole grid units: 1/12 of a squared unit each
    std = (n * unit**2 / 12 + (sigma * query.scale * query.clip) ** 2).sqrt() / n
    if sigma == 0:
        std = torch.zeros_like(n)
    mean = sums.to(torch.float64) * unit / n[:, None, None]
    return NetMeans(mean.to(torch.float32), std.to(torch.float32))


@dataclass(frozen=True)
class Matching:
    """How images are moved.

    Attributes:
        steps: number of steps, each under one network; 0 returns the start.
        group: images per class that are matched together.
        lr: highest step of an image, root mean square over its pixels, in units of the range
            [0, 1]; falls to 0 along a cosine.
        factor: pixels are free on a grid this many times coarser, from which the image is
            interpolated: ``factor``² images take the room of one (multi-formation, Kim et al.,
            ICML 2022, https://arxiv.org/abs/2205.14959).
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    steps: int = 240
    group: int = 50
    lr: float = 0.03
    factor: int = 1

    def __post_init__(self) -> None:
        for name, low in (("steps", 0), ("group", 1), ("lr", 0), ("factor", 1)):
            if not low <= (got := getattr(self, name)) < math.inf:
                raise ConfigError(f"{name} of match must be at least {low}. Got {got}")


@dataclass(frozen=True)
class Matched:
    """What `match` made.

    Attributes:
        images: uint8, in the order and with the labels of the start.
        history: (steps done, mean over classes of the squared distance to the released means).
        noise: the distance that the true means are expected to have, from the noise alone. A loss
            well below it has fitted noise.
    """

    images: Images
    history: tuple[tuple[int, float], ...]
    noise: float


def match(
    release: NetMeans,
    nets: RandomConv,
    start: Images,
    how: Matching,
    rng: torch.Generator,
    progress: Callable[[int, int], None] | None = None,
) -> Matched:
    """Move ``start`` until its class means under ``nets`` are the released ones.

    Post-processing: it sees the release and the start, and may run for as long as wanted.

    Args:
        release: what to match.
        nets: the networks that it was made with.
        start: images that may be shared already; any number of each class. Left as they are.
        how: see `Matching`.
        rng: source of the order of images and networks; the same seed gives the same bytes.
        progress: called after every step with (steps done, steps in all).

    Raises:
        DataError: no image, or a release for other classes or networks.
    """
    want = [len(start.classes), nets.nets, nets.features]
    if not len(start) or list(release.mean.shape) != want:
        raise DataError(
            f"match needs images and means of shape {want}. Got {len(start)} images and means of "
            f"shape {list(release.mean.shape)}: take the networks of the release"
        )
    pixels = torch.empty(start.pixels.shape, dtype=torch.uint8)
    losses = torch.zeros(how.steps + 1, dtype=torch.float64)
    groups = _groups(start.labels, how.group)
    for i, rows in enumerate(groups):
        moving = _Moving(release, nets, start.take(rows), how)
        for step, loss in enumerate(_descend(moving, nets.nets, how.steps, rng)):
            losses[step] += loss * len(rows) / len(start)
            if progress is not None and step:
                progress(i * how.steps + step, len(groups) * how.steps)
        pixels[rows] = moving.pixels()
    marks = sorted({how.steps * i // CHECKS for i in range(CHECKS + 1)})
    noise = float(release.std[start.counts() > 0].square().mean()) * nets.dim
    images = Images(pixels, start.labels, start.classes, start.groups)
    return Matched(images, tuple((mark, float(losses[mark])) for mark in marks), noise)


def _descend(moving: _Moving, nets: int, steps: int, rng: torch.Generator) -> Iterator[float]:
    """Move a group, yielding its loss before the first step and after each."""
    yield moving.loss()
    turns: list[int] = []
    for step in range(steps):
        turns = turns or torch.randperm(nets, generator=rng).tolist()
        moving.step(turns.pop(), (1 + math.cos(math.pi * step / steps)) / 2)
        yield moving.loss()


class _Moving:
    """A group of images on their way, with what the networks saw of them last."""

    def __init__(self, release: NetMeans, nets: RandomConv, start: Images, how: Matching) -> None:
        self._release, self._nets, self._how = release, nets, how
        self._labels = start.labels
        self._sizes = start.counts().clamp(min=1).to(torch.float32)[:, None]
        self._held = start.counts() > 0
        self._side = (start.pixels.shape[2], start.pixels.shape[3])
        coarse = (max(1, self._side[0] // how.factor), max(1, self._side[1] // how.factor))
        self._free = F.adaptive_avg_pool2d(start.floats(), coarse)
        # Embeddings [T, N, e] and their class means [T, C, e]
        self._seen = nets.rows(self._form(self._free)).transpose(0, 1).contiguous()
        blank = torch.zeros(nets.nets, len(start.classes), nets.features)
        self._mean = blank.index_add(1, self._labels, self._seen) / self._sizes
        self._filters = [_Filter(z, release.std) for z in self._seen]
        self._first, self._second = torch.zeros_like(self._free), torch.zeros(len(start))
        self._steps = 0

    def step(self, t: int, rate: float) -> None:
        """Move all images by what network ``t`` says; ``rate`` is a share of the highest step."""
        free = self._free.requires_grad_()
        whole = self._form(free)
        parts = torch.split(torch.arange(len(whole)), self._nets.step)
        pull = torch.cat([self._pull(t, whole[rows], rows) for rows in parts])
        (gradient,) = torch.autograd.grad(whole, free, pull)
        self._free = self._adam(free.detach(), gradient, rate * self._how.lr)

    def loss(self) -> float:
        """Return the mean over classes of the squared distance, as each network saw it last."""
        gap = (self._mean - self._release.mean.transpose(0, 1))[:, self._held]
        return float(gap.square().sum()) / gap.shape[1]

    def pixels(self) -> Tensor:
        """Return the images as bytes."""
        return (self._form(self._free) * 255).round().to(torch.uint8)

    def _pull(self, t: int, x: Tensor, rows: Tensor) -> Tensor:
        """Return the gradient at images ``x``; the class means take in what is seen now."""
        x = x.detach().requires_grad_()
        z = self._nets.embed(x, range(t, t + 1))[:, 0]
        labels, now = self._labels[rows], z.detach()
        self._mean[t].index_add_(0, labels, (now - self._seen[t, rows]) / self._sizes[labels])
        self._seen[t, rows] = now
        residual = self._filters[t](self._mean[t] - self._release.mean[:, t])
        (gradient,) = torch.autograd.grad(z, x, residual[labels])
        return gradient

    def _adam(self, free: Tensor, gradient: Tensor, rate: float) -> Tensor:
        """Return the moved pixels. One second moment per image keeps quiet pixels quiet."""
        a, b = DECAY
        self._steps += 1
        self._first = a * self._first + (1 - a) * gradient
        self._second = b * self._second + (1 - b) * gradient.square().mean((1, 2, 3))
        size = (self._second / (1 - b**self._steps)).sqrt().clamp(min=1e-20)
        step = self._first / size[:, None, None, None] / (1 - a**self._steps)
        return (free - rate * step).clamp(0, 1)

    def _form(self, free: Tensor) -> Tensor:
        if free.shape[2:] == self._side:
            return free.clone()
        return F.interpolate(free, self._side, mode="bilinear", align_corners=False)


class _Filter:
    """What of a residual is signal, under one network.

    In the eigenbasis of the start's embeddings a true residual r has variance s·λ_k (images move
    along what images differ in), the released mean has noise variance τ² in every direction; s
    follows from ‖r‖² less its noise. Each direction keeps sλ_k / (sλ_k + τ²), Wiener's share.
    """

    def __init__(self, z: Tensor, std: Tensor) -> None:
        """Prepare from embeddings ``[N, e]`` and the noise ``[C]`` of every number of a mean."""
        self._noise = std.to(torch.float64).square()
        e = z.shape[1]
        values, basis = torch.linalg.eigh(torch.cov(z.T.to(torch.float64), correction=0))
        values = values.clamp(min=0)
        values = values / values.sum() if float(values.sum()) > 0 else values
        self._share = (1 - SPREAD) * values + SPREAD / e  # sums to 1
        self._basis = basis

    def __call__(self, residual: Tensor) -> Tensor:
        """Filter float32 ``[C, e]``; a class within three deviations of pure noise gets zeros."""
        r = residual.to(torch.float64) @ self._basis
        e, noise = r.shape[1], self._noise[:, None]
        energy = r.square().sum(1, keepdim=True)
        signal = (energy - e * noise) * (energy > (e + 3 * math.sqrt(2 * e)) * noise)
        prior = signal * self._share
        kept = r * prior / (prior + noise).clamp(min=torch.finfo(torch.float64).tiny)
        out: Tensor = (kept @ self._basis.T).to(torch.float32)
        return out


def _groups(labels: Tensor, size: int) -> list[Tensor]:
    """Return rows of each group: of every class the first ``size`` images, the next, and so on."""
    group = ranks(labels) // size
    return [(group == g).nonzero()[:, 0] for g in range(int(group.max()) + 1)]


def ranks(labels: Tensor) -> Tensor:
    """Return int64 ``[n]``: how many earlier images have the same label."""
    out = torch.empty_like(labels)
    for c in range(int(labels.max()) + 1):
        rows = (labels == c).nonzero()[:, 0]
        out[rows] = torch.arange(len(rows))
    return out
