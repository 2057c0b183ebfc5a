"""What the terminal shows of a plan, a run, a score."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

from fedgist.report.numbers import alike_rounds

__all__ = [
    "print_checks",
    "print_ledger",
    "print_names",
    "print_plan",
    "print_record",
    "print_result",
    "print_scores",
    "print_task",
]

HEAD_NAMES = {
    "qda": "quadratic discriminant, codec",
    "lda": "linear discriminant, features",
    "ridge": "ridge regression, features",
    "logistic": "logistic regression, features",
    "decode": "network, decoded images",
    "match": "network, matched images",
    "distilled": "network, distilled images",
    "fedavg": "network, averaged by round",
    "dp_fedavg": "network, noised sums by round",
    "fedprox": "network, averaged by round",
    "fedadam": "network, Adam on mean updates",
    "scaffold": "network, averaged by round",
    "sfl": "network, split",
    "fedsumup": "compressor and network, small images",
    "uploads": "network, transformed images",
    "oneshot_fedavg": "network, averaged once",
    "ensemble": "all clients' networks together",
    "feddf": "network, taught by all on other images",
    "dense": "network, taught by all on generated images",
    "co_boosting": "network, taught by all, weighted",
    "fedcvae_ens": "network, images of all decoders",
    "fedcvae_kd": "network, images of one decoder",
    "fedsd2c": "network, images from sent codes",
    "fedsynth": "network, updates as synthetic batches",
    "fedcgs": "Gaussian head, features",
    "fed3r": "ridge regression, features",
}


def print_result(report: Mapping[str, Any], folder: Path) -> None:
    """Print a finished run: accuracies, claim, costs, files."""
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"\n[bold]{report['title']}[/bold]")
    out.print(_heads_table(report["heads"]))
    out.print(_facts_table(_result_facts(report)))
    for note in dict.fromkeys([*report["claim"]["notes"], *_site_notes(report["clients"])]):
        out.print(f"[yellow]note[/yellow] {note}")
    out.print(f"\nWritten to [bold]{folder}[/bold]:")
    for f in report["files"]:
        out.print(f"  {f['path']:<30} {f['what']}")


def print_plan(record: Mapping[str, Any]) -> None:
    """Print what is known before any image is read."""
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"\n[bold]Plan: {record['title']}[/bold] (no image has been read)")
    out.print(_blocks_table(record["left"]))
    claim = record["claim"]
    facts = [
        ("privacy", claim["line"]),
        ("odds", claim["odds"]),
        ("mechanism", f"{claim['mechanism']}; σ = {claim['sigma']:.4f}; {claim['accountant']}"),
        ("other readings", _readings(claim)),
        ("sampling", claim["sampling"]),
        ("public data", record["track"]),
        ("upload per client", _size(record["bytes_up"])),
        ("expected signal", record["signal"]),
    ]
    out.print(_facts_table(facts))
    for note in claim["notes"]:
        out.print(f"[yellow]note[/yellow] {note}")


def print_task(record: Mapping[str, Any]) -> None:
    """Print what a task asks of a site."""
    out = Console(highlight=False, soft_wrap=True)
    out.print(f"\n[bold]Task: {record['title']}[/bold] (no image has been read)")
    out.print(f"hash [bold]{record['hash']}[/bold]")
    out.print(_blocks_table(record["left"]))
    claim, terms, n = record["claim"], record["exchange"], len(record["sites"])
    summed = "the coordinator sees their total only" if record["secure_sum"] else "no"
    facts = [
        ("privacy", claim["line"]),
        ("odds", claim["odds"]),
        ("mechanism", f"{claim['mechanism']}; σ = {claim['sigma']:.4f}; {claim['accountant']}"),
        ("sampling", claim["sampling"]),
        ("classes", ", ".join(record["task"]["classes"])),
        ("method", f"{record['method']}, {record['rounds']} round(s)"),
        ("encoders", "\n".join(f"{k} {v[:16]}" for k, v in record["encoders"].items())),
        ("upload per site", _size(record["bytes_up"])),
        ("secure sum", summed),
        ("sites", f"{n}; quorum {terms['quorum']}, threshold {terms['threshold']}"),
        ("deadline", f"{terms['deadline'] or 'none'}; a step waits {terms['patience']:g} s"),
        ("coordinator", _who(record["coordinator"])),
        *[(f"site {i}", _who(s)) for i, s in enumerate(record["sites"])],
    ]
    out.print(_facts_table(facts))
    for note in claim["notes"]:
        out.print(f"[yellow]note[/yellow] {note}")


def print_ledger(record: Mapping[str, Any]) -> None:
    """Print every release of a holder's data and what they add up to."""
    out = Console(highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, title=record["file"], title_justify="left")
    for name in ("time (UTC)", "task", "round", "ε alone", "of one", "images"):
        table.add_column(
            name, justify="right" if name in ("round", "images", "ε alone") else "left"
        )
    for e in record["entries"]:
        eps = "∞" if math.isinf(e["epsilon"]) else f"{e['epsilon']:.4g}"
        cells = (e["time"][:16], e["name"], str(e["round"]), eps, e["unit"])
        table.add_row(*cells, f"{e['images']:,}")
    out.print(table)
    out.print(f"[bold]{record['line'].replace('= inf', '= ∞')}[/bold]")


def print_checks(checks: Sequence[Mapping[str, str]]) -> None:
    """Print what was examined, one line each, what is wrong with its remedy."""
    out = Console(highlight=False, soft_wrap=True)
    colours = {"good": "green", "bad": "red", "warning": "yellow"}
    for c in checks:
        mark = f"[{colours[c['state']]}]{c['state']:<8}[/]"
        out.print(f"{mark}[bold]{c['what']:<12}[/] ", end="")
        out.print(c["found"], markup=False)
        if c["remedy"]:
            out.print(" " * 21 + c["remedy"], markup=False)


def print_scores(record: Mapping[str, Any]) -> None:
    """Print accuracies of stored classifiers on other images."""
    out = Console(highlight=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, title=f"{record['images']:,} images of {record['test']}")
    for name in ("classifier", "accuracy", "log loss", "calibration error"):
        table.add_column(name, justify="left" if name == "classifier" else "right")
    for s in record["scores"]:
        table.add_row(
            s["head"], f"{100 * s['accuracy']:.1f} %", f"{s['nll']:.3f}", f"{s['ece']:.3f}"
        )
    out.print(table)


def print_names(rows: Sequence[Any]) -> None:
    """Print one name a line, with what follows it when rows are records."""
    for row in rows:
        print(row if isinstance(row, str) else "  ".join(str(v) for v in row.values()))


def print_record(record: Mapping[str, Any]) -> None:
    """Print a flat record as two columns; nested ones one level in."""
    facts = []
    for key, value in record.items():
        if isinstance(value, list | tuple) and value and isinstance(value[0], Mapping):
            value = "\n".join(", ".join(str(v) for v in row.values()) for row in value)
        elif isinstance(value, Mapping):
            value = "\n".join(f"{k}: {v}" for k, v in value.items())
        facts.append((key, str(value)))
    Console(highlight=False, soft_wrap=True).print(_facts_table(facts))


def _site_notes(visits: Sequence[Mapping[str, Any]]) -> list[str]:
    """Say once what several sites report alike."""
    sites: dict[str, list[str]] = {}
    for v in visits:
        if v["note"]:
            sites.setdefault(v["note"], []).append(v["client"])
    return [
        f"{who[0] if len(who) == 1 else f'{len(who)} clients'}: {n}" for n, who in sites.items()
    ]


def _heads_table(heads: Mapping[str, Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    table.add_column("head", no_wrap=True)
    table.add_column("accuracy", justify="right", no_wrap=True)
    table.add_column("without privacy", justify="right", no_wrap=True)
    table.add_column("", style="dim", no_wrap=True)
    for name, h in heads.items():
        accuracy = f"[bold]{_percent(h.get('accuracy'))}[/bold]"
        table.add_row(name, accuracy, _percent(h.get("ceiling")), HEAD_NAMES.get(name, ""))
        if "codec_consistent" in h:
            table.add_row("", _percent(h["codec_consistent"]), "", "test images through the codec")
    return table


def _result_facts(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    claim, visits = report["claim"], report["clients"]
    seconds = [v["seconds"] for v in visits if v["seconds"] is not None]
    server = sum(report["details"].get("seconds", {}).values())
    eps = "∞ (no guarantee)" if math.isinf(claim["epsilon"]) else f"{claim['epsilon']:.4g}"
    unit = claim["unit"] + (f", at most {claim['records']} images" if claim["records"] > 1 else "")
    return [
        ("privacy", f"ε = {eps}, δ = {claim['delta']:g}"),
        ("unit", f"one {unit}; adjacency {claim['adjacency']}"),
        ("noise added by", claim["noise_by"]),
        ("public data", claim["track"]),
        ("odds", claim["odds"]),
        ("upload", f"{_size(report['bytes_up'])} per client, {len(visits)} clients"),
        *_client_time(seconds),
        ("server time", f"{server:.1f} s"),
        *([("attacks", shown["headline"])] if (shown := report.get("exposure")) else []),
    ]


def _client_time(seconds: Sequence[float]) -> list[tuple[str, str]]:
    if not seconds:
        return []
    text = f"{sum(seconds) / len(seconds):.2f} s mean, {max(seconds):.2f} s longest"
    return [("client time", text)]


def _facts_table(facts: Sequence[tuple[str, str]]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="bold", no_wrap=True)
    table.add_column(overflow="fold")
    for key, value in facts:
        table.add_row(key, value)
    return table


def _readings(claim: Mapping[str, Any]) -> str:
    parts = []
    for adjacency, eps in claim["readings"].items():
        if adjacency != claim["adjacency"]:
            parts.append(f"{adjacency} ε = {'∞' if math.isinf(eps) else f'{eps:.4g}'}")
    return "; ".join(parts)


def _blocks_table(left: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD)
    for name in ("round", "block", "shape", "bits", "bytes", "noise (std, grid units)"):
        table.add_column(name, justify="left" if name in ("block", "shape") else "right")
    for b in alike_rounds(left):
        shape = " x ".join(str(n) for n in b["shape"])
        table.add_row(
            b["rounds"],
            f"{b['view']} {b['block']}".strip(),
            shape,
            str(b["bits"]),
            f"{b['bytes']:,}",
            _noise(b["noise"]),
        )
    return table


def _who(party: Mapping[str, str]) -> str:
    return f"{party['name']}  {party['fingerprint']}"


def _noise(scales: Sequence[float] | str | None) -> str:
    if isinstance(scales, str):
        return scales
    if not scales:
        return "none"
    plain, off = scales
    return f"{plain:,.1f}" if plain == off else f"{plain:,.0f} / {off:,.0f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{100 * value:.1f} %"


def _size(n: int | None) -> str:
    return "depends on the data" if n is None else f"{n / 1024:.1f} KiB"
