"""The files that all may share: the synthetic set, and classifiers.

``DIR/synthetic/`` holds the same images twice: as an ImageFolder and as one npz. There is no test
split: synthetic images measure nothing. The set is written aside and put in place when complete,
so what is at ``synthetic/`` is always a whole set.

A classifier is one safetensors file. Its header has one key, ``fedgist``, with a JSON object of
``kind``, ``meta`` and ``extra``. (One key only: the order of several would change from one writing
to the next, and with it the file's hash.)
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedgist.errors import DataError
from fedgist.report.croissant import croissant
from fedgist.report.place import MARK, SET, place_folder
from fedgist.report.readme import Terms, dataset_card
from fedgist.report.record import write_json
from fedgist.types import Classifier, Images, Tensors
from fedgist.whole import write_whole

__all__ = [
    "classifier_extra",
    "describe",
    "fill_synthetic",
    "folder_names",
    "load_classifier",
    "nhwc",
    "save_classifier",
    "write_synthetic",
]

KEY = "fedgist"
UNSAFE = re.compile(r'[<>:"/\\|?*\x00-\x1f\x7f\ud800-\udfff]')
DEVICES = re.compile(r"(con|prn|aux|nul|com[0-9]|lpt[0-9])(\..*)?", re.IGNORECASE)


def write_synthetic(
    images: Images, folder: Path, claim: Mapping[str, Any], made: str = ""
) -> list[dict[str, Any]]:
    """Write ``folder/synthetic/``; an earlier set there is replaced when the new one is complete.

    ::

        synthetic/train/<class>/00000.png    every class has its folder, empty ones too
        synthetic/synthetic.npz              images uint8 [n, h, w] or [n, h, w, 3], labels int64
                                             [n], classes (text); in the same order
        synthetic/classes.json               class number, name and folder
        synthetic/metadata.json, README.md   the claim and how the set was made
        synthetic/croissant.json             the same for programs (Croissant 1.1)

    Args:
        images: the set.
        folder: the run's output folder.
        claim: `Claim.record` of the release that the set was made from.
        made: the title of the run, for the README.

    Returns:
        One entry for the report's list of files: path, what, bytes.

    Raises:
        ConfigError: the folder cannot be written, or ``synthetic/`` holds something that FedGist
            did not write. What was there before is untouched.
    """
    target = folder / "synthetic"
    place_folder(target, lambda aside: fill_synthetic(aside, images, claim, made))
    h, w = images.pixels.shape[-2:]
    total = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    what = f"{len(images):,} synthetic images, {h} x {w}: ImageFolder and npz"
    return [{"path": "synthetic/", "what": what, "bytes": total}]


def folder_names(classes: Sequence[str]) -> list[str]:
    """Return one distinct folder name per class that every common file system takes.

    Letters of any script stay. What a path cannot hold becomes ``_``; names that differ only in
    case or in Unicode form are told apart by the class number.
    """
    taken: set[str] = set()
    names = []
    for i, text in enumerate(classes):
        name = UNSAFE.sub("_", unicodedata.normalize("NFC", text))
        name = name.encode()[:100].decode(errors="ignore").strip(". ")
        if not name or DEVICES.fullmatch(name):
            name = f"{name}_" if name else "class"
        while name.casefold() in taken:
            name = f"{name}-{i}"
        taken.add(name.casefold())
        names.append(name)
    return names


def fill_synthetic(
    folder: Path,
    images: Images,
    claim: Mapping[str, Any],
    made: str,
    terms: Terms | None = None,
    created: str = "",
) -> None:
    """Write a whole set into an empty folder; see `write_synthetic`."""
    pixels = nhwc(images)
    record = describe(folder, images, claim, made, "imagefolder", terms)
    np.savez(
        folder / "synthetic.npz",
        images=pixels,
        labels=images.labels.numpy(),
        classes=np.array(images.classes, dtype=np.str_),
    )
    folders = [folder / "train" / name for name in folder_names(images.classes)]
    for class_folder in folders:
        class_folder.mkdir(parents=True)
    following = [0] * len(folders)
    for array, label in zip(pixels, images.labels.tolist(), strict=True):
        file = folders[label] / f"{following[label]:05d}.png"
        Image.fromarray(array).save(file, "PNG", compress_level=1)
        following[label] += 1
    about = croissant(record | {"created": created}, folder, len(images), terms)
    write_json(folder / "croissant.json", about)


def describe(
    folder: Path,
    images: Images,
    claim: Mapping[str, Any],
    made: str,
    layout: str,
    terms: Terms | None = None,
) -> dict[str, Any]:
    """Write what every form of a set has: metadata.json, classes.json, README.md.

    Returns:
        ``title``, ``claim`` and ``task``, as the cards take them.
    """
    n, c, h, w = images.pixels.shape
    names = folder_names(images.classes) if layout == "imagefolder" else []
    counts = images.counts().tolist()
    shape = [h, w] if c == 1 else [h, w, c]
    meta = {"format": SET, "synthetic": True, "made": made, "images": n}
    write_json(folder / MARK, meta | {"shape": shape, "claim": claim})
    table = [
        {"index": i, "name": name} | ({"folder": names[i]} if names else {}) | {"images": counts[i]}
        for i, name in enumerate(images.classes)
    ]
    write_json(folder / "classes.json", {"classes": table})
    task = {"name": "images", "classes": list(images.classes), "channels": c, "size": h}
    record = {"title": made, "claim": dict(claim), "task": task}
    card = dataset_card(record, n, layout, terms)
    write_whole(folder / "README.md", card.encode())
    return record


def nhwc(images: Images) -> NDArray[np.uint8]:
    """Return the pixels as uint8 ``[n, h, w]`` or ``[n, h, w, 3]``."""
    x = images.pixels
    x = x if x.dtype == torch.uint8 else (x * 255).round().to(torch.uint8)
    pixels: NDArray[np.uint8] = np.ascontiguousarray(x.movedim(1, -1).numpy())
    return pixels[..., 0] if pixels.shape[-1] == 1 else pixels


def save_classifier(classifier: Classifier, path: Path, extra: Mapping[str, str]) -> None:
    """Write a classifier as safetensors, put in place when complete.

    Args:
        classifier: what to save.
        path: the file.
        extra: what a reader should know besides (the task, the claim), as strings.

    Raises:
        ConfigError: the file cannot be written.
    """
    header = {"kind": classifier.kind, "meta": dict(classifier.meta()), "extra": dict(extra)}
    # Cloned: safetensors refuses tensors that share memory.
    tensors = {k: v.detach().cpu().contiguous().clone() for k, v in classifier.tensors().items()}
    text = json.dumps(header, sort_keys=True, allow_nan=False)
    write_whole(path, save(tensors, {KEY: text}))


def load_classifier(path: Path) -> Classifier:
    """Read what `save_classifier` wrote; nothing in the file is executed.

    Raises:
        DataError: there is no such file, it is damaged, or its kind is unknown.
        EncoderError: its encoder is not installed here, or is another one of the same name.
    """
    header, tensors = _read(path)
    kind, meta = header["kind"], header["meta"]
    try:
        if kind == "network":
            from fedgist.train import Network

            return Network.load(tensors, meta)
        if kind == "compressed":
            from fedgist.compress import CompressedNetwork

            return CompressedNetwork.load(tensors, meta)
        if kind == "ensemble":
            from fedgist.train.ensemble import Ensemble

            return Ensemble.load(tensors, meta)
        from fedgist.heads.linear import KINDS, CodeClassifier

        if kind in KINDS:
            return CodeClassifier.load(kind, tensors, meta)
    except (KeyError, ValueError, TypeError, RuntimeError) as e:
        raise DataError(f"classifier '{path}' must be complete. Got {type(e).__name__}: {e}") from e
    raise DataError(
        f"the kind of classifier '{path}' must be network, compressed, ensemble or one of "
        f"{', '.join(KINDS)}. Got '{kind}'"
    )


def classifier_extra(path: Path) -> dict[str, str]:
    """Return the ``extra`` that a classifier was saved with.

    Raises:
        DataError: there is no such file, or it is damaged.
    """
    extra: dict[str, str] = _read(path)[0]["extra"]
    return extra


def _read(path: Path) -> tuple[dict[str, Any], Tensors]:
    try:
        with safe_open(path, framework="pt") as f:
            header = json.loads((f.metadata() or {})[KEY])
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (not a mapping)
        texts = [header["kind"], *header["meta"].values(), *header["extra"].values()]
        if not all(isinstance(text, str) for text in texts):
            raise TypeError("a header value that is not text")
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise DataError(
            f"'{path}' must be a classifier that FedGist saved (safetensors). Got "
            f"{type(e).__name__}: {e}"
        ) from e
    return header, tensors
