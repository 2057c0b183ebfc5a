"""The command line: parses and calls, no logic.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 a check failed, 2 wrong use or bad
input.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as Bar

import fedgist
from fedgist.errors import ConfigError, FedGistError
from fedgist.progress import Progress, Visit

__all__ = ["app", "main"]

app = typer.Typer(
    name="fedgist",
    help="Learn from images that may not move: one upload, exact privacy, a classifier and images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
encoders = typer.Typer(help="Frozen public encoders.", no_args_is_help=True)
app.add_typer(encoders, name="encoder")

Config = Annotated[Path | None, typer.Argument(help="TOML file; all keys have defaults.")]
Data = Annotated[str | None, typer.Option("--data", help="Named set, file or folder.")]
MethodName = Annotated[str | None, typer.Option("--method", help="Name, or a dotted module.")]
Clients = Annotated[int | None, typer.Option("--clients", help="How many clients to simulate.")]
Split = Annotated[
    str | None, typer.Option("--partition", help="iid, dirichlet:0.5, pathological:2, natural ...")
]
Epsilon = Annotated[float | None, typer.Option("--epsilon", help="Privacy ε; inf for none.")]
Heads = Annotated[
    list[str] | None, typer.Option("--head", help="lda, qda, ridge, decode, match; repeat.")
]
Seed = Annotated[int | None, typer.Option("--seed", help="Seed of the whole run.")]
Sets = Annotated[list[str] | None, typer.Option("--set", help="Any key: --set privacy.delta=1e-6.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Out = Annotated[Path, typer.Option("--out", help="Folder for everything that is written.")]


@app.command()
def run(
    config: Config = None,
    data: Data = None,
    method: MethodName = None,
    clients: Clients = None,
    partition: Split = None,
    epsilon: Epsilon = None,
    head: Heads = None,
    seed: Seed = None,
    set_: Sets = None,
    out: Out = Path("fedgist-out"),
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Simulate a federation on one machine, end to end, and write everything to a folder."""

    def body() -> None:
        from fedgist.config import load
        from fedgist.experiment import execute
        from fedgist.summary import print_result

        resolved = load(config, _sets(data, method, clients, partition, epsilon, head, seed, set_))
        with _Bars() as tell:
            result = execute(resolved, out, tell)
        if as_json:
            from fedgist.report.record import to_json

            print(to_json(result.report))
        else:
            print_result(result.report, out)

    _guarded(body, debug)


@app.command()
def plan(
    config: Config = None,
    data: Data = None,
    method: MethodName = None,
    clients: Clients = None,
    partition: Split = None,
    epsilon: Epsilon = None,
    head: Heads = None,
    seed: Seed = None,
    set_: Sets = None,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show rounds, ε, noise, bytes and expected signal before any image is read."""

    def body() -> None:
        from fedgist.config import load
        from fedgist.experiment import plan_record
        from fedgist.summary import print_plan

        resolved = load(config, _sets(data, method, clients, partition, epsilon, head, seed, set_))
        record = plan_record(resolved)
        _show(record, as_json, print_plan)

    _guarded(body, debug)


@app.command()
def evaluate(
    folder: Annotated[Path, typer.Argument(help="A folder that `fedgist run` wrote.")],
    test: Annotated[str, typer.Option("--test", help="Named set, file or folder of real images.")],
    split: Annotated[str, typer.Option("--split", help="Which split of it.")] = "test",
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Score the classifiers of a finished run on other real images."""

    def body() -> None:
        from fedgist.evaluation import evaluate_folder
        from fedgist.summary import print_scores

        _show(evaluate_folder(folder, test, split), as_json, print_scores)

    _guarded(body, debug)


@encoders.command("list")
def encoder_list(as_json: AsJson = False, debug: Debug = False) -> None:
    """List the encoders that ship with FedGist or that it can load."""

    def body() -> None:
        from fedgist.encoders import encoder_names
        from fedgist.summary import print_names

        _show(encoder_names(), as_json, print_names)

    _guarded(body, debug)


@encoders.command("info")
def encoder_info(
    name: Annotated[str, typer.Argument(help="Name, file or folder of an encoder.")],
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Show an encoder's hash, sizes, sources, licences and quality."""

    def body() -> None:
        from fedgist.encoders import encoder_info as info
        from fedgist.summary import print_record

        _show(info(name), as_json, print_record)

    _guarded(body, debug)


@encoders.command("train")
def encoder_train(
    images: Annotated[Path, typer.Argument(help="Public images: a folder, or .npy [n,3,64,64].")],
    out: Annotated[Path, typer.Option("--out", help="The .safetensors file to write.")],
    shown: Annotated[int, typer.Option("--shown", help="Images shown in all.")] = 400_000,
    held_out: Annotated[float, typer.Option("--held-out", help="Share that is measured.")] = 0.05,
    seed: Annotated[int, typer.Option("--seed", help="Seed of the training.")] = 0,
    debug: Debug = False,
) -> None:
    """Train a codec on public images of your own. Stopped, it goes on where it was."""

    def body() -> None:
        from fedgist.encoders.make import train_own

        def note(images: int, db: float) -> None:
            print(f"{images:>9,} of {shown:,} images, {db:.2f} dB", file=sys.stderr)

        codec = train_own(images, out, shown=shown, held_out=held_out, seed=seed, log=note)
        print(f"Written to {out} ({codec.digest[:12]}); use it with --set method.encoder={out}")

    _guarded(body, debug)


@app.callback(invoke_without_command=True)
def version(
    show: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False,
) -> None:
    """Handle options that need no command."""
    if show:
        print(fedgist.__version__)
        raise typer.Exit


def main() -> None:
    """Entry point."""
    # Threads that spin while they wait make a shared machine several times slower. Read by the
    # OpenMP library when PyTorch loads it, which is later than here.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    app()


def _sets(
    data: str | None,
    method: str | None,
    clients: int | None,
    partition: str | None,
    epsilon: float | None,
    heads: list[str] | None,
    seed: int | None,
    sets: Iterable[str] | None,
) -> list[str]:
    """Spell options as settings, so that there is one way to configure a run."""
    out = []
    for key, value in (
        ("data.source", data),
        ("method.name", method),
        ("data.clients", clients),
        ("data.partition", partition),
        ("privacy.epsilon", epsilon),
        ("method.heads", heads or None),
        ("seed", seed),
    ):
        if value is not None:
            out.append(f"{key}={json.dumps(value) if isinstance(value, str | list) else value}")
    return out + list(sets or ())


def _show(record: Any, as_json: bool, pretty: Callable[[Any], None]) -> None:
    if as_json:
        from fedgist.report.record import to_json

        print(to_json(record))
    else:
        pretty(record)


def _guarded(body: Callable[[], None], debug: bool) -> None:
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
        raise typer.Exit(2) from None
    except KeyboardInterrupt:
        print("fedgist: stopped; files that were written are whole", file=sys.stderr)
        raise typer.Exit(130) from None


class _Bars(Progress):
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

    def __enter__(self) -> _Bars:
        self._bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._finish()
        self._bar.stop()

    def stage(self, text: str) -> None:
        self._finish()
        self._task = self._bar.add_task(text, total=None, note="")

    def client(self, done: int, total: int, visit: Visit) -> None:
        note = f"{visit.bytes_up / 1024:.0f} KiB each, {visit.seconds:.2f} s"
        self._bar.update(self._task, completed=done, total=total, note=note)

    def _finish(self) -> None:
        if self._task is not None:
            task = self._bar.tasks[self._task]
            self._bar.update(self._task, completed=task.total or 1, total=task.total or 1)
