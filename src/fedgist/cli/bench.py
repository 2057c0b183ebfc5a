"""The command that runs benchmark files and writes their tables and figures."""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedgist.cli.common import AsJson, Debug, guarded, show

if TYPE_CHECKING:
    from fedgist.bench import Lines, Planned, Step

__all__ = ["add_bench"]

WIDTH = 100


def add_bench(app: typer.Typer) -> None:
    """Register the command of this file."""
    app.command()(bench)


def bench(
    file: Annotated[Path, typer.Argument(help="Benchmark file: base, cases, sweep, seeds.")],
    quick: Annotated[
        bool, typer.Option("--quick", help="Seconds, embedded images; nothing is kept.")
    ] = False,
    only: Annotated[str, typer.Option("--only", help="Cases whose name holds this.")] = "",
    again: Annotated[bool, typer.Option("--again", help="Run what has a result, too.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="List what would run and what is there.")
    ] = False,
    report: Annotated[
        bool, typer.Option("--report", help="Run nothing: write tables and figure of the results.")
    ] = False,
    out: Annotated[
        Path | None, typer.Option("--out", help="Folder of results; default: results, beside FILE.")
    ] = None,
    docs: Annotated[
        Path, typer.Option("--docs", help="Folder that --report writes NAME.md and NAME.svg to.")
    ] = Path("docs/results"),
    threads: Annotated[int | None, typer.Option("--threads", min=1, help="Of PyTorch.")] = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Run a benchmark file, going on where it stopped (exit 1: a run failed or not as expected)."""
    bad: list[str] = []

    def body() -> None:
        from fedgist.bench import load_suite, planned, read_lines

        suite = load_suite(file)
        # small results never stand among whole ones
        name = suite.name + "-quick" * quick
        path = (out or file.parent / "results") / f"{name}.jsonl"
        if report:
            _report(suite.title, path, docs / name, as_json)
            return
        todo = planned(suite, quick=quick, only=only)
        keep = None if quick and out is None else path
        if dry_run:
            before = [] if keep is None else read_lines(keep)
            show(_states(todo, before, again), as_json, _print_states)
            return
        if threads is not None:
            import torch

            torch.set_num_threads(threads)
        bad.extend(_run(todo, keep, quick, again, as_json))

    guarded(body, debug)
    if bad:
        raise typer.Exit(1)


def _run(
    todo: Sequence[Planned], path: Path | None, quick: bool, again: bool, as_json: bool
) -> list[str]:
    """Run, print the table, return what failed or is not as expected."""
    from fedgist.bench import Lines, run_suite, unmet
    from fedgist.bench.report import records

    tell = Teller(len(todo))
    with nullcontext() if path is None else Lines(path) as lines:
        try:
            found = run_suite(todo, lines, again=again, tell=tell)
        except KeyboardInterrupt:
            _say(f"stopped: {tell.done} of {len(todo)} runs are done{_kept_in(lines)}")
            raise typer.Exit(130) from None
    bad = unmet(todo, found, quick=quick)
    show(records(found), as_json, _print_records)
    _say(f"{tell.fresh} run, {tell.kept} kept from before{_written(path)}")
    for commit, count in tell.others.items():
        _say(f"note: {count} of them at commit {commit}, not this one; --again runs them again")
    for text in bad:
        _say(f"NOT MET: {text}")
    return bad


def _kept_in(lines: Lines | None) -> str:
    if lines is None:
        return ", kept nowhere"
    return f", kept in {lines.path}; the same command goes on from there"


def _written(path: Path | None) -> str:
    return "" if path is None else f"; results: {path}"


class Teller:
    """Prints a line for each run: accuracies, seconds, and about how long the rest takes.

    The rest is estimated as the median of the runs so far for each that is left.
    """

    def __init__(self, total: int, say: Callable[[str], None] | None = None) -> None:
        self.total, self.done, self.kept, self.fresh = total, 0, 0, 0
        self.others: dict[str, int] = {}
        self._seconds: list[float] = []
        self._say = say or _say
        self._commit: str | None = None

    def __call__(self, step: Step) -> None:
        """One run is done."""
        self.done += 1
        line, left = step.line, self.total - self.done
        if step.kept:
            self.kept += 1
            time = "kept"
            self._note(line["commit"])
        else:
            self.fresh += 1
            self._seconds.append(step.seconds)
            time = _duration(step.seconds)
            if left:
                time += f", {_duration(left * statistics.median(self._seconds))} left"
        count = f"[{self.done:>{len(str(self.total))}}/{self.total}]"
        name = f"{line['case']}, seed {line['seed']}"
        if "error" in line:
            result = line["error"]
        else:
            scores = line["heads"].items()
            result = ", ".join(
                f"{h} {100 * v['accuracy']:.1f}" if "accuracy" in v else h for h, v in scores
            )
        room = WIDTH - len(count) - len(time) - 4
        name = _cut(name, max(room // 2, room - len(result) - 2))
        self._say(f"{count} {_cut(f'{name}: {result}', room):<{room}}  {time}")

    def _note(self, commit: str) -> None:
        """Count results of other code than this."""
        if self._commit is None:
            from fedgist.bench import provenance

            self._commit = str(provenance()["commit"])
        if commit != self._commit:
            self.others[commit] = self.others.get(commit, 0) + 1


def _cut(text: str, room: int) -> str:
    return text if len(text) <= room else text[: room - 1] + "…"


def _duration(seconds: float) -> str:
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def _states(
    todo: Sequence[Planned], lines: Sequence[Mapping[str, Any]], again: bool
) -> list[dict[str, Any]]:
    """Return one row for each run: what there is of it."""
    good = {r["hash"]: r for r in lines if "error" not in r}
    failed = {r["hash"] for r in lines if "error" in r}
    rows = []
    for p in todo:
        row = {"case": p.case.name, "seed": p.seed, "hash": p.hash, "set": list(p.case.set)}
        if p.hash in good and not again:
            state = f"there, of {good[p.hash]['created'][:10]} at {good[p.hash]['commit']}"
        else:
            state = "runs again" if p.hash in {*good, *failed} else "runs"
        rows.append(row | {"state": state if p.error is None else f"fails: {p.error}"})
    return rows


def _print_states(rows: Sequence[Mapping[str, Any]]) -> None:
    for row in rows:
        print(f"{row['case']}, seed {row['seed']}: {row['state']}")
    left = sum(row["state"].startswith("runs") for row in rows)
    _say(f"{len(rows)} runs, {left} of them to do")


def _print_records(rows: Sequence[Mapping[str, Any]]) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    from fedgist.bench.report import cell

    heads = list(dict.fromkeys(k for r in rows for k in r["mean"] if "_ceiling" not in k))
    if len(heads) > 4:  # one narrow column instead of many
        grid = [(r["case"], ", ".join(f"{h} {cell(r, h)}" for h in heads if h in r["mean"]))
                for r in rows]  # fmt: skip
        names = ["case", "accuracy, %"]
    else:
        grid = [(r["case"], *(cell(r, h) for h in heads)) for r in rows]
        names = ["case", *(f"{h}, %" for h in heads)]
    table = Table(box=box.SIMPLE_HEAD, collapse_padding=True)
    for name in names:
        table.add_column(name, overflow="fold")
    for row in grid:
        table.add_row(*row)
    out = Console(highlight=False)
    out.width = max(WIDTH, out.width)  # a pipe has 80 columns
    out.print(table, markup=False)


def _report(title: str, path: Path, target: Path, as_json: bool) -> None:
    """Write Markdown and figure, or print the rows."""
    from fedgist.bench import read_lines
    from fedgist.bench.report import figure, markdown, records
    from fedgist.errors import ConfigError
    from fedgist.report.folder import claim_folder
    from fedgist.whole import write_whole

    lines = read_lines(path)
    if not lines:
        raise ConfigError(f"results must be there before a report. Got none in '{path}': run first")
    if as_json:
        show(records(lines), True, print)
        return
    claim_folder(target.parent)
    page, picture = target.with_name(target.name + ".md"), target.with_name(target.name + ".svg")
    if (drawn := figure(lines)) is not None:
        write_whole(picture, drawn)
    text = markdown(title, lines, picture.name if drawn else None)
    write_whole(page, text.encode())
    print(page)
    if drawn:
        print(picture)


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
