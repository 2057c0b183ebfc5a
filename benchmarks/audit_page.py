"""Write the tables of docs/audit.md from committed result files.

Usage: python benchmarks/audit_page.py
"""

from __future__ import annotations

from typing import Any

from fedsumup_page import put
from sweeps import ROOT, found, table

from fedgist.whole import write_whole

PAGE = ROOT / "docs" / "audit.md"
NAMES = {"claim": "the claim"}
KINDS = ("likelihood ratio", "LiRA", "RMIA", "loss threshold", "one-run audit")


def main() -> int:
    """Rewrite the page."""
    text = PAGE.read_text(encoding="utf-8")
    write_whole(PAGE, filled(text).encode())
    return 0


def filled(text: str) -> str:
    """Return the page with every table anew."""
    if (audits := found("audit_fashion")) is not None:
        cases = audits["cases"]
        text = put(text, "noise", noise(cases))
        text = put(text, "attacks", attacks(cases))
        text = put(text, "seconds", seconds(cases))
    if (utility := found("utility_demo")) is not None:
        text = put(text, "heads", heads(utility))
        text = put(text, "tstr", tstr(utility))
        text = put(text, "distances", distances(utility))
    return text


def noise(cases: list[dict[str, Any]]) -> str:
    """Return what the audits of the noise found."""
    lines = []
    for case in cases:
        for row in case["noise"]:
            if "blocks" not in row:
                mu = "–" if row["mu_claimed"] is None else f"{row['mu_claimed']:.3f}"
                told = NAMES.get(row["audit"], row["audit"])
                low = f"{row['epsilon_low']:.4g} of {row['epsilon']:.4g}"
                lines.append(
                    [case["name"], told, f"{row['mu_low']:.3f} of {mu}", low, row["state"]]
                )
    return table(["run", "audited", "μ at least", "ε at least", "result"], lines)


def attacks(cases: list[dict[str, Any]]) -> str:
    """Return the largest AUC of each kind of attack over a run's classifiers, beside the cap."""
    lines = []
    for case in cases:
        best: dict[str, float] = {}
        for row in case["attacks"]:
            kind = next(k for k in KINDS if row["attack"].startswith(k))
            best[kind] = max(best.get(kind, 0.0), row["auc"])
        caps = [row["claim_cap"] for row in case["attacks"] if row.get("claim_cap")]
        cells = [f"{best[k]:.3f}" if k in best else "–" for k in KINDS]
        state = "no claim" if not caps else "within"
        if any(row["state"] == "contradicted" for row in case["attacks"]):
            state = "contradicted"
        lines.append([case["name"], *cells, f"{max(caps):.3f}" if caps else "–", state])
    return table(["run", *KINDS, "at most, by the claim", "result"], lines)


def seconds(cases: list[dict[str, Any]]) -> str:
    """Return how long the parts of an audit took."""
    parts = ("noise", "records", "losses", "shadows", "uploads", "total")
    lines = [[c["name"], *(f"{c['seconds']['audit'].get(p, 0):.0f}" for p in parts)] for c in cases]
    return table(["run", *parts], lines)


def heads(utility: dict[str, Any]) -> str:
    """Return accuracy and calibration of the classifiers of a run."""
    lines = []
    for row in utility["classifiers"]:
        low, high = row["interval"]
        fit = row["calibration"]
        lines.append(
            [
                row["head"],
                f"{100 * row['accuracy']:.1f} ({100 * low:.1f}–{100 * high:.1f})",
                f"{fit['nll']:.3f}",
                f"{fit['ece']:.3f}",
                f"{fit['ece_expected']:.3f}",
                f"{fit['tempered']['temperature']:.1f}",
            ]
        )
    head = ["head", "accuracy, % (95 %)", "NLL", "ECE", "ECE by chance", "best temperature"]
    return table(head, lines)


def tstr(utility: dict[str, Any]) -> str:
    """Return what models trained on the synthetic set reach on real images."""
    same = {row["name"].removeprefix("tstr "): row for row in utility["agreement"]}
    lines = [
        [
            row["model"],
            f"{100 * row['accuracy']:.1f}",
            "–" if row["trtr"] is None else f"{100 * row['trtr']['accuracy']:.1f}",
            "–" if row["ratio"] is None else f"{row['ratio']:.3f}",
            f"{100 * same[row['model']]['same']:.1f}",
        ]
        for row in utility["tstr"]
    ]
    own = utility["own"]
    head = ["model", "trained on synthetic, %", "trained on real, %", "ratio"]
    return table([*head, f"same answer as {own}, %"], lines)


def distances(utility: dict[str, Any]) -> str:
    """Return how far the synthetic set is from real images, beside two halves of those."""
    d = utility["distances"]["overall"]
    rows = [
        [f"Fréchet distance, {d['dimensions']} directions", d["frechet"], d["frechet_floor"]],
        ["KID", d["kid"], d["kid_floor"]],
        ["density", d["density"], d["density_floor"]],
        ["coverage", d["coverage"], d["coverage_floor"]],
    ]
    lines = [[name, f"{there:.3g}", f"{floor:.3g}"] for name, there, floor in rows]
    what = f"{utility['distances']['encoder']} features, {d['n']} images"
    return table([what, "synthetic to real", "two halves of real"], lines)


if __name__ == "__main__":
    raise SystemExit(main())
