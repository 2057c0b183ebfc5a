"""What all commands share: options, one-line errors, progress bars."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

from fedgist.errors import ConfigError, FedGistError, ProtocolError
from fedgist.progress import Progress, Visit

__all__ = ["AsJson", "Bars", "Debug", "Out", "Sets", "group", "guarded", "show"]

Sets = Annotated[list[str] | None, typer.Option("--set", help="Any key: --set privacy.delta=1e-6.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for everything that is written.")]


def group(text: str) -> typer.Typer:
    """Return a group of commands."""
    return typer.Typer(help=text, no_args_is_help=True)


def show(record: Any, as_json: bool, pretty: Callable[[Any], None]) -> None:
    """Print a result for people or for programs."""
    if as_json:
        from fedgist.report.record import to_json

        print(to_json(record))
    else:
        pretty(record)


def guarded(body: Callable[[], None], debug: bool) -> None:
    """Turn our own errors into one line and exit code 2."""
    try:
        body()
    except FedGistError as e:
        if debug:
            raise
        label = "error" if not isinstance(e, ConfigError) else "configuration"
        Console(stderr=True, soft_wrap=True, highlight=False).print(
            f"fedgist: {label}: {e}", style="red", markup=False
        )
        # 1: what was asked for could not be brought to an end; 2: it was asked for wrongly
        raise typer.Exit(1 if isinstance(e, ProtocolError) else 2) from None
    except KeyboardInterrupt:
        print("fedgist: stopped; files that were written are whole", file=sys.stderr)
        raise typer.Exit(130) from None


class Bars(Progress):
    """Shows stages, clients and training steps on stderr."""

    def __init__(self) -> None:
        self._bar = Bar(
            TextColumn("[bold]{task.description:<14}"),
            BarColumn(32),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TextColumn("{task.fields[note]}"),
            console=Console(stderr=True),
        )
        self._task: Any = None

    def __enter__(self) -> Bars:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finish()
        self._bar.stop()

    def stage(self, text: str) -> None:
        """See `Progress.stage`."""
        self._finish()
        self._task = self._bar.add_task(text, total=None, note="")

    def client(self, done: int, total: int, visit: Visit) -> None:
        """See `Progress.client`."""
        note = f"{visit.bytes_up / 1024:.0f} KiB each"
        if visit.seconds is not None:
            note += f", {visit.seconds:.2f} s"
        self._bar.update(self._task, completed=done, total=total, note=note)

    def _finish(self) -> None:
        if self._task is not None:
            task = self._bar.tasks[self._task]
            self._bar.update(self._task, completed=task.total or 1, total=task.total or 1)
