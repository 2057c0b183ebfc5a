"""`fedgist inspect`: look at what would leave this site, and decide."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from fedgist.cli.common import AsJson, Debug, guarded, show

__all__ = ["inspect"]


def inspect(
    task: Annotated[Path, typer.Option("--task", help="The task file that all sites agreed on.")],
    key: Annotated[Path, typer.Option("--key", help="Your private key, NAME.key.")],
    data: Annotated[str, typer.Option("--data", help="This site's images, as for join.")],
    state: Annotated[
        Path | None, typer.Option("--state", help="As for join; default in ~/.fedgist.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder for the page; default: beside the gist.")
    ] = None,
    send: Annotated[bool, typer.Option("--send", help="Decide: it may leave.")] = False,
    withhold: Annotated[
        str, typer.Option("--withhold", help="With --send: leave out images, 3,17,40.")
    ] = "",
    withhold_class: Annotated[
        list[str] | None,
        typer.Option("--withhold-class", help="With --send: leave out a class; repeat."),
    ] = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Decide: send nothing.")] = False,
    gist: Annotated[
        str, typer.Option("--gist", help="Decide only about this one: first digits of its hash.")
    ] = "",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look at the gist that waits (join or contribute --review), and decide about it.

    Without a decision: a summary, and a page for the browser. What is withheld is left out of this
    and every later round of the task.
    """

    def body() -> None:
        from fedgist.federation import open_review
        from fedgist.report.inspect_page import write_inspection

        verdict = _verdict(send, refuse, bool(withhold or withhold_class))
        numbers = _numbers(withhold)
        subject = open_review(task, key, data, state)
        if verdict is not None:
            receipt = subject.decide(verdict, withhold_class or (), numbers, gist)
            place = subject.review.place(receipt.said["step"])
            decided = dict(receipt.said) | {"file": str(place)}
            show(decided, as_json, _print_decision)
            return
        found = subject.inspect()
        page = None
        if found.record["waiting"] is not None:
            page = str(write_inspection(subject, found, out or subject.review.folder))
        show(found.record | {"page": page}, as_json, print_inspection)

    guarded(body, debug)


def print_inspection(record: Mapping[str, Any]) -> None:
    """Print what waits, how alike it is, and what can be done."""
    from fedgist.report.inspect_page import alike, caution, lead

    out = Console(highlight=False, soft_wrap=True)
    w = record["waiting"]
    if w is None:
        out.print("Nothing waits for a decision.")
        for said in record["decisions"]:
            _print_decision(said)
        return
    out.print(
        f"\n[bold]{record['task']}[/bold], round {w['round']} of {w['rounds']}, method "
        f"{record['method']}: nothing has been sent"
    )
    for text in (lead(record), alike(record), caution(record)):
        if text:
            out.print(text, markup=False)
    out.print(_table(w))
    out.print(f"[bold]privacy[/bold] {record['claim']['line']}")
    for note in record["claim"]["notes"]:
        out.print(f"[yellow]note[/yellow] {note}")
    out.print(f"[bold]SHA-256[/bold] {w['gist']}")
    if w["decision"]:
        out.print(f"[bold]decided[/bold] {w['decision']['decision']}, not sent yet")
    out.print(f"\nLook at it: [bold]{record['page']}[/bold]", markup=True)
    out.print("Then run the same command with --send, --send --withhold 3,17,")
    out.print("--send --withhold-class NAME, or --refuse.")


def _table(w: Mapping[str, Any]) -> Table:
    """Return classes for uploads, tensors for anything else."""
    table = Table(box=box.SIMPLE_HEAD)
    if "classes" in w:
        for name in ("class", "sent", "of", "most alike", "SSIM", "PSNR (dB)", "distance"):
            table.add_column(name, justify="left" if name == "class" else "right")
        for c in w["classes"]:
            worst, cells = c["worst"], ["", "", "", ""]
            if worst:
                figures = (f"{worst['ssim']:.2f}", f"{worst['psnr']:.1f}")
                cells = [f"No. {worst['number']}", *figures, f"{worst['distance']:.3f}"]
            table.add_row(c["name"], f"{c['sent']:,}", f"{c['held']:,}", *cells)
        return table
    for name in ("what", "shape", "numbers", "noise (std, grid units)", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for p in w["pieces"]:
        noise = p["noise"]
        shown = noise if isinstance(noise, str) else f"{noise[0]:,.1f}" if noise else "none"
        shape = " x ".join(str(n) for n in p["shape"])
        table.add_row(p["name"], shape, p["type"], shown, f"{p['bytes']:,}")
    return table


def _print_decision(said: Mapping[str, Any]) -> None:
    """Print one decision and what follows from it."""
    out = Console(highlight=False, soft_wrap=True)
    verdict = "send" if said["decision"] == "send" else "send nothing"
    out.print(
        f"[bold]Round {said['round']}: {verdict}[/bold] (gist {said['gist'][:12]}, {said['time']})"
    )
    if said["classes"]:
        out.print(f"  without class {', '.join(said['classes'])}", markup=False)
    if n := len(said["images"]):
        out.print(f"  without {n} {'image' if n == 1 else 'different images'}")
    if sent := said.get("sent"):
        out.print(f"  made ready to leave: {sent['gist'][:12]}, {sent['bytes']:,} bytes")
    if "file" in said:
        out.print(f"Signed and kept in {said['file']}", markup=False)
        out.print("join acts on it by itself; a `contribute` or `join --once` is to be run again.")


def _verdict(send: bool, refuse: bool, withholds: bool) -> Any:
    from fedgist.errors import ConfigError

    if send and refuse:
        raise ConfigError("a decision must be --send or --refuse. Got both")
    if withholds and not send:
        raise ConfigError(
            "--withhold and --withhold-class must come with --send, which sends the rest. Got no "
            "--send"
        )
    return "send" if send else "refuse" if refuse else None


def _numbers(text: str) -> list[int]:
    from fedgist.errors import ConfigError

    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not all(p.isdecimal() for p in parts):
        raise ConfigError(f"--withhold must be numbers with commas, such as 3,17. Got '{text}'")
    return [int(p) for p in parts]
