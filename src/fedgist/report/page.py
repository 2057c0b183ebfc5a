"""report.html: one page that loads nothing, runs nothing and can be printed.

The page is for the person who answers for the data, so it starts with what happened, how well it
worked and what is promised, and only then goes into detail.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedgist.report import numbers, words
from fedgist.report.bars import budget_plot, even_rounds
from fedgist.report.figures import class_samples, heat_map, png_uri, spectrum
from fedgist.report.layout import moment, template
from fedgist.report.plots import accuracy_plot, roc_plot
from fedgist.report.verdicts import limit_words, roc_words
from fedgist.types import Images
from fedgist.whole import write_whole

__all__ = ["render_page", "write_page"]

OPEN_CLIENTS = 20  # the table of clients is folded away beyond this many
MOST_CLIENTS = 1000  # rows of it; the rest is in report.json
CELLS = (20, 24)  # clients and classes up to which the partition is a table of numbers
OPEN_CLASSES = 30


def write_page(report: Mapping[str, Any], samples: Images | None, path: Path) -> None:
    """Write the page.

    Args:
        report: everything measured about one run (the content of report.json).
        samples: the synthetic set, of which a few images per class are shown, or None.
        path: the HTML file.

    Raises:
        ConfigError: the file cannot be written.
    """
    picture = (report.get("exposure") or {}).get("picture")
    uri = None if picture is None else png_uri((path.parent / picture).read_bytes())
    write_whole(path, render_page(report, samples, uri).encode("utf-8", "replace"))


def render_page(
    report: Mapping[str, Any], samples: Images | None = None, exposure_uri: str | None = None
) -> str:
    """Return the page as HTML; ``exposure_uri`` is the picture of attacks. See `write_page`."""
    context = _context(_complete(report), samples) | {"exposure_uri": exposure_uri}
    return template("page.html.j2").render(context)


def _complete(report: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what a run may leave out."""
    empty: dict[str, Any] = {
        "simulation": False,
        "config": {},
        "left": [],
        "bytes_up": None,
        "bytes_down": 0,
        "clients": [],
        "partition": None,
        "budget": [],
        "limit": None,
        "heads": {},
        "curve": None,
        "chosen": None,
        "details": {},
        "membership": None,
        "exposure": None,
        "timings": {},
        "files": [],
        "versions": {},
        "device": "cpu",
    }
    out = empty | {k: v for k, v in report.items() if v is not None}
    score = dict.fromkeys(("accuracy", "ceiling", "codec_consistent", "personalised"))
    return out | {"heads": {name: score | head for name, head in out["heads"].items()}}


def _context(report: dict[str, Any], samples: Images | None) -> dict[str, Any]:
    synthetic = len(samples) if samples is not None and len(samples) else None
    spectra = report["details"].get("spectra") or {}
    return {
        "r": report,
        "claim": report["claim"],
        "task": report["task"],
        "created": moment(report["created"]),
        "banners": words.banners(report),
        "lead": words.lead(report, synthetic),
        "best": _best(report["heads"]),
        "synthetic": synthetic,
        "next_steps": words.next_steps(report),
        "sharing": words.sharing(report),
        "trust": words.trust(report["claim"]),
        "unprotected": words.unprotected(report),
        "adjacency": words.ADJACENCY,
        "laws": words.LAWS,
        "block_words": words.BLOCKS,
        "left": numbers.alike_rounds(report["left"]),
        "by_image": any(b["shape"][:1] == ["each image"] for b in report["left"]),
        "head_words": words.HEADS,
        "clients": _clients(report["clients"]),
        "partition": _partition(report),
        "samples": class_samples(samples) if samples is not None and synthetic else [],
        "personal": _personal(report["heads"]),
        "ceilings": any(h["ceiling"] is not None for h in report["heads"].values()),
        "consistent": any(h["codec_consistent"] is not None for h in report["heads"].values()),
        "classes": _classes(report),
        "open_classes": OPEN_CLASSES,
        "spectrum": spectrum(spectra) if spectra else None,
        "spectra": spectra,
        "spectrum_text": words.spectrum_text(spectra),
        "attacks": _attacks(report["membership"] or [], report["claim"]["epsilon"]),
        "exposure": report["exposure"],
        **_plots(report),
        "stages": _stages(report),
        "config": "\n".join(_toml(report["config"])),
    }


def _plots(report: Mapping[str, Any]) -> dict[str, Any]:
    curve, classes = report["curve"], len(report["task"]["classes"])
    rows = report["membership"] or []
    attacks = [row for row in rows if not row["attack"].startswith("closest")]  # similarity only
    return {
        "curve_plot": accuracy_plot(curve, report["heads"], classes, "curve") if curve else None,
        "budget_plot": budget_plot(report["budget"], "budget"),
        "even_rounds": even_rounds(report["budget"]),
        "roc_plot": roc_plot(attacks, report["limit"], "roc"),
        "roc_words": roc_words(report["limit"]),
        "roc_more": limit_words(report["claim"], report["limit"]),
    }


def _best(heads: Mapping[str, Any]) -> str | None:
    scored = {k: v["accuracy"] for k, v in heads.items() if v["accuracy"] is not None}
    return max(scored, key=lambda k: scored[k]) if scored else None


def _personal(heads: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Sum up what fine-tuning at each client gained: means over all images held out."""
    rows = []
    for name, head in heads.items():
        found = [c for c in (head["personalised"] or {}).get("clients", []) if c["tested"]]
        if found:
            n = sum(c["tested"] for c in found)
            before, after = (
                sum(c[k] * c["tested"] for c in found) / n for k in ("before", "after")
            )
            better = sum(c["after"] > c["before"] for c in found)
            row = {"head": name, "clients": len(found), "better": better}
            rows.append(row | {"before": before, "after": after})
    return rows


def _clients(clients: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sum up the clients; those with a note come first in the table."""
    spread: dict[str, tuple[Any, ...]] = {}
    for key in ("images", "seconds", "bytes_up"):
        values = [c[key] for c in clients if c[key] is not None]
        spread[key] = ()  # only the clients themselves know
        if values:
            spread[key] = (min(values), numbers.middle(values), max(values), sum(values))
    ordered = sorted(clients, key=lambda c: not c.get("note"))
    return {
        "spread": spread,
        "rows": ordered[:MOST_CLIENTS],
        "total": len(clients),
        "noted": sum(bool(c.get("note")) for c in clients),
        "fold": len(clients) > OPEN_CLIENTS,
    }


def _partition(report: Mapping[str, Any]) -> dict[str, Any] | None:
    if not report["partition"] or not report["partition"].get("table"):
        return None
    part = report["partition"]
    table = part["table"]
    held = [sum(n > 0 for n in row) for row in table]
    largest = max(max(row, default=0) for row in table) or 1
    small = len(table) <= CELLS[0] and len(table[0]) <= CELLS[1]
    tints = [[round(0.6 * math.sqrt(n / largest), 3) for n in row] for row in table]
    return {
        "spec": part.get("spec", ""),
        "seed": part.get("seed"),
        "table": table if small else None,
        "tints": tints if small else None,
        "uri": None if small else heat_map(table),
        "height": min(480, 20 * len(table[0])),
        "rows": report["task"]["classes"] if len(table[0]) <= CELLS[1] else [],
        "clients": len(table),
        "classes": len(table[0]),
        "largest": largest,
        "held": (min(held), numbers.middle(held), max(held)),
        "images": (
            min(map(sum, table)),
            numbers.middle([sum(row) for row in table]),
            max(map(sum, table)),
        ),
    }


def _classes(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Join what is known of each class: noisy count, signal to noise, accuracy of each head."""
    details = report["details"]
    heads = {k: v["per_class"] for k, v in report["heads"].items() if v.get("per_class")}
    columns = {k: details.get(k) for k in ("counts", "present", "signal_to_noise")}
    if not heads and not any(columns.values()):
        return []

    def at(values: Sequence[Any] | None, c: int) -> Any:
        return values[c] if values and c < len(values) else None

    return [
        {
            "name": name,
            "accuracy": {k: at(v, c) for k, v in heads.items()},
            **{k: at(v, c) for k, v in columns.items()},
        }
        for c, name in enumerate(report["task"]["classes"])
    ]


def _attacks(membership: Sequence[Mapping[str, Any]], epsilon: float) -> dict[str, Any]:
    """Fill in what an attack may leave out; its ε is the claim's unless it names another."""
    keys = ("sees", "note", "low", "high", "cap", "tpr_at_1pct", "cap_tpr_at_1pct", "records")
    empty: dict[str, Any] = {"epsilon": epsilon} | dict.fromkeys(keys)
    rows = [empty | dict(row) for row in membership]
    return {"rows": rows, "several": len({row["epsilon"] for row in rows}) > 1}


def _stages(report: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return seconds by stage; what the protocol's (or the server's) part consists of, indented."""
    timings = {k: v for k, v in report["timings"].items() if k != "total"}
    total = report["timings"].get("total") or sum(timings.values()) or 1.0
    inner = dict(report["details"].get("seconds") or {})
    seconds = [c["seconds"] for c in report["clients"]]
    if "clients" not in timings and seconds and None not in seconds:
        inner = {"clients": sum(seconds)} | inner
    parent = next((k for k in ("protocol", "server") if k in timings), None)
    rows = []
    for name, value in timings.items():
        rows.append({"name": name, "seconds": value, "share": value / total, "inner": False})
        if name == parent:
            rows += [
                {"name": k, "seconds": v, "share": v / total, "inner": True}
                for k, v in inner.items()
            ]
    return rows


def _toml(config: Mapping[str, Any], prefix: str = "") -> list[str]:
    """Lay out a configuration as TOML for reading; run.toml is the file to load."""
    plain = {k: v for k, v in config.items() if not isinstance(v, Mapping)}
    lines = [f"{k} = {_value(v)}" for k, v in plain.items() if v is not None]
    lines += [f"# {k} is not set" for k, v in plain.items() if v is None]
    for key, value in config.items():
        if isinstance(value, Mapping):
            name = f"{prefix}{key}"
            inner = _toml(value, f"{name}.")
            head = [] if inner and inner[0].startswith("[") else [f"[{name}]"]
            lines += ["", *head, *inner] if lines else [*head, *inner]
    return lines


def _value(value: Any) -> str:
    if isinstance(value, float):
        return "inf" if math.isinf(value) else repr(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(_value(v) for v in value)}]"
    return json.dumps(value, ensure_ascii=False)
