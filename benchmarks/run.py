"""Run a benchmark file: invariance, cost, participation, accuracy; check what it expects.

Accuracy is what `fedgist bench` runs; here its results go to one JSON file with the other parts.

Usage: python benchmarks/run.py FILE.toml [--quick] [--parts cost ...] [--only TEXT]

Results carry commit, versions, configuration and seeds. ``--quick`` runs a seconds-long slice on
the embedded images, without expectations: it proves that the file runs.
"""

from __future__ import annotations

import argparse
import json
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch loads OpenMP

import statistics
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from fedgist.bench import (
    PICKED,
    Step,
    as_settings,
    by_case,
    check,
    load_suite,
    peak_memory,
    planned,
    provenance,
    run_suite,
    unmet,
)
from fedgist.config import Run, load
from fedgist.exchange.local import LocalExchange
from fedgist.experiment import execute
from fedgist.privacy.client import Client
from fedgist.privacy.noise import SeededNoise
from fedgist.queries import MomentsQuery
from fedgist.report.record import read_json, to_json
from fedgist.setup import open_exchange, open_sites, prepare_run
from fedgist.types import BATCH
from fedgist.whole import write_whole

QUICK = [
    "data.source=fashion-mini",
    "data.limit=1500",
    "method.synthetic_size=500",
    "method.recipe.steps=20",
    "method.class_size=150",
]


def main() -> int:
    """Run the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--parts", nargs="+", help="run these only, keep the rest of the results")
    parser.add_argument("--only", default="", help="accuracy of cases so named; keep the rest")
    parser.add_argument("--cost-child", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.parts = ["accuracy"] if args.only else args.parts
    torch.set_num_threads(args.threads)
    spec = tomllib.loads(args.file.read_text())
    base = as_settings(spec["base"]) + (QUICK if args.quick else [])
    if args.cost_child:
        print(json.dumps(cost_child(base, args.cost_child)))
        return 0
    out = args.out or args.file.parent / "results" / f"{spec['name']}.json"
    results: dict[str, Any] = read_json(out) if args.parts else {}
    results |= {"benchmark": spec["name"], "quick": args.quick} | provenance()
    results["base"] = base
    # hours of computing: what is done is kept, whatever happens next
    args.before = results.get("accuracy", []) if args.only else []
    args.keep = lambda done: save(out, results | done)
    failures = [f for f in results.get("failures", []) if f.split(":")[0] not in args.parts]
    for part, runner in (
        ("invariance", invariance),
        ("cost", cost),
        ("participation", participation),
        ("accuracy", accuracy),
    ):
        if part in spec and part in (args.parts or spec):
            say(f"== {part}")
            results[part] = runner(spec, base, args, failures)
            what = f"{part} of '{args.only}'" if args.only else part
            results.setdefault("commits", {})[what] = results["commit"]
            save(out, results | {"failures": failures})
    results["failures"] = failures
    save(out, results)
    say(f"written: {out}")
    for line in results["failures"]:
        say(f"NOT MET: {line}")
    return 1 if results["failures"] else 0


def accuracy(
    spec: dict[str, Any], base: list[str], args: argparse.Namespace, failures: list[str]
) -> list[dict[str, Any]]:
    """Every case with every seed, as `fedgist bench` runs it: accuracies, ceilings, attacks."""
    todo = planned(load_suite(args.file), quick=args.quick, only=args.only)
    done: list[dict[str, Any]] = []

    def told(step: Step) -> None:
        line = step.line
        done.append(line)
        heads = line.get("heads", {}).items()
        got = line.get("error") or ", ".join(f"{h} {100 * v['accuracy']:.1f}" for h, v in heads)
        say(f"{line['case']}, seed {line['seed']}: {got}")
        args.keep({"accuracy": over(args.before, rows_of(done))})

    run_suite(todo, tell=told)
    failures += [f"accuracy: {text}" for text in unmet(todo, done, quick=args.quick)]
    return over(args.before, rows_of(done))


def over(before: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Lay new rows over old ones of the same names."""
    new = {row["name"]: row for row in rows}
    return [new.pop(row["name"], row) for row in before] + list(new.values())


def rows_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row a case as result files have it: what is the same for all runs left out."""
    return [
        row | {"runs": [{k: run[k] for k in ("seed", *PICKED)} for run in row["runs"]]}
        for row in by_case(lines)
    ]


def invariance(
    spec: dict[str, Any], base: list[str], args: argparse.Namespace, failures: list[str]
) -> list[dict[str, Any]]:
    """Sums and releases of every split, compared bit for bit with the first."""
    part, rows = spec["invariance"], []
    first: tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]] | None = None
    for clients, split in part["splits"]:
        clients = min(clients, 100) if args.quick else clients
        run = load(
            None,
            [
                *base,
                f"privacy.epsilon={part['epsilon']}",
                f"data.clients={clients}",
                f"data.partition={split}",
                'method.heads=["lda"]',
            ],
        )
        exchange, released, seconds = sums_of(run)
        got = (exchange.exact, released)
        first = first or got
        same = [all(torch.equal(a[k], b[k]) for k in a) for a, b in zip(first, got, strict=True)]
        rows.append(
            {
                "clients": clients,
                "split": split,
                "sums_identical": same[0],
                "release_identical": same[1],
                "seconds": seconds,
            }
        )
        say(f"{clients} clients, {split}: sums {same[0]}, release {same[1]}, {seconds:.1f} s")
        if not all(same):
            failures.append(f"invariance: {clients} clients, {split}")
    return rows


def sums_of(run: Run) -> tuple[LocalExchange, dict[str, torch.Tensor], float]:
    """Run the exchange alone; return it with its exact sums, the release, and seconds."""
    made = prepare_run(run)
    sites = open_sites(made)
    exchange = open_exchange(made, sites, observe=True)
    started = time.perf_counter()
    merged = exchange.round(0, made.plan.rounds[0], {})
    return exchange, merged.tensors, time.perf_counter() - started


def participation(
    spec: dict[str, Any], base: list[str], args: argparse.Namespace, failures: list[str]
) -> list[dict[str, Any]]:
    """Accuracy when only a share of the clients takes part."""
    part, rows = spec["participation"], []
    for share in part["shares"]:
        run = load(
            None,
            [
                *base,
                f"privacy.epsilon={part['epsilon']}",
                f"data.clients={part['clients']}",
                f"data.participation={share}",
                "evaluation.membership=false",
                "evaluation.ceiling=false",
            ],
        )
        report = execute(run).report
        heads = {h: r["accuracy"] for h, r in report["heads"].items()}
        images = sum(c["images"] for c in report["clients"])
        rows.append({"share": share, "images": images, "accuracy": heads})
        say(f"{share:.0%} of {part['clients']} clients: {heads}")
    return rows


def cost(
    spec: dict[str, Any], base: list[str], args: argparse.Namespace, failures: list[str]
) -> dict[str, Any]:
    """Bytes, client time over a bare encoder pass, memory and server time, in one run."""
    part = spec["cost"]
    out: dict[str, Any] = client_cost(base)
    rows = []
    for clients in part["clients"]:
        clients = min(clients, 100) if args.quick else clients
        command = [sys.executable, __file__, str(args.file), "--cost-child", str(clients)]
        command += ["--threads", str(args.threads)] + (["--quick"] if args.quick else [])
        rows.append(json.loads(subprocess.run(command, check=True, capture_output=True).stdout))
        say(f"{clients} clients: {rows[-1]}")
    out["runs"] = rows
    out["memory_ratio"] = rows[-1]["memory_gib"] / rows[0]["memory_gib"]
    out["memory_gib"] = max(r["memory_gib"] for r in rows)
    out["kib_per_client"] = rows[0]["bytes_up"] / 1024
    if not args.quick:
        failures += check(out, part.get("expect", {}), "cost")
    say(f"statistics / encode: {out['statistics_over_encode']:.3f}")
    return out


def client_cost(base: list[str], pairs: int = 25) -> dict[str, Any]:
    """Time a client's whole work against encoding alone, in alternation, on one thread and on all.

    The ratio is the median over adjacent pairs: the speed of a shared machine drifts.
    """
    run = load(None, [*base, "privacy.epsilon=10", "data.clients=10", 'method.heads=["lda"]'])
    made = prepare_run(run)
    images = open_sites(made).together()
    images = images.take(torch.arange(min(len(images), 3000)))
    rnd = made.plan.rounds[0]
    (query,) = rnd.queries
    assert isinstance(query, MomentsQuery)
    space = made.method.space  # type: ignore[attr-defined]

    def encode() -> None:
        for x, _ in images.batches(BATCH):
            space.encoder.encode_task(x)

    def whole() -> None:
        client = Client("bench", images, rnd, sigma=1, noise=SeededNoise(0), max_images=65_535)
        client.moments(space.codes, query)

    threads = torch.get_num_threads()
    out: dict[str, Any] = {"images": len(images)}
    for n, suffix in ((1, ""), (threads, "_all_threads")):
        torch.set_num_threads(n)
        timed = [(seconds(encode), seconds(whole)) for _ in range(pairs)][2:]
        bare = statistics.median(a for a, _ in timed)
        out[f"encode_images_per_second{suffix}"] = len(images) / bare
        out[f"statistics_over_encode{suffix}"] = statistics.median(b / a for a, b in timed)
    torch.set_num_threads(threads)
    return out


def seconds(work: Callable[[], None]) -> float:
    """Time one call."""
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def cost_child(base: list[str], clients: int) -> dict[str, Any]:
    """Run one federation in a process of its own and report its peak memory."""
    run = load(
        None,
        [
            *base,
            "privacy.epsilon=10",
            f"data.clients={clients}",
            'method.heads=["qda", "lda", "ridge"]',
            "evaluation.ceiling=false",
            "evaluation.membership=false",
        ],
    )
    report = execute(run).report
    peak = peak_memory() / 1024
    return {
        "clients": clients,
        "memory_gib": peak,
        "bytes_up": report["bytes_up"],
        "client_seconds_sum": sum(c["seconds"] for c in report["clients"]),
        "server_seconds": sum(report["details"]["seconds"].values()),
        "total_seconds": report["timings"]["total"],
    }


def save(path: Path, results: dict[str, Any]) -> None:
    """Write results aside and rename."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, (to_json(results) + "\n").encode())


def say(text: str) -> None:
    """Print to stderr."""
    print(text, file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
