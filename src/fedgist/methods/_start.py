"""What distilled images begin with: draws from a Gaussian for every class, or smooth noise.

A class keeps its own mean, all share one covariance, of images shrunk to a tile in their cosines of
lowest frequency. These are three sums over records (n, Σz by class, Σzzᵀ over all), so they are
released once with noise, by each client or over all clients, at a small part of the budget.
Matching moves all images of a class alike; that they differ comes from here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.encoders.dct import cosines
from fedgist.heads.shrinkage import clamp_eigenvalues, rie, signal_share
from fedgist.methods._distil import Canvas
from fedgist.privacy.client import Client, Sensitive
from fedgist.privacy.statistics import from_triangle, to_triangle
from fedgist.queries import SumQuery
from fedgist.types import Task

__all__ = ["Beginning", "Start"]

KEPT = 36  # cosines of a channel
# Noise multipliers over that of what images are matched to: all three are almost free
COUNT = 8.0
MEAN = 4.0
SPREAD = 3.0
LEAST = 0.005  # variance of a pixel between images of a class: no estimate is trusted below

Start = Literal["gaussian", "noise"]
Rows = Callable[[Tensor], Tensor]  # [b, c, h, w] -> [b, numbers]


@dataclass(frozen=True)
class Beginning:
    """What is asked for a start, and how images are drawn from the answer.

    Attributes:
        task: what images look like.
        canvas: how synthetic images are stored.
        kind: ``gaussian``, or ``noise``, for which only counts are asked.
        rates: of the queries: (1.0,) beside sampled ones.
        whole: factor on all noise multipliers.
    """

    task: Task
    canvas: Canvas
    kind: Start = "gaussian"
    rates: tuple[float, ...] = ()
    whole: float = 1.0

    @classmethod
    def beside(cls, task: Task, canvas: Canvas, kind: Start) -> Beginning:
        """Return what, with one query of scale ``whole``, has the budget of one of scale 1."""
        free = cls(task, canvas, kind)
        # 1/σ² = Σ 1/(scale σ)² over all of them
        return replace(free, whole=math.sqrt(1 + sum(q.scale**-2 for q in free.queries)))

    @property
    def queries(self) -> tuple[SumQuery, ...]:
        """Return what is asked, counts first."""
        classes, d = len(self.task.classes), len(self._lowest[0]) * self.task.channels
        # pixels less one half have at most this norm, and so have their cosines
        norm = math.sqrt(self.task.channels) * self.canvas.tile(self.task) / 2
        asked = [self._query("count", 1.0, COUNT, 256, (classes, 1))]
        if self.kind == "gaussian":
            triangle = (d * (d + 1) // 2,)
            asked += [
                self._query("mean", norm, MEAN, 256, (classes, d)),
                self._query("spread", norm**2, SPREAD, 512, triangle),
            ]
        return tuple(asked)

    def rows(self, query: SumQuery) -> Rows:
        """Return what a record adds to one of the sums."""
        if query.name == "count":
            return lambda x: torch.ones(len(x), 1)
        if query.name == "mean":
            return self._codes
        return lambda x: _products(self._codes(x))

    def ask(self, client: Client) -> tuple[Sensitive, ...]:
        """Return the exact sums of a client, in the order of the queries."""
        return tuple(self._asked(client, q) for q in self.queries)

    def begin(self, client: Client, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Release the sums, noised by this client, and `draw`."""
        pairs = zip(self.queries, self.ask(client), strict=True)
        noised = {q.name: client.release(exact)["rows"] for q, exact in pairs}
        return self.draw(noised, client.sigma, rng)

    def draw(
        self, sums: Mapping[str, Tensor], sigma: float, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Draw the first images.

        Args:
            sums: query's name -> noised sums, int64 in grid units.
            sigma: multiplier of their noise.
            rng: source of the draws.

        Returns:
            Noised images of each class, float32 ``[C]``, and free images as `Canvas.start` has
            them.
        """
        queries = {q.name: q for q in self.queries}
        units = {k: sums[k].to(torch.float64) * (q.clip / q.levels) for k, q in queries.items()}
        count = units["count"][:, 0]
        if self.kind == "noise":
            return count.to(torch.float32), self.canvas.start(self.task, rng)
        noise = {k: sigma * q.scale * q.clip for k, q in queries.items()}
        n = count.clamp(min=1)
        mean, std = units["mean"] / n[:, None], noise["mean"] / n
        # James and Stein (1961), towards grey
        energy = mean.square().sum(1).clamp(min=1e-30)
        shrunk = mean * (1 - mean.shape[1] * std**2 / energy).clamp(min=0)[:, None]
        root = torch.linalg.cholesky(
            self._covariance(units["spread"], noise["spread"], n, mean, std)
        )
        shape = (len(n), self.canvas.formed, mean.shape[1])
        xi = torch.randn(shape, generator=rng, dtype=torch.float64)
        z = (shrunk[:, None] + xi @ root.T).unflatten(2, (self.task.channels, -1))
        side = self.canvas.tile(self.task)
        pixels = (z.to(torch.float32) @ self._cosines).unflatten(3, (side, side))
        return count.to(torch.float32), (0.5 + pixels).clamp(0, 1)

    def _asked(self, client: Client, query: SumQuery) -> Sensitive:
        rows = self.rows(query)
        return client.sum(lambda x, y: {"rows": rows(x)}, query)

    def _covariance(
        self, total: Tensor, noise: float, n: Tensor, mean: Tensor, std: Tensor
    ) -> Tensor:
        """Return the covariance within classes, positive definite: what is noise shrinks away.

        Towards the falling spectrum of natural images, 1 / (1 + f²) at frequency f, of which only
        the size is taken from the release.

        Args:
            total: noised Σzzᵀ of all records, as `_products` has it.
            noise: deviation of each of its numbers.
            n: images of each class.
            mean: their means, noised: ``std`` in every number of a class.
            std: of the means.
        """
        d, images = mean.shape[1], float(n.sum())
        share = n / images
        eye = torch.eye(d, dtype=torch.float64)
        between = (mean * share[:, None]).T @ mean - (share @ std**2) * eye
        within = from_triangle(total / _weights(d)) / images - between
        falling = (1 / (1 + self._lowest[0].to(torch.float64))).repeat(self.task.channels)
        side = self.canvas.tile(self.task)
        least = LEAST * side**2 * self.task.channels / d
        size = max(float(within.diagonal().mean()), least)
        target = torch.diag(falling * size / falling.mean())
        v = (noise / images) ** 2 / 2  # of an entry off the diagonal: see `_weights`
        signal = signal_share(within, v, target)
        made = signal * rie(within, v, target) + (1 - signal) * target
        return clamp_eigenvalues(made, 1e-3 * size)

    def _codes(self, x: Tensor) -> Tensor:
        """Return cosines of images ``[b, c, h, w]``, channel by channel: ``[b, d]``."""
        side = self.canvas.tile(self.task)
        tiles = F.adaptive_avg_pool2d(x, (side, side)).flatten(2) - 0.5
        return (tiles @ self._cosines.T).flatten(1)

    @cached_property
    def _lowest(self) -> tuple[Tensor, Tensor]:
        """Squared frequencies of the cosines that are kept, rising, and their places, ``[k]``."""
        f = torch.arange(self.canvas.tile(self.task))
        values, places = (f[:, None] ** 2 + f**2).flatten().sort(stable=True)
        return values[:KEPT], places[:KEPT]

    @cached_property
    def _cosines(self) -> Tensor:
        """The cosines, float32 ``[k, side²]``."""
        side = self.canvas.tile(self.task)
        return cosines(side, self._lowest[1]).flatten(1).to(torch.float32)

    def _query(
        self, name: str, clip: float, scale: float, levels: int, shape: tuple[int, ...]
    ) -> SumQuery:
        return SumQuery(
            clip,
            levels,
            scale * self.whole,
            per_class=name != "spread",
            name=name,
            shape=shape,
            rates=self.rates,
        )


def _products(z: Tensor) -> Tensor:
    """Return zzᵀ of rows ``[b, d]`` as ``[b, d(d+1)/2]`` of norm ‖z‖²."""
    return to_triangle(z[:, :, None] * z[:, None, :]) * _weights(z.shape[1]).to(z.dtype)


def _weights(d: int) -> Tensor:
    """Return √2 for what stands twice in a symmetric matrix, else 1: norms are then the same."""
    weights = torch.full((d * (d + 1) // 2,), math.sqrt(2), dtype=torch.float64)
    weights[:d] = 1
    return weights
