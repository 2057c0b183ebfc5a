"""A benchmark run to its end: what is there is kept, a failure is noted, the rest goes on."""

from __future__ import annotations

import hashlib
import json
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fedgist.bench.file import Case, Suite, quicken
from fedgist.bench.lines import Lines, plain
from fedgist.bench.measure import Sums, Uploads, fresh_peak, peak_memory, pick, provenance
from fedgist.config import Run, load, plain_toml
from fedgist.errors import ConfigError, FedGistError
from fedgist.experiment import execute

__all__ = [
    "Planned",
    "Step",
    "by_case",
    "check",
    "config_hash",
    "named",
    "planned",
    "run_suite",
    "summarise",
    "unmet",
]

Line = dict[str, Any]


@dataclass(frozen=True)
class Planned:
    """One run that a benchmark asks for.

    Attributes:
        case: of what.
        seed: with which seed.
        run: resolved, or None where that failed.
        hash: of the resolved run: equal runs have equal hashes.
        error: why it cannot be run.
    """

    case: Case
    seed: int
    run: Run | None
    hash: str
    error: str | None = None


@dataclass(frozen=True)
class Step:
    """What is told after each run: the line, how long it took, whether it was there before."""

    planned: Planned
    line: Line
    seconds: float
    kept: bool


def planned(suite: Suite, *, quick: bool = False, only: str = "") -> list[Planned]:
    """Return every run of a benchmark, in its order.

    Args:
        suite: the benchmark.
        quick: a slice that takes seconds: `quicken`, first seeds, first points of sweeps.
        only: cases whose name holds this; the one of exactly this name where there is one.

    Raises:
        ConfigError: settings of a case are wrong (its name comes first), or no case is left.
    """
    cases = [c for c in suite.cases if not (c.skip_quick if quick else c.only_quick)]
    names = named([c.name for c in cases], only)
    cases = [c for c in cases if c.name in names]
    if quick:
        cases = list({c.stem: c for c in reversed(cases)}.values())[::-1]
    return [_planned(suite, c, s, quick) for c in cases for s in c.seeds[: 1 if quick else None]]


def named(names: Sequence[str], only: str) -> list[str]:
    """Return the name that is ``only``, or else those that hold it.

    Raises:
        ConfigError: there is none.
    """
    if found := [n for n in names if n == only] or [n for n in names if only in n]:
        return found
    raise ConfigError(f"--only must be part of the name of a case. Got '{only}'")


def _planned(suite: Suite, case: Case, seed: int, quick: bool) -> Planned:
    # no table needs the curve over ε, which the settings of a file may ask for all the same
    sets = ["evaluation.curve=false", *suite.base, *case.set, f"seed={seed}"]
    try:
        run = load(None, sets)
    except ConfigError as e:
        raise ConfigError(f"case '{case.name}': {e}") from e
    except FedGistError as e:  # of this machine, not of the file: a package or an encoder lacks
        return Planned(case, seed, None, _digest(sets), _named(e))
    run = quicken(run) if quick else run
    return Planned(case, seed, run, config_hash(run))


def config_hash(run: Run) -> str:
    """Return 16 hex digits of the SHA-256 of a resolved run as canonical JSON, without nulls."""
    return _digest(plain_toml(run.model_dump()))


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def run_suite(
    todo: Sequence[Planned],
    lines: Lines | None = None,
    *,
    again: bool = False,
    tell: Callable[[Step], None] = lambda step: None,
) -> list[Line]:
    """Run what has no result yet; return one line for each planned run, old or new.

    A run that fails leaves a line with ``error`` and is tried again next time; the rest goes on.

    Args:
        todo: what to run.
        lines: where results are kept, or None to keep them nowhere.
        again: run what has a result, too.
        tell: called after each run.
    """
    where, kept = provenance(), (Sums(), Uploads())
    before = [] if again or lines is None else lines.all
    there, latest = _there(before), {(r["case"], r["seed"]): r["hash"] for r in before}
    out = []
    for p in todo:
        started = time.perf_counter()
        old = there.get((p.hash, p.case.name)) or there.get((p.hash, None))
        if old is None:
            line = _measured(p, *kept, where)
            line = plain(line) if lines is None else lines.add(line)
            there |= {} if again else _there([line])
        else:
            line = old | _named_as(p)
            # under another name, or settings are again what they were: the last line counts
            if lines is not None and latest.get((p.case.name, p.seed)) != p.hash:
                lines.add(line)
        out.append(line)
        tell(Step(p, line, time.perf_counter() - started, old is not None))
    return out


def _there(lines: Iterable[Line]) -> dict[tuple[str, str | None], Line]:
    """Index good results by hash and name, and by hash alone."""
    good = [line for line in lines if "error" not in line]
    return {(r["hash"], name): r for r in good for name in (None, r["case"])}


def _measured(p: Planned, sums: Sums, uploads: Uploads, where: Mapping[str, Any]) -> Line:
    """Run one case with one seed; an error of ours becomes part of the line."""
    started = time.perf_counter()
    fresh_peak()
    line: Line = {"hash": p.hash} | _named_as(p) | dict(where)
    line["created"] = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    if p.run is None:
        return line | {"error": p.error}
    line["config"] = p.run.model_dump()
    try:
        once = sums if p.case.sums_once else uploads if p.case.uploads_once else None
        report = execute(p.run).report if once is None else once.report(p.run)
        found = plain(pick(report))
    except FedGistError as e:
        return line | {"error": _named(e), "seconds": time.perf_counter() - started}
    seconds = {"seconds": time.perf_counter() - started, "peak_memory_mib": peak_memory()}
    return line | seconds | found


def _named_as(p: Planned) -> Line:
    """Return what a line says of the case, which is no part of the run itself."""
    case = p.case
    return {
        "case": case.name,
        "seed": p.seed,
        "stem": case.stem,
        "sweep": dict(case.sweep),
        "set": list(case.set),
    }


def _named(e: FedGistError) -> str:
    return f"{type(e).__name__}: {e}"


def by_case(lines: Iterable[Line]) -> list[dict[str, Any]]:
    """Gather lines to one row a case: its latest results by seed, their mean and deviation.

    Returns:
        Rows in the order of first appearance: ``name``, ``set``, ``runs`` (lines), ``mean`` and
        ``std`` (see `summarise`). Cases without a result are left out.
    """
    latest: dict[str, dict[int, Line]] = {}
    for line in lines:
        seen = latest.setdefault(line["case"], {})
        if "error" not in line or "error" in seen.get(line["seed"], line):
            seen[line["seed"]] = line
    rows = []
    for name, seen in latest.items():
        runs = [seen[s] for s in sorted(seen) if "error" not in seen[s]]
        if runs:
            rows.append({"name": name, "set": runs[-1]["set"], "runs": runs} | summarise(runs))
    return rows


def summarise(runs: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, float]]:
    """Return ``mean`` and ``std`` over seeds, by HEAD, HEAD_ceiling and HEAD_codec_consistent."""
    values: dict[str, list[float]] = {}
    for run in runs:
        for head, r in run["heads"].items():
            for key, suffix in (
                ("accuracy", ""),
                ("ceiling", "_ceiling"),
                ("codec_consistent", "_codec_consistent"),
            ):
                if key in r:
                    values.setdefault(head + suffix, []).append(r[key])
    spread = {k: statistics.stdev(v) if len(v) > 1 else 0.0 for k, v in values.items()}
    return {"mean": {k: statistics.fmean(v) for k, v in values.items()}, "std": spread}


def check(got: Mapping[str, float], expect: Mapping[str, Sequence[float]], where: str) -> list[str]:
    """Compare means with the ranges of a file; return one sentence for each that is not met."""
    out = []
    for key, (low, high) in expect.items():
        if key not in got or not low <= got[key] <= high:
            found = f"{got[key]:.4g}" if key in got else "none"
            out.append(f"{where}: {key} must lie in [{low}, {high}]. Got {found}")
    return out


def unmet(todo: Sequence[Planned], lines: Iterable[Line], *, quick: bool = False) -> list[str]:
    """Return one sentence for each run that failed, and for each expectation not met.

    Expectations are of whole runs: none is checked of a quick one, nor where a seed failed.
    """
    lines = list(lines)
    failed = [r for r in lines if "error" in r]
    out = [f"{r['case']}, seed {r['seed']}: {r['error']}" for r in failed]
    if quick:
        return out
    broken = {r["case"] for r in failed}
    means = {row["name"]: row["mean"] for row in by_case(lines)}
    for case in {p.case.name: p.case for p in todo}.values():
        if case.name not in broken:
            out += check(means[case.name], case.expect, case.name)
    return out
