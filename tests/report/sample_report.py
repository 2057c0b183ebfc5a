"""Reports as a run would make them: realistic, small, and in every shape that can occur."""

from __future__ import annotations

import math
from typing import Any

import torch

from fedgist.audit.roc import closed_form
from fedgist.privacy.claim import Privacy, calibrate, claim_of
from fedgist.queries import MomentsQuery
from fedgist.types import Images, Round

FASHION = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
HOSTILE = (
    "<script>alert('x')</script>",
    'He said "&" </title>',
    "Naïve Größe, Ελληνικά, кошка, 肺炎",
    "inf",
    "{{ 7 * 7 }}{% raw %}",
    "x" * 300,
)


def classes_100() -> tuple[str, ...]:
    return HOSTILE + tuple(f"adenocarcinoma, subtype {i} of the long list" for i in range(94))


def claim(
    epsilon: float = 10.0, *, trust: Any = "central", noise: Any = "seeded", parity: bool = False
) -> dict[str, Any]:
    query = MomentsQuery(clip=8.0, dim=128, classes=10)
    if parity:
        query = MomentsQuery(
            clip=8.0,
            dim=128,
            classes=10,
            mean=0.5,
            second=0.5,
            pooled=0,
            count=0,
            exact_counts=True,
            basic=True,
        )
    plan = [Round("sum", (query,))]
    privacy = Privacy(epsilon=epsilon, trust=trust, noise=noise)
    return claim_of(plan, privacy, calibrate(plan, privacy), track="public images").record()


def images(
    classes: tuple[str, ...] = FASHION, per_class: int = 12, size: int = 28, channels: int = 1
) -> Images:
    """Smooth blobs; the last class has none."""
    rng = torch.Generator().manual_seed(0)
    labels = torch.arange(len(classes) - 1).repeat_interleave(per_class)
    small = torch.rand(len(labels), channels, 5, 5, generator=rng)
    x = torch.nn.functional.interpolate(small, (size, size), mode="bilinear")
    return Images((x * 255).to(torch.uint8), labels, classes)


def spectra(d: int = 128) -> dict[str, Any]:
    exact = [3.0 * (i + 1) ** -1.4 for i in range(d)]
    edge = 0.12
    wobble = [edge * math.cos(math.pi * (i + 0.5) / d) for i in range(d)]
    released = sorted((a + b for a, b in zip(exact, wobble, strict=True)), reverse=True)
    shrunk = [max(0.6 * a + 0.4 * b, 4e-3) for a, b in zip(exact, released, strict=True)]
    return {"released": released, "shrunk": shrunk, "exact": exact, "noise_edge": edge}


def attack(name: str, auc: float) -> dict[str, Any]:
    rates = {"tpr_at_1pct": 0.277, "cap_tpr_at_1pct": 0.331, "claim_cap": 0.909}
    words = {"attack": name, "sees": "the noised sum, all other records", "note": "a remark"}
    figures = {"auc": auc, "low": auc - 0.02, "high": None, "cap": 0.909}
    return words | figures | rates | {"roc": roc(max(0.0, 4 * (auc - 0.5)))}


def curve() -> dict[str, Any]:
    """The accuracy at five ε; the run's own is 10."""
    rows = [
        {
            "epsilon": e,
            "sigma": 5.0 / e,
            "own": e == 10.0,
            "heads": {"qda": 0.4 + 0.1 * i, "lda": 0.35 + 0.11 * i, "ridge": 0.3 + 0.11 * i},
        }
        for i, e in enumerate((0.3, 1.0, 3.0, 10.0, 30.0))
    ]
    without = {"qda": 0.8311, "lda": 0.8021, "ridge": 0.7777}
    return {"images": 2000, "of": 10_000, "rows": rows, "without": without}


def budget() -> list[dict[str, Any]]:
    """Two views of the images, the first with more of the budget."""
    shares = {
        "codes": {"mean": 0.3, "second": 0.18, "pooled": 0.108, "count": 0.012},
        "features": {"mean": 0.18, "pooled": 0.212, "count": 0.008},
    }
    return [
        {"round": 1, "view": view, "block": block, "share": share}
        for view, blocks in shares.items()
        for block, share in blocks.items()
    ]


def roc(mu: float) -> dict[str, list[float]]:
    """The curve of a Gaussian shift by ``mu``."""
    return closed_form(mu).record()


def limit() -> dict[str, Any]:
    """What ε = 10 lets attacks reach."""
    terms = {"bound": "gaussian", "epsilon": 10.0, "delta": 1e-5, "mu": 1.888}
    return terms | {"roc": roc(1.888)}


def report(
    classes: tuple[str, ...] = FASHION,
    clients: int = 10,
    claim_record: dict[str, Any] | None = None,
    **changes: Any,
) -> dict[str, Any]:
    """A FedKT-CSD run. Keyword arguments replace top-level entries."""
    c = len(classes)
    rng = torch.Generator().manual_seed(1)
    mix = torch.rand(clients, c, generator=rng) ** 6
    total = 6000 if clients < 100 else 60_000
    table = (total * mix / mix.sum()).round().to(torch.int64).tolist()
    triangle = 128 * 129 // 2
    left = [
        {
            "round": 1,
            "view": "",
            "block": "count",
            "shape": [c],
            "numbers": c,
            "bits": 16,
            "bytes": 2 * c,
        },
        {
            "round": 1,
            "view": "",
            "block": "mean",
            "shape": [c, 128],
            "numbers": 128 * c,
            "bits": 24,
            "bytes": 384 * c,
        },
        {
            "round": 1,
            "view": "",
            "block": "second",
            "shape": [c, triangle],
            "numbers": triangle * c,
            "bits": 31,
            "bytes": -(-31 * triangle * c // 8),
        },
    ]
    up = sum(b["bytes"] for b in left)
    visits = [
        {
            "client": f"client {i}",
            "images": sum(row),
            "seconds": 0.02 + 0.00034 * sum(row),
            "bytes_up": up,
            "bytes_down": 0,
            "note": "holds no image: sent zeros" if sum(row) == 0 else None,
        }
        for i, row in enumerate(table)
    ]
    scores = [min(0.99, max(0.02, float(v))) for v in torch.rand(c, generator=rng) * 0.5 + 0.5]
    heads = {
        "qda": {"accuracy": 0.8128, "ceiling": 0.8311, "per_class": scores},
        "lda": {"accuracy": 0.7954, "ceiling": 0.8021, "per_class": scores[::-1]},
        "ridge": {"accuracy": 0.7702, "ceiling": 0.7777, "per_class": scores},
        "decode": {
            "accuracy": 0.7544,
            "ceiling": 0.7903,
            "codec_consistent": 0.7931,
            "per_class": [None, *scores[1:]],
            "personalised": {
                "clients": [
                    {"trained": 80, "tested": 20, "before": 0.75, "after": 0.85},
                    {"trained": 40, "tested": 10, "before": 0.9, "after": 0.9},
                    {"trained": 1, "tested": 0, "before": None, "after": None},
                ]
            },
        },
    }
    return {
        "fedgist": "0.1.0",
        "created": "2026-11-29T22:41:00Z",
        "title": "FedKT-CSD on fashion-mini",
        "simulation": True,
        "seed": 0,
        "config": {
            "seed": 0,
            "out": "fedgist-out",
            "data": {"source": "fashion-mini", "clients": clients, "partition": "dirichlet:0.5"},
            "privacy": {"epsilon": 10.0, "delta": 1e-05, "trust": "central", "noise": "seeded"},
            "method": {
                "name": "fedkt_csd",
                "encoder": "pca",
                "heads": ["qda", "lda", "ridge", "decode"],
                "radius": None,
                "recipe": {"model": "convnet", "epochs": 12, "cap": math.inf},
            },
        },
        "task": {
            "name": "fashion-mini",
            "classes": list(classes),
            "channels": 1,
            "size": 28,
            "fit": "stretch",
            "max_images": 65_535,
        },
        "claim": claim_record or claim(),
        "left": left,
        "budget": budget(),
        "limit": limit(),
        "bytes_up": up,
        "bytes_down": 0,
        "clients": visits,
        "partition": {"spec": "dirichlet:0.5", "seed": 0, "table": table},
        "heads": heads,
        "curve": curve(),
        "chosen": "qda",
        "details": {
            "counts": [sum(row[i] for row in table) + 0.5 * (i % 3) for i in range(c)],
            "present": [i != c - 1 for i in range(c)],
            "spectra": spectra(),
            "signal_to_noise": [math.inf if i == 1 else 40.0 / (i + 1) ** 2 for i in range(c)],
            "seconds": {
                "estimate": 0.05,
                "qda": 0.02,
                "lda": 0.01,
                "ridge": 0.01,
                "decode": 1.1,
                "train": 31.0,
            },
        },
        "membership": [attack("likelihood ratio", 0.884), attack("closest synthetic image", 0.502)],
        "timings": {"total": 47.2, "load": 8.5, "protocol": 32.9, "write": 0.9, "evaluate": 5.0},
        "files": [
            {
                "path": "synthetic/",
                "what": "10,000 images: ImageFolder and npz",
                "bytes": 12_345_678,
            },
            {"path": "classifier.safetensors", "what": "the qda classifier", "bytes": 1_331_000},
            {"path": "samples.png", "what": "ten images of each class", "bytes": 90_000},
            {"path": "report.json", "what": "this report for programs", "bytes": 40_000},
            {"path": "run.toml", "what": "the resolved configuration", "bytes": 900},
        ],
        "versions": {"python": "3.11.2", "torch": "2.13.0", "numpy": "2.4.6"},
        "device": "cpu",
    } | changes
