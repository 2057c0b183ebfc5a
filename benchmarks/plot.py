"""Draw the accuracy sweeps of committed result files as one SVG of small multiples.

Usage: python benchmarks/plot.py [RESULTS.json ...] [--out FIGURE.svg]

Without files it reads the sweeps in benchmarks/results. Lines are means over seeds, bands reach
from the least to the greatest seed. The same results give the same bytes. Mid-tones on no ground:
the figure reads on white and on near-black pages.
"""

from __future__ import annotations

import argparse
import io
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sweeps import FILES, Point, normalised, series

from fedgist.bench.report import STYLE, TEXT
from fedgist.report.record import read_json
from fedgist.whole import write_whole

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"1": "#d9702a", "10": "#2a86d0"}


@dataclass(frozen=True)
class Anchor:
    """A published result on the full data set.

    Attributes:
        eps: its ε.
        accuracy: in percent.
        text: beside it, or empty.
        offset: of the text, in points.
    """

    eps: str
    accuracy: float
    text: str = ""
    offset: tuple[float, float] = (0, 0)


@dataclass(frozen=True)
class Panel:
    """One sweep.

    Attributes:
        title: above the panel.
        what: what its cases vary, as they are named.
        head: whose accuracy is drawn.
        label: below the horizontal axis.
        ticks: of the horizontal axis, or None for matplotlib's own.
        log: whether the horizontal axis is logarithmic.
        anchors: published results to compare with.
    """

    title: str
    what: str
    head: str
    label: str
    ticks: tuple[float, ...] | None = None
    log: bool = False
    anchors: tuple[Anchor, ...] = ()


SIZES = (100, 300, 1000, 3000, 6000)
# Tramèr and Boneh, arXiv 2011.11660 (ε = 3); DP-FETA as measured by DPImageBench, arXiv 2503.14681.
SCATTERNET = (Anchor("3", 89.7, "DP-SGD on ScatterNet, ε = 3", (0, -9)),)
UNNAMED = (Anchor("3", 89.7),)
FETA = (Anchor("1", 81.7), Anchor("10", 87.3, "DP-FETA", (4, 6)))
PANELS = (
    (
        Panel("Dimension", "dimension", "lda", "directions d", (32, 64, 128, 256, 512), True,
              SCATTERNET),
        Panel("Clipping", "clip quantile", "lda", "public quantile of norms",
              (0.0, 0.25, 0.5, 0.75, 1.0), False, UNNAMED),
        Panel("Budget", "share of the means", "lda", "share of the means (rest: covariance)",
              (0.0, 0.25, 0.5, 0.75, 1.0), False, UNNAMED),
    ),
    (
        Panel("Data: lda on scattering", "images a class", "lda", "images a class", SIZES, True),
        Panel("Data: qda on the pca codec", "images a class", "qda", "images a class", SIZES,
              True),
        Panel("Data: decoded images → MLP", "images a class", "decode", "images a class", SIZES,
              True, FETA),
    ),
)  # fmt: skip


def main() -> int:
    """Draw the files named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", type=Path, nargs="*")
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "figures" / "accuracy.svg")
    args = parser.parse_args()
    folder = ROOT / "benchmarks" / "results"
    rows = cases(args.files or [folder / f"{name}.json" for name in FILES])
    args.out.parent.mkdir(parents=True, exist_ok=True)
    write_whole(args.out, svg(rows))
    print(f"written: {args.out}", file=sys.stderr)
    return 0


def cases(files: Iterable[Path]) -> list[dict[str, Any]]:
    """Return the cases of all files."""
    return [row for path in files for row in read_json(path)["accuracy"]]


def svg(rows: list[dict[str, Any]]) -> bytes:
    """Draw every panel; the same cases give the same bytes."""
    with plt.rc_context(STYLE):
        height, width = len(PANELS), max(map(len, PANELS))
        figure, axes = plt.subplots(
            height, width, figsize=(9.6, 5.6), sharey="row", squeeze=False, layout="constrained"
        )
        for panels, line in zip(PANELS, axes, strict=True):
            for panel, ax in zip(panels, line, strict=True):
                draw(ax, panel, rows)
            line[0].set_ylabel("test accuracy, %")
        legend(figure)
        out = io.BytesIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
        plt.close(figure)
    return out.getvalue()


def draw(ax: Axes, panel: Panel, rows: list[dict[str, Any]]) -> None:
    """Draw one sweep: a line for each ε, one without privacy, published results."""
    line(ax, series(rows, panel.what, panel.head, "10", "ceiling"), TEXT, dashed=True)
    for eps, colour in COLOURS.items():
        line(ax, series(rows, panel.what, panel.head, eps), colour)
        if panel.what == "clip quantile" and (point := normalised(rows, panel.head, eps)):
            ax.axhline(point.mean, color=colour, lw=0.9, ls=(0, (1, 2)))
    if panel.log:
        ax.set_xscale("log")
        ax.minorticks_off()
    if panel.ticks:
        ax.set_xticks(panel.ticks, [thousands(t) for t in panel.ticks])
    for anchor in panel.anchors:
        mark(ax, panel, anchor)
    ax.set_title(panel.title, fontsize=9.5, fontweight="bold", loc="left")
    ax.set_xlabel(panel.label)
    ax.grid(axis="y", color=TEXT, alpha=0.25, lw=0.6)
    ax.tick_params(length=2.5)


def line(ax: Axes, points: list[Point], colour: str, dashed: bool = False) -> None:
    """Draw means over a band from the least to the greatest seed."""
    x = [p.x for p in points]
    ax.fill_between(x, [p.low for p in points], [p.high for p in points], color=colour, alpha=0.25,
                    lw=0)  # fmt: skip
    look: dict[str, Any] = {"ls": "--", "lw": 1.1} if dashed else {"marker": "o", "ms": 3.2}
    ax.plot(x, [p.mean for p in points], color=colour, **({"lw": 1.6} | look))


def mark(ax: Axes, panel: Panel, anchor: Anchor) -> None:
    """Draw a published result: across the panel, or at the full data set where data vary."""
    colour = COLOURS.get(anchor.eps, TEXT)
    if panel.what == "images a class":
        at, side = 1.4 * SIZES[-1], "right"  # beside the last point, not on it
        look: dict[str, Any] = {"marker": "D", "ms": 4.5, "mfc": "none", "ls": "none"}
        ax.plot([at], [anchor.accuracy], color=colour, **look)
    else:
        at, side = (panel.ticks or (0,))[0], "left"
        ax.axhline(anchor.accuracy, color=colour, lw=0.8)
    ax.annotate(
        anchor.text,
        (at, anchor.accuracy),
        anchor.offset,
        textcoords="offset points",
        color=colour,
        fontsize=7.5,
        ha=side,
    )


def thousands(number: float) -> str:
    """Return ``3k`` for 3,000: labels of a logarithmic axis stand close."""
    return f"{number / 1000:g}k" if number >= 1000 else f"{number:g}"


def legend(figure: Figure) -> None:
    """Say once, above all panels, what the lines are."""
    marks = [
        plt.Line2D([], [], color=COLOURS["1"], marker="o", ms=3.2, label="ε = 1"),
        plt.Line2D([], [], color=COLOURS["10"], marker="o", ms=3.2, label="ε = 10"),
        plt.Line2D([], [], color=TEXT, ls="--", lw=1.1, label="no privacy, same head"),
        plt.Line2D([], [], color=TEXT, lw=0.9, ls=(0, (1, 2)), label="records scaled to norm 1"),
        plt.Line2D([], [], color=TEXT, marker="D", ms=4.5, mfc="none", ls="none",
                   label="published, full data"),
    ]  # fmt: skip
    figure.legend(
        handles=marks, loc="outside upper left", ncols=len(marks), frameon=False, fontsize=8.5
    )


if __name__ == "__main__":
    sys.exit(main())
