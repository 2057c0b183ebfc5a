"""Run and audit the cases of a benchmark file; keep the table of attacks of each.

Usage: python benchmarks/audits.py FILE.toml [--quick] [--only TEXT] [--out RESULTS.json]

Each case is `fedgist run` followed by `fedgist audit` on its folder. What is done is kept after
every case; a case of the same settings that is there already is not run again. ``--quick`` takes
a few embedded images, trials and shadows: it proves that the file runs.
"""

from __future__ import annotations

import argparse
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before PyTorch loads OpenMP

import tempfile
import tomllib
from pathlib import Path
from typing import Any

import torch
from run import save, say

from fedgist.auditing import audit_folder
from fedgist.bench import as_settings, named, provenance, quicken
from fedgist.config import load
from fedgist.errors import ConfigError
from fedgist.experiment import execute
from fedgist.report.record import read_json

TRIALS = 200  # of a quick audit of the noise
LEFT_OUT = {"roc"}  # curves: they are in audit.json


def main() -> int:
    """Run the file named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--only", default="", help="cases whose name holds this, or is this")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    spec = tomllib.loads(args.file.read_text())
    base = as_settings(spec["base"])
    out = args.out or args.file.parent / "results" / f"{spec['name']}.json"
    before = read_json(out)["cases"] if out.is_file() else []
    kept = {row["name"]: row for row in before}
    failures = []
    try:
        names = named([c["name"] for c in spec["case"]], args.only)
    except ConfigError as e:
        raise SystemExit(str(e)) from e
    for case in (c for c in spec["case"] if c["name"] in names):
        sets = [*base, *case["set"], f"seed={spec['seed']}"]
        shadows = 4 if args.quick else case.get("shadows", spec["shadows"])
        todo = {"set": sets, "shadows": shadows, "heads": case.get("heads", [])}
        todo |= {"trials": TRIALS if args.quick else None}
        old = kept.get(case["name"], {})
        if {k: old.get(k) for k in todo} != todo:
            kept[case["name"]] = {"name": case["name"]} | todo | audited(todo) | provenance()
        row = kept[case["name"]]
        say(f"{case['name']}: {row['state']}")
        want = case.get("expect", {}).get("state", row["state"])
        if want != row["state"] and not args.quick:
            failures.append(f"{case['name']}: must be {want}. Got {row['state']}")
        order = [kept[c["name"]] for c in spec["case"] if c["name"] in kept]
        save(out, {"benchmark": spec["name"], "cases": order, "failures": failures})
    for line in failures:
        say(f"NOT MET: {line}")
    return 1 if failures else 0


def audited(todo: dict[str, Any]) -> dict[str, Any]:
    """Run one case in a folder of its own and audit it; return what tables need."""
    with tempfile.TemporaryDirectory() as folder:
        run = load(None, todo["set"])
        run = quicken(run) if todo["trials"] else run
        report = execute(run, Path(folder) / "run").report
        found = audit_folder(
            Path(folder) / "run",
            trials=todo["trials"],
            shadows=todo["shadows"],
            heads=todo["heads"],
        )
    accuracy = {h: row.get("accuracy") for h, row in report["heads"].items()}
    seconds = {"run": report["timings"]} | {"audit": found["seconds"]}
    plain = {k: v for k, v in found.items() if k not in ("seconds", "title")}
    plain["attacks"] = [
        {k: v for k, v in row.items() if k not in LEFT_OUT} for row in found["attacks"]
    ]
    return plain | {"accuracy": accuracy, "seconds": seconds}


if __name__ == "__main__":
    raise SystemExit(main())
