"""CIFAR-10 and CIFAR-100 python batches, read by an unpickler that can build arrays only.

The published files are Python 2 pickles: dicts of byte strings, lists of ints, and one numpy array.
"""

from __future__ import annotations

import _codecs
import pickle
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.records import Records, Source
from fedgist.errors import DataError

__all__ = ["find_cifar", "open_cifar", "read_batch"]

SIDE = 32
CIFAR10 = {"train": tuple(f"data_batch_{i}" for i in range(1, 6)), "test": ("test_batch",)}
CIFAR100 = {"train": ("train",), "test": ("test",)}

# Everything a batch may call. numpy's `_reconstruct` moves between releases; arrays know theirs.
_RECONSTRUCT = np.empty(0).__reduce__()[0]
ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy._core.multiarray", "_reconstruct"): _RECONSTRUCT,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
    ("_codecs", "encode"): _codecs.encode,
}


class ArrayUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        try:
            return ALLOWED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"the global {module}.{name}, which is refused") from None


def read_batch(path: Path) -> dict[str, Any]:
    """Unpickle one batch or meta file; any global but numpy's array constructors is refused.

    Raises:
        DataError: missing, damaged, not a dict, or asks for another global.
    """
    try:
        with path.open("rb") as f:
            batch = ArrayUnpickler(f, encoding="latin1").load()
    except Exception as e:  # a damaged pickle raises almost anything
        raise DataError(
            f"'{path}' must be a CIFAR batch of plain arrays. Got {type(e).__name__}: {e}"
        ) from e
    if not isinstance(batch, dict):
        raise DataError(f"'{path}' must hold a dict. Got {type(batch).__name__}")
    return batch


def find_cifar(folder: Path) -> Path | None:
    """Return the folder at or below ``folder`` that holds CIFAR batches, or None."""
    for below in ("", "cifar-10-batches-py", "cifar-100-python"):
        at = folder / below
        if (at / "batches.meta").is_file() or ((at / "meta").is_file() and _splits(at)):
            return at
    return None


def open_cifar(folder: Path) -> Source:
    """Open ``cifar-10-batches-py`` or ``cifar-100-python`` (fine labels)."""
    ten = (folder / "batches.meta").is_file()
    meta, key = ("batches.meta", "label_names") if ten else ("meta", "fine_label_names")
    names = read_batch(folder / meta).get(key)
    if not isinstance(names, list) or not all(isinstance(n, str) for n in names):
        raise DataError(f"'{folder / meta}' must hold a list '{key}'. Got {type(names).__name__}")
    splits = _splits(folder)
    if not splits:
        raise DataError(f"'{folder}' must hold CIFAR batches. Got none")
    return Source(
        name="cifar-10" if ten else "cifar-100",
        classes=tuple(names),
        channels=3,
        size=SIDE,
        splits=tuple(splits),
        licence="not stated",
        read=partial(_read, splits, "labels" if ten else "fine_labels"),
    )


def _splits(folder: Path) -> dict[str, list[Path]]:
    layout = CIFAR10 if (folder / "batches.meta").is_file() else CIFAR100
    found = {s: [folder / f for f in files] for s, files in layout.items()}
    present = {s: [p for p in paths if p.is_file()] for s, paths in found.items()}
    return {s: paths for s, paths in present.items() if paths}


def _read(splits: dict[str, list[Path]], key: str, split: str) -> Records:
    pixels, labels = [], []
    for path in splits[split]:
        batch = read_batch(path)
        data, ids = batch.get("data"), batch.get(key)
        if not isinstance(data, np.ndarray) or data.dtype != np.uint8 or data.ndim != 2:
            raise DataError(f"'data' of '{path}' must be a uint8 array [n, 3072]")
        if data.shape[1] != 3 * SIDE * SIDE:
            raise DataError(f"'data' of '{path}' must be [n, 3072]. Got {list(data.shape)}")
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise DataError(f"'{key}' of '{path}' must be a list of integers")
        if len(ids) != len(data):
            raise DataError(
                f"'{path}' must have one label per image. Got {len(data)} images and {len(ids)} "
                "labels"
            )
        pixels.append(data.reshape(-1, 3, SIDE, SIDE))
        labels.extend(ids)
    return Records(np.concatenate(pixels), np.array(labels, np.int64))
