"""A benchmark file: base settings, cases, a sweep, seeds, and what accuracies are expected.

::

    name = "clients"                        # results go to NAME.jsonl
    title = "Accuracy against the number of clients"
    seeds = [0, 1, 2]

    [base]                                  # settings of `fedgist run`, as tables or dotted keys
    data.source = "fashion-mnist"

    [[case]]                                # or [[accuracy]]
    name = "lda"
    set = ["method.heads=['lda']"]
    expect.lda = [0.8, 1.0]                 # of the mean over seeds, at every point of the sweep

    [sweep]                                 # its product is taken with every case
    "data.clients" = [1, 10, 100]
    "privacy.epsilon" = { label = "ε", values = [1, 10] }

A case may have a sweep of its own instead: ``sweep = {}`` for none, to stand beside all points.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from pydantic import Field

from fedgist.config import Run, Strict, read_strict, validated
from fedgist.errors import ConfigError

__all__ = ["Case", "Suite", "as_settings", "load_suite", "quicken", "shown"]


@dataclass(frozen=True)
class Case:
    """One point of a benchmark, run once for each seed.

    Attributes:
        name: unique in its file; values of the sweep are part of it.
        set: ``key=value`` settings over the base.
        seeds: at least one.
        expect: range that the mean over seeds must lie in, by head (or ``HEAD_ceiling``,
            ``HEAD_codec_consistent``), of accuracies in [0, 1].
        sums_once: exact sums are kept from case to case (see `fedgist.bench.measure.Sums`).
        uploads_once: so are the clients' trained networks (`fedgist.bench.measure.Uploads`).
        only_quick, skip_quick: left out of whole runs, of quick ones.
        stem: the name without the sweep's values.
        sweep: label -> value of this point.
    """

    name: str
    set: tuple[str, ...]
    seeds: tuple[int, ...]
    expect: Mapping[str, tuple[float, float]]
    sums_once: bool
    uploads_once: bool
    only_quick: bool
    skip_quick: bool
    stem: str
    sweep: Mapping[str, Any]


@dataclass(frozen=True)
class Suite:
    """A benchmark file, read."""

    name: str
    title: str
    base: tuple[str, ...]
    cases: tuple[Case, ...]


class _CaseTable(Strict):
    name: str = ""
    set: tuple[str, ...] = ()
    seeds: tuple[int, ...] | None = Field(default=None, min_length=1)
    expect: dict[str, tuple[float, float]] = Field(default_factory=dict)
    sums_once: bool = False
    uploads_once: bool = False
    only_quick: bool = False
    skip_quick: bool = False
    sweep: dict[str, Any] | None = None


class _FileTable(Strict):
    name: str = Field(pattern=r"^\w[\w.-]*$")
    title: str = ""
    seeds: tuple[int, ...] = Field(default=(0,), min_length=1)
    base: dict[str, Any] = Field(default_factory=dict)
    case: list[dict[str, Any]] = Field(default_factory=list)
    accuracy: list[dict[str, Any]] = Field(default_factory=list)
    sweep: dict[str, Any] = Field(default_factory=dict)
    # of benchmarks/run.py, not of this command
    invariance: dict[str, Any] | None = None
    participation: dict[str, Any] | None = None
    cost: dict[str, Any] | None = None


class _AxisTable(Strict):
    label: str | None = Field(default=None, min_length=1)
    values: list[Any] = Field(min_length=1)


@dataclass(frozen=True)
class _Axis:
    key: str
    label: str
    values: Sequence[Any]


def load_suite(path: Path) -> Suite:
    """Read a benchmark file.

    Raises:
        ConfigError: an unreadable file, an unknown key, a wrong value, two cases of one name.
    """
    table = read_strict(path, _FileTable, "a benchmark")
    if table.case and table.accuracy:
        raise ConfigError(f"{path} must spell its cases [[case]] or [[accuracy]]. Got both")
    axes = _sweep(table.sweep, f"{path}: sweep")
    raw = table.case or table.accuracy or ([{}] if axes else [])
    if not raw:
        raise ConfigError(f"{path} must have a [[case]] or a [sweep]. Got neither")
    cases = [
        c for i, r in enumerate(raw, 1) for c in _cases(r, table.seeds, axes, f"{path}, case {i}")
    ]
    names = [c.name for c in cases]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise ConfigError(f"{path}: names of cases must differ. Got '{twice}' twice")
    return Suite(
        table.name, table.title or table.name, tuple(as_settings(table.base)), tuple(cases)
    )


def _cases(
    raw: Mapping[str, Any], seeds: tuple[int, ...], axes: Sequence[_Axis], where: str
) -> Iterator[Case]:
    """Return one case for each point of the sweep."""
    where = f"{where} '{raw['name']}'" if raw.get("name") else where
    t = validated(_CaseTable, raw, where)
    if t.sweep is not None:
        axes = _sweep(t.sweep, f"{where}: sweep")
    if not (t.name or axes):
        raise ConfigError(f"{where}: name must be there. Got none")
    plain = Case(
        t.name,
        t.set,
        t.seeds or seeds,
        t.expect,
        t.sums_once,
        t.uploads_once,
        t.only_quick,
        t.skip_quick,
        t.name,
        {},
    )
    for values in itertools.product(*(a.values for a in axes)):
        point = list(zip(axes, values, strict=True))
        words = [f"{a.label} = {shown(v)}" for a, v in point]
        yield replace(
            plain,
            name=", ".join([t.name] * bool(t.name) + words),
            set=(*t.set, *(f"{a.key}={_toml(v)}" for a, v in point)),
            sweep={a.label: v for a, v in point},
        )


def _sweep(table: Mapping[str, Any], where: str) -> list[_Axis]:
    axes = list(_axes(table, where))
    labels = [a.label for a in axes]
    if len(set(labels)) < len(labels):
        raise ConfigError(f"{where}: labels must differ. Got {labels}")
    return axes


def _axes(table: Mapping[str, Any], where: str, prefix: str = "") -> Iterator[_Axis]:
    """Read ``key = [values]`` and ``key = {label, values}``, under dotted keys or tables."""
    for k, v in table.items():
        key = prefix + k
        if isinstance(v, Mapping) and "values" not in v:
            yield from _axes(v, where, f"{key}.")
            continue
        axis = validated(
            _AxisTable, v if isinstance(v, Mapping) else {"values": v}, f"{where}.{key}"
        )
        if key == "seed":
            raise ConfigError(f"{where}: seed must be given as seeds = [...]. Got it in the sweep")
        yield _Axis(key, axis.label or key, axis.values)


def as_settings(table: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Flatten tables to ``key=value`` settings."""
    out = []
    for key, value in table.items():
        if isinstance(value, Mapping):
            out += as_settings(value, f"{prefix}{key}.")
        else:
            out.append(f"{prefix}{key}={_toml(value)}")
    return out


def _toml(value: Any) -> str:
    """Write a value as TOML in one line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return json.dumps(value, ensure_ascii=False)


def shown(value: Any) -> str:
    """Write a value as it stands in names."""
    if isinstance(value, str):
        return value
    return f"{value:g}" if isinstance(value, float) else _toml(value)


# What a quick run has at most. By the last part of a key: methods share their words.
MOST = {
    **{"rounds": 2, "passes": 1, "steps": 3, "epochs": 1, "batch": 8},
    **{"class_size": 20, "synthetic_size": 60, "matched": 1, "images": 40, "drawn": 20},
    **{"per_class": 1, "nets": 2, "net_width": 4, "width": 4},
}


def quicken(run: Run) -> Run:
    """Return the run on 200 embedded images, five clients and few small steps: it takes seconds.

    Method, heads, privacy and encoders stay; attacks are left out, which take minutes.
    """
    data = run.data
    return Run(
        seed=run.seed,
        data=data.model_copy(
            update={
                "source": "fashion-mini",
                "test": None,
                "sites": (),
                "limit": min(data.limit or 200, 200),
                "clients": min(data.clients, 5),
                "partition": "iid" if data.partition == "natural" else data.partition,
            }
        ),
        task=run.task.model_copy(update={"name": None, "classes": None, "max_images": None}),
        privacy=run.privacy,
        method={k: _capped(k, v) for k, v in run.method.items()},
        evaluation=run.evaluation.model_copy(
            update={"membership": False, "inversion": False, "personalise": False}
        ),
    )


def _capped(key: str, value: Any) -> Any:
    """Cap the numbers that decide how long a method takes, in tables of tables."""
    if isinstance(value, Mapping):
        return {k: _capped(k, v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_capped(key, v) for v in value)
    if key in MOST and isinstance(value, int | float) and not isinstance(value, bool):
        return type(value)(min(value, MOST[key]))
    return value
