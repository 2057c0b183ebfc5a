"""What an audit says in plain words, for the person who answers for the data.

An audit can refute a claim. It cannot prove one: every text says so.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgist.report.numbers import amount, epsilon, power

__all__ = ["Verdict", "adversaries", "limit_words", "noise_name", "roc_words", "verdict"]

ENOUGH = 85  # percent of a claim that the audit of the noise must reach
NOISE = {
    "claim": "the claim",
    "deviation of every block of a release of full size": "how much noise is really added",
}
TRIES = {
    "likelihood ratio": "The strongest attack there can be on one image in a noised sum: it weighs "
    "how likely the sum is with the image and without it.",
    "loss threshold": "Calls an image “used” when the finished classifier is very sure of it. "
    "Simple, and weak.",
    "LiRA (offline)": "Trains many classifiers like the finished one without the image, and sees "
    "whether the finished one is surer of it than they are.",
    "RMIA (offline)": "As LiRA, but measures how sure the classifier is against other images of "
    "the same kind.",
    "one-run audit": "Plants marked images, half of them used, and guesses from what is sent which "
    "ones.",
    "closest synthetic image": "Looks for the synthetic image that is most like it.",
}


@dataclass(frozen=True)
class Verdict:
    """The outcome of an audit in words; ``level`` is ``green``, ``amber`` or ``red``."""

    level: str
    title: str
    tried: str
    means: str
    not_means: str


def verdict(record: Mapping[str, Any]) -> Verdict:
    """Say what was tried, what it means and what it does not mean."""
    state, tried = record["state"], _tried(record)
    if state == "contradicted":
        return _refuted(record, tried)
    if state == "inconclusive":
        return Verdict(
            "amber",
            "Open: nothing was refuted, but the audit was too weak to count as a pass",
            tried,
            f"No attack got past what is claimed. But the strongest came to {_best(record)} of it, "
            f"and only from {ENOUGH} % on does it count: a weaker audit may miss missing noise. "
            "Run it again with more trials (--trials).",
            f"It is no pass, and no sign that something is wrong. {_no_proof(record)}",
        )
    if state == "pass":
        return Verdict(
            "green",
            "Passed: no attack here got past the claim",
            tried,
            f"The strongest attacker, who knows everything but one image, came to "
            f"{_best(record)} of what the claim allows and no further. So the audit was sharp "
            f"enough: had the claim been more than about {100 - ENOUGH} % too good, this would "
            "have refuted it.",
            _no_proof(record),
        )
    return Verdict(
        "red" if math.isinf(record["claim"]["epsilon"]) else "amber",
        "No claim: there is no limit to hold attacks against",
        tried,
        "Nothing is promised (ε = ∞), so nothing can be refuted. The figures show what some "
        "attackers get."
        if math.isinf(record["claim"]["epsilon"])
        else "No part of this run adds noise that an audit could measure.",
        "That an attack on this page fails does not mean that images are safe: without a "
        "guarantee a better attack may succeed. Handle what left the clients like the originals.",
    )


def _refuted(record: Mapping[str, Any], tried: str) -> Verdict:
    names = [noise_name(r) for r in record["noise"] if r["state"] == "contradicted"]
    names += [r["attack"] for r in record["attacks"] if r["state"] == "contradicted"]
    nominal = all(name.startswith("nominal") for name in names)
    title, which = "Refuted: more leaks than is claimed", ""
    if nominal:
        title = "Refuted: the ε that the published mechanism names"
        which = (
            f"What this run itself claims, ε = {epsilon(record['claim']['epsilon'])}, is another "
            "statement and is not refuted. "
        )
    return Verdict(
        "red",
        title,
        tried,
        f"Refuted by: {'; '.join(names)}. An attacker did better than the stated limit lets "
        f"anybody do, by more than luck explains: the limit does not hold. {which}Pass nothing on "
        "that relies on it, and find out why: too little noise, noise left out or used twice, or a "
        "statement that was never true of this method.",
        "It does not mean that somebody’s images have been rebuilt, nor that everything has "
        "leaked. It means that nobody can rely on the stated limit.",
    )


def _tried(record: Mapping[str, Any]) -> str:
    bounds = [r for r in record["noise"] if "rates" in r]
    parts = []
    if bounds:
        n = sum(2 * r["rates"]["trials"] for r in bounds)
        parts.append(
            f"the noise was drawn {amount(n)} times by the very code of the run, with one chosen "
            "record in or out, and an attacker who knows everything else had to tell which"
        )
    if any("blocks" in r for r in record["noise"]):
        parts.append("the noise of a whole release was measured")
    if k := len(record["attacks"]):
        few = "attack" if k == 1 else "attacks"
        parts.append(f"{k} {few} tried to tell images that were used from images that were not")
    if record["exposure"]:
        parts.append("images were rebuilt from what clients send")
    text = "; ".join(parts) or "nothing could be tried"
    return text[:1].upper() + text[1:] + "."


def _no_proof(record: Mapping[str, Any]) -> str:
    out = (
        "It is no proof. That no attack here succeeded does not show that none can; the limit "
        "rests on the mathematics of the noise, and the audit looks for mistakes in carrying it "
        "out. Nothing here speaks of what many images have in common, of several images of one "
        "person, or of the computers and people that handle the data."
    )
    if record["claim"]["seeded"]:
        out += (
            " And a simulation was audited: its noise comes from a seed, and whoever has the seed "
            "can take it off."
        )
    return out


def _best(record: Mapping[str, Any]) -> str:
    """Return the largest share of a claim that an audit of the noise has shown."""
    shares = []
    for r in record["noise"]:
        if r.get("mu_claimed"):
            shares.append(r["mu_low"] / r["mu_claimed"])
        if "epsilon_low" in r and 0 < r["epsilon"] < math.inf:
            shares.append(r["epsilon_low"] / r["epsilon"])
    return f"{100 * max(shares):.0f} %" if shares else "an unknown part"


def noise_name(row: Mapping[str, Any]) -> str:
    """Return what an audit of the noise looks at, in plain words."""
    name = str(row["audit"])
    return NOISE.get(name, name)


def adversaries(record: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, what it sees, what it does) for every attacker, once each."""
    out: dict[tuple[str, str], str] = {}
    for row in record["noise"]:
        if "rates" in row:
            does = f"Tells two cases apart that differ in {row['canary']}."
            out[f"audit of the noise: {noise_name(row)}", row["sees"]] = does
    for row in [*record["attacks"], *record["similarity"]]:
        kind = row["attack"].split(",")[0]
        out[kind, row["sees"]] = TRIES.get(kind, "")
    for row in (record["exposure"] or {}).get("rows", ()):
        out[f"rebuilding images: {row['name']}", row["sees"]] = ""
    return [(name, sees, does) for (name, sees), does in out.items()]


def roc_words(limit: Mapping[str, Any] | None) -> str:
    """Explain a figure of ROC curves, and say which limit is drawn."""
    out = (
        "Both axes are logarithmic: at the left end an attacker finds somebody almost without "
        "false alarms. A curve on the dotted line is guessing. Curves end where there are too few "
        "unused images to tell, and rest on few of them near that end; nothing is drawn where no "
        "image is found."
    )
    if not limit:
        return out + " There is no limit: nothing is promised."
    if limit["bound"] == "gaussian":
        which = (
            f"that of a single Gaussian with μ = {limit['mu']:.3g}, to which all the noise of this "
            "run amounts"
        )
    else:
        which = (
            f"all that ε = {limit['epsilon']:.4g} and δ = {power(limit['delta'])} say by "
            "themselves, since sampled releases amount to no single Gaussian"
        )
    return f"{out} Limit: {which}."


def limit_words(claim: Mapping[str, Any], limit: Mapping[str, Any] | None) -> str:
    """Say what the limit means where the claim is of other neighbours; empty where it is not."""
    if not limit or claim["adjacency"] == "add-remove":
        return ""
    return (
        f"The claim is about {claim['adjacency']}: it does not hide that an image was there at "
        "all. The limit is that of the same noise read under add-remove, "
        f"ε = {epsilon(limit['epsilon'])}."
    )
