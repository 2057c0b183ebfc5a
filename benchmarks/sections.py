"""Sections of docs/results.md made from the result files beside the main one."""

from __future__ import annotations

from typing import Any

from performance_page import performance_table
from seeds_page import sections
from sweeps import FILES, by_size, found, sweep, table

from fedgist.bench.report import cell

__all__ = ["others"]


def others() -> list[str]:
    """Return the sections of the result files that were made beside the main one."""
    parts = dependence()
    if (scale := found("codec_scale")) is not None:
        parts += [
            "## What codecs keep of photographs",
            "Mean PSNR in dB of patches of 64 x 64 pixels, 3 x 64 x 64 numbers in 128, by how far "
            "a photograph was shrunk; *trained on*: patches of photographs that the codecs have "
            "seen. Photographs that they have not seen score as well: what is lost is what 128 "
            "numbers cannot hold, not what more training would find "
            "(`scripts/codec_by_scale.py`).",
            scale_table(scale),
        ]
    if (small := found("small_sets")) is not None:
        parts += [
            "## Small sets, %",
            "`benchmarks/small_sets.toml`; in brackets: no privacy. `lda` reads scattering "
            "features unless the case says otherwise, the other heads the `pca` codec; heads of "
            "one row share one release. Three sites are the drawing styles of Google, Twitter and "
            "Fluent; all rows of emoji are tested on all three styles. Their classes are unequal, "
            "and heads take classes as equally likely (`method.prior=counts` takes the counts).",
            small_table(small),
        ]
    parts += sections()
    if (seconds := found("seconds")) is not None:
        parts += ["## Seconds and bytes", seconds_table(seconds)]
    if (performance := found("performance")) is not None:
        parts += ["## Cost and its growth", performance_table(performance)]
    return parts


def scale_table(results: dict[str, Any]) -> str:
    """One row a codec and split, one column a scale."""
    splits = ("trained", "trained on"), ("held out", "held out")
    scales = sorted({r["short_side"] for r in results["rows"]})
    at = {(r["split"], r["short_side"]): r["psnr_db"] for r in results["rows"]}
    head = ("codec", "photographs", *(f"short side {s}" for s in scales), "all patches")
    return table(
        head,
        [
            (
                f"`{codec}`",
                label,
                *(f"{at[split, s][codec]:.1f}" for s in scales),
                f"{results['mean_db'][split][codec]:.1f}",
            )
            for codec in results["mean_db"]["trained"]
            for split, label in splits
        ],
    )


def dependence() -> list[str]:
    """Return figure and tables of what accuracy depends on, if the sweeps were run."""
    read = {name: found(name) for name in FILES}
    rows = [row for results in read.values() if results for row in results["accuracy"]]
    if not rows:
        return []
    parts = [
        "## What accuracy depends on",
        "![Accuracy against dimension, clipping, budget shares and data](figures/accuracy.svg)",
        "Means of 3 seeds, bands from the least to the greatest (`benchmarks/plot.py`). Top row: "
        "`lda` on 512 scattering directions unless the axis says otherwise. Published: DP-SGD on "
        "ScatterNet features (arXiv 2011.11660), DP-FETA as measured by DPImageBench (arXiv "
        "2503.14681). Whole numbers: "
        "seeds differ by a point or more. These are reports: test labels chose no default.",
    ]
    for what, head, title in (
        ("dimension", "lda", "Dimension"),
        ("clip quantile", "lda", "Clipping to a public quantile of norms (dotted in the figure: "
         "the default, every record scaled to norm 1)"),
        ("share of the means", "lda", "Share of the squared budget for the class means"),
        ("images a class", "lda", "Images a class: `lda` on scattering"),
        ("images a class", "qda", "Images a class: `qda` on the `pca` codec"),
        ("images a class", "decode", "Images a class: decoded images → MLP"),
    ):  # fmt: skip
        parts += [f"{title}:", sweep(rows, what, head)]
    if (few := found("directions_fashion")) is not None:
        parts += [
            "Fewer images carry fewer directions. `lda`, ε = 1:",
            by_size(few["accuracy"]),
        ]
    if (limits := found("limits_fashion")) is not None:
        parts += [
            "What limits a linear classifier at 512 directions. Along a row: noise. Down a column: "
            "the discriminant's bias, which more rounds take away. What then lacks is the "
            "encoder's, and that of a linear rule:",
            limits_table(limits),
        ]
    return parts


def limits_table(limits: dict[str, Any]) -> str:
    """Set accuracies side by side that differ in noise, in the head, or in neither."""
    exact = {row["name"]: row for row in limits["accuracy"]}
    best: dict[str, Any] = {}
    for name in ("accuracy_fashion", "logistic_fashion"):
        best |= {row["name"]: row for row in (found(name) or {"accuracy": []})["accuracy"]}
    lda = [best.get(f"discriminant on scattering, ε = {e}") for e in (10, 1)]
    rounds = [best.get(f"logistic regression in seven rounds, ε = {e}") for e in (10, 1)]
    rows = [
        ("`lda`, one round", cell(lda[0], "lda_ceiling"), *(cell(r, "lda") for r in lda)),
        (
            "`logistic`, seven rounds",
            cell(exact.get("logistic regression in seven rounds, no privacy"), "logistic"),
            *(cell(r, "logistic") for r in rounds),
        ),
    ]
    return table(("head, the same features", "no privacy", "ε = 10", "ε = 1"), rows)


def seconds_table(r: dict[str, Any]) -> str:
    """Seconds of one core at client and server, bytes up, and ratios."""
    first = r["cases"][0]
    rows = [
        (
            c["name"],
            f"{c['encode']:.2f}",
            f"{max(c['client'] - c['encode'], 0):.2f}",
            f"{c['client_over_encode']:.2f}",
            f"{c['bytes_up'] / 1024:,.0f}",
            f"{c['server']:.2f}",
            f"{c['server'] / first['server']:,.1f}",
        )
        for c in r["cases"]
    ]
    text = (
        f"One client with {first['images']:,} images of 28x28 pixels, CPU seconds of one core "
        f"(`benchmarks/seconds.py`, {r['commit']}), medians of "
        f"{first['repeats']} whole runs, one of matched images. *Statistics*: what the client's "
        "work takes beyond a bare pass of the encoders. *Server*: noise, heads, training."
    )
    head = (
        "outcome", "client: encoding, s", "client: statistics, s", "client / encoding",
        "KiB up", "server, s", "server / `lda`'s",
    )  # fmt: skip
    return text + "\n\n" + table(head, rows)


def small_table(results: dict[str, Any]) -> str:
    """One row a case, every head's accuracy; ceilings in brackets."""
    heads = list(dict.fromkeys(h for row in results["accuracy"] for h in row["runs"][0]["heads"]))
    rows = []
    for row in results["accuracy"]:
        cells = []
        for head in heads:
            text = cell(row, head)
            if f"{head}_ceiling" in row["mean"]:
                text += f" ({100 * row['mean'][f'{head}_ceiling']:.1f})"
            cells.append(text)
        rows.append((row["name"], *cells))
    return table(("case", *heads), rows)
