"""Measure one client of distillation and of FedAvg: seconds of one core, bytes, peak memory.

Usage: python benchmarks/client_cost.py [--out RESULTS.json]

A client with 6,000 images of the full Fashion-MNIST, one tenth of them at random; every method in a
process of its own, one after the other. FedAvg is measured for one round; how many rounds it needs
for an accuracy is in `results/rounds_fashion.json`.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch loads OpenMP

import resource
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch
from run import save, say

from fedgist.bench import provenance
from fedgist.config import load
from fedgist.exchange.gist import Duty, answer
from fedgist.run import generator
from fedgist.setup import open_sites, prepare_run

BASE = ["data.source=fashion-mnist", "data.clients=10", "data.partition=iid"]
METHODS = {
    "anis": ["method.name=anis", "privacy.epsilon=10"],
    "ndpdc": ["method.name=ndpdc", "privacy.epsilon=10"],
    "collab_dm": ["method.name=collab_dm", "privacy.epsilon=10"],
    "fedavg, one round": ["method.name=fedavg", "privacy.epsilon=inf", "method.rounds=1"],
}


def main() -> int:
    """Measure all and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    here = Path(__file__).parent / "results" / "client_cost.json"
    parser.add_argument("--out", type=Path, default=here)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.child:
        print(json.dumps(measured(METHODS[args.child])))
        return 0
    rows = []
    for name in METHODS:
        command = [sys.executable, __file__, "--child", name]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
        rows.append({"method": name, "set": METHODS[name]} | json.loads(done.stdout))
        say(str(rows[-1]))
    save(args.out, {"benchmark": "client_cost"} | provenance() | {"base": BASE} | {"cases": rows})
    return 0


def measured(options: list[str]) -> dict[str, Any]:
    """Let one client answer the first round."""
    made = prepare_run(load(None, [*BASE, *options]))
    sites = open_sites(made)
    images, privacy, plan = sites.loaders[0](), made.run.privacy, made.plan
    duty = Duty(made.method, made.task, privacy, plan.sigma, len(sites.names))
    shared = made.method.start(made.task, generator(0, "start")).shared
    started = time.process_time()
    answer(duty, 0, "client 0", lambda: images, 0, plan.rounds[0], shared, {})
    return {
        "images": len(images),
        "cpu_seconds": time.process_time() - started,
        "bytes_up": plan.bytes_up,
        "bytes_down": sum(v.numel() * v.element_size() for v in shared.values()),
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }


if __name__ == "__main__":
    sys.exit(main())
