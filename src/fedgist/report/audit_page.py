"""audit.html: what an audit has found, in the design of the report, for the same reader.

The verdict comes first, in words; then who attacked and what they saw, then figures.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedgist.report.bars import bound_plot
from fedgist.report.layout import moment, template
from fedgist.report.plots import roc_plot
from fedgist.report.verdicts import adversaries, limit_words, noise_name, roc_words, verdict
from fedgist.whole import write_whole

__all__ = ["render_audit", "write_audit_page"]


def write_audit_page(record: Mapping[str, Any], path: Path) -> None:
    """Write the page.

    Args:
        record: what `fedgist.auditing.audit_folder` returns (the content of audit.json).
        path: the HTML file.

    Raises:
        ConfigError: the file cannot be written.
    """
    write_whole(path, render_audit(record).encode("utf-8", "replace"))


def render_audit(record: Mapping[str, Any]) -> str:
    """Return the page as HTML; what older records lack is left out. See `write_audit_page`."""
    empty: dict[str, Any] = {
        "created": "",
        "limit": None,
        "command": None,
        "seed": None,
        "versions": {},
    }
    r = empty | dict(record)
    tables = [row for row in r["noise"] if "blocks" in row]
    bounds = [row | {"audit": noise_name(row)} for row in r["noise"] if "rates" in row]
    return template("audit.html.j2").render(
        r=r,
        claim=r["claim"],
        created=moment(r["created"]),
        verdict=verdict(r),
        adversaries=adversaries(r),
        bounds=bounds,
        tables=tables,
        bound_plot=bound_plot(bounds, "bounds"),
        roc_plot=roc_plot(r["attacks"], r["limit"], "roc"),
        roc_words=roc_words(r["limit"]),
        roc_more=limit_words(r["claim"], r["limit"]),
        attacks=[_limits(row) for row in r["attacks"]],
        similarity=[_limits(row) for row in r["similarity"]],
        exposure=r["exposure"],
        exposure_uri=None,
        seconds={k: v for k, v in r["seconds"].items() if k != "total"},
    )


def _limits(row: Mapping[str, Any]) -> dict[str, Any]:
    """Fill in what an attack may lack; its limit is the claim's, or else that of its own noise."""
    kinds = ("", "_tpr_at_0.1pct", "_tpr_at_1pct")
    found = [row.get(f"claim_cap{k}") for k in kinds]
    if found[0] is None:
        found = [row.get(f"cap{k}") for k in kinds]
    keys = ("note", "low", "high", "records", "tpr_at_0.1pct", "tpr_at_1pct", "state")
    return dict.fromkeys(keys) | dict(row) | {"limits": found}
