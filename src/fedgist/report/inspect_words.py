"""What the inspect page says in words about rules, trust, spending and evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedgist.report.numbers import amount, percent, rate

__all__ = ["evidence_lines", "overall", "path", "rule_rows", "spent"]

RULES = {
    "max_epsilon": ("ε of the task", "at most"),
    "max_delta": ("δ of the task", "at most"),
    "methods": ("Method", "one of"),
    "trust": ("Who may add the noise", "one of"),
    "raw": ("May images be read without noise", ""),
    "seeded": ("May the noise come from a seed", ""),
    "min_sites": ("Sites that take part", "at least"),
    "plain_sums": ("May exact sums go to the coordinator", ""),
    "encoders": ("What encoders were trained on", "one of"),
    "min_class": ("Images of the smallest class", "at least"),
    "noise under an ε": ("Noise, where an ε is stated", ""),
    "counts": ("Class sizes, where presence is hidden", ""),
    "accountant": ("What the accountant assumes", ""),
    "statement": ("What the gist says of itself", ""),
    "noise in it": ("Noise measured in this gist", ""),
    "ledger": ("Total ε after it, by the ledger", "at most"),
}


def rule_rows(rules: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rules for reading, broken ones first: ``title``, ``limit``, ``got``, ``kept``."""
    rows = []
    for rule in rules:
        title, word = RULES.get(rule["rule"], (rule["rule"], ""))
        limit = _short(rule["limit"])
        limit = "no limit" if limit == "∞" else f"{word} {limit}".strip()
        if rule["rule"] == "methods" and limit.count(",") > 4:
            limit = "one that ships with FedGist"
        rows.append({"title": title, "limit": limit, "got": _short(rule["got"])} | rule_state(rule))
    return sorted(rows, key=lambda row: bool(row["kept"]))


def rule_state(rule: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a rule is called and whether it is kept."""
    return {"rule": rule["rule"], "kept": rule["kept"]}


def path(record: Mapping[str, Any], w: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return who sees what on the way, in order.

    Returns:
        Dictionaries with ``who``, ``sees``, ``then`` (what happens before it goes on, or empty)
        and ``bound``: whether the privacy bound holds against whoever stands there.
    """
    claim = record["claim"]
    noised = claim["sigma"] > 0 and not w["raw"] and math.isfinite(claim["epsilon"])
    trust = claim["trust"] if noised else "none"
    sites, missing = record["sites"], record["missing"]
    some = f"; up to {missing} of {sites} may be missing" if missing else ""
    site = {"who": "This site", "sees": "its own images", "bound": False}
    after = {
        "who": "Everybody after it",
        "sees": "classifiers and synthetic images made of all sites",
        "then": "",
    }
    masks = "adds masks that cancel in the sum"
    if trust == "local":
        return [
            site | {"then": "adds all of the noise itself"},
            _coordinator("this site’s noised numbers", True),
            after | {"bound": True},
        ]
    if trust == "distributed":
        return [
            site | {"then": f"adds its share of the noise{some}; {masks}"},
            _coordinator("the noised total of all sites, none alone", True),
            after | {"bound": True},
        ]
    if trust == "central":
        secure = w["secure"]
        what = "the exact total of all sites" if secure else "this site’s exact sums"
        then = "adds the noise"
        return [
            site | {"then": masks if secure else "sends exact sums"},
            _coordinator(what, False) | {"then": then},
            after | {"bound": True},
        ]
    return [
        site | {"then": "adds no noise that a bound could rest on"},
        _coordinator("what this site sends, as it is", False),
        after | {"bound": False},
    ]


def _coordinator(sees: str, bound: bool) -> dict[str, Any]:
    return {"who": "Coordinator", "sees": sees, "then": "", "bound": bound}


def spent(ledger: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return the budget bar: ``line`` and the shares ``before``, ``after``, ``cap`` of its length.

    A total that is infinite fills the bar.
    """
    if ledger is None:
        return None
    before, after, cap = ledger["before"], ledger["after"], ledger["cap"]["epsilon"]
    whole = max(v for v in (1.0, 1.15 * _finite(after), 1.1 * _finite(cap)))
    where = f"at δ = {ledger['cap']['delta']:g}"
    limit = "no limit is set" if math.isinf(cap) else f"the limit is {cap:g}"
    n = ledger["releases"]
    earlier = "nothing was released before" if not n else f"{n:,} earlier: ε = {_eps(before)}"
    note = " It stands in the ledger already." if ledger["recorded"] else ""
    return {
        "line": f"Of the image that has spent most, {earlier}; with this, ε = {_eps(after)} "
        f"{where}; {limit}.{note}",
        "before": min(1.0, _finite(before, whole) / whole),
        "after": min(1.0, _finite(after, whole) / whole),
        "cap": None if math.isinf(cap) else min(1.0, cap / whole),
        "whole": whole,
    }


def evidence_lines(evidence: Mapping[str, Any], claim: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what was found in the site's own images: ``title``, ``text``, ``state``."""
    lines = []
    if noise := evidence["noise"]:
        states = {b["state"] for b in noise.values()}
        n = sum(b["numbers"] for b in noise.values())
        state = "bad" if "small" in states else "note" if "other images" in states else "good"
        text = (
            f"The exact sums of the same images were taken off: what is left is "
            f"{overall(noise):.3f} times the planned noise, over {amount(n)} numbers in "
            f"{len(noise)} blocks. "
        )
        text += {
            "good": "That is as planned, in every block.",
            "bad": "That is too little: the statement does not hold. Do not send it.",
            "note": "More than planned means that the gist was made of other images than these: "
            "some may have been withheld, or --data names others.",
        }[state]
        lines.append({"title": "Noise in this gist", "text": text, "state": state})
    codes = evidence["codes"]
    for clip in codes["clip"] if codes else ():
        name = f", {clip['view']}" if clip["view"] else ""
        text = (
            f"{percent(clip['cut'])} of {amount(codes['images'])} images looked at have a code "
            f"longer than the agreed radius {amount(clip['radius'])} and are shortened to it. "
        )
        text += (
            "These images are unlike the public ones that the radius was chosen on, which may cost "
            "accuracy. Privacy does not suffer."
            if clip["cut"] > 0.5
            else "The bound counts every image as if it were that long."
        )
        state = "note" if clip["cut"] > 0.5 else "good"
        lines.append({"title": f"Shortened{name}", "text": text, "state": state})
    if codes and codes["exposure"]:
        lines.append(_exposed(codes["exposure"]))
    faint = [c for c in evidence["classes"] if c["faint"]]
    if faint:
        names = ", ".join(f"{c['name']} ({c['used']:,})" for c in faint[:8])
        text = (
            f"{names}: fewer images than the {amount(faint[0]['level'])} from which on a class "
            "rises above the noise if no other site has it. Little is gained by sending them."
        )
        lines.append({"title": "Small classes", "text": text, "state": "note"})
    return lines


def _exposed(found: Mapping[str, Any]) -> dict[str, str]:
    half, worst, cap = (found[k]["auc"] for k in ("median", "worst", "cap"))
    text = (
        "Somebody who knows all other images and sees the noised sum tells whether one image was "
        f"used with an AUC of {rate(half)} for the median image and {rate(worst)} for the most "
        f"exposed; no image can pass {rate(cap)} (0.5 is guessing, 1 is certainty). "
    )
    if worst - half > 0.01:
        named = ", ".join(f"No. {row['number']} ({rate(row['auc'])})" for row in found["named"])
        text += f"Most exposed: {named}."
    else:
        text += "No image stands out."
    return {"title": "The best attack there is", "text": text, "state": "good"}


def overall(noise: Mapping[str, Mapping[str, Any]]) -> float:
    """Return the measured over the planned deviation of all blocks together."""
    square = sum(b["ratio"] ** 2 * b["numbers"] for b in noise.values())
    return math.sqrt(square / sum(b["numbers"] for b in noise.values()))


def _finite(value: float, otherwise: float = 0.0) -> float:
    return value if math.isfinite(value) else otherwise


def _eps(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.4g}"


def _short(value: Any) -> str:
    if isinstance(value, float) and math.isfinite(value):
        return f"{value:.4g}"
    return "∞" if value in ("inf", math.inf) else str(value)
