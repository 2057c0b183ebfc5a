"""Measure seconds of one core and bytes, at client and server, for every case of a file.

Usage: python benchmarks/seconds.py FILE.toml [--out RESULTS.json]

CPU time on one thread: on a shared machine it drifts less than the clock. *Encode* is a bare
pass of the public encoders over the images, *client* everything that a client does in all rounds,
*server* everything else (adding the noise, building heads, training), evaluation left out.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch loads OpenMP

import statistics
import sys
import time
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from performance_case import Stopwatch
from run import save, say
from torch import Tensor

from fedgist.bench import as_settings, provenance
from fedgist.config import load
from fedgist.methods.fedkt_csd import FedKTCSD
from fedgist.methods.logistic import LogisticRegression
from fedgist.run import drive
from fedgist.setup import Prepared, open_exchange, open_sites, prepare_run
from fedgist.types import Images


def main() -> int:
    """Measure the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    spec = tomllib.loads(args.file.read_text())
    base = as_settings(spec["base"])
    out = args.out or args.file.parent / "results" / f"{spec['name']}.json"
    results: dict[str, Any] = (
        {"benchmark": spec["name"]} | provenance() | {"base": base} | {"cases": []}
    )
    for case in spec["case"]:
        row = measured([*base, *case["set"]], case.get("repeats", spec["repeats"]))
        results["cases"].append({"name": case["name"], "set": case["set"]} | row)
        say(f"{case['name']}: {row}")
        save(out, results)
    return 0


def measured(options: Sequence[str], repeats: int) -> dict[str, Any]:
    """Return medians over ``repeats`` whole runs: seconds by part, bytes, images."""
    made = prepare_run(load(None, options))
    images = open_sites(made).together()
    passes = encoders(made)
    encode(passes, images)  # caches of the process are filled once, not in what is measured
    runs = []
    for _ in range(repeats):
        started = time.process_time()
        encode(passes, images)
        runs.append({"encode": time.process_time() - started} | one(made))
    row: dict[str, Any] = {k: statistics.median(r[k] for r in runs) for k in runs[0]}
    row["client_over_encode"] = statistics.median(r["client"] / r["encode"] for r in runs)
    return row | {"images": len(images), "rounds": len(made.plan.rounds), "repeats": repeats}


def one(made: Prepared) -> dict[str, float]:
    """Run the protocol once, without evaluation."""
    watch = Stopwatch()
    sites = open_sites(made)
    sites = replace(sites, loaders=[watch.around(load) for load in sites.loaders])
    exchange = open_exchange(made, sites, observe=False, progress=watch)
    started = time.process_time()
    drive(made.method, made.task, exchange, made.plan.rounds, made.run.seed)
    total = time.process_time() - started
    up, down = (sum(getattr(v, k) for v in exchange.visits) for k in ("bytes_up", "bytes_down"))
    return {
        "client": watch.seconds,
        "server": total - watch.seconds,
        "bytes_up": up,
        "bytes_down": down,
    }


def encoders(made: Prepared) -> list[Callable[[Tensor], Tensor]]:
    """Return the bare encoders that the run's views need."""
    method = made.method
    if isinstance(method, LogisticRegression):
        return [method.space.encoder.encode_task]
    assert isinstance(method, FedKTCSD)
    of: dict[str, Callable[[], Callable[[Tensor], Tensor]]] = {
        "codes": lambda: method.space.encoder.encode_task,
        "features": lambda: method.feature_space.encoder.encode_task,
        "match": lambda: method.networks.rows,
    }
    return [of[view]() for view in method.views]


def encode(passes: Sequence[Callable[[Tensor], Tensor]], images: Images) -> None:
    """Encode all images and keep nothing."""
    for x, _ in images.batches():
        for run in passes:
            run(x)


if __name__ == "__main__":
    sys.exit(main())
