"""Arrays in one ``.npz``: MedMNIST's layout, plain arrays, and FedGist's own synthetic sets.

Keys are ``{train,val,test}_images`` and ``{train,val,test}_labels`` or ``images`` and ``labels``
(one split, ``train``); optional ``classes`` (names) and ``groups`` or ``{split}_groups``. Labels
are ``[n]`` or ``[n, 1]``. Nothing is ever unpickled.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedgist.data.images import Array
from fedgist.data.medmnist import labels_of
from fedgist.data.records import Records, Source, group_ids, one_test_split
from fedgist.errors import DataError

__all__ = ["open_npz"]

Shape = tuple[int, ...]


def open_npz(path: Path | Traversable, name: str | None = None, licence: str = "") -> Source:
    """Open an npz of images and labels.

    Class names come from ``classes``, else from MedMNIST's list when the file is named as one of
    its sets, else they are the numbers 0 to the largest label.

    Raises:
        DataError: unreadable, keys missing, or labels that are not one integer per image.
    """
    name = name or path.name.removesuffix(".npz")
    with _load(path) as z:
        keys = {s: f"{s}_" for s in ("train", "val", "test") if f"{s}_images" in z}
        if not keys and "images" in z:
            keys = {"train": ""}
        if not keys:
            raise DataError(
                f"'{path}' must hold images and labels, or train_images and train_labels. Got the "
                f"keys {list(z)}"
            )
        keys = one_test_split(keys)
        labels = {split: _labels(z, f"{key}labels", path) for split, key in keys.items()}
        shape = _shape(z, f"{next(iter(keys.values()))}images", path)
        known = labels_of(name)
        classes = _classes(z) or known or _numbers(labels)
    channels, size = _native(shape)
    return Source(
        name=name,
        classes=classes,
        channels=channels,
        size=size,
        splits=tuple(keys),
        licence=licence or "not stated",
        read=partial(_read, path, keys, labels),
    )


def _read(
    path: Path | Traversable, keys: dict[str, str], labels: dict[str, Array], split: str
) -> Records:
    with _load(path) as z:
        groups = None
        if (key := f"{keys[split]}groups") in z:
            names = z[key].ravel().tolist()
            ids = group_ids(names)
            groups = np.array([ids[n] for n in names], np.int64)
            if len(groups) != len(labels[split]):
                raise DataError(
                    f"'{key}' of '{path}' must have one entry per image. Got {len(groups)} for "
                    f"{len(labels[split])} labels"
                )
        return Records(z[f"{keys[split]}images"], labels[split], groups)


@contextmanager
def _load(path: Path | Traversable) -> Iterator[Any]:
    """Open the file; whatever is wrong inside it becomes a `DataError` that names it."""
    try:
        with path.open("rb") as f:
            z = np.load(f, allow_pickle=False)
            if not isinstance(z, np.lib.npyio.NpzFile):
                raise DataError(f"'{path}' must be an npz archive. Got a single array")
            with z:
                yield z
    except (OSError, EOFError, ValueError, KeyError, zlib.error, zipfile.BadZipFile) as e:
        raise DataError(f"'{path}' must be a readable npz without objects. Got {e}") from e


def _labels(z: Any, key: str, path: Path | Traversable) -> Array:
    if key not in z:
        raise DataError(f"'{path}' must hold '{key}'. Got the keys {list(z)}")
    y: Array = z[key]
    if y.ndim == 2 and y.shape[1] > 1:
        raise DataError(
            f"'{key}' of '{path}' must be one label per image. Got {list(y.shape)}: multi-label "
            "sets are not supported"
        )
    if y.ndim not in (1, 2) or y.dtype.kind not in "iu":
        raise DataError(
            f"'{key}' of '{path}' must be integers [n] or [n, 1]. Got {y.dtype} {list(y.shape)}"
        )
    return y.reshape(-1).astype(np.int64)


def _classes(z: Any) -> tuple[str, ...]:
    if "classes" not in z:
        return ()
    return tuple(c.decode() if isinstance(c, bytes) else str(c) for c in z["classes"].tolist())


def _numbers(labels: dict[str, Array]) -> tuple[str, ...]:
    top = max((int(y.max()) for y in labels.values() if len(y)), default=0)
    return tuple(str(i) for i in range(top + 1))


def _shape(z: Any, key: str, path: Path | Traversable) -> Shape:
    """Read an array's shape from its header, without its pixels."""
    with z.zip.open(f"{key}.npy") as f:
        version = np.lib.format.read_magic(f)
        header = {
            (1, 0): np.lib.format.read_array_header_1_0,
            (2, 0): np.lib.format.read_array_header_2_0,
        }.get(version)
        if header is None:
            raise DataError(f"'{key}' of '{path}' must be npy version 1 or 2. Got {version}")
        shape: Shape = header(f)[0]
    return shape


def _native(shape: Shape) -> tuple[Literal[1, 3], int]:
    """Return channels and size; `convert` is the one that refuses wrong shapes."""
    h, w, channels = 0, 1, 1
    if len(shape) == 3:
        h, w = shape[1:]
    elif len(shape) == 4 and shape[3] in (1, 3):
        h, w, channels = shape[1:]
    elif len(shape) == 4:
        channels, h, w = shape[1:]
    return 3 if channels == 3 else 1, h if h == w else 64
