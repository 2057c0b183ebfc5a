"""Read sweeps from result files: which case is which point, and tables of them.

A case is a point of a sweep when its name reads "[HEAD, ]WHAT = NUMBER, ε = NUMBER".
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedgist.bench.report import table
from fedgist.report.record import read_json

__all__ = [
    *("FILES", "RESULTS", "ROOT", "Point", "by_size", "found", "normalised", "series", "sweep"),
    "table",
]

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "benchmarks" / "results"

FILES = ("dimension_fashion", "sweeps_fashion", "size_fashion")
CASE = re.compile(r"(?:(?P<head>\w+), )?(?P<what>[^=,]+) = (?P<x>[\d.]+), ε = (?P<eps>[\d.]+)")
NORMALISED = re.compile(r"normalised records, ε = (?P<eps>[\d.]+)")
BY_SIZE = re.compile(r"(?P<n>\d+) images a class, d = (?P<d>\d+), ε = (?P<eps>[\d.]+)")
Rows = Sequence[dict[str, Any]]


def found(name: str) -> dict[str, Any] | None:
    """Return a committed result file, if it is there."""
    path = RESULTS / f"{name}.json"
    return read_json(path) if path.is_file() else None


@dataclass(frozen=True)
class Point:
    """One case: its accuracies over seeds, in percent."""

    x: float
    mean: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.mean:.1f}" if self.high - self.low < 1 else f"{self.mean:.0f}"


def series(rows: Rows, what: str, head: str, eps: str, key: str = "accuracy") -> list[Point]:
    """Return the points of one line, by rising x.

    Args:
        rows: cases of result files.
        what: the quantity that varies, as cases are named.
        head: whose cases.
        eps: as cases are named.
        key: ``accuracy``, or ``ceiling`` for that without privacy.
    """
    points = []
    for row in rows:
        m = CASE.fullmatch(row["name"])
        if m and (m["what"], m["eps"]) == (what, eps) and m["head"] in (None, head):
            points.append(measured(row, head, key, float(m["x"])))
    return sorted((p for p in points if p is not None), key=lambda p: p.x)


def normalised(rows: Rows, head: str, eps: str) -> Point | None:
    """Return the case in which every record is scaled to norm 1, if it was run."""
    for row in rows:
        if (m := NORMALISED.fullmatch(row["name"])) and m["eps"] == eps:
            return measured(row, head, "accuracy", 0.0)
    return None


def measured(row: dict[str, Any], head: str, key: str, x: float) -> Point | None:
    """Return mean and range over seeds, or None when the case lacks the number."""
    scores = [run["heads"].get(head, {}) for run in row["runs"]]
    values = [100 * s[key] for s in scores if key in s]
    return Point(x, statistics.fmean(values), min(values), max(values)) if values else None


def sweep(rows: Rows, what: str, head: str) -> str:
    """Return one sweep as a table: a column for each x, a row for each ε."""
    lines = {
        "no privacy": series(rows, what, head, "10", "ceiling"),
        "ε = 10": series(rows, what, head, "10"),
        "ε = 1": series(rows, what, head, "1"),
    }
    heads = [f"{p.x:,g}" for p in lines["ε = 10"]]
    return table((what, *heads), [(k, *v) for k, v in lines.items() if v])


def by_size(rows: Rows, head: str = "lda") -> str:
    """Return accuracies by images a class (rows) and dimension (columns)."""
    found: dict[tuple[int, int], str] = {}
    for row in rows:
        if (m := BY_SIZE.fullmatch(row["name"])) and (p := measured(row, head, "accuracy", 0.0)):
            found[int(m["n"]), int(m["d"])] = str(p)
    sizes, dims = (sorted({k[i] for k in found}) for i in (0, 1))
    lines = [(f"{n:,}", *(found.get((n, d), "–") for d in dims)) for n in sizes]
    return table(("images a class", *(f"d = {d}" for d in dims)), lines)
