"""What methods cost on one core: seconds, bytes, memory, their growth, and a comparison of commits.

Usage: python benchmarks/performance.py [--only TEXT ...] [--quick] [--out RESULTS.json]
       python benchmarks/performance.py --against COMMIT [--fail-over 1.3] [--only TEXT ...]

Every case of performance.toml is a process of its own (`performance_case.py`) on one thread. It
runs once to warm up, which gives the peak of memory, then for each repeat a bare pass and the
protocol without evaluation. CPU seconds: on a shared machine they drift less than the clock.

* client: what all clients do in all rounds; also by image, and over the *bare* pass of the same
  images through the encoders, or through the network that is trained where a method has none.
* server: all else: adding noise, building heads, training.
* bytes up: of one client over all rounds, by the plan's widths; over what the numbers need at
  least or about, see `code_length`.
* memory: the peak beyond an idle process that has imported all it needs and holds the images.

``--against`` checks the commit out into a temporary clone and measures both packages in turns,
repeat by repeat, with the scripts and settings of today: a ratio is of neighbours in time. Marked
is a median ratio beyond 1.15 (or its inverse) whose repeats all lie on that side of 1; of bytes up,
which do not vary, any difference. ``--fail-over`` ends with status 1 where a marked one is greater.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
from run import save, say

from fedgist.bench import Case, load_suite, provenance
from fedgist.report.record import read_json

HERE = Path(__file__).resolve().parent
REPEATS, SEED = 3, 0
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE"}
BEYOND = 1.15  # ratios nearer to 1 are noise of a shared machine
POINT = re.compile(r"(?P<stem>.+), (?P<axis>clients|classes|d) = (?P<value>\d+)")
RATIOS = ("client", "over_bare", "server", "bytes_up", "bytes_over_code", "memory")
GROWS = ("client", "server", "bytes_up", "bytes_up_all", "memory")
LABELS = {
    "client": "client, s",
    "over_bare": "client / bare",
    "server": "server, s",
    "bytes_up": "bytes up",
    "bytes_up_all": "bytes up, all",
    "bytes_over_code": "bytes / code",
    "memory": "memory, MiB",
}

Row = dict[str, Any]


def main() -> int:
    """Measure the cases, or compare them with a commit."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--file", type=Path, default=HERE / "performance.toml")
    parser.add_argument("--only", nargs="+", default=[], help="parts of the names of cases")
    parser.add_argument("--repeats", type=int, default=REPEATS)
    parser.add_argument("--quick", action="store_true", help="200 images and few steps")
    parser.add_argument("--resume", action="store_true", help="keep cases that are in the results")
    parser.add_argument("--against", metavar="COMMIT")
    parser.add_argument("--fail-over", type=float, default=math.inf, metavar="RATIO")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    suite = load_suite(args.file)
    whole = not (args.quick or args.only or args.against)
    out = args.out or (HERE / "results" / f"{suite.name}.json" if whole else None)
    cases = [c for c in suite.cases if not args.only or any(o in c.name for o in args.only)]
    kept = {}
    if args.resume and out and out.exists():
        rows = read_json(out)["cases"]
        kept = {(r["name"], tuple(r["set"])): r for r in rows if "error" not in r}
    results: Row = {"benchmark": suite.name, "quick": args.quick} | provenance()
    results |= {
        "threads": 1,
        "seed": SEED,
        "repeats": args.repeats,
        "base": list(suite.base),
        "cases": [],
    }
    with tempfile.TemporaryDirectory() as folder:
        make_sets(Path(folder), cases)
        sources = [HERE.parent / "src"]
        if args.against:
            results["against"], old = checked_out(args.against, Path(folder, "old"))
            sources.insert(0, old / "src")
        versions = [Version(source, Path(folder)) for source in sources]
        try:
            for case in cases:
                row = kept.get((case.name, case.set))
                row = row or measured(case, suite.base, versions, args)
                results["cases"].append({"commit": results["commit"]} | row)
                say(told(row))
                results["growth"] = growth(results["cases"])
                if out:
                    save(out, results)
        finally:
            for version in versions:
                version.close()
    if args.against:
        return compared(results, args)
    print(terminal(results))
    return 0


def make_sets(folder: Path, cases: Iterable[Case]) -> None:
    """Write the sets ``classes-N.npz`` that cases name: 2,000 grey 28x28 images of N classes."""
    named = re.findall(r"classes-(\d+)\.npz", " ".join(s for c in cases for s in c.set))
    for n in {int(n) for n in named}:
        rng = np.random.default_rng(SEED)
        labels = np.arange(2000) % n
        pixels = rng.integers(0, 160, (n, 28, 28))[labels] + rng.integers(0, 96, (2000, 28, 28))
        np.savez(folder / f"classes-{n}.npz", images=pixels.astype(np.uint8), labels=labels)


def checked_out(commit: str, folder: Path) -> tuple[str, Path]:
    """Check a commit out into a clone that borrows this repository's objects; change nothing here.

    Returns:
        The commit's short hash and the clone's folder.
    """

    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"COMMIT must be one of this repository. Got '{commit}': {done.stderr}")
        return done.stdout.strip()

    sha = git("-C", str(HERE.parent), "rev-parse", "--verify", f"{commit}^{{commit}}")
    git("clone", "-q", "--shared", "--no-checkout", str(HERE.parent), str(folder))
    git("-C", str(folder), "checkout", "-q", "--detach", sha)
    return sha[:7], folder


class Version:
    """A process with one version of the package: it forks another one for each case."""

    def __init__(self, source: Path, folder: Path) -> None:
        env = os.environ | ONE_THREAD | {"PYTHONPATH": str(source)}
        if data := env.get("FEDGIST_DATA"):
            env["FEDGIST_DATA"] = str(Path(data).absolute())
        self.errors = tempfile.TemporaryFile("w+", dir=folder)  # noqa: SIM115 - closed with it
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "performance_case.py")],
            **{"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": self.errors},
            **{"cwd": folder, "env": env, "text": True},
        )

    def ask(self, do: str, **more: Any) -> Row:
        """Let the case do one thing and wait for the answer.

        Raises:
            CaseError: this version lacks what the case asks for, or it failed.
        """
        try:
            print(json.dumps({"do": do} | more), file=self.process.stdin, flush=True)
            answer: Row = json.loads(self.process.stdout.readline())  # type: ignore[union-attr]
        except (OSError, ValueError):
            self.errors.seek(0)
            said = self.errors.read().strip().splitlines() or ["it ended without a word"]
            raise CaseError(said[-1]) from None
        if "error" in answer:
            raise CaseError(answer["error"])
        return answer

    def close(self) -> None:
        """End it."""
        with suppress(OSError):
            self.process.stdin.close()  # type: ignore[union-attr]
        self.process.stdout.close()  # type: ignore[union-attr]
        self.process.wait()
        self.errors.close()


class CaseError(Exception):
    """What a version said of a case that it cannot measure."""


def measured(case: Case, base: Sequence[str], versions: Sequence[Version], args: Any) -> Row:
    """Return a case's row; of two versions, the old one first, with both and their ratios."""
    row: Row = {"name": case.name, "set": list(case.set)}
    sets = [*base, *case.set, f"seed={SEED}"]
    repeats: list[list[Row]] = [[] for _ in versions]
    begun: list[Version] = []
    try:
        for version in versions:
            version.ask("prepare", set=sets, quick=args.quick)
            begun.append(version)
        for i in range(args.repeats):
            # who goes first alternates: a drift of the machine favours nobody
            for k in range(len(versions))[:: 1 if i % 2 == 0 else -1]:
                repeats[k].append(with_ratio(versions[k].ask("repeat")))
        facts = [version.ask("finish") for version in versions]
    except CaseError as e:
        for version in begun if len(begun) < len(versions) else ():
            version.ask("finish")  # lets go of the case
        return row | {"error": str(e), "lacks": len(versions) > 1 and not begun}
    found = [summary(f, r) for f, r in zip(facts, repeats, strict=True)]
    return row | (found[0] if len(found) == 1 else {"versions": found, "ratios": ratios(*found)})


def with_ratio(repeat: Row) -> Row:
    """Add the client's seconds over the bare pass."""
    return repeat | {"over_bare": repeat["client"] / repeat["bare"]}


def summary(facts: Row, repeats: Sequence[Row]) -> Row:
    """Return facts, all repeats, and the median of each quantity."""
    over = facts["bytes_up"] / facts["code_bytes"] if facts["code_bytes"] else None
    row = facts | {k: statistics.median(r[k] for r in repeats) for k in repeats[0]}
    return row | {
        "client_by_image": row["client"] / facts["images"],
        "bytes_over_code": over,
        "memory": facts["peak_mib"] - facts["idle_mib"],
        "repeats": list(repeats),
    }


def ratios(old: Row, new: Row) -> dict[str, Row]:
    """Return new over old by quantity: median, least and greatest of the repeats, beyond noise.

    A quantity that one of them does not know is left out.
    """
    out: dict[str, Row] = {}
    for key in RATIOS:
        if key in old["repeats"][0]:
            pairs = zip(old["repeats"], new["repeats"], strict=True)
            each = [b[key] / a[key] for a, b in pairs if a[key] > 0]
        else:
            each = [new[key] / old[key]] if old[key] and new[key] else []
        if each:
            middle = statistics.median(each)
            far = max(middle, 1 / middle) > BEYOND and (min(each) > 1 or max(each) < 1)
            marked = middle != 1 if key == "bytes_up" else far
            out[key] = {"median": middle, "low": min(each), "high": max(each), "marked": marked}
    return out


def growth(rows: Iterable[Row]) -> list[Row]:
    """Fit quantity ~ axis^exponent by least squares of logarithms, for each curve of cases.

    Returns:
        ``stem``, ``axis``, ``values`` and ``exponents``: by quantity ``all`` over all points and
        ``last`` between the last two, where constant parts weigh least.
    """
    curves: dict[tuple[str, str], list[tuple[int, Row]]] = {}
    for row in rows:
        m = POINT.fullmatch(row["name"])
        if m and "error" not in row:
            curves.setdefault((m["stem"], m["axis"]), []).append((int(m["value"]), row))
    out = []
    for (stem, axis), points in curves.items():
        points.sort(key=lambda p: p[0])
        x = np.log([n for n, _ in points])
        if len(points) < 2:
            continue
        exponents = {}
        for key in GROWS:
            y = np.log([max(row[key], 1e-9) for _, row in points])
            last = (y[-1] - y[-2]) / (x[-1] - x[-2])
            exponents[key] = {"all": float(np.polyfit(x, y, 1)[0]), "last": float(last)}
        values = [n for n, _ in points]
        out.append({"stem": stem, "axis": axis, "values": values, "exponents": exponents})
    return out


def terminal(results: Row) -> str:
    """Return the tables of a run as text."""
    head = ("case", "images", "bare, s", "client, s", "ms/image", "client/bare", "server, s",
            "bytes up", "/code", "MiB")  # fmt: skip
    rows = [
        (r["name"], f"{r['images']:,}", f"{r['bare']:.2f}", f"{r['client']:.2f}",
         f"{1000 * r['client_by_image']:.2f}", f"{r['over_bare']:.2f}", f"{r['server']:.2f}",
         f"{r['bytes_up']:,}", shown(r["bytes_over_code"]), f"{r['memory']:.0f}")
        for r in results["cases"] if "error" not in r
    ]  # fmt: skip
    parts = [columns(head, rows)]
    if results["growth"]:
        head = ("growth: exponent, and between the last two points", *map(LABELS.get, GROWS))
        parts.append(columns(head, [exponent_row(g) for g in results["growth"]]))
    parts += [f"NOT MEASURED {r['name']}: {r['error']}" for r in results["cases"] if "error" in r]
    return "\n\n".join(parts)


def exponent_row(g: Row) -> list[str]:
    """Return the cells of one growth curve."""
    name = f"{g['stem']}, {g['axis']} {', '.join(map(str, g['values']))}"
    pairs = ((round(e[k], 2) + 0.0 for k in ("all", "last")) for e in g["exponents"].values())
    return [name, *("  ".join(f"{v:.2f}" for v in pair) for pair in pairs)]


def compared(results: Row, args: Any) -> int:
    """Print ratios; return 1 where a marked one is over the limit."""
    rows, worse = [], []
    for row in results["cases"]:
        for key, r in row.get("ratios", {}).items():
            word = ("more" if r["median"] > 1 else "less") if r["marked"] else ""
            spread = "" if r["low"] == r["high"] else f"{r['low']:.2f} to {r['high']:.2f}"
            old, new = (shown(v[key]) for v in row["versions"])
            rows.append((row["name"], LABELS[key], old, new, f"{r['median']:.3f}", spread, word))
            if r["marked"] and r["median"] > args.fail_over:
                worse.append(f"{row['name']}, {LABELS[key]}: {r['median']:.2f} times")
    old, new = results["against"], results["commit"]
    print(columns(("case", "quantity", old, new, "new/old", "repeats", "beyond noise"), rows))
    errors = [r for r in results["cases"] if "error" in r]
    for r in errors:
        print(f"{f'NOT IN {old}' if r['lacks'] else 'FAILED'} {r['name']}: {r['error']}")
    for text in worse:
        print(f"OVER {args.fail_over:g} {text}")
    return 1 if worse or any(not r["lacks"] for r in errors) else 0


def told(row: Row) -> str:
    """Say in one line what came of a case."""
    if "error" in row:
        return f"{row['name']}: {row['error']}"
    if "ratios" in row:
        each = (f"{LABELS[k]} {r['median']:.2f}" for k, r in row["ratios"].items())
        return f"{row['name']}: {', '.join(each)}"
    return f"{row['name']}: client {row['client']:.2f} s, server {row['server']:.2f} s"


def shown(value: float | None) -> str:
    """Write a number of any size."""
    if value is None:
        return "–"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if value < 100 else f"{value:.0f}"


def columns(head: Sequence[Any], rows: Sequence[Sequence[str]]) -> str:
    """Return a text table: the first column to the left, numbers to the right."""
    widths = [max(len(str(r[i])) for r in (head, *rows)) for i in range(len(head))]
    lines = []
    for r in (head, *rows):
        cells = [str(v).rjust(w) for v, w in zip(r[1:], widths[1:], strict=True)]
        lines.append("  ".join([str(r[0]).ljust(widths[0]), *cells]).rstrip())
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
