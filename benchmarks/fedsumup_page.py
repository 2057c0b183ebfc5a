"""Write the tables and the figure of docs/fedsumup.md from committed result files.

Usage: python benchmarks/fedsumup_page.py

Tables stand between ``<!-- NAME -->`` and ``<!-- /NAME -->``. The figure has accuracy against SSIM
twice: of the upload as it is, and of the best picture that any attack made of it.
"""

from __future__ import annotations

import io
import re
import statistics
import sys
from collections.abc import Sequence
from typing import Any

import matplotlib

matplotlib.use("Agg")

from matplotlib import pyplot as plt
from sweeps import ROOT, found, table

from fedgist.bench.report import STYLE, TEXT
from fedgist.whole import write_whole

Rows = list[dict[str, Any]]
GROUPS = (  # how cases begin, what the legend says, colour, mark
    ("size", "FedSumUp, y = 4 … 20", "#2a86d0", "o"),
    ("λ", "FedSumUp, λ = 0.003 … 10", "#7d5bbe", "s"),
    ("bicubic", "bicubic thumbnails, y = 4 … 14", TEXT, "D"),
    ("DP-Pix", "DP-Pix, ε = 10, 100 for 16 pixels", "#d9702a", "^"),
    ("LDP-Slicing", "LDP-Slicing, ε = 4, 12 for a pixel", "#2d9d78", "v"),
    ("DeepFixCX", "DeepFixCX, 1 and 3 patches", "#c24b7a", "P"),
)
REFERENCES = ("class mean", "bicubic", "upload")


def main() -> int:
    """Rewrite page and figure with what result files there are."""
    page = ROOT / "docs" / "fedsumup.md"
    text = page.read_text(encoding="utf-8")
    for name in ("table", "colour"):
        if (results := found(f"fedsumup_{name}")) is not None:
            text = put(text, name, compared(results["accuracy"]))
    if (results := found("fedsumup_compressors")) is not None:
        head = ["compressor", "accuracy, %", "client seconds"]
        rows = [
            [r["name"], accuracy(r), f"{mean(r, 'client_seconds'):.1f}"]
            for r in results["accuracy"]
        ]
        text = put(text, "compressors", table(head, rows))
    if (results := found("fedsumup_scale")) is not None:
        text = put(text, "scale", scale(results["accuracy"]))
    if (results := found("fedsumup_sweeps")) is not None:
        text = put(text, "sweeps", compared(results["accuracy"], cost=False))
        figure = ROOT / "docs" / "figures" / "fedsumup.svg"
        write_whole(figure, frontier(results["accuracy"]))
    page.write_text(text, encoding="utf-8")
    return 0


def put(text: str, name: str, block: str) -> str:
    """Put a table between its marks."""
    marks = re.compile(rf"<!-- {name} -->.*<!-- /{name} -->", re.DOTALL)
    return marks.sub(lambda _: f"<!-- {name} -->\n{block}\n<!-- /{name} -->", text)


def compared(rows: Rows, cost: bool = True) -> str:
    """Return accuracy, what uploads show as they are and after the best attack, and cost."""
    head = ["method", "accuracy, %", "upload: PSNR / SSIM / distance", "MoIA", "best attack"]
    if cost:
        head += ["client seconds", "sent / received by a client"]
    base = next((mean(r, "client_seconds") for r in rows if r["name"].startswith("FedAvg")), None)
    lines = []
    for row in rows:
        line = [row["name"], accuracy(row), shown(row, "upload"), shown(row, "MoIA"), best(row)]
        if cost:
            spent = mean(row, "client_seconds")
            part = f" ({100 * spent / base:.0f} %)" if base else ""
            sent = f"{size(mean(row, 'bytes_up'))} / {size(mean(row, 'bytes_down'))}"
            line += [f"{spent:.1f}{part}", sent]
        lines.append(line)
    return table(head, lines)


def scale(rows: Rows) -> str:
    """Return accuracy by label skew and by number of clients, methods side by side."""
    by: dict[str, dict[str, str]] = {}
    for row in rows:
        method, _, what = row["name"].partition(", ")
        by.setdefault(what, {})[method] = accuracy(row)
    methods = list(dict.fromkeys(m for r in by.values() for m in r))
    return table(["", *methods], [[what, *(r[m] for m in methods)] for what, r in by.items()])


def accuracy(row: dict[str, Any]) -> str:
    """Return every seed's accuracy."""
    return ", ".join(f"{100 * score(run):.1f}" for run in row["runs"])


def score(run: dict[str, Any]) -> float:
    """Return the accuracy of a run's one classifier."""
    (head,) = run["heads"].values()
    return float(head["accuracy"])


def mean(row: dict[str, Any], key: str) -> float:
    """Return the mean over seeds."""
    return statistics.fmean(run[key] for run in row["runs"])


def attacks(row: dict[str, Any]) -> dict[str, dict[str, float]]:
    """Return the means over seeds of what each attack reached, by its name."""
    tables = [run["exposure"]["rows"] for run in row["runs"] if run.get("exposure")]
    out = {}
    for name in dict.fromkeys(a["name"] for t in tables for a in t):
        same = [a for t in tables for a in t if a["name"] == name]
        out[name] = {k: statistics.fmean(a[k] for a in same) for k in ("psnr", "ssim", "distance")}
    return out


def strongest(row: dict[str, Any]) -> tuple[str, dict[str, float]] | None:
    """Return the picture most alike to the originals by SSIM, the upload itself among them."""
    tried = {k: v for k, v in attacks(row).items() if k not in REFERENCES or k == "upload"}
    return max(tried.items(), key=lambda item: item[1]["ssim"]) if tried else None


def shown(row: dict[str, Any], name: str) -> str:
    """Return PSNR, SSIM and distance of one attack."""
    a = attacks(row).get(name)
    return f"{a['psnr']:.1f} / {a['ssim']:.2f} / {a['distance']:.2f}" if a else "–"


def best(row: dict[str, Any]) -> str:
    """Return the strongest attack and its figures."""
    most = strongest(row)
    return f"{shown(row, most[0])} ({most[0]})" if most else "–"


def size(count: float) -> str:
    """Return bytes as KiB or MiB."""
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 1024:.0f} KiB"


def frontier(rows: Rows) -> bytes:
    """Draw accuracy against SSIM, of uploads and of what attacks make of them."""
    with plt.rc_context(STYLE):
        figure, axes = plt.subplots(1, 2, figsize=(9.6, 4.4), sharey=True, layout="constrained")
        for ax, attacked in zip(axes, (False, True), strict=True):
            points = []
            for start, label, colour, mark in GROUPS:
                own = [r for r in rows if r["name"].startswith(start)]
                xy = [(similarity(r, attacked), 100 * statistics.fmean(map(score, r["runs"])))
                      for r in own]  # fmt: skip
                points += xy
                line = "none" if start == "λ" else "-"
                ax.plot(*zip(*xy, strict=True), marker=mark, ms=5, ls=line, lw=0.8, color=colour,
                        label=label)  # fmt: skip
            kept = sorted(undominated(points))
            ax.plot(*zip(*kept, strict=True), "o", ms=11, mfc="none", mec=TEXT, mew=0.9,
                    label="not dominated")  # fmt: skip
            ax.set_xlabel("SSIM of the best picture that an attack makes of it" if attacked else
                          "SSIM of the upload as it is")  # fmt: skip
            ax.grid(color=TEXT, alpha=0.25, lw=0.6)
        axes[0].set_ylabel("test accuracy, %")
        handles, labels = axes[0].get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside upper left", ncols=3, frameon=False)
        out = io.BytesIO()
        figure.savefig(
            out, format="svg", transparent=True, metadata={"Date": None, "Creator": None}
        )
        plt.close(figure)
    return out.getvalue()


def similarity(row: dict[str, Any], attacked: bool) -> float:
    """Return the SSIM of a case's upload, or of the strongest attack on it."""
    most = strongest(row)
    assert most is not None
    return most[1]["ssim"] if attacked else attacks(row)["upload"]["ssim"]


def undominated(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Return the points that no other betters in one figure without losing in the other."""
    return [
        (x, y)
        for x, y in points
        if not any(a <= x and b >= y and (a < x or b > y) for a, b in points)
    ]


if __name__ == "__main__":
    sys.exit(main())
