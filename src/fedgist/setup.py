"""From a config to what the protocol needs: plan, sites, test images."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from fedgist.config import Run, make_method
from fedgist.data import Partition, Source, open_source, partition
from fedgist.exchange.local import LocalExchange
from fedgist.method import Method
from fedgist.privacy.claim import Privacy
from fedgist.privacy.noise import noise_scales
from fedgist.progress import Progress
from fedgist.run import Plan, Sent, derive, generator, plan_of, sent_blocks, sent_pieces
from fedgist.types import Images, Task

__all__ = [
    "Prepared",
    "Sites",
    "blocks",
    "open_exchange",
    "open_sites",
    "prepare_run",
    "test_images",
]


@dataclass(frozen=True)
class Prepared:
    """A run before any private image is read."""

    run: Run
    method: Method
    task: Task
    plan: Plan
    source: Source
    title: str


@dataclass(frozen=True)
class Sites:
    """The clients that take part.

    Attributes:
        loaders: return one client's images; nothing is kept between calls.
        names: for messages and reports.
        split: how a simulation dealt the images out, or None for sites with data of their own.
        table: int64 ``[all clients, classes]`` of that split. Simulations only.
        together: returns all images at once, for ceilings and attacks.
    """

    loaders: Sequence[Callable[[], Images]]
    names: Sequence[str]
    split: Partition | None
    table: list[list[int]] | None
    together: Callable[[], Images]


def prepare_run(run: Run) -> Prepared:
    """Work out method, task and plan from public facts."""
    method = make_method(run)
    source = open_source(run.data.sites[0] if run.data.sites else run.data.source)
    options = {k: v for k, v in run.task.model_dump().items() if v is not None}
    task = source.task(**options)
    plan = plan_of(method, task, run.privacy)
    name = str(run.method["name"]).replace("_", "-")
    return Prepared(run, method, task, plan, source, f"{name} on {task.name}")


def open_sites(made: Prepared) -> Sites:
    """Return one loader per client that takes part."""
    data, task, seed = made.run.data, made.task, made.run.seed
    if data.sites:
        loaders = [_site_loader(where, task) for where in data.sites]
        short = [Path(where).name or where for where in data.sites]
        # names tell sites apart: two folders of one name are named in full
        names = [
            name if short.count(name) == 1 else where
            for name, where in zip(short, data.sites, strict=True)
        ]
        return Sites(loaders, names, None, None, lambda: _join([load() for load in loaders]))
    images, _ = _training(made)
    if data.limit is not None and data.limit < len(images):
        order = torch.randperm(len(images), generator=generator(seed, "limit"))
        images = images.take(order[: data.limit].sort().values)
    split = partition(images, data.clients, data.partition, derive(seed, "partition") % 2**31)
    chosen = _participants(data.clients, data.participation, seed)
    rows = [split.clients[i] for i in chosen]
    loaders = [lambda r=r: images.take(r) for r in rows]  # type: ignore[misc]
    return Sites(
        loaders,
        [f"client {i}" for i in chosen],
        split,
        split.table(images.labels, len(task.classes)).tolist(),
        lambda: images.take(torch.cat(rows).sort().values),
    )


def open_exchange(
    made: Prepared, sites: Sites, *, observe: bool, progress: Progress | None = None
) -> LocalExchange:
    """Return the exchange that runs the plan over the sites; options as `LocalExchange`."""
    return LocalExchange(
        made.method,
        made.task,
        made.run.privacy,
        made.plan.sigma,
        sites.loaders,
        sites.names,
        seed=made.run.seed,
        progress=progress or Progress(),
        observe=observe,
    )


def test_images(made: Prepared) -> Images | None:
    """Return real images to test on, or None when there are none."""
    where = made.run.data.test
    if made.run.data.held_out is not None:
        return _training(made)[1]
    if where is not None:
        source = open_source(where)
        return source.prefer("test", made.task)
    return made.source.images("test", made.task) if "test" in made.source.splits else None


def _training(made: Prepared) -> tuple[Images, Images | None]:
    """Return a source's training images, and those of them that no client has (``held_out``)."""
    images, share = made.source.images("train", made.task), made.run.data.held_out
    if share is None:
        return images, None
    order = torch.randperm(len(images), generator=generator(made.run.seed, "held out"))
    aside = min(max(1, round(share * len(images))), len(images) - 1)
    return images.take(order[aside:].sort().values), images.take(order[:aside].sort().values)


def blocks(plan: Plan, task: Task, privacy: Privacy) -> list[dict[str, Any]]:
    """List what leaves each client: view, block, shape, bits, bytes, noise in grid units."""
    rows = []
    for r, rnd in enumerate(plan.rounds):
        inside = "inside" if rnd.queries and plan.sigma > 0 else None
        open_ = {p.name for p in rnd.sends if p.by_image}
        for name, sent in sent_pieces(rnd).items():
            row = _row(r, "", name, sent, inside)
            rows.append(row | {"shape": ["each image", *sent.shape[1:]]} if name in open_ else row)
        for query in rnd.queries if rnd.noised else ():
            scales = noise_scales(query, plan.sigma) if plan.sigma > 0 else {}
            for name, sent in sent_blocks(query, task, privacy, plan.sigma).items():
                rows.append(_row(r, query.name, name, sent, scales.get(name)))
    return rows


def _row(r: int, view: str, block: str, sent: Sent, noise: object) -> dict[str, Any]:
    return {
        "round": r + 1,
        "view": view,
        "block": block,
        "shape": list(sent.shape),
        "numbers": sent.numbers,
        "bits": sent.bits,
        "bytes": sent.bytes,
        "noise": noise,
    }


def _site_loader(where: str, task: Task) -> Callable[[], Images]:
    return lambda: open_source(where).images("train", task)


def _participants(clients: int, share: float, seed: int) -> list[int]:
    n = max(1, round(clients * share))
    if n == clients:
        return list(range(clients))
    return sorted(torch.randperm(clients, generator=generator(seed, "participation"))[:n].tolist())


def _join(parts: Sequence[Images]) -> Images:
    same = len({p.pixels.dtype for p in parts}) == 1
    return Images(
        torch.cat([p.pixels if same else p.floats() for p in parts]),
        torch.cat([p.labels for p in parts]),
        parts[0].classes,
    )
