"""The privacy card of a run: the layers of NIST SP 800-226 as one JSON file.

It is made of the report record alone: nothing in it that the record does not say. The layers
go from what is promised, over how, down to what the promise rests on (final version, March 2025,
doi 10.6028/NIST.SP.800-226).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from fedgist.errors import DataError
from fedgist.report.readme import may_pass_on
from fedgist.report.words import ADJACENCY, trust, unprotected

__all__ = ["privacy_card"]

FORMAT = "fedgist-privacy-card-1"
NIST = "NIST SP 800-226 (March 2025), doi:10.6028/NIST.SP.800-226"
UNITS = {
    "image": "one image",
    "person": "one person: all images of theirs at one client, at most {records}",
    "client": "one client: all of its images, at most {records}",
}
ADVERSARY = {
    "local": "everybody but the client itself, the server and all other clients included",
    "central": "everybody who sees the result; the server and those who read what reaches it are "
    "trusted",
    "distributed": "everybody who sees the result, and a server that sees the total over the "
    "clients but no single upload",
}
SAMPLERS = {
    "discrete": {
        True: "inversion of a table, or rounded normal numbers at large scales",
        False: "OpenDP's exact discrete Gaussian",
    },
    "rounded": {
        True: "rounded normal numbers",
        False: "exact inversion of the rounded Gaussian",
    },
}


def privacy_card(record: Mapping[str, Any], *, scores: bool = True) -> dict[str, Any]:
    """Return the privacy claim of a run in the layers of NIST SP 800-226, as plain JSON values.

    Args:
        record: the report of the run, as `record.read_json` gives it.
        scores: tell scores on real images and results of attacks. They are exact: a card that is
            passed on goes without, unless those images are public.

    Raises:
        DataError: it is not the report of a run.
    """
    try:
        return _privacy_card(record if scores else _without_scores(record))
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as e:
        raise DataError(
            f"report.json must be the report of a FedGist run. Got {type(e).__name__}: {e}"
        ) from e


def _privacy_card(record: Mapping[str, Any]) -> dict[str, Any]:
    claim = record["claim"]
    unit = claim["unit"]
    return {
        "format": FORMAT,
        "follows": NIST,
        "title": record["title"],
        "created": record["created"],
        "software": {"fedgist": record["fedgist"], "versions": dict(record["versions"])},
        "statement": claim["line"],
        "fit_for_release": math.isfinite(claim["epsilon"]) and not claim["seeded"],
        "guarantee": {
            "unit": {
                "name": unit,
                "images_at_most": claim["records"],
                "text": UNITS[unit].format(records=claim["records"]),
            },
            "adjacency": {
                "name": claim["adjacency"],
                "hides": ADJACENCY[claim["adjacency"]].format(unit=unit),
            },
            "parameters": {
                "epsilon": claim["epsilon"],
                "epsilon_asked_for": claim["nominal"],
                "delta": claim["delta"],
                "epsilon_by_adjacency": dict(claim["readings"]),
            },
            "odds": claim["odds"],
        },
        "algorithm": _algorithm(record),
        "utility": _utility(record),
        "implementation": _implementation(claim),
        "trust": {
            "model": claim["trust"],
            "noise_by": claim["noise_by"],
            "text": trust(claim),
            "simulation": record["simulation"],
            "secure_sum": (record["config"].get("exchange") or {}).get("secure"),
        },
        "threat": _threat(claim),
        "data_collection": _collection(record),
        "access_control": {
            "covered": False,
            "text": "Who may read the images, keys and results is no part of this claim.",
            "results": may_pass_on(claim),
        },
        "not_covered": _not_covered(record),
        "auditing": _auditing(record),
        "public_sources": {"track": claim["track"], "encoders": _encoders(record)},
        "notes": list(claim["notes"]),
    }


def _without_scores(record: Mapping[str, Any]) -> dict[str, Any]:
    heads: dict[str, dict[str, Any]] = {name: {} for name in record["heads"]}
    return dict(record) | {"heads": heads, "curve": None, "membership": None, "exposure": None}


def _not_covered(record: Mapping[str, Any]) -> list[dict[str, str]]:
    """Return what the report says, as far as it speaks of what is in this card."""
    shown: dict[str, Any] = {
        "clients": [{"images": None} for _ in record["clients"]],
        "partition": None,
        "details": {},
        "curve": None,
        "membership": record.get("membership"),
    }
    titles = {"This report": "This card"}
    return [
        {"title": titles.get(title, title), "text": text}
        for title, text in unprotected(dict(record) | shown)
    ]


def _algorithm(record: Mapping[str, Any]) -> dict[str, Any]:
    claim, library = record["claim"], ("fedgist", record["fedgist"])
    if not claim["sampling"].startswith("none"):  # closed forms are FedGist's own, this is not
        library = ("dp-accounting", record["versions"].get("dp-accounting"))
    columns = ("round", "view", "block", "numbers", "bits", "noise")
    return {
        "mechanism": claim["mechanism"],
        "noise": {
            "law": claim["law"] if claim["sigma"] > 0 else None,
            "multiplier": claim["sigma"],
            "sensitivity": claim["sensitivity"],
        },
        "sampling": claim["sampling"],
        "accountant": claim["accountant"],
        "accountant_library": dict(zip(("name", "version"), library, strict=True)),
        "releases": [{k: row.get(k) for k in columns} for row in record["left"]],
    }


def _utility(record: Mapping[str, Any]) -> dict[str, Any]:
    heads = {
        name: {k: head[k] for k in ("accuracy", "ceiling") if head.get(k) is not None}
        for name, head in record["heads"].items()
    }
    measured = any(heads.values())
    return {
        "told": measured,
        "chosen": record["chosen"],
        "heads": heads,
        "note": "Share of real test images classified correctly; ceiling: without noise. No noise "
        "covers these numbers."
        if measured
        else "No score is told here: none was measured, or they were left out.",
    }


def _implementation(claim: Mapping[str, Any]) -> dict[str, Any]:
    if claim["sigma"] <= 0:
        return {"randomness": None, "sampler": None, "floating_point": None}
    law = "discrete" if claim["sampling"].startswith("none") else "rounded"
    return {
        "randomness": "seed" if claim["seeded"] else "operating system",
        "sampler": SAMPLERS[law][claim["seeded"]],
        "floating_point": "none in what is released: records are clipped and rounded to integers, "
        "and integer noise is added to integer sums",
    }


def _threat(claim: Mapping[str, Any]) -> dict[str, Any]:
    if math.isinf(claim["epsilon"]):
        return {"adversary": None, "knows": None, "text": "No guarantee, against nobody."}
    return {
        "adversary": ADVERSARY[claim["trust"]],
        "knows": f"everything but the one {claim['unit']}, and all that is public",
        "text": claim["odds"],
    }


def _collection(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "clients": len(record["clients"]),
        "bytes_from_each_client_at_most": record["bytes_up"],
        "bytes_to_each_client_at_most": record["bytes_down"],
        "blocks": sorted({row["block"] for row in record["left"]}),
        "text": "The blocks named here leave the clients, and nothing else of their images.",
    }


def _auditing(record: Mapping[str, Any]) -> dict[str, Any] | None:
    attacks = record.get("membership") or []
    exposure = record.get("exposure")
    if not attacks and not exposure:
        return None
    keys = ("attack", "sees", "note", "auc", "low", "high", "epsilon_low", "tpr_at_1pct", "cap")
    return {
        "membership": [{k: row[k] for k in keys if k in row} for row in attacks],
        "exposure_measured": bool(exposure),
    }


def _encoders(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    pinned = record.get("encoders")
    pinned = record["config"].get("encoders") if pinned is None else pinned
    return [{"name": name, "sha256": digest} for name, digest in (pinned or {}).items()]
