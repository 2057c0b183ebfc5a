"""The seeds' tables: sections of docs/results.md from the lines of `fedgist bench`.

FedKT-CSD against one upload of other things, over splits, clients, participation and resolution;
one-shot distillation without and with DP, beside the numbers that its paper gives.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from sweeps import RESULTS, found

from fedgist.bench.lines import read_lines
from fedgist.bench.report import cell, figure, records, shown, table

__all__ = ["figures", "sections", "splits"]

Records = Sequence[Mapping[str, Any]]

# What a row is called, the case's name without its sweep, its head.
OURS = (
    ("FedKT-CSD `lda`, ε = 10", "FedKT-CSD, ε = 10", "lda"),
    ("FedKT-CSD `lda`, ε = 1", "FedKT-CSD, ε = 1", "lda"),
    ("FedKT-CSD decoded images → ConvNet-3, ε = 10", "FedKT-CSD, ε = 10", "decode"),
    ("FedKT-CSD `lda` on a random network, ε = 10", "FedKT-CSD on a random network, ε = 10", "lda"),
    ("`logistic`, seven rounds, ε = 10", "logistic, seven rounds, ε = 10", "logistic"),
)
OTHERS = (
    ("one-shot FedAvg", "ensemble", "average"),
    ("DENSE", "DENSE", "dense"),
    ("Co-Boosting", "Co-Boosting", "co_boosting"),
    ("FedSD2C", "FedSD2C", "fedsd2c"),
    ("*ceiling: ensemble of all networks*", "ensemble", "ensemble"),
)
CENTRAL = ("*ceiling: centralised*", "centralised, six epochs", "oneshot_fedavg")
SPLITS = (
    *OURS, OTHERS[0], ("FedDF, digits unlabelled", "FedDF, digits as public images", "feddf"),
    *OTHERS[1:], ("FedAvg, ten rounds", "FedAvg, ten rounds of one epoch", "fedavg"), CENTRAL,
)  # fmt: skip
CLIENTS = (
    ("FedKT-CSD `lda`, ε = 10", "FedKT-CSD's lda, ε = 10", "lda"),
    ("one-shot FedAvg", "one-shot FedAvg", "oneshot_fedavg"), *OTHERS[1:],
)  # fmt: skip
SHARES = (
    ("FedKT-CSD `lda`, ε = 10", "FedKT-CSD's lda, ε = 10", "lda"),
    ("the same, no privacy", "FedKT-CSD's lda, no privacy", "lda"),
    *(row for row in OTHERS if row[0] != "Co-Boosting"),
)
SMALL = (
    ("FedKT-CSD `lda`, ε = 10", "FedKT-CSD, ε = 10", "lda"),
    ("the same, no privacy", "FedKT-CSD, no privacy", "lda"),
    ("FedKT-CSD decoded images → ConvNet-3, ε = 10", "FedKT-CSD, ε = 10", "decode"),
    *OTHERS, ("*ceiling: centralised*", "centralised, ten epochs", "oneshot_fedavg"),
)  # fmt: skip
PIXELS = (
    ("Fashion-MNIST, `lda`", "Fashion-MNIST, 20,000 images", "lda"),
    ("Fashion-MNIST, `qda` on `pca` codes", "Fashion-MNIST, 20,000 images", "qda"),
    ("emoji by style, `lda`", "emoji by style", "lda"),
    ("emoji, no privacy", "emoji by style", "lda_ceiling"),
)

SPLIT_NAMES = {
    "pathological:2": "two classes each",
    "dirichlet:0.1": "Dirichlet 0.1",
    "dirichlet:0.5": "Dirichlet 0.5",
}

# Seed 003's rows: name, ε, (result file, case, head) on Fashion-MNIST and on digits, published.
DISTILLED = (
    ("FedAvg, 20 rounds", "∞", ("fedavg_fashion", "FedAvg, 20 rounds, no privacy", "fedavg"),
     ("distillation_mnist", "FedAvg, 20 rounds, no privacy", "fedavg"), "81.0 / 95.7"),
    ("DOSFL", "∞", ("oneshot_distilled_fashion", "DOSFL, 10 steps of 5 inputs", "distilled"),
     ("distillation_mnist", "DOSFL, no privacy", "distilled"), "50.4 / 76.5"),
    ("FedD3", "∞",
     ("oneshot_distilled_fashion", "FedD3, kernel inducing points, 10 images a class", "distilled"),
     ("distillation_mnist", "FedD3, 10 images a class, no privacy", "distilled"), "73.6 / 91.9"),
    ("FedSynth, five rounds", "∞",
     ("oneshot_distilled_fashion", "FedSynth, 3 steps of 3 inputs, 5 rounds", "fedsynth"),
     None, "–"),
    ("distribution matching (`dm`)", "∞",
     ("dm_fashion", "DM, 10 images a class, real start, no privacy", "distilled"),
     ("distillation_mnist", "DM, 10 images a class, real start, no privacy", "distilled"),
     "82.7 / 96.2 (ANIS)"),
    ("DPFL: DP-FedAvg, one round", "10",
     ("rounds_fashion", "DPFL, clipped updates, 1 round, ε = 10 for an image", "dp_fedavg"),
     ("distillation_mnist", "DPFL, 1 round, ε = 10 for an image", "dp_fedavg"), "74.1 / 80.1"),
    ("PPFL-DC", "10", ("rounds_fashion", "PPFL-DC, ε = 10", "distilled"),
     ("distillation_mnist", "PPFL-DC, ε = 10", "distilled"), "73.6 / 90.4"),
    ("NDPDC", "10", ("ndpdc_fashion", "NDPDC, ε = 10", "distilled"),
     ("distillation_mnist", "NDPDC, ε = 10", "distilled"), "81.0 / 95.4"),
    ("FedDM, three rounds", "10", ("feddm_fashion", "FedDM, 3 rounds, ε = 10", "distilled"),
     ("distillation_mnist", "FedDM, 3 rounds, ε = 10", "distilled"), "81.0 / 95.5"),
    ("ANIS, sound", "10", ("anis_fashion", "ANIS, sound, ε = 10", "distilled"),
     ("distillation_mnist", "ANIS, sound, ε = 10", "distilled"), "81.5 / 95.8"),
    ("additive class sums, matched (`collab_dm`)", "10",
     ("additive_fashion", "additive, small networks, ε = 10", "distilled"),
     ("distillation_mnist", "additive, ε = 10", "distilled"), "–"),
    ("FedKT-CSD `lda`", "10", ("accuracy_fashion", "discriminant on scattering, ε = 10", "lda"),
     ("distillation_mnist", "FedKT-CSD, lda, ε = 10", "lda"), "–"),
)  # fmt: skip


def sections() -> list[str]:
    """Return the sections of what has been run."""
    return [part for made in (_splits, _over, _distilled) for part in made()]


def _splits() -> Iterator[str]:
    if lines := _lines("splits_fashion"):
        yield "## One upload, over splits"
        yield (
            "`fedgist bench benchmarks/splits_fashion.toml`: 10,000 images of Fashion-MNIST, ten "
            "clients, ConvNet-3 of width 24 everywhere, six local epochs (published runs: two "
            "hundred), settings chosen on held-out images (`choices_fashion.toml`), two seeds "
            "where ± stands, else one. Rows without ε promise nothing. FedKT-CSD's sums do not "
            "depend on the split; it, `logistic` and FedSD2C use encoders fitted on public images, "
            "all others and the random network no public data. Published in DENSE's paper (arXiv "
            "2112.12371) for Dirichlet 0.1 / 0.5, five clients: FedAvg 41.7 / 83.7, DENSE "
            "50.3 / 85.9."
        )
        yield pivot(lines, "split", SPLITS, cost=True)
        if full := _lines("oneshot_fashion"):
            yield (
                "On all 60,000 images, Dirichlet 0.1, three local epochs, one seed "
                "(`oneshot_fashion.toml`): what the server makes of ten networks, and the ensemble "
                "of the same networks, whose probabilities or logits are averaged."
            )
            yield _costs(full)
    if codes := _lines("oneshot_codes_fashion"):
        yield (
            "One upload of codes, decoders, noised images or feature sums, all 60,000 images, "
            "Dirichlet 0.1, one seed (`oneshot_codes_fashion.toml`):"
        )
        yield _costs(codes)
    if lines := _lines("oneshot_small") + _lines("oneshot_emoji"):
        yield "The same on small sets (`oneshot_small.toml`, `oneshot_emoji.toml`), one seed:"
        yield pivot(lines, "data", SMALL)
    if choices := _lines("choices_fashion"):
        yield (
            "How settings were chosen: 5,000 images, Dirichlet 0.1, tested on images held out of "
            "the training images, two seeds (`choices_fashion.toml`). Papers average logits and "
            "begin with fresh weights; after few local epochs that is far worse."
        )
        yield _costs(choices)


def _over() -> Iterator[str]:
    if lines := _lines("clients_fashion"):
        yield "Over the number of clients (`clients_fashion.toml`, Dirichlet 0.1, one seed):"
        yield "![Accuracy against the number of clients](figures/clients.svg)"
        yield pivot(lines, "clients", CLIENTS)
    if lines := _lines("participation_fashion"):
        yield (
            "Over the share of twenty clients that take part (`participation_fashion.toml`, two "
            "seeds where ± stands). A tenth is two clients, which lack whole classes: no method "
            "learns what nobody sends."
        )
        yield pivot(lines, "participation", SHARES)
    if lines := _lines("resolution"):
        yield "Over the side in pixels that images are read at, ε = 10 (`resolution.toml`):"
        yield pivot(lines, "pixels", PIXELS)


def _distilled() -> Iterator[str]:
    if not _lines("distillation_mnist"):
        return
    yield "## One-shot distillation, without and with DP"
    yield (
        "Fashion-MNIST: all 60,000 images, ten clients, Dirichlet 0.5. MNIST: 5,000 digits, four "
        "clients. Published: Fashion-MNIST / MNIST as the ANIS paper prints them, all digits, with "
        "ε, split and number of clients not stated, and clipping rules under which no finite ε "
        "holds ([why](distillation.md#why-anis-as-published-is-not-private)). Here ε is for one "
        "image, add/remove, δ = 1e-5, and holds."
    )
    rows = []
    for name, epsilon, fashion, digits, published in DISTILLED:
        rows.append((name, epsilon, _one(fashion), _one(digits), published))
    yield table(("method", "ε", "Fashion-MNIST", "MNIST, 5,000", "published"), rows)


def figures() -> dict[str, bytes]:
    """Draw what depends on a number; return SVG by file name."""
    asked = {"clients.svg": ("clients_fashion", CLIENTS)}
    drawn = {name: figure(_chosen(_lines(of), rows)) for name, (of, rows) in asked.items()}
    return {name: svg for name, svg in drawn.items() if svg is not None}


def splits() -> str:
    """Return the README's table, without cost."""
    return pivot(_lines("splits_fashion"), "split", SPLITS)


def _chosen(lines: Records, rows: Sequence[tuple[str, str, str]]) -> Iterator[dict[str, Any]]:
    """Yield lines of the heads that a table shows, under the names that it has for them."""
    for title, stem, head in rows:
        name = re.sub(r"[*`]", "", title)
        for r in lines:
            if r["stem"] == stem and head in r.get("heads", {}):
                case = {"case": f"{name}, {r['sweep']}", "stem": name}
                yield dict(r) | case | {"heads": {name: r["heads"][head]}}


def _costs(lines: Records) -> str:
    """Return one row a case: the head that it is about, the ensemble behind it, cost."""
    rows = []
    for r in records(lines):
        heads = [h for h in r["mean"] if h not in ("ensemble", "average")]
        best = " / ".join(cell(r, h) for h in heads or ["ensemble"])
        behind = cell(r, "ensemble") if heads else "–"
        epsilon = "∞" if math.isinf(r["epsilon"]) else f"{r['epsilon']:g}"
        rows.append((r["case"], epsilon, best, behind, *_cost(r)))
    return table(
        ("case", "ε", "accuracy", "its ensemble", "KiB up", "clients, s", "server, s"), rows
    )


def pivot(
    lines: Records, label: str, rows: Sequence[tuple[str, str, str]], *, cost: bool = False
) -> str:
    """Return a table of one row a method and one column a value of a sweep.

    A case without the sweep stands in every column. With ``cost``: bytes that a client sends, and
    seconds of all clients and of the server, at the first column's value that was run.
    """
    rows_of = records(lines)
    values = list(dict.fromkeys(r["sweep"][label] for r in rows_of if label in r["sweep"]))
    if all(isinstance(v, int | float) for v in values):
        values.sort()
    body = []
    for title, stem, head in rows:
        mine = [r for r in rows_of if r["stem"] == stem and head in r["mean"]]
        if not mine:
            continue
        by = {r["sweep"].get(label): r for r in mine}
        cells = [cell(by.get(v) or by.get(None), head) for v in values]
        body.append((title, *cells, *(_cost(mine[0]) if cost else ())))
    more = ("KiB up", "clients, s", "server, s") if cost else ()
    names = (SPLIT_NAMES.get(v, shown(v)) for v in values)
    return table((label, *names, *more), body)


def _cost(record: Mapping[str, Any]) -> tuple[str, str, str]:
    up, clients, server = (record[k] for k in ("bytes_up", "client_seconds", "server_seconds"))
    return f"{up / 1024:,.0f}", "–" if clients is None else f"{clients:,.0f}", f"{server:,.0f}"


def _one(where: tuple[str, str, str] | None) -> str:
    """Return one number of a result file of either kind."""
    if where is None:
        return "–"
    name, case, head = where
    if (results := found(name)) is not None:
        rows = {r["name"]: r for r in results["accuracy"]}
    else:
        rows = {r["case"]: r for r in records(_lines(name))}
    return cell(rows.get(case), head)


@cache
def _lines(name: str) -> list[dict[str, Any]]:
    return read_lines(RESULTS / f"{name}.jsonl")
