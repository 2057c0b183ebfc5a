"""The command that turns a simulation's claims into evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fedgist.cli.common import AsJson, Bars, Debug, guarded, show

__all__ = ["add_audit"]

COLOURS = {"pass": "green", "contradicted": "red", "inconclusive": "yellow"}


def add_audit(app: typer.Typer) -> None:
    """Register the command of this file."""
    app.command()(audit)


def audit(
    run: Annotated[Path, typer.Argument(help="A folder that `fedgist run` wrote.")],
    shadows: Annotated[
        int, typer.Option("--shadows", min=0, help="Shadow classifiers for LiRA and RMIA; 0: none.")
    ] = 64,
    head: Annotated[
        list[str] | None,
        typer.Option("--head", help="Classifier to attack with them; repeat. A network is slow."),
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option("--trials", min=100, help="Releases to count; by default as many as needed."),
    ] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Attack a finished simulation and hold what is found against its claim (exit 1: refuted)."""
    states = []

    def body() -> None:
        from fedgist.auditing import audit_folder

        with Bars() as tell:
            found = audit_folder(
                run, trials=trials, shadows=shadows, heads=head or (), progress=tell
            )
        states.append(found["state"])
        show(found, as_json, lambda record: _print(record, run))

    guarded(body, debug)
    if "contradicted" in states:
        raise typer.Exit(1)


def _print(record: Mapping[str, Any], folder: Path) -> None:
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"\n[bold]Audit: {record['title']}[/bold]")
    out.print(f"claim {record['claim']['line']}")
    if record["noise"]:
        out.print(_noise_table(record["noise"]))
    for row in record["noise"]:
        if "blocks" in row:
            ratios = ", ".join(f"{k} {b['ratio']:.3f}" for k, b in row["blocks"].items())
            out.print(f"{row['audit']} ({row['note']}): {ratios}  {_coloured(row['state'])}")
    if record["attacks"]:
        out.print(_attack_table(record["attacks"]))
    for row in record["similarity"]:
        out.print(f"similarity, not privacy: {row['attack']}, AUC {row['auc']:.3f}")
    if record["exposure"]:
        out.print(f"uploads: {record['exposure']['headline']}")
    for note in record["notes"]:
        out.print(f"[yellow]note[/yellow] {note}")
    out.print(
        f"\nresult: {_coloured(record['state'])}; written to [bold]{folder}/audit.json[/bold], "
        f"to read: [bold]{folder}/audit.html[/bold]"
    )


def _noise_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="the noise, as executed", title_justify="left")
    for name in ("audited", "adversary sees", "canary", "μ ≥", "of μ", "ε ≥", "of ε", "result"):
        table.add_column(name)
    for row in rows:
        if "blocks" not in row:
            claimed, limit = row["mu_claimed"], row["epsilon"]
            table.add_row(
                row["audit"],
                row["sees"],
                row["canary"],
                f"{row['mu_low']:.3f}",
                "-" if claimed is None else f"{claimed:.3f}",
                f"{row['epsilon_low']:.3g}",
                "∞" if math.isinf(limit) else f"{limit:.3g}",
                _coloured(row["state"]),
            )
    return table


def _attack_table(rows: list[dict[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, title="membership of single images", title_justify="left")
    names = ("attack", "adversary sees", "AUC", "95 %", "TPR at 0.1 %", "at 1 %", "result")
    for name in names:
        table.add_column(name)
    for row in rows:
        caps = [row.get(f"claim_cap{k}") for k in ("", "_tpr_at_0.1pct", "_tpr_at_1pct")]
        if row.get("cap") is not None and caps[0] is None:
            caps[0] = row["cap"]
        interval = "-" if row["low"] is None else f"{row['low']:.3f} .. {row['high']:.3f}"
        table.add_row(
            row["attack"],
            row["sees"],
            _of(row["auc"], caps[0]),
            interval,
            _of(row.get("tpr_at_0.1pct"), caps[1]),
            _of(row.get("tpr_at_1pct"), caps[2]),
            _coloured(row["state"]),
        )
    return table


def _of(value: float | None, cap: float | None) -> str:
    """Write a figure beside what the claim allows."""
    text = "-" if value is None else f"{value:.3f}"
    return text if cap is None else f"{text} (≤ {cap:.3f})"


def _coloured(state: str) -> str:
    colour = COLOURS.get(state)
    return f"[{colour}]{state}[/{colour}]" if colour else state
