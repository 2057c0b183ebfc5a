"""What the report says in plain words. Every sentence must hold for the claim it is shown with.

Terms follow NIST SP 800-226: ε with its unit, the trust model, and what lies outside the guarantee.
No ε is ever called safe: the odds stand beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from fedgist.report.numbers import amount, size

__all__ = [
    "ADJACENCY",
    "BLOCKS",
    "HEADS",
    "LAWS",
    "Banner",
    "banners",
    "lead",
    "next_steps",
    "sharing",
    "spectrum_text",
    "trust",
    "uncovered",
    "unprotected",
]

HEADS = {
    "qda": "one Gaussian per class, closed form",
    "lda": "one Gaussian per class with a shared covariance, closed form",
    "ridge": "least squares on the class means, closed form",
    "logistic": "logistic regression, moved by a few noised gradients",
    "decode": "a network trained on the synthetic images only",
    "match": "a network trained on synthetic images that were moved to look, to random networks, "
    "as the classes do",
    "distilled": "a network trained on distilled images only",
    "fedavg": "the clients' networks, averaged round by round",
    "dp_fedavg": "one network, moved by clipped and noised sums",
    "fedprox": "the clients' networks, held near the last one and averaged round by round",
    "fedadam": "one network, moved by the clients' mean update as Adam moves it",
    "scaffold": "the clients' networks, corrected for their drift and averaged round by round",
    "oneshot_fedavg": "the clients' networks, trained once and averaged",
    "ensemble": "all clients' networks, asked together",
    "feddf": "the clients' average, taught by all their networks on other images",
    "dense": "a network taught by all clients' networks on images from a generator",
    "co_boosting": "a network taught by all clients' networks, weighted, on generated images",
    "sfl": "one network, its first layers trained at the clients and the others at the server",
    "fedsumup": "a learned compressor and a network behind it, trained on small images",
    "fedsynth": "one network, moved by synthetic data that stand for the clients' updates",
    "uploads": "a network trained on transformed images",
    "fedsd2c": "a network trained on decoded images, with what the clients' networks say of them",
    "fedcvae_ens": "a network trained on images from all clients' decoders",
    "fedcvae_kd": "a network trained on images from one decoder that learned from all clients'",
    "fedcgs": "one Gaussian per class with the covariance of all features, closed form",
    "fed3r": "ridge regression on features, closed form",
}
SUMS = {
    "count": "how many images each class has",
    "mean": "sum of the codes, per class",
    "second": "sum of the products of code entries, per class",
    "pooled": "the same products, summed over all classes",
    "rows": "sum of what each image adds, clipped to a fixed length",
}
BLOCKS = SUMS | {
    "pixels": "synthetic images",
    "counts": "how many images each class has",
    "update": "how far training moved the network's weights",
    "images": "how many images there are",
    "each pixels": "a small image of each image that takes part",
    "each labels": "its label, in clear",
    "control": "how far the correction for drift moved",
    "activations": "what the first layers make of a batch of images",
    "labels": "their labels, in clear",
    "tag": "a random number that tells batches apart",
    "gradient": "of the first layers, for a batch",
    "inputs": "synthetic inputs of one network, of no fixed range",
    "targets": "their soft labels",
    "rates": "how far a network steps on each batch of them",
    "each codes": "the code of a refined image, which decodes to it",
    "each probabilities": "what the client's network says of it",
    "decoder": "a network that draws images like the client's",
}
ADJACENCY = {
    "add-remove": "whether one {unit} was there at all, and everything about it",
    "replace-one": "which {unit} it was, its labels included; the total number is public",
    "replace-same-class": "what one {unit} looks like; labels and class sizes are public",
}
LAWS = {"gaussian": "Gaussian", "discrete-gaussian": "discrete Gaussian"}
TRUST = {
    "local": "Each client adds all of the noise before anything leaves. Nobody else, the server "
    "included, sees its exact sums.",
    "central": "Clients send exact sums; the server adds the noise. The bound holds against "
    "everybody who sees the result, not against the server or anyone who can read what "
    "reaches it.",
    "distributed": "Each client adds a share of the noise, and the server is meant to see only the "
    "total over all clients. A single upload outside the secure sum carries too little noise.",
}


@dataclass(frozen=True)
class Banner:
    """A warning above everything else; ``level`` is ``red`` or ``amber``."""

    level: str
    title: str
    text: str


def banners(report: Mapping[str, Any]) -> list[Banner]:
    """Return the warnings that must be read first."""
    claim = report["claim"]
    out = []
    if math.isinf(claim["epsilon"]):
        why = (
            f"Noise was added, but part of what left has none, so no ε holds under "
            f"{claim['adjacency']}."
            if claim["sigma"] > 0
            else "Nothing was noised."
        )
        text = (
            "Handle every file of this run, and whatever left a client, like the original images."
        )
        out.append(Banner("red", "No privacy guarantee holds", f"{why} {text}"))
    parts = []
    if report["simulation"]:
        parts.append("All clients ran inside one process that could read all images.")
    if claim["seeded"] and claim["sigma"] > 0:
        parts.append("The noise came from a seed: whoever knows it can take the noise off again.")
        if math.isfinite(claim["epsilon"]):
            parts.append("The ε below is what the same run promises with real noise.")
    if parts:
        title = "A simulation" if report["simulation"] else "Noise from a seed"
        if claim["seeded"]:
            title += ", not fit for release"
        out.append(Banner("amber", title, " ".join(parts)))
    return out


def lead(report: Mapping[str, Any], synthetic: int | None) -> str:
    """Say in one or two sentences what happened."""
    clients = report["clients"]
    task = report["task"]
    n = len(clients)
    counts = [c["images"] for c in clients]
    statistics = bool(report["left"]) and {b["block"] for b in report["left"]} <= set(SUMS)
    what = "sums of numeric codes of its images, never an image" if statistics else "its gist"
    who = "One client" if n == 1 else f"{n:,} clients"
    hold = "holds" if n == 1 else "together hold"
    made = []
    if report["heads"]:
        k = len(report["heads"])
        made.append("one classifier" if k == 1 else f"{k} classifiers")
    if synthetic:
        made.append(f"{synthetic:,} synthetic images")
    end = f" From that the server made {' and '.join(made)}." if made else ""
    sent = f"{'It' if n == 1 else 'Each'} sent {what}: {size(report['bytes_up'])}."
    if None in counts:  # in a real federation nobody but the clients knows
        return f"{who} took part, with images of {len(task['classes'])} classes. {sent}{end}"
    images = sum(counts)
    plural = "image" if images == 1 else "images"
    return f"{who} {hold} {images:,} {plural} of {len(task['classes'])} classes. {sent}{end}"


def trust(claim: Mapping[str, Any]) -> str:
    """Say who sees what before the noise is in."""
    if claim["sigma"] <= 0:
        return "No noise was added anywhere: the server and everybody after it see exact sums."
    return TRUST[claim["trust"]]


def unprotected(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (short title, sentence) for everything that the claim does not cover."""
    out = uncovered(report["claim"])
    if exact := _exact(report):
        text = f"It holds exact numbers ({exact}). Take them out before showing it to people who "
        out.append(("This report", f"{text}may not see the data."))
    return out


def uncovered(claim: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (short title, sentence) for what no claim of these terms covers."""
    return [
        (
            "What all sites agreed on",
            "The class list, the task's settings, the encoder and the privacy terms are public. "
            "So is who took part, when, and how large a message was.",
        ),
        *_unprotected_by(claim),
        (
            "What is true of many",
            "A bound on one unit hides no trend: what most images of a class or a site share, a "
            "scanner's mark included, can be learned.",
        ),
        (
            "Whether a site answers",
            "A site that refuses because of its own images (a class too small, a ledger at its "
            "limit) shows by refusing that it does.",
        ),
        (
            "Earlier and later runs",
            "Every further release of the same images adds to ε, and so does choosing settings by "
            "trial on private data.",
        ),
        (
            "Anything outside the images",
            "File names, patient records and logs are no part of what is sent, and nothing here "
            "speaks for how they are kept.",
        ),
    ]


def _unprotected_by(claim: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return what these very terms leave open."""
    out = {
        "add-remove": [],
        "replace-one": [("The number of images", "Under replace-one it counts as public.")],
        "replace-same-class": [
            ("Labels and class sizes", "Under replace-same-class they count as public.")
        ],
    }[claim["adjacency"]]
    if claim["unit"] == "image":
        text = "The unit is one image. For somebody with k images ε grows at least about k-fold."
        out.append(("People with several images", text))
    if claim["unit"] != "client":
        text = "The bound counts within one client. What two clients hold on one person adds up."
        out.append(("The same person at two sites", text))
    if claim["sigma"] > 0 and claim["trust"] == "central":
        out.append(("The server", "It saw each client's exact sums, and was trusted with them."))
    if claim["sigma"] > 0 and claim["trust"] == "distributed":
        text = "If more drop out or collude than the terms allow for, too little noise is left."
        out.append(("Clients who work together", text))
    return out


def _exact(report: Mapping[str, Any]) -> str:
    """Name the numbers in the report that no noise covers."""
    there = {
        "images per client": any(c["images"] is not None for c in report["clients"]),
        "the partition": bool(report["partition"]),
        "scores on real test images": any(
            h.get("accuracy") is not None for h in report["heads"].values()
        ),
        "results without privacy": any(h.get("ceiling") for h in report["heads"].values()),
        "the curve over ε, made from exact sums": bool(report.get("curve")),
        "the exact spectrum": bool((report["details"].get("spectra") or {}).get("exact")),
        "attack scores": bool(report["membership"]),
    }
    return ", ".join(name for name, is_there in there.items() if is_there)


def next_steps(report: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return (path, what to do with it) for the files that a reader will want."""
    advice = {
        "synthetic/": "Train any model on it as on real images, as often as you like: nothing "
        "further is asked of any client.",
        "classifier.safetensors": "Ready to use. Measure it on your own images with "
        "fedgist evaluate.",
        "samples.png": "A look at every class.",
        "run.toml": "The settings in full: fedgist run run.toml repeats this run.",
        "report.json": "Everything on this page, for programs.",
    }
    return [(f["path"], advice[f["path"]]) for f in report["files"] if f["path"] in advice]


def sharing(report: Mapping[str, Any]) -> str:
    """Say who may get the files."""
    claim = report["claim"]
    if math.isinf(claim["epsilon"]):
        return "Keep all of them where the original images may be kept."
    if claim["seeded"]:
        return (
            "Do not pass them on as protected. For a release run again with "
            'privacy.noise = "system".'
        )
    return (
        "The bound above holds for the synthetic set and the classifier, both together. It does "
        "not cover this report: see “What is not protected”."
    )


def spectrum_text(spectra: Mapping[str, Any]) -> str:
    """Describe the spectrum for those who do not see the figure, and for the caption."""
    released = spectra.get("released") or []
    negative = sum(v <= 0 for v in released)
    edge = spectra.get("noise_edge") or 0.0
    whose = "the pooled covariance" if spectra.get("class") is None else "the largest class"
    out = f"{len(released)} covariance eigenvalues of {whose}."
    if edge > 0:
        above = sum(v > edge for v in released)
        out += f" {above} released ones rise above {amount(edge)}, the most that noise alone shows."
    if negative:
        out += (
            f" {negative} released values are zero or negative, which no covariance has: noise. "
            "They cannot be drawn on this axis; shrinkage repairs them."
        )
    return out
