"""What a run left, in the formats that other programs read: ``fedgist export``.

Every format gets a folder of its own, complete: data, README.md (a Hugging Face card),
privacy-card.json, metadata.json. It is written aside and put in place when complete.

===============  ==================================================================================
imagefolder      one PNG a file, one folder a class, an npz, croissant.json
parquet          Hugging Face data sets: columns ``image`` (struct of bytes and path) and ``label``
webdataset       tar shards of ``KEY.png`` and ``KEY.cls``
medmnist         one npz: ``train_images``, ``train_labels``; no test split, for there is none
dpimagebench     ``gen.npz``: ``x`` float32 ``[n, c, h, w]`` in [0, 1], ``y`` int64 ``[n]``, which
                 is what its evaluator feeds to networks
safetensors      the classifier as FedGist reads it
onnx, torch      the classifier for other programs, checked against it (`fedgist.report.portable`)
===============  ==================================================================================
"""

from __future__ import annotations

import io
import json
import tarfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from fedgist.data import open_source
from fedgist.errors import ConfigError, DataError, did_you_mean
from fedgist.report.cards import privacy_card
from fedgist.report.export import (
    classifier_extra,
    describe,
    fill_synthetic,
    load_classifier,
    nhwc,
)
from fedgist.report.place import MARK, MODEL, place_folder
from fedgist.report.portable import write_onnx, write_torch
from fedgist.report.readme import Terms, model_card
from fedgist.report.record import read_json, write_json
from fedgist.types import Images
from fedgist.whole import write_whole

__all__ = ["FORMATS", "export", "find_synthetic", "read_synthetic"]

SYNTHETIC = Path("synthetic") / "synthetic.npz"
SHARD = 10_000  # images in one Parquet file or tar: tens of megabytes
GROUP = 1_000  # rows of a Parquet row group: what a reader holds at once


def export(
    run: Path,
    formats: Sequence[str],
    out: Path,
    *,
    head: str | None = None,
    terms: Terms | None = None,
    scores: bool = False,
) -> list[dict[str, Any]]:
    """Write what a run left in other formats: ``out/FORMAT/`` for each.

    Args:
        run: a folder that a run wrote.
        formats: names of `FORMATS`.
        out: the folder for the new folders.
        head: which classifier; None for the first.
        terms: of publication, for the cards.
        scores: whether privacy cards tell scores on real images, which no noise covers.

    Returns:
        One row a format: format, path, bytes, seconds; for classifiers the head and, where it was
        checked, the largest difference of a log-probability.

    Raises:
        ConfigError: an unknown format or head, a kind of classifier that a format cannot hold, or a
            folder that cannot be written.
        DataError: the run's files are missing or damaged, or a written classifier disagrees.
        MissingExtra: a package that a format needs is not installed.
    """
    if not formats:
        raise ConfigError(f"--as must name a format: {', '.join(FORMATS)}. Got none")
    for name in formats:
        if name not in FORMATS:
            raise ConfigError(
                f"--as must be one of {', '.join(FORMATS)}. Got '{name}'."
                f"{did_you_mean(name, FORMATS)}"
            )
    record = read_json(run / "report.json")
    card = privacy_card(record, scores=scores)
    images = read_synthetic(run) if any(f in IMAGES for f in formats) else None
    rows = []
    for name in dict.fromkeys(formats):
        if name in IMAGES:
            assert images is not None
            fill = partial(_fill_images, name, images, record, terms)
        else:
            fill = partial(_fill_classifier, name, run, record, head, terms)
        rows.append(_place(out / name, fill, card))
    return rows


def _place(
    target: Path, fill: Callable[[Path], dict[str, Any]], card: Mapping[str, Any]
) -> dict[str, Any]:
    """Write one folder; return its row."""
    start = time.perf_counter()
    found: dict[str, Any] = {}

    def whole(folder: Path) -> None:
        write_json(folder / "privacy-card.json", card)
        found.update(fill(folder))

    place_folder(target, whole)
    size = sum(f.stat().st_size for f in target.rglob("*") if f.is_file())
    seconds = time.perf_counter() - start
    row = {"format": target.name, "path": str(target), "bytes": size, "seconds": seconds}
    return row | found


def read_synthetic(run: Path) -> Images:
    """Read the synthetic set of a run.

    Raises:
        DataError: there is none, or it is damaged.
    """
    if (found := find_synthetic(run)) is None:
        raise DataError(
            f"a run must have left synthetic images to export them. Got no '{run / SYNTHETIC}': "
            "its method makes none, or this is no folder of a run"
        )
    return found


def find_synthetic(run: Path) -> Images | None:
    """Read the synthetic set of a run, or return None where there is none.

    Raises:
        DataError: it is damaged.
    """
    path = run / SYNTHETIC
    if not path.is_file():
        return None
    source = open_source(path)
    held = source.read("train")
    pixels = torch.from_numpy(np.ascontiguousarray(held.pixels))
    pixels = pixels[:, None] if pixels.ndim == 3 else pixels.movedim(-1, 1)
    return Images(pixels.contiguous(), torch.from_numpy(held.labels), source.classes)


def _fill_images(
    name: str, images: Images, record: Mapping[str, Any], terms: Terms | None, folder: Path
) -> dict[str, Any]:
    claim, title = record["claim"], record["title"]
    if name == "imagefolder":
        fill_synthetic(folder, images, claim, title, terms, record["created"])
    else:
        describe(folder, images, claim, title, name, terms)
        IMAGES[name](folder, images)
    return {}


def _pngs(images: Images) -> Iterator[bytes]:
    for array in nhwc(images):
        buffer = io.BytesIO()
        Image.fromarray(array).save(buffer, "PNG", compress_level=1)
        yield buffer.getvalue()


def _parquet(folder: Path, images: Images) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    labels = images.labels.tolist()
    features = {
        "image": {"_type": "Image"},
        "label": {"_type": "ClassLabel", "names": list(images.classes)},
    }
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema(
        [("image", image), ("label", pa.int64())],
        metadata={"huggingface": json.dumps({"info": {"features": features}})},
    )
    (folder / "data").mkdir()
    shards = max(1, -(-len(labels) // SHARD))
    pngs = _pngs(images)
    for i in range(shards):
        path = folder / "data" / f"train-{i:05d}-of-{shards:05d}.parquet"
        with pq.ParquetWriter(path, schema) as writer:
            for at in range(i * SHARD, min(len(labels), (i + 1) * SHARD), GROUP):
                part = labels[at : min(at + GROUP, (i + 1) * SHARD)]
                cells = [
                    {"bytes": next(pngs), "path": f"{at + j:08d}.png"} for j in range(len(part))
                ]
                writer.write_table(pa.table({"image": cells, "label": part}, schema=schema))


def _webdataset(folder: Path, images: Images) -> None:
    labels = images.labels.tolist()
    pngs = _pngs(images)
    for i in range(max(1, -(-len(labels) // SHARD))):
        path = folder / f"train-{i:06d}.tar"
        with tarfile.open(path, "w", format=tarfile.USTAR_FORMAT) as tar:
            for j in range(i * SHARD, min(len(labels), (i + 1) * SHARD)):
                for end, data in (("png", next(pngs)), ("cls", str(labels[j]).encode())):
                    member = tarfile.TarInfo(f"{j:08d}.{end}")  # no owner, time 0: same bytes
                    member.size = len(data)
                    tar.addfile(member, io.BytesIO(data))


def _medmnist(folder: Path, images: Images) -> None:
    small = len(images.classes) <= 256
    np.savez(
        folder / "medmnist.npz",
        train_images=nhwc(images),
        train_labels=images.labels.numpy().astype(np.uint8 if small else np.int64)[:, None],
        classes=np.array(images.classes, dtype=np.str_),
    )


def _dpimagebench(folder: Path, images: Images) -> None:
    np.savez(folder / "gen.npz", x=images.floats().numpy(), y=images.labels.numpy())


def _fill_classifier(
    name: str,
    run: Path,
    record: Mapping[str, Any],
    head: str | None,
    terms: Terms | None,
    folder: Path,
) -> dict[str, Any]:
    path = _classifier(run, head)
    held, extra = load_classifier(path), classifier_extra(path)
    head, task = extra.get("head", path.stem), record["task"]
    shape = task["channels"], task["size"]
    found: dict[str, Any] = {"head": head}
    file, reads = MODELS[name]
    if name == "safetensors":
        write_whole(folder / file, path.read_bytes())
    else:
        write = write_onnx if name == "onnx" else write_torch
        found["difference"] = write(held, folder / file, *shape)
    meta = {"format": MODEL, "kind": held.kind, "head": head, "claim": record["claim"]}
    write_json(folder / MARK, meta | {"task": task} | found)
    card = model_card(record, held.kind, head, f"- `{file}`: {reads}\n{_BESIDE}", terms)
    write_whole(folder / "README.md", card.encode())
    return found


def _classifier(run: Path, head: str | None) -> Path:
    """Return the file of a head; of the first where none is named."""
    files = sorted(run.glob("classifier*.safetensors"))
    heads = {classifier_extra(path).get("head", path.stem): path for path in files}
    if not heads:
        raise DataError(
            f"a run must have left a classifier to export it. Got no classifier*.safetensors in "
            f"'{run}'"
        )
    if head is None:
        first = run / "classifier.safetensors"
        return first if first in files else files[0]
    if head not in heads:
        raise ConfigError(f"--head must be one of {', '.join(heads)}. Got '{head}'")
    return heads[head]


_BESIDE = """- `metadata.json`: task, classes in the order of the outputs, the claim.
- `privacy-card.json`: the privacy claim in the layers of NIST SP 800-226.
"""
IMAGES: dict[str, Callable[[Path, Images], None]] = {
    "imagefolder": lambda folder, images: None,  # `fill_synthetic` writes it
    "parquet": _parquet,
    "webdataset": _webdataset,
    "medmnist": _medmnist,
    "dpimagebench": _dpimagebench,
}
MODELS = {
    "safetensors": ("classifier.safetensors", "`fedgist.load_classifier(path).predict(images)`."),
    "onnx": ("classifier.onnx", "ONNX, input `images`, output `log_probabilities`, any batch."),
    "torch": (
        "classifier.pt2",
        "`torch.export.load(path).module()(images)`, any batch. Load only what you trust: PyTorch "
        "unpickles parts of it.",
    ),
}
FORMATS = (*IMAGES, *MODELS)
