"""Measure three ways to per-record gradients of the matching loss, and embeddings alone.

Usage: python benchmarks/record_gradients.py [--out RESULTS.json]

One thread, images of 28x28, 12 synthetic images of 14x14 a class, medians of runs in alternation.
*Records a second* is what a client's sampled records cost in one round: gradients with respect to
the synthetic images (`anis`), by copies, by vmap of a vector-Jacobian product, and from the whole
Jacobian; *embeddings* is all that noise on residuals or class sums of embeddings takes (`anis` by
default, `ndpdc`, `collab_dm`). *Stretch* is ‖Jᵀv‖ / ‖v‖ of records, 5th and 95th percentile over
the median; *alike* the cosine, averaged over classes, between the sum of normalised gradients and
that of normalised residuals pulled back: how far a bound on one is a bound on the other.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch loads OpenMP

import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from run import save, say
from torch import Tensor

from fedgist.bench import provenance
from fedgist.data import open_source
from fedgist.methods._descent import View, random_view
from fedgist.methods._distil import Canvas
from fedgist.methods._gradients import by_copies, by_jacobian, by_vmap

REPEATS = 3
FEW, MANY = 50, 250  # records


def main() -> int:
    """Measure and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent / "results" / "record_gradients.json"
    parser.add_argument("--out", type=Path, default=here)
    args = parser.parse_args()
    torch.set_num_threads(1)
    source = open_source("fashion-mini")
    task = source.task()
    images = source.images("train", task)
    canvas, rng = Canvas(3, 2), torch.Generator().manual_seed(0)
    free = canvas.start(task, rng)
    rows = []
    for width, strided in ((16, True), (16, False), (32, True)):
        view = random_view(canvas, task, "flip", rng, width=width, strided=strided)
        for records in (FEW, MANY):
            x, y = images.floats(slice(0, records)), images.labels[:records]
            speed = {k: records / s for k, s in medians(ways(view, free, x, y)).items()}
            row: dict[str, Any] = {"width": width, "strided": strided, "records": records}
            row |= equivalence(view, free, x, y)
            rows.append(row | {"records_per_second": speed})
            say(str(rows[-1]))
    save(args.out, {"benchmark": "record_gradients"} | provenance() | {"cases": rows})
    return 0


def ways(view: View, free: Tensor, x: Tensor, y: Tensor) -> dict[str, Callable[[], Tensor]]:
    """Return what is measured."""
    v = view.cotangents(free, x, y)
    ways: dict[str, Callable[[], Tensor]] = {
        "by copies": lambda: by_copies(view.means, free, y, v),
        "by vmap": lambda: by_vmap(view.means, free, y, v),
        "embeddings": lambda: view.real(x, y),
    }
    if len(x) == MANY:  # costs the same however few records there are: half a minute
        ways["by jacobian"] = lambda: by_jacobian(view.means, free, y, v)
    return ways


def equivalence(view: View, free: Tensor, x: Tensor, y: Tensor) -> dict[str, Any]:
    """Compare bounds on gradients and on residuals."""
    v = view.cotangents(free, x, y)
    g = by_copies(view.means, free, y, v)
    stretch = g.flatten(1).norm(dim=1) / v.norm(dim=1)
    low, middle, high = stretch.quantile(torch.tensor([0.05, 0.5, 0.95])).tolist()
    summed = [torch.zeros(len(free), *row.shape[1:]) for row in (g, v)]
    for total, rows in zip(summed, (g, v), strict=True):
        lengths = rows.flatten(1).norm(dim=1).view(-1, *[1] * (rows.dim() - 1))
        total.index_add_(0, y, rows / lengths)
    pulled = by_copies(view.means, free, torch.arange(len(free)), summed[1])
    cosine = torch.nn.functional.cosine_similarity(summed[0].flatten(1), pulled.flatten(1))
    held = torch.bincount(y, minlength=len(free)) > 0
    return {"stretch": [low / middle, high / middle], "alike": float(cosine[held].mean())}


def medians(ways: dict[str, Callable[[], Tensor]]) -> dict[str, float]:
    """Return median seconds of each, taken in alternation."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS + 1):
        for name, work in ways.items():
            started = time.perf_counter()
            work()
            taken[name].append(time.perf_counter() - started)
    return {name: statistics.median(s[1:]) for name, s in taken.items()}


if __name__ == "__main__":
    sys.exit(main())
