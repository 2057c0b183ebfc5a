"""The algorithms behind `partition`: from labels to the rows of each client.

``iid``, ``dirichlet``, ``dirichlet-balanced`` and ``distribution`` are flwr-datasets' partitioners.
The others are written here because its own (0.6) leave images out (``pathological``: classes that
nobody drew; ``shards``: the remainder), fail (``inner-dirichlet``: NaN once a client's classes are
used up, and work per image that grows with the clients), or cannot give one client several persons.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from fedgist.errors import ConfigError

__all__ = ["Dealer", "Rows", "dealer", "natural"]

Labels = NDArray[np.int64]  # [n], every one of 0..C-1 occurs
Rows = list[NDArray[np.int64]]  # per client, positions in the labels
Dealer = Callable[[Labels, int, float, int, np.random.Generator], Rows]
"""Maps labels, number of clients, the spec's parameter, seed and generator to rows."""

PREASSIGNED = 5  # images of each of its classes that every client of `distribution` has (FedProx)
TINY = 1e-300  # a class mix with less mass than this has none


def dealer(name: str) -> Dealer:
    """Return the algorithm of a spec's name, other than ``natural``."""
    own: dict[str, Dealer] = {
        "inner-dirichlet": _inner_dirichlet,
        "pathological": _pathological,
        "shards": _shards,
    }
    return own.get(name) or partial(_flower, name)


def natural(groups: Tensor | None, clients: int, rng: np.random.Generator) -> Rows:
    """Keep groups whole: group i is client i, or several random groups make one client.

    Raises:
        ConfigError: no groups, or fewer groups than clients.
    """
    if groups is None:
        raise ConfigError(
            "partition 'natural' must have images with groups. Got none: add a metadata.csv with "
            "file_name and person, or a 'groups' array"
        )
    names, index = np.unique(groups.numpy(), return_inverse=True)
    if clients > len(names):
        raise ConfigError(
            f"clients must be at most the number of groups, {len(names)}, for partition 'natural'. "
            f"Got {clients}"
        )
    home = np.arange(len(names))
    if clients < len(names):
        for client, some in enumerate(np.array_split(rng.permutation(len(names)), clients)):
            home[some] = client
    return [np.flatnonzero(home[index] == i) for i in range(clients)]


def _flower(
    name: str, labels: Labels, clients: int, value: float, seed: int, rng: np.random.Generator
) -> Rows:
    """Run a partitioner of flwr-datasets on a table of labels only."""
    Dataset, flower = _import_flower()
    if name == "iid":
        made: Any = flower.IidPartitioner(clients)
    elif name == "distribution":
        made = flower.DistributionPartitioner(
            *_log_normal(labels, clients, int(value), rng), shuffle=False, seed=seed
        )
    else:
        made = flower.DirichletPartitioner(
            clients,
            "label",
            value,
            min_partition_size=0,
            self_balancing=name == "dirichlet-balanced",
            shuffle=False,
            seed=seed,
        )
    table = Dataset.from_dict({"label": labels}).with_format("arrow")
    # Positions are all that is wanted; a real selection costs milliseconds per client.
    table.select = lambda indices, **_: np.asarray(indices, np.int64)
    made.dataset = table
    try:
        with np.errstate(invalid="raise", divide="raise"):
            return [made.load_partition(i) for i in range(clients)]
    except (FloatingPointError, ZeroDivisionError) as e:  # all its mass on clients that are full
        raise ConfigError(
            f"ALPHA of {name}:ALPHA must leave every class a client with room. Got {value:g} for "
            f"{clients} clients: use a larger one"
        ) from e


def _import_flower() -> tuple[Any, Any]:
    """Import what takes seconds; telemetry stays off unless the user has switched it on."""
    os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
    state = random.getstate()  # something below draws from the global generator when imported
    from datasets import Dataset
    from flwr_datasets import partitioner

    random.setstate(state)
    return Dataset, partitioner


def _log_normal(
    labels: Labels, clients: int, k: int, rng: np.random.Generator
) -> tuple[NDArray[np.float64], int, int, str, int]:
    """Return the positional arguments of DistributionPartitioner for FedProx's power law."""
    counts = np.bincount(labels)
    if k > len(counts) or clients % len(counts):
        raise ConfigError(
            f"distribution:K must have K <= {len(counts)} and a multiple of {len(counts)} clients, "
            f"the number of classes that occur. Got K = {k} and {clients} clients"
        )
    columns = clients * k // len(counts)
    shares = rng.lognormal(0.0, 2.0, (len(counts), columns))
    return shares, clients, k, "label", min(PREASSIGNED, int(counts.min()) // columns)


def _pathological(
    labels: Labels, clients: int, value: float, seed: int, rng: np.random.Generator
) -> Rows:
    """Give each client the K classes that fewest clients have so far, ties at random."""
    k, classes = int(value), int(labels.max()) + 1
    if k > classes or clients * k < classes:
        raise ConfigError(
            f"pathological:K must have K <= {classes} and K x clients >= {classes}, the number of "
            f"classes that occur. Got K = {k} and {clients} clients"
        )
    owners: list[list[int]] = [[] for _ in range(classes)]
    for client in rng.permutation(clients):
        ties = rng.random(classes)
        for c in sorted(range(classes), key=lambda c: (len(owners[c]), ties[c]))[:k]:
            owners[c].append(int(client))
    parts: list[Rows] = [[] for _ in range(clients)]
    for c, having in enumerate(owners):
        rows = np.flatnonzero(labels == c)
        if len(rows) < len(having):
            raise ConfigError(
                f"pathological:{k} with {clients} clients must have {len(having)} images of every "
                f"class. Got {len(rows)}: use fewer clients or a smaller K"
            )
        for client, share in zip(having, np.array_split(rows, len(having)), strict=True):
            parts[client].append(share)
    return [np.concatenate(p) for p in parts]


def _shards(
    labels: Labels, clients: int, value: float, seed: int, rng: np.random.Generator
) -> Rows:
    """Cut the images sorted by label into K x clients blocks and deal K to each client."""
    k = int(value)
    if clients * k > len(labels):
        raise ConfigError(
            f"shards:K must have K x clients <= {len(labels)}, the number of images. Got K = {k} "
            f"and {clients} clients"
        )
    blocks = np.array_split(np.argsort(labels, kind="stable"), clients * k)
    deal = rng.permutation(clients * k).reshape(clients, k)
    return [np.concatenate([blocks[b] for b in row]) for row in deal]


def _inner_dirichlet(
    labels: Labels, clients: int, value: float, seed: int, rng: np.random.Generator
) -> Rows:
    """Fill clients of equal size image by image, as in FedDyn (arXiv 2111.04263).

    A client with room is picked uniformly, then a class by the client's own mix over the classes
    that are left; a client whose classes are all used up takes what is left in proportion.
    """
    n, classes = len(labels), int(labels.max()) + 1
    stock = [np.flatnonzero(labels == c).tolist() for c in range(classes)]
    mix = rng.dirichlet(np.full(classes, value), size=clients)
    cumulative = mix.cumsum(1)
    room = [n // clients + (i < n % clients) for i in range(clients)]
    open_clients = [i for i in range(clients) if room[i]]
    parts: list[list[int]] = [[] for _ in range(clients)]
    for u, v in rng.random((n, 2)):
        at = int(u * len(open_clients))
        client = open_clients[at]
        row = cumulative[client]
        if row[-1] < TINY:
            row = np.cumsum([len(s) for s in stock])
        c = int(np.searchsorted(row, v * row[-1], side="right"))
        parts[client].append(stock[c].pop())
        room[client] -= 1
        if not room[client]:
            open_clients[at] = open_clients[-1]
            open_clients.pop()
        if not stock[c]:
            mix[:, c] = 0
            cumulative = mix.cumsum(1)
    return [np.array(p, np.int64) for p in parts]
