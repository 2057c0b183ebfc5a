"""Noised sums over a client's images by class: what clients begin with, and how sums are read."""

from __future__ import annotations

import math
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError
from fedgist.methods._distil import Canvas
from fedgist.privacy.client import Client, Sensitive
from fedgist.queries import SumQuery
from fedgist.types import Task

__all__ = [
    "COUNT",
    "Start",
    "begin",
    "begin_queries",
    "count_query",
    "noised_means",
    "rates_of",
    "signal_level",
]

COUNT = 8.0  # noise multiplier of the counts over that of the gradients: a few images, almost free
MEAN = 4.0  # of the class means
SPREAD = 0.5  # of the noise that tells images apart which start at one mean
FEW = 4  # records of a class that a sample must hold to be worth a step

Start = Literal["mean", "noise"]


def begin_queries(task: Task, canvas: Canvas, start_at: Start) -> tuple[SumQuery, ...]:
    """Return what `begin` asks: noised counts, and class means to start at."""
    counts = count_query(task)
    return (counts, mean_query(task, canvas)) if start_at == "mean" else (counts,)


def begin(
    client: Client, task: Task, canvas: Canvas, start_at: Start, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Return noised counts, float32 ``[C]``, and the first images, as `Canvas.start` does."""
    counts = class_counts(client, task)
    if start_at == "mean":
        return counts, mean_start(client, task, canvas, counts, rng)
    return counts, canvas.start(task, rng)


def noised_means(
    client: Client, made: Sensitive, query: SumQuery, counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Release class sums and divide them by how many records each is expected to hold.

    Never by the number in the sample, which is private: by the public rate times a noised count.

    Returns:
        float32 ``[C, numbers]``, and ``[C]``: the deviation of the noise in every number.
    """
    expected = torch.tensor(query.rates).expand(len(counts)) * counts.clamp(min=1)
    noised = client.release(made)["rows"].to(torch.float32)
    mean = noised * (query.clip / query.levels) / expected[:, None]
    return mean, client.sigma * query.scale * query.clip / expected


def rates_of(batch: float, class_size: tuple[int, ...], task: Task) -> tuple[float, ...]:
    """Return public sampling rates: one, or one for each class.

    Raises:
        ConfigError: class sizes for another number of classes.
    """
    if len(class_size) not in (1, len(task.classes)):
        raise ConfigError(
            f"method.class_size must be one number, or one for each of the {len(task.classes)} "
            f"classes. Got {len(class_size)}"
        )
    return tuple(min(1.0, batch / n) for n in class_size)


def signal_level(query: SumQuery, sigma: float) -> float:
    """Return from how many images of a class on its sums say something.

    So many that all of them together rise above their noise, and that a sample holds `FEW`.
    """
    effort = query.rate * math.sqrt(query.times)
    noise = sigma * query.scale * query.clip * math.sqrt(query.row) / effort
    return noise + FEW / query.rate


def count_query(task: Task) -> SumQuery:
    """Return the query for noised counts: they say which images have nothing behind them."""
    shape = (len(task.classes), 1)
    return SumQuery(
        1.0, levels=256, scale=COUNT, per_class=True, name="count", shape=shape, rates=(1.0,)
    )


def class_counts(client: Client, task: Task) -> Tensor:
    """Release a client's images per class, noised: float32 ``[C]``."""
    query = count_query(task)
    ones = client.sum(lambda x, y: {"rows": torch.ones(len(x), 1)}, query)
    return client.release(ones)["rows"][:, 0].to(torch.float32) / query.levels


def mean_query(task: Task, canvas: Canvas) -> SumQuery:
    """Return the query for class sums of images shrunk to a tile, less one half; never clipped."""
    side = canvas.tile(task)
    numbers = task.channels * side**2
    return SumQuery(
        math.sqrt(numbers) / 2,
        levels=1024,
        scale=MEAN,
        per_class=True,
        name="mean",
        shape=(len(task.classes), numbers),
        rates=(1.0,),
    )


def mean_start(
    client: Client, task: Task, canvas: Canvas, counts: Tensor, rng: torch.Generator
) -> Tensor:
    """Begin at noised class means, each image with smooth noise of its own.

    A mean is shrunk towards grey by its known noise (James and Stein, 1961).

    Returns:
        float32 ``[C, tiles, channels, tile, tile]`` in [0, 1].
    """
    query, side = mean_query(task, canvas), canvas.tile(task)
    made = client.sum(
        lambda x, y: {"rows": F.adaptive_avg_pool2d(x, (side, side)).flatten(1) - 0.5}, query
    )
    mean, std = noised_means(client, made, query, counts)
    energy = mean.square().sum(1, keepdim=True).clamp(min=1e-30)
    mean = mean * (1 - mean.shape[1] * std[:, None] ** 2 / energy).clamp(min=0)
    smooth = canvas.start(task, rng) - 0.5
    return (0.5 + mean.view(-1, 1, task.channels, side, side) + SPREAD * smooth).clamp(0, 1)
