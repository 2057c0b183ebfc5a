"""The command that writes what a run left in other formats."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from fedgist.cli.common import AsJson, Debug, Out, guarded, show

__all__ = ["add_export"]

As = Annotated[
    list[str],
    typer.Option(
        "--as",
        help="imagefolder, parquet, webdataset, medmnist, dpimagebench, safetensors, onnx or "
        "torch; repeat.",
    ),
]


def add_export(app: typer.Typer) -> None:
    """Register the command of this file."""
    app.command()(export)


def export(
    run: Annotated[Path, typer.Argument(help="A folder that a run wrote.")],
    as_: As,
    out: Out = Path("fedgist-export"),
    head: Annotated[str | None, typer.Option("--head", help="Which classifier.")] = None,
    licence: Annotated[str, typer.Option("--licence", help="For the cards: cc-by-4.0 ...")] = "",
    creator: Annotated[str, typer.Option("--creator", help="Who publishes, for the cards.")] = "",
    url: Annotated[str, typer.Option("--url", help="Where it will be published.")] = "",
    published: Annotated[str, typer.Option("--published", help="On which day: 2026-12-01.")] = "",
    scores: Annotated[
        bool, typer.Option("--scores", help="Tell scores on real images, which no noise covers.")
    ] = False,
    as_json: AsJson = False,
    debug: Debug = False,
) -> None:
    """Write the synthetic set and the classifier of a run in other formats, each with its cards."""

    def body() -> None:
        from fedgist.report.formats import export as write
        from fedgist.report.readme import Terms

        terms = Terms(licence, creator, url, published)
        rows = write(run, as_, out, head=head, terms=terms, scores=scores)
        show(rows, as_json, _print)

    guarded(body, debug)


def _print(rows: list[dict[str, Any]]) -> None:
    for row in rows:
        text = f"{row['path']}: {row['bytes']:,} bytes, {row['seconds']:.1f} s"
        if "head" in row:
            text += f", head {row['head']}"
        if "difference" in row:
            text += f", largest difference to FedGist {row['difference']:.1e}"
        print(text)
