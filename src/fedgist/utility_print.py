"""What the terminal shows of a utility evaluation, within 100 columns."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

__all__ = ["print_utility"]

WIDTH = 100


def print_utility(record: Mapping[str, Any]) -> None:
    """Print classifiers, models trained on synthetic images, agreement and distances."""
    wide = max(WIDTH, Console().width)  # a pipe has 80 columns: no figure is cut off there
    out = Console(highlight=False, soft_wrap=True, width=wide)
    count = f"{record['images']:,} images of {record['test']} ({record['settings']['split']})"
    out.print(f"\n[bold]Utility on {count}[/bold]")
    alike = {row["name"]: row for row in record["agreement"]}
    out.print(_classifiers(record["classifiers"], record["own"], alike))
    if record["tstr"]:
        out.print(_tstr(record["tstr"], alike))
    if record["distances"]:
        out.print(_distances(record["distances"]))
    for note in record["notes"]:
        out.print(f"[yellow]note[/yellow] {note}", soft_wrap=False)
    folder, seconds = record["folder"], record["seconds"]["total"]
    out.print(f"\n{seconds:.0f} s; written to [bold]{folder}/utility.json[/bold]")


def _table(title: str, names: Sequence[str]) -> Table:
    """Return a table whose first column is text, all others figures."""
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left", collapse_padding=True)
    for i, name in enumerate(names):
        table.add_column(name, justify="right" if i else "left", no_wrap=True)
    return table


def _classifiers(
    rows: Sequence[Mapping[str, Any]], own: str, alike: Mapping[str, Mapping[str, Any]]
) -> Table:
    title = (
        f"classifiers; 'same' as '{own}', the one to use; T: best temperature; after ECE: by chance"
    )
    five = any(r["calibration"]["top5"] is not None for r in rows)
    names = ("head", "accuracy, 95 %", "balanced", *(["top 5"] * five))
    table = _table(title, (*names, "NLL", "Brier", "ECE", "T", "same"))
    for r in rows:
        c = r["calibration"]
        t = c["tempered"]
        same = alike.get(f"classifier {r['head']}")
        table.add_row(
            r["head"],
            _interval(r),
            _percent(r["balanced_accuracy"]),
            *([_percent(c["top5"])] * five),
            f"{c['nll']:.3f}",
            f"{c['brier']:.3f}",
            f"{c['ece']:.3f} ({c['ece_expected']:.3f})",
            f"{t['temperature']:.2f}" if t else "-",
            _percent(same["same"]) if same else "",
        )
    return table


def _tstr(rows: Sequence[Mapping[str, Any]], alike: Mapping[str, Mapping[str, Any]]) -> Table:
    ceiling = any(r["trtr"] for r in rows)
    seeds = max(len(r["accuracies"]) for r in rows)
    title = f"trained on {rows[0]['trained_on']:,} synthetic images, tested on real ones"
    real = ("on real", "ratio") if ceiling else ()
    spread = ("± seeds",) if seeds > 1 else ()
    names = ("model", "accuracy, 95 %", *spread, "balanced", *real)
    table = _table(title, (*names, "same", "kappa", "both wrong"))
    for r in rows:
        same = alike[f"tstr {r['model']}"]
        all_ = r["accuracies"]
        table.add_row(
            r["model"],
            _interval(r),
            *([f"{100 * statistics.stdev(all_):.1f}" if len(all_) > 1 else ""] * (seeds > 1)),
            _percent(r["balanced_accuracy"]),
            *([_percent(r["trtr"]["accuracy"]), f"{r['ratio']:.3f}"] if ceiling else []),
            _percent(same["same"]),
            _number(same["kappa"]),
            _percent(same["both_wrong"]),
        )
    return table


def _distances(found: Mapping[str, Any]) -> Table:
    title = (
        f"distances from real images in {found['encoder']} features; in brackets: real from real"
    )
    names = ("class", "Fréchet distance", "dims", "KID ± standard error", "density", "coverage")
    table = _table(title, names)
    for name, row in ({"all": found["overall"]} | found["per_class"]).items():
        if row is None:
            table.add_row(_short(name), "too few images", "", "", "", "")
            continue
        far, kid = (_number(row[k]) for k in ("frechet", "kid"))
        table.add_row(
            _short(name),
            "too few images" if row["frechet"] is None else _beside(far, row["frechet_floor"]),
            str(row["dimensions"] or ""),
            _beside(f"{kid} ± {_number(row['kid_error'])}", row["kid_floor"]),
            _beside(_number(row["density"]), row["density_floor"]),
            _beside(_number(row["coverage"]), row["coverage_floor"]),
        )
    return table


def _short(name: str, most: int = 18) -> str:
    return name if len(name) <= most else f"{name[: most - 1]}…"


def _interval(row: Mapping[str, Any]) -> str:
    low, high = (f"{100 * v:.1f}" for v in row["interval"])
    return f"{_percent(row['accuracy'])} ({low} .. {high})"


def _beside(text: str, floor: float | None) -> str:
    return text if floor is None else f"{text} ({_number(floor)})"


def _number(value: float | None) -> str:
    """Three figures that matter."""
    if value is None:
        return "-"
    value = round(value, 2) + 0.0  # no -0.00
    return f"{value:.1f}" if abs(value) >= 100 else f"{value:.2f}"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{100 * value:.1f} %"
