"""inspect.html: one gist before it is sent, for the person who answers for the data.

Real images are on it: it is written for its owner's eyes only (mode 600) and loads nothing. The
record lies beside it as inspect.json.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.compress import as_uint8, enlarge
from fedgist.errors import ConfigError
from fedgist.exchange.store import write_durably
from fedgist.report import inspect_words, words
from fedgist.report.examine import first_of
from fedgist.report.figures import _tile, _uri
from fedgist.report.inspect import Inspection, Subject
from fedgist.report.layout import moment, template
from fedgist.report.numbers import amount, size
from fedgist.report.record import to_json

__all__ = ["render_inspection", "write_inspection"]

SHOWN = 112  # pixels: how wide an image is drawn
LITTLE = 56  # the same, in a row of several
PAGE_BYTES = 6_000_000  # of pixels on the page, before compression
MOST_CLASSES = 100
LOOK = 60  # synthetic pictures that are shown
OPEN_CLASSES = 12  # more are folded away
UPLOADS = {
    "pixels": "one small picture for every image",
    "labels": "the class of every image, readable as it is",
}
ALONE = (
    "The coordinator sees what this site sends. Other sites see only what it makes of all that it "
    "gets."
)
MASKED = (
    "It is added to what other sites send, under masks: the coordinator sees the total of all "
    "sites, and this site's numbers only if the secure sum is broken."
)


def write_inspection(subject: Subject, found: Inspection, folder: Path) -> Path:
    """Write page and record into ``folder`` (made, mode 700, if it is not there).

    Returns:
        The page: ``inspect.html``, or ``GIST.inspect.html`` for a gist file.

    Raises:
        ConfigError: the folder cannot be made or written.
        ProtocolError: the file cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise ConfigError(f"--out must be a folder. Got '{folder}': {e.strerror or e}") from e
    file = found.record["waiting"]["file"]
    name = "inspect" if file is None else f"{Path(file).name}.inspect"
    path = folder / f"{name}.html"
    write_durably(folder / f"{name}.json", (to_json(found.record) + "\n").encode())
    write_durably(path, render_inspection(subject, found).encode("utf-8", "replace"))
    return path


def render_inspection(subject: Subject, found: Inspection) -> str:
    """Return the page as HTML; ``found`` must have something that waits."""
    record, w = found.record, found.record["waiting"]
    claim, classes = record["claim"], (w.get("classes") or [])[:MOST_CLASSES]
    figures = _figures(subject, found, classes)
    rules = inspect_words.rule_rows(w["rules"])
    return template("inspect.html.j2").render(
        r=record,
        w=w,
        claim=claim,
        made=moment(w["made"]),
        decided=moment(w["decision"]["time"]) if w["decision"] else "",
        rules=rules,
        broken=[rule for rule in rules if not rule["kept"]],
        path=inspect_words.path(record, w),
        spent=inspect_words.spent(w["ledger"]),
        evidence=inspect_words.evidence_lines(w["evidence"], claim),
        unprotected=words.uncovered(claim),
        adjacency=words.ADJACENCY,
        laws=words.LAWS,
        decoded=_decoded(subject, found),
        lead=lead(record),
        alike=alike(record),
        who=MASKED if w["secure"] else ALONE,
        caution=caution(record),
        pieces=[p | {"what": _what(w["kind"], p["name"])} for p in w["pieces"]],
        classes=classes,
        fold=OPEN_CLASSES,
        figures=figures,
        width=_width(subject.agreement.task.size),
        pictures=_pictures(found) if w["kind"] == "pictures" else [],
        uploads=_pictures(found) if w["kind"] == "uploads" and found.rows is None else [],
        withheld=_withheld(w["withheld"]),
        example=_example(w, subject.agreement.task.classes[0]),
    )


def lead(record: Mapping[str, Any]) -> str:
    """Say in plain words what leaves if the answer is yes."""
    w, claim = record["waiting"], record["claim"]
    if w["kind"] == "uploads":
        n = next(p["shape"][0] for p in w["pieces"] if p["name"] == "pixels")
        what = (
            f"{amount(n)} small pictures leave this site, one made of each image that is used, "
            f"each with the name of its class. That is {size(w['bytes'])}. "
        )
    elif w["kind"] == "pictures":
        n = next(p["shape"][0] for p in w["pieces"] if p["name"] == "pixels")
        what = (
            f"{amount(n)} made-up pictures leave this site, {size(w['bytes'])}. None is one of "
            "this site's images, but they were made to stand for them. "
        )
    else:
        what = f"Numbers leave this site, {size(w['bytes'])}, and no picture. "
    if claim["sigma"] <= 0:
        return what + "No noise is added, and no privacy guarantee holds."
    if w["raw"]:
        return what + "Part of it has no noise, so no privacy guarantee holds."
    noise = {
        "central": "There is no noise in it yet: the coordinator is trusted to add it",
        "distributed": "This site's share of random noise is in it, and the other sites add theirs",
    }.get(claim["trust"], "Random noise is in it")
    return what + (
        f"{noise}, so that what anyone can learn of one {claim['unit']} from the outcome is "
        "limited, whatever they know besides."
    )


def alike(record: Mapping[str, Any]) -> str:
    """Say how alike uploads are to their images; empty for a gist without uploads."""
    w = record["waiting"]
    if not w.get("closest"):
        return ""
    top = w["closest"][0]
    return (
        f"The picture most like its image is that of image No. {top['number']} (class "
        f"“{top['class']}”): similarity {top['ssim']:.2f}, where 1 means the same. "
        f"Half of all pictures have less than {w['ssim']:.2f}."
    )


def caution(record: Mapping[str, Any]) -> str:
    """Say what the page cannot tell."""
    w = record["waiting"]
    if w["kind"] == "uploads":
        return (
            "A low similarity is not a promise. Somebody who holds the same compressor, or who "
            "trains a network to enlarge such pictures, may see more than the eye does here. How "
            "many images there are, and their classes, can be read as they are."
        )
    if w["kind"] == "pictures":
        return "A made-up picture may resemble an image closely, the more so where there are few."
    if w["raw"]:
        return (
            "Numbers are not harmless because nobody can read them: from numbers without noise "
            "that a network was trained to, images have been rebuilt."
        )
    return ""


def _what(kind: str, name: str) -> str:
    if kind == "uploads" and name in UPLOADS:
        return UPLOADS[name]
    return words.BLOCKS.get(name.rpartition(".")[2], "")


def _withheld(withheld: Mapping[str, Any]) -> str:
    """Say what earlier decisions of this task keep out."""
    parts = []
    if withheld["classes"]:
        names = ", ".join(f"“{c}”" for c in withheld["classes"])
        parts.append(f"every image of class {names}")
    if n := withheld["images"]:
        parts.append(f"{amount(n)} {'image' if n == 1 else 'images'} by number")
    return " and ".join(parts)


def _example(w: Mapping[str, Any], first: str) -> dict[str, str]:
    """Return what to put into the commands that withhold something."""
    closest = w.get("closest") or []
    numbers = ",".join(str(p["number"]) for p in closest[:2]) or "3,17"
    return {"numbers": numbers, "class": shlex.quote(closest[0]["class"] if closest else first)}


def _figures(
    subject: Subject, found: Inspection, classes: Sequence[Mapping[str, Any]]
) -> dict[int, tuple[str, str]]:
    """Return row -> (image, upload enlarged) as ``data:`` addresses, as many as the page takes."""
    images = subject.images
    if found.rows is None or images is None:
        return {}
    pixels = found.gist["pixels"]
    side = images.pixels.shape[-1]
    cost = 2 * min(side, SHOWN) ** 2 * images.pixels.shape[1]
    room = PAGE_BYTES // (cost * max(1, len(classes)))
    chosen = {p["row"] for p in found.record["waiting"]["closest"]}
    for c in classes:
        if c["worst"] is not None:
            chosen |= {c["worst"]["row"], *(p["row"] for p in c["first"][: max(0, room - 1)])}
    out = {}
    for i in sorted(chosen):
        real = images.pixels[found.rows[i]]
        small = _unit(pixels[i : i + 1])
        out[i] = (_uri(_tile(real, SHOWN)), _uri(_tile(_enlarged(small, side), SHOWN)))
    return out


def _decoded(subject: Subject, found: Inspection) -> list[dict[str, Any]]:
    """Return for each class real images and images decoded from what leaves, as addresses."""
    made = found.decoded
    if made is None:
        return []
    real, mine = subject.images, first_of(made)
    first = {} if real is None else first_of(real)
    rows = []
    for c, name in enumerate(made.classes[:MOST_CLASSES]):
        own = [] if real is None else [_uri(_tile(x, LITTLE)) for x in real.pixels[first[c]]]
        held = None if real is None else int((real.labels == c).sum())
        made_of = [_uri(_tile(x, LITTLE)) for x in made.pixels[mine[c]]]
        rows.append({"name": name, "held": held, "real": own, "made": made_of})
    return rows


def _pictures(found: Inspection) -> list[str]:
    """Return the first pictures of a gist as ``data:`` addresses, in the order they are sent."""
    pixels = _unit(found.gist["pixels"][:LOOK])
    if pixels.shape[1] not in (1, 3):
        return []
    return [_uri(_tile(x, SHOWN)) for x in as_uint8(pixels)]


def _unit(pixels: Tensor) -> Tensor:
    """Return float32 in [0, 1]; what lies outside is scaled to fit."""
    if pixels.dtype == torch.uint8:
        return pixels.to(torch.float32) / 255
    x = pixels.to(torch.float32)
    low, high = float(x.min()), float(x.max())
    return x if 0 <= low <= high <= 1 else (x - low) / max(high - low, 1e-12)


def _enlarged(small: Tensor, side: int) -> Tensor:
    return as_uint8(enlarge(small, side)[0])


def _width(side: int) -> int:
    """Return at how many pixels an image is drawn: a whole factor where it is small."""
    return side * max(1, SHOWN // side) if side < SHOWN else SHOWN
