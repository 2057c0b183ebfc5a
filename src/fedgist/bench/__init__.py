"""Benchmark files: cases x sweeps x seeds run with every result kept, checked and reported."""

from __future__ import annotations

from fedgist.bench.file import Case, Suite, as_settings, load_suite, quicken
from fedgist.bench.lines import Lines, read_lines
from fedgist.bench.measure import PICKED, Sums, peak_memory, pick, provenance
from fedgist.bench.suite import (
    Planned,
    Step,
    by_case,
    check,
    config_hash,
    named,
    planned,
    run_suite,
    summarise,
    unmet,
)

__all__ = [
    "PICKED",
    "Case",
    "Lines",
    "Planned",
    "Step",
    "Suite",
    "Sums",
    "as_settings",
    "by_case",
    "check",
    "config_hash",
    "load_suite",
    "named",
    "peak_memory",
    "pick",
    "planned",
    "provenance",
    "quicken",
    "read_lines",
    "run_suite",
    "summarise",
    "unmet",
]
