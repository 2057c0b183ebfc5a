"""Noised sums over a client's images by class: how often they are asked, how they are read."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.privacy.client import Client, Sensitive
from fedgist.queries import SumQuery
from fedgist.types import Task

__all__ = ["noised_means", "rates_of", "signal_level"]

FEW = 4  # records of a class that a sample must hold to be worth a step


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
