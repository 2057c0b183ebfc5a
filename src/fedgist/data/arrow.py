"""Hugging Face data on disk: Parquet files and folders, and `datasets.save_to_disk` folders.

Read with pyarrow alone. The image column is a struct of ``bytes`` and ``path`` (or plain bytes);
class names come from the schema's ``huggingface`` metadata when it has them.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.images import Encoded, native
from fedgist.data.records import SPLITS, Records, Source, one_test_split
from fedgist.errors import DataError

__all__ = ["find_arrow", "open_arrow"]

IMAGE_COLUMNS = ("image", "img")
LABEL_COLUMNS = ("label", "labels", "fine_label")


@dataclass(frozen=True)
class _Columns:
    image: str
    label: str
    names: tuple[str, ...]  # class names in the metadata, () if there are none


def find_arrow(folder: Path) -> list[Path]:
    """Return the data files of a Parquet or `save_to_disk` folder, at most three levels down."""
    levels = ("", "*/", "*/*/")
    parquet = sorted(p for at in levels for p in folder.glob(f"{at}*.parquet"))
    return parquet or sorted(p for at in levels[:2] for p in folder.glob(f"{at}data-*.arrow"))


def open_arrow(root: Path, files: list[Path]) -> Source:
    """Open Parquet or Arrow files that belong to one data set.

    Raises:
        DataError: unreadable, columns missing, files of two data sets, or class lists that differ.
    """
    homes = sorted({str(_home(p)) for p in files})
    if len(homes) > 1:
        raise DataError(f"'{root}' must hold one data set. Got {homes}: name one of them")
    splits: dict[str, list[Path]] = {}
    for path in files:
        splits.setdefault(_split(path), []).append(path)
    splits = one_test_split(splits)
    columns = {path: _columns(path) for paths in splits.values() for path in paths}
    first = next(iter(columns.values()))
    for path, other in columns.items():
        if other != first:
            raise DataError(
                f"columns and class lists of '{root}' must be the same in every file. Got "
                f"{first.image}, {first.label}, {list(first.names)} and, in '{path.name}', "
                f"{other.image}, {other.label}, {list(other.names)}"
            )
    raw = {split: _labels(paths, first.label) for split, paths in splits.items()}
    if not any(raw.values()):
        raise DataError(f"'{root}' must hold at least one image. Got none")
    classes = first.names or _infer(raw)
    channels, size = native(_heads(files, first.image))
    return Source(
        name=root.absolute().name.removesuffix(".parquet"),
        classes=classes,
        channels=channels,
        size=size,
        splits=tuple(splits),
        licence="not stated",
        read=partial(_read, splits, raw, first.image, classes),
    )


def _read(
    splits: dict[str, list[Path]],
    raw: dict[str, list[Any]],
    column: str,
    classes: tuple[str, ...],
    split: str,
) -> Records:
    files = []
    for path in splits[split]:
        rows = [row for batch in _batches(path, column) for row in batch]
        files += [_encoded(path, i, row) for i, row in enumerate(rows)]
    labels = raw[split]
    if labels and isinstance(labels[0], str):
        unknown = sorted(set(labels) - set(classes))
        if unknown:
            raise DataError(f"labels of '{path}' must be among {list(classes)}. Got {unknown}")
        labels = [classes.index(y) for y in labels]
    return Records(files, np.array(labels, np.int64))


def _home(path: Path) -> Path:
    """Return the folder of a file's data set: above ``train/`` if files lie in split folders."""
    return path.parent.parent if path.parent.name.lower() in SPLITS else path.parent


def _split(path: Path) -> str:
    word = re.split(r"[-_.]", path.stem.lower())[0]
    return SPLITS.get(word) or SPLITS.get(path.parent.name.lower()) or "train"


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException) as e:
        raise DataError(f"'{path}' must be a readable Parquet or Arrow file. Got {e}") from e


def _columns(path: Path) -> _Columns:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _reading(path):
        if path.suffix == ".parquet":
            schema = pq.read_schema(path)
        else:
            with pa.memory_map(str(path)) as f:
                schema = pa.ipc.open_stream(f).schema
    image = next((c for c in IMAGE_COLUMNS if c in schema.names), None)
    label = next((c for c in LABEL_COLUMNS if c in schema.names), None)
    if image is None or label is None:
        raise DataError(
            f"'{path}' must have a column of {list(IMAGE_COLUMNS)} and one of "
            f"{list(LABEL_COLUMNS)}. Got {schema.names}"
        )
    try:
        meta = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
        names = meta.get("info", {}).get("features", {}).get(label, {}).get("names") or ()
    except (ValueError, AttributeError) as e:
        raise DataError(f"the huggingface metadata of '{path}' must be valid JSON. Got {e}") from e
    return _Columns(image, label, tuple(str(n) for n in names))


def _batches(path: Path, column: str, size: int = 256) -> Iterator[list[Any]]:
    """Yield one column's values, ``size`` at a time."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with _reading(path):
        if path.suffix == ".parquet":
            with pq.ParquetFile(path) as f:
                for batch in f.iter_batches(batch_size=size, columns=[column]):
                    yield batch.column(0).to_pylist()
        else:
            with pa.memory_map(str(path)) as f:
                for batch in pa.ipc.open_stream(f):
                    yield batch.column(column).to_pylist()


def _labels(paths: list[Path], column: str) -> list[Any]:
    labels = [y for path in paths for batch in _batches(path, column) for y in batch]
    kinds = {type(y) for y in labels}
    if kinds - {int} and kinds - {str}:
        raise DataError(
            f"labels of '{paths[0]}' must be all integers or all strings. Got "
            f"{sorted(k.__name__ for k in kinds)}"
        )
    return labels


def _infer(raw: dict[str, list[Any]]) -> tuple[str, ...]:
    values = {y for labels in raw.values() for y in labels}
    if all(isinstance(y, int) for y in values):
        return tuple(str(i) for i in range(max(values) + 1))
    return tuple(sorted(str(y) for y in values))


def _heads(files: list[Path], column: str) -> list[Encoded]:
    """Return the first images of every file."""
    heads = []
    for path in files:
        rows = next(iter(_batches(path, column, 16)), [])[:16]
        heads += [_encoded(path, i, row) for i, row in enumerate(rows)]
    return heads


def _encoded(path: Path, i: int, row: Any) -> Encoded:
    data = row.get("bytes") if isinstance(row, dict) else row
    if not isinstance(data, bytes):
        raise DataError(
            f"image {i} of '{path}' must be embedded as bytes. Got {type(data).__name__}: save the "
            "data set with its images inside"
        )
    return Encoded(f"image {i} of {path}", data)
