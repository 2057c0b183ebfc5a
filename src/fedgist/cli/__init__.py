"""The command line: parses and calls, no logic.

Results go to stdout, progress to stderr. Exit codes: 0 done, 1 a check failed or an exchange could
not be brought to an end, 2 wrong use or bad input.
"""

from __future__ import annotations

import os
from typing import Annotated

import typer

import fedgist
from fedgist.cli.audit import add_audit
from fedgist.cli.bench import add_bench
from fedgist.cli.experiments import add_experiments
from fedgist.cli.export import add_export
from fedgist.cli.sites import add_sites

__all__ = ["app", "main"]

app = typer.Typer(
    name="fedgist",
    help="Learn from images that may not move: one upload, exact privacy, a classifier and images.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
add_experiments(app)
add_audit(app)
add_bench(app)
add_export(app)
add_sites(app)


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
