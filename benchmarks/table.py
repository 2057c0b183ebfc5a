"""Write the tables of the README and of docs/results.md from a committed result file.

Usage: python benchmarks/table.py benchmarks/results/fedkt_csd_fashion.json
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

from sections import others
from seeds_page import figures, splits
from sweeps import ROOT, found, table

from fedgist.bench.report import cell
from fedgist.report.record import read_json

HEADS = {
    "qda": "`qda`, quadratic discriminant",
    "lda": "`lda`, linear discriminant",
    "ridge": "`ridge`",
    "decode": "`decode`: MLP trained on synthetic images",
    "convnet": "`decode`: ConvNet-3 trained on synthetic images",
}


# Result file, how its cases are named, head, what the reader is told, track.
BEST = (
    ("logistic_fashion", "logistic regression in seven rounds", "logistic",
     "`logistic` on scattering, seven rounds", "public images"),
    ("accuracy_fashion", "discriminant on scattering", "lda",
     "`lda` on scattering", "public images"),
    ("codec_fashion", "gist-ae", "qda", "`qda` on the codec `gist-ae` alone", "public images"),
    ("fedkt_csd_fashion", "", "qda", "`qda` on the codec `pca` alone", "public images"),
    ("codec_fashion", "gist-ae", "decode", "images decoded by `gist-ae` → MLP", "public images"),
    ("fedkt_csd_fashion", "", "decode", "images decoded by `pca` → MLP", "public images"),
    ("match_fashion", "matched images", "match", "matched images → ConvNet-3", "public images"),
    ("accuracy_fashion", "no public data: discriminant on a random network", "lda",
     "`lda` on a random network", "no public data"),
    ("no_public_fashion", "cosines", "qda", "`qda` on the codec `dct` alone", "no public data"),
    ("no_public_fashion", "cosines", "decode", "images decoded by `dct` → MLP", "no public data"),
)  # fmt: skip


def main() -> None:
    """Rewrite both files."""
    results = read_json(Path(sys.argv[1]))
    best, main_table = best_table(), accuracy(results)
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    block = f"<!-- results -->\n{best}\n<!-- /results -->"
    text = re.sub(r"<!-- results -->.*<!-- /results -->", lambda _: block, text, flags=re.DOTALL)
    block = f"<!-- splits -->\n{splits()}\n<!-- /splits -->"
    text = re.sub(r"<!-- splits -->.*<!-- /splits -->", lambda _: block, text, flags=re.DOTALL)
    readme.write_text(text, encoding="utf-8")
    for name, svg in figures().items():
        (ROOT / "docs" / "figures" / name).write_bytes(svg)
    text = page(results, best, main_table)
    (ROOT / "docs" / "results.md").write_text(text, encoding="utf-8")


def best_table() -> str:
    """Return the most accurate classifiers and synthetic sets of all result files."""
    lines = [
        "| built by the server | track | no privacy | ε = 10 | ε = 1 |",
        "|---|---|---|---|---|",
    ]
    for name, prefix, head, label, track in BEST:
        if (results := found(name)) is None:
            continue
        cases = {row["name"]: row for row in results["accuracy"]}
        at = [cases.get(f"{prefix}, ε = {e}" if prefix else f"ε = {e}") for e in (10, 1)]
        cells = [cell(at[0], f"{head}_ceiling"), *(cell(row, head) for row in at)]
        lines.append(f"| {label} | {track} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def accuracy(results: dict[str, Any]) -> str:
    """One row a head, one column a privacy level; mean ± standard deviation in percent."""
    cases = {row["name"]: row for row in results["accuracy"]}
    lines = ["| head | no privacy | ε = 10 | ε = 3 | ε = 1 |", "|---|---|---|---|---|"]
    for head, label in HEADS.items():
        name, suffix = ("decode", ", ConvNet-3") if head == "convnet" else (head, "")
        cells = [cell(cases.get(f"ε = 10{suffix}"), f"{name}_ceiling")]
        cells += [cell(cases.get(f"ε = {e}{suffix}"), name) for e in (10, 3, 1)]
        lines.append(f"| {label} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def page(r: dict[str, Any], best: str, main_table: str) -> str:
    """Return docs/results.md."""
    parts = [
        "# Results",
        f"Written by `benchmarks/table.py` from `benchmarks/results/{r['benchmark']}.json` "
        f"({commits(r)}; {r['device']}, {r['threads']} threads, torch "
        f"{r['versions'].get('torch')}). Full Fashion-MNIST, 10 clients, Dirichlet 0.1, δ = 1e-5, "
        "add/remove, noise by the server, track *public images*, 3 seeds, real test split, last "
        "step of training.",
        "## The most accurate classifiers and synthetic sets, %",
        best,
        "Every row has the whole budget. Configurations: `benchmarks/*_fashion.toml`, results of "
        "the same names. *No privacy* for networks: trained on the 60,000 real images.",
        *others(),
        "## All heads on the codec alone, %",
        main_table,
        "The defaults of the heads (mixing, eigenvalue floors, students) were chosen on a held-out "
        "sixth of Fashion-MNIST's training images; that choice is not counted in ε. Test images "
        "decided nothing.",
        "*No privacy*: closed-form heads from the exact sums; networks trained on the 60,000 real "
        "images with the same recipe and number of steps.",
        "Test images passed through the codec first: "
        + codec_line(r)
        + ". The published mechanism (raw codes, ε/2 + ε/2, exact counts, eigenvalue clamp): "
        + paper_line(r),
        "## The same sums however the images are dealt out",
        table(
            ("clients", "split", "sums identical", "release identical", "seconds"),
            [
                (
                    i["clients"],
                    i["split"],
                    i["sums_identical"],
                    i["release_identical"],
                    f"{i['seconds']:.1f}",
                )
                for i in r["invariance"]
            ],
        ),
        "## Participation",
        "100 clients, Dirichlet 0.1, ε = 10, one seed.",
        table(
            ("share", "images", *r["participation"][0]["accuracy"]),
            [
                (
                    f"{p['share']:.0%}",
                    f"{p['images']:,}",
                    *(f"{100 * a:.1f}" for a in p["accuracy"].values()),
                )
                for p in r["participation"]
            ],
        ),
        "## Cost",
        cost(r["cost"]),
        "## Membership inference",
        "One image, add/remove, against the noised sum (exact likelihood ratio, all other records "
        "known) and against the synthetic images (closest one; a similarity figure, not a "
        "guarantee). *Cap*: the most that any attack can reach at this noise. First seed.",
        membership(r),
    ]
    return "\n\n".join(parts) + "\n"


def commits(r: dict[str, Any]) -> str:
    """Name the commit that each part was measured at."""
    by: dict[str, list[str]] = {}
    for part, commit in r["commits"].items():
        by.setdefault(commit, []).append(part)
    return ", ".join(f"{' and '.join(parts)} at {commit}" for commit, parts in by.items())


def codec_line(r: dict[str, Any]) -> str:
    """Codec-consistent accuracies of both students."""
    out = []
    for row in r["accuracy"]:
        if "decode_codec_consistent" in row["mean"] and "published" not in row["name"]:
            out.append(f"{row['name']} {cell(row, 'decode_codec_consistent')}")
    return "; ".join(out)


def paper_line(r: dict[str, Any]) -> str:
    """Accuracy of the published mechanism, and the ε that its noise gives."""
    row = next(row for row in r["accuracy"] if "published" in row["name"])
    claim = row["runs"][0]["claim"]
    same = claim["readings"]["replace-same-class"]
    return (
        f"qda {cell(row, 'qda')}, decode {cell(row, 'decode')} at nominal ε = "
        f"{claim['nominal']:g}, which is ε = {same:.2f} if the counts are public and a record may "
        "change within its class, and no ε at all under add/remove."
    )


def cost(c: dict[str, Any]) -> str:
    """Bytes, seconds, memory."""
    rows = [
        (
            run["clients"],
            f"{run['bytes_up'] / 1024:.1f} KiB",
            f"{run['client_seconds_sum']:.1f} s",
            f"{run['server_seconds']:.2f} s",
            f"{run['memory_gib']:.2f} GiB",
        )
        for run in c["runs"]
    ]
    line = (
        f"Encoding runs at {c['encode_images_per_second']:,.0f} images/s on one thread and "
        f"{c['encode_images_per_second_all_threads']:,.0f} on all; a client's whole work takes "
        f"{c['statistics_over_encode']:.2f} times as long on one thread and "
        f"{c['statistics_over_encode_all_threads']:.2f} times on all. Closed-form heads; the "
        "network of `decode` comes on top at the server."
    )
    head = ("clients", "upload per client", "all clients together", "server", "peak memory")
    return table(head, rows) + "\n\n" + line


def membership(r: dict[str, Any]) -> str:
    """AUC of both attacks beside the cap."""
    rows = []
    for case in r["accuracy"]:
        for a in case["runs"][0]["membership"] or ():
            interval = "" if a["low"] is None else f" [{a['low']:.3f}, {a['high']:.3f}]"
            rows.append(
                (
                    case["name"],
                    a["attack"],
                    f"{a['auc']:.3f}{interval}",
                    f"{a['cap']:.3f}",
                    percent(a.get("tpr_at_1pct")),
                    percent(a.get("cap_tpr_at_1pct")),
                )
            )
    head = ("release", "attack", "AUC [95 %]", "cap", "TPR at 1 % FPR", "cap")
    return table(head, rows)


def percent(value: float | None) -> str:
    """Return a share in percent or a dash."""
    return "–" if value is None else f"{100 * value:.1f} %"


if __name__ == "__main__":
    main()
