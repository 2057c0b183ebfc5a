"""Deal one image set out to simulated clients, by name, reproducibly.

=========================  ====================================================================
spec                       what each client gets
=========================  ====================================================================
``iid``                    equal shares at random
``dirichlet:ALPHA``        each class divided by a draw from Dirichlet(ALPHA); empty clients occur
``dirichlet-balanced:A``   the same, but a client that holds its fair share gets no further class
``inner-dirichlet:ALPHA``  equal shares; a client's class mix is a draw from Dirichlet(ALPHA)
``distribution:K``         K neighbouring classes, log-normal amounts (FedProx: mu 0, sigma 2)
``pathological:K``         K classes, each divided equally among the clients that have it
``shards:K``               K blocks of the images sorted by label (FedAvg)
``natural``                whole persons or sites (`Images.groups`)
=========================  ====================================================================

The algorithms are in `dealers`.
"""

from __future__ import annotations

import math
import os
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedgist.data.dealers import dealer, natural
from fedgist.errors import ConfigError, DataError, did_you_mean
from fedgist.types import Images

__all__ = ["SPECS", "Partition", "partition"]

SPECS = (
    "iid",
    "dirichlet:ALPHA",
    "dirichlet-balanced:ALPHA",
    "inner-dirichlet:ALPHA",
    "distribution:K",
    "pathological:K",
    "shards:K",
    "natural",
)
ALPHAS = (1e-6, 1e6)


@dataclass(frozen=True)
class Partition:
    """Which image belongs to which client.

    Attributes:
        spec: how it was drawn, as given.
        seed: what it was drawn with.
        clients: per client, the int64 positions of its images, ascending. May be empty. Together
            they hold every position exactly once.
    """

    spec: str
    seed: int
    clients: tuple[Tensor, ...]

    def table(self, labels: Tensor, classes: int) -> Tensor:
        """Return int64 ``[clients, classes]``: how many images of each class each client holds."""
        return torch.stack([torch.bincount(labels[r], minlength=classes) for r in self.clients])

    def save(self, path: Path) -> None:
        """Write spec, seed, sizes and indices as npz, aside and renamed."""
        aside = path.with_name(path.name + ".part")
        with aside.open("wb") as f:
            np.savez_compressed(
                f,
                spec=np.array(self.spec),
                seed=np.array(self.seed, np.int64),
                sizes=np.array([len(r) for r in self.clients], np.int64),
                indices=torch.cat(self.clients).numpy(),
            )
        os.replace(aside, path)

    @staticmethod
    def load(path: Path) -> Partition:
        """Read what `save` wrote.

        Raises:
            DataError: unreadable, or its indices are not every position exactly once.
        """
        try:
            with np.load(path, allow_pickle=False) as z:
                spec, seed = str(z["spec"]), int(z["seed"])
                sizes, indices = z["sizes"], z["indices"]
        except (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as e:
            raise DataError(f"'{path}' must be a saved partition. Got {e}") from e
        whole = indices.dtype == sizes.dtype == np.int64 and sizes.ndim == indices.ndim == 1
        if not whole or not _covers(indices, len(indices)) or (sizes < 0).any():
            raise DataError(f"the indices of '{path}' must be every position exactly once")
        if len(sizes) < 1 or sizes.sum() != len(indices):
            raise DataError(f"the sizes of '{path}' must sum to {len(indices)}. Got {sizes.sum()}")
        parts = np.split(indices, np.cumsum(sizes)[:-1])
        return Partition(spec, seed, tuple(torch.from_numpy(p.copy()) for p in parts))


def partition(images: Images, clients: int, spec: str, seed: int) -> Partition:
    """Deal images out to clients. Every image goes to exactly one; clients may stay empty.

    The same (images' labels and groups, ``clients``, ``spec``, ``seed``) give the same partition.

    Args:
        images: what is dealt out; only labels and groups are read.
        clients: number of clients, at most the number of images.
        spec: one of the table above, e.g. ``dirichlet:0.5``.
        seed: 0 or more.

    Raises:
        ConfigError: unknown spec, or one that cannot be met with this many clients.
    """
    name, value = _parse(spec)
    if not 1 <= clients <= len(images):
        raise ConfigError(
            f"clients must lie in 1..{len(images)}, the number of images. Got {clients}"
        )
    if seed < 0:
        raise ConfigError(f"the partition's seed must be >= 0. Got {seed}")
    if name == "natural":
        rows = natural(images.groups, clients, np.random.default_rng(seed))
    else:
        # Shuffled first: partitioners take the images of a class in the order in which they lie.
        rng = np.random.default_rng([seed, clients])
        order = rng.permutation(len(images))
        # Numbered anew: some partitioners assume that every class of 0..C-1 occurs.
        labels = np.unique(images.labels.numpy()[order], return_inverse=True)[1]
        dealt = dealer(name)(labels.astype(np.int64), clients, value, seed, rng)
        rows = [order[r] for r in dealt]
    assert _covers(np.concatenate(rows), len(images)) and len(rows) == clients
    return Partition(spec, seed, tuple(torch.from_numpy(np.sort(r)) for r in rows))


def _covers(indices: NDArray[np.int64], n: int) -> bool:
    return np.array_equal(np.sort(indices), np.arange(n))


def _parse(spec: str) -> tuple[str, float]:
    """Return name and parameter (0 when the spec has none)."""
    name, _, text = spec.partition(":")
    known = {s.partition(":")[0]: s.partition(":")[2] for s in SPECS}
    if name not in known:
        hint = did_you_mean(name, known)
        raise ConfigError(f"partition must be one of {', '.join(SPECS)}. Got '{spec}'.{hint}")
    try:
        value = float(text or "nan")
    except ValueError:
        value = math.nan
    low, high = ALPHAS
    kind = known[name]
    if kind == "ALPHA" and not low <= value <= high:
        raise ConfigError(f"ALPHA of {name}:ALPHA must lie in [{low:g}, {high:g}]. Got '{spec}'")
    if kind == "K" and not (value >= 1 and value.is_integer()):
        raise ConfigError(f"K of {name}:K must be a positive integer. Got '{spec}'")
    if not kind and ":" in spec:
        raise ConfigError(f"partition '{name}' must have no parameter. Got '{spec}'")
    return name, value if kind else 0.0
