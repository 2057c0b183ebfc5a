"""Arrays in one ``.npz``: MedMNIST's layout, plain arrays, and FedGist's own synthetic sets.

Keys are ``{train,val,test}_images`` and ``{train,val,test}_labels`` or ``images`` and ``labels``
(one split, ``train``); optional ``classes`` (names) and ``groups`` or ``{split}_groups``. Labels
are ``[n]`` or ``[n, 1]``; those of a multi-label set, ``[n, k]`` of 0 and 1, have to be reduced to
one, see `fedgist.data.findings`. Nothing is ever unpickled.
"""

from __future__ import annotations

import warnings
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedgist.data.findings import Reduction, reduced, reduced_classes
from fedgist.data.images import Array
from fedgist.data.medmnist import findings_of, labels_of
from fedgist.data.records import Records, Source, group_ids, one_test_split
from fedgist.errors import DataError

__all__ = ["open_npz"]

Shape = tuple[int, ...]


def open_npz(
    path: Path | Traversable,
    name: str | None = None,
    licence: str = "",
    reduction: Reduction | None = None,
) -> Source:
    """Open an npz of images and labels.

    Class names come from ``classes``, else from MedMNIST's list when the file is named as one of
    its sets, else they are the numbers 0 to the largest label. Of a multi-label set these are the
    names of its findings, the numbers 0 to k - 1 where nothing names them.

    Args:
        path: the file.
        name: of the source; the file's by default, with ``-any`` or ``-single`` where reduced.
        licence: of the images.
        reduction: to one label for each image; for multi-label sets, which need one. Reading a
            split warns how many images it leaves out.

    Raises:
        DataError: unreadable, keys missing, labels that are not one integer per image, or a
            reduction of labels that are.
    """
    name = name or path.name.removesuffix(".npz")
    with _load(path) as z:
        keys = _keys(z, path)
        tables = {split: _array(z, f"{key}labels", path) for split, key in keys.items()}
        shape = _shape(z, f"{next(iter(keys.values()))}images", path)
        named = _classes(z)
    keep: dict[str, Array] = {}
    if reduction is None:
        labels = {s: _single(y, f"'{keys[s]}labels' of '{path}'") for s, y in tables.items()}
        classes = named or labels_of(name) or _numbers(labels)
    else:
        findings = named or findings_of(name) or _columns(tables)
        classes = reduced_classes(reduction, findings)
        labels = {}
        for s, y in tables.items():
            where = f"'{keys[s]}labels' of '{path}'"
            labels[s], keep[s] = reduced(reduction, y, where, len(findings))
        name = f"{name}-{reduction}"
    channels, size = _native(shape)
    return Source(
        name=name,
        classes=classes,
        channels=channels,
        size=size,
        splits=tuple(keys),
        licence=licence or "not stated",
        read=partial(_read, path, keys, labels, keep),
    )


def _keys(z: Any, path: Path | Traversable) -> dict[str, str]:
    """Return the prefix of each split's keys."""
    keys = {s: f"{s}_" for s in ("train", "val", "test") if f"{s}_images" in z}
    if not keys and "images" in z:
        keys = {"train": ""}
    if not keys:
        raise DataError(
            f"'{path}' must hold images and labels, or train_images and train_labels. Got the "
            f"keys {list(z)}"
        )
    return one_test_split(keys)


def _read(
    path: Path | Traversable,
    keys: dict[str, str],
    labels: dict[str, Array],
    keep: dict[str, Array],
    split: str,
) -> Records:
    """Read a split; ``keep`` says which images have a label, where not all have."""
    rows = keep.get(split)
    n = len(labels[split] if rows is None else rows)
    with _load(path) as z:
        groups = None
        if (key := f"{keys[split]}groups") in z:
            names = z[key].ravel().tolist()
            ids = group_ids(names)
            groups = np.array([ids[n] for n in names], np.int64)
            if len(groups) != n:
                raise DataError(
                    f"'{key}' of '{path}' must have one entry per image. Got {len(groups)} for "
                    f"{n} labels"
                )
        pixels = z[f"{keys[split]}images"]
    if rows is None:
        return Records(pixels, labels[split], groups)
    if len(pixels) != n:  # afterwards their numbers could agree by accident
        raise DataError(
            f"'{path}' must have one label per image. Got {len(pixels)} {split} images and {n} "
            "labels"
        )
    if not rows.all():
        warnings.warn(
            f"every image of '{path}' should have one finding at most. Got {n - rows.sum()} of {n} "
            f"{split} images with two or more: they are left out",
            stacklevel=3,
        )
    return Records(pixels[rows], labels[split], None if groups is None else groups[rows])


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


def _array(z: Any, key: str, path: Path | Traversable) -> Array:
    if key not in z:
        raise DataError(f"'{path}' must hold '{key}'. Got the keys {list(z)}")
    y: Array = z[key]
    return y


def _single(y: Array, where: str) -> Array:
    """Return one label for each image, int64 ``[n]``."""
    if y.ndim == 2 and y.shape[1] > 1:
        raise DataError(
            f"{where} must be one label per image. Got {list(y.shape)}: of a multi-label set, open "
            "FILE.npz#any (no finding or any: two classes) or FILE.npz#single (images with two or "
            "more findings are left out)"
        )
    if y.ndim not in (1, 2) or y.dtype.kind not in "iu":
        raise DataError(f"{where} must be integers [n] or [n, 1]. Got {y.dtype} {list(y.shape)}")
    return y.reshape(-1).astype(np.int64)


def _columns(tables: dict[str, Array]) -> tuple[str, ...]:
    """Number the columns of the first split's labels; `reduced` refuses what has none."""
    first = next(iter(tables.values()))
    return tuple(str(i) for i in range(first.shape[1] if first.ndim == 2 else 0))


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
