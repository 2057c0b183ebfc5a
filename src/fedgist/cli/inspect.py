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


GistFile = Annotated[
    Path | None, typer.Argument(metavar="[GIST]", help="A gist file; without, the gist that waits.")
]
Task = Annotated[
    Path | None, typer.Option("--task", help="The task file; default task.toml, for a file.")
]
Key = Annotated[Path | None, typer.Option("--key", help="Your private key, NAME.key: to decide.")]
Data = Annotated[str | None, typer.Option("--data", help="This site's images, as for join.")]
Rules = Annotated[
    Path | None,
    typer.Option("--policy", help="What this site allows. Exit code 1 if a rule is broken."),
]
Book = Annotated[Path | None, typer.Option("--ledger", help="Default: ~/.fedgist/ledger.sqlite.")]
State = Annotated[Path | None, typer.Option("--state", help="As for join; default in ~/.fedgist.")]
Page = Annotated[
    Path | None, typer.Option("--out", help="Folder for the page; default: beside the gist.")
]
Withheld = Annotated[
    str, typer.Option("--withhold", help="With --send: leave out images, 3,17,40.")
]
WithheldClass = Annotated[
    list[str] | None,
    typer.Option("--withhold-class", help="With --send: leave out a class; repeat."),
]
Asked = Annotated[
    float | None,
    typer.Option("--ask-epsilon", min=0, help="With --refuse: the ε you would agree to."),
]
Digits = Annotated[
    str, typer.Option("--gist", help="Decide only about this one: first digits of its hash.")
]


def inspect(
    gist_file: GistFile = None,
    task: Task = None,
    key: Key = None,
    data: Data = None,
    policy: Rules = None,
    ledger: Book = None,
    state: State = None,
    out: Page = None,
    send: Annotated[bool, typer.Option("--send", help="Decide: it may leave.")] = False,
    withhold: Withheld = "",
    withhold_class: WithheldClass = None,
    refuse: Annotated[bool, typer.Option("--refuse", help="Decide: send nothing.")] = False,
    ask_epsilon: Asked = None,
    gist: Digits = "",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Look at a gist before it leaves, and decide about it. Nothing is sent by this command.

    The gist lies in a file (contribute) or waits (join or contribute --review, with --task, --key
    and --data). Without a decision: a summary, and a page for the browser. What is withheld is left
    out of this and every later round of the task.
    """
    broken: list[str] = []

    def body() -> None:
        verdict = _verdict(send, refuse, bool(withhold or withhold_class))
        if ask_epsilon is not None and not refuse:
            raise _wrong("--ask-epsilon must come with --refuse. Got no --refuse")
        numbers = _numbers(withhold)
        subject = _subject(gist_file, task, key, data, policy, ledger, state)
        if verdict is not None:
            receipt = subject.decide(verdict, withhold_class or (), numbers, gist, ask_epsilon)
            place = subject.review.place(receipt.said["step"])
            decided = dict(receipt.said) | {"file": str(place)}
            show(decided, as_json, _print_decision)
            return
        found = subject.inspect()
        show(found.record | _written(subject, found, out), as_json, print_inspection)
        if policy is not None and (w := found.record["waiting"]):
            broken.extend(r["rule"] for r in w["rules"] if not r["kept"])

    guarded(body, debug)
    if broken:
        raise typer.Exit(1)


def _subject(
    gist: Path | None,
    task: Path | None,
    key: Path | None,
    data: str | None,
    policy: Path | None,
    ledger: Path | None,
    state: Path | None,
) -> Any:
    """Open what is to be looked at."""
    from fedgist.federation import home
    from fedgist.inspection import open_gist, open_review

    book = ledger or home() / "ledger.sqlite"
    if gist is not None:
        return open_gist(gist, task, key=key, data=data, policy=policy, ledger=book)
    if task is None or key is None or data is None:
        raise _wrong("GIST must be a gist file, or --task, --key and --data be given. Got neither")
    folder = state or home() / "site"
    return open_review(task, key, data, folder, state=state, policy=policy, ledger=book)


def _written(subject: Any, found: Any, out: Path | None) -> dict[str, Any]:
    """Write the page and the record beside each other, where something waits."""
    from fedgist.report.inspect_page import write_inspection

    if found.record["waiting"] is None:
        return {"page": None}
    return {"page": str(write_inspection(subject, found, out or subject.review.folder))}


def print_inspection(record: Mapping[str, Any]) -> None:
    """Print what waits, how alike it is, and what can be done."""
    from fedgist.report.inspect_page import alike, caution, lead
    from fedgist.report.inspect_words import evidence_lines, rule_rows, spent

    out = Console(highlight=False, soft_wrap=True)
    w = record["waiting"]
    if w is None:
        out.print("Nothing waits for a decision.")
        for said in record["decisions"]:
            _print_decision(said)
        return
    state = f"in {w['file']}, not sent by this command" if w["file"] else "nothing has been sent"
    out.print(
        f"\n[bold]{record['task']}[/bold], round {w['round']} of {w['rounds']}, method "
        f"{record['method']}: {state}"
    )
    for text in (lead(record), alike(record), caution(record)):
        if text:
            out.print(text, markup=False)
    out.print(_table(w))
    out.print(f"[bold]privacy[/bold] {record['claim']['line']}")
    out.print(f"[bold]odds[/bold]    {record['claim']['odds']}")
    for note in record["claim"]["notes"]:
        out.print(f"[yellow]note[/yellow]    {note}")
    for line in evidence_lines(w["evidence"], record["claim"]):
        colour = {"good": "green", "note": "yellow", "bad": "red"}[line["state"]]
        out.print(f"[{colour}]{line['title']}[/{colour}]: {line['text']}")
    if bar := spent(w["ledger"]):
        out.print(f"[bold]ledger[/bold]  {bar['line']}")
    rules = rule_rows(w["rules"])
    for rule in rules:
        if not rule["kept"]:
            out.print(
                f"[red]broken[/red]  {rule['title']}: {rule['got']}, allowed: {rule['limit']}"
            )
    kept = sum(r["kept"] for r in rules)
    whose = "the policy's" if record["policy"] else "the defaults"
    out.print(f"[bold]rules[/bold]   {kept} of {len(rules)} rules kept ({whose})")
    out.print(f"[bold]SHA-256[/bold] {w['gist']}")
    if w["decision"]:
        out.print(f"[bold]decided[/bold] {w['decision']['decision']}, not sent yet")
    out.print(f"\nLook at it: [bold]{record['page']}[/bold]", markup=True)
    out.print(
        "Then run the same command with --send, --refuse" + (" (and --key)." if w["file"] else ",")
    )
    if not w["file"]:
        out.print("--send --withhold 3,17 or --send --withhold-class NAME.")


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
    for name in ("what", "shape", "numbers", "noise (std)", "bytes"):
        table.add_column(name, justify="right" if name == "bytes" else "left")
    for p in w["pieces"]:
        noise = p["noise"]
        shown = noise if isinstance(noise, str) else f"{noise[0]:,.1f}" if noise else "none"
        shape = " x ".join(str(n) for n in p["shape"])
        kind = p["type"].replace("integers of ", "").replace(" bits", "-bit integers")
        table.add_row(p["name"], shape, kind, shown, f"{p['bytes']:,}")
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
        if (asked := said.get("asked_epsilon")) is not None:
            out.print(f"  this site would take part at ε = {asked:g}")
        out.print(f"Signed and kept in {said['file']}", markup=False)
        if said["file"].endswith(".decision.json"):
            return
        out.print("join acts on it by itself; a `contribute` or `join --once` is to be run again.")


def _wrong(text: str) -> Exception:
    from fedgist.errors import ConfigError

    return ConfigError(text)


def _verdict(send: bool, refuse: bool, withholds: bool) -> Any:
    if send and refuse:
        raise _wrong("a decision must be --send or --refuse. Got both")
    if withholds and not send:
        raise _wrong(
            "--withhold and --withhold-class must come with --send, which sends the rest. Got no "
            "--send"
        )
    return "send" if send else "refuse" if refuse else None


def _numbers(text: str) -> list[int]:
    parts = [p.strip() for p in text.split(",") if p.strip()]
    if not all(p.isdecimal() for p in parts):
        raise _wrong(f"--withhold must be numbers with commas, such as 3,17. Got '{text}'")
    return [int(p) for p in parts]
