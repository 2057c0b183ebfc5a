"""Image folders: ``root/class/files`` or ``root/{train,test,val}/class/files``.

This covers ImageFolder, EuroSAT (``2750/<Class>/*.jpg``), ImageNette and ImageNet
(``{train,val}/<wnid>/*.JPEG``), Tiny-ImageNet's ``train`` and Hugging Face's imagefolder. A class
is a folder, also when it is empty. Whose image it is can stand in ``metadata.csv`` (in the root or
in a split's folder), with the columns ``file_name`` (relative to that csv) and ``group`` or
``person``.
"""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import numpy as np

from fedgist.data.images import SUFFIXES, Encoded, native
from fedgist.data.records import SPLITS, Records, Source, group_ids, one_test_split
from fedgist.errors import DataError

__all__ = ["open_folder"]

GROUP_COLUMNS = ("group", "person")
WRAPPERS = ("eurosat", "eurosat_rgb", "2750")


def open_folder(root: Path) -> Source:
    """Open a folder of class folders.

    Raises:
        DataError: no class folder, no image at all, class lists of two splits that differ, or a
            ``metadata.csv`` that leaves an image out.
    """
    top = _descend(root)
    splits = _split_folders(top)
    classes = _class_names(top, splits)
    files = {s: _files(folder, classes) for s, folder in splits.items()}
    everything = [path for rows in files.values() for path, _ in rows]
    if not everything:
        raise DataError(
            f"'{root}' must hold at least one image in a class folder. Got none with a suffix of "
            f"{' '.join(SUFFIXES)}"
        )
    channels, size = native([Encoded(str(p), p) for p in everything])
    groups = _groups(top, splits, everything)
    return Source(
        name=root.absolute().name,
        classes=classes,
        channels=channels,
        size=size,
        splits=tuple(splits),
        licence="not stated",
        read=partial(_read, files, groups),
    )


def _read(
    files: Mapping[str, list[tuple[Path, int]]], groups: Mapping[Path, int] | None, split: str
) -> Records:
    rows = files[split]
    return Records(
        [Encoded(str(path), path) for path, _ in rows],
        np.array([label for _, label in rows], np.int64),
        None if groups is None else np.array([groups[path] for path, _ in rows], np.int64),
    )


def _descend(root: Path) -> Path:
    """Follow a lone folder that wraps the classes (``eurosat/2750``) or the splits."""
    while len(below := _folders(root)) == 1:
        inside = {f.name.lower() for f in _folders(below[0])}
        if below[0].name.lower() not in WRAPPERS and "train" not in inside:
            break
        root = below[0]
    return root


def _split_folders(root: Path) -> dict[str, Path]:
    """Return the splits. A root with other folders than splits' has one, ``train``: itself."""
    below = _folders(root)
    names = [SPLITS.get(f.name.lower()) for f in below]
    if not below or None in names or not any(_folders(f) for f in below):
        return {"train": root}
    if len(set(names)) != len(names):
        raise DataError(
            f"'{root}' must hold each split once. Got the folders {[f.name for f in below]}"
        )
    return one_test_split({str(n): f for n, f in zip(names, below, strict=True)})


def _class_names(root: Path, splits: Mapping[str, Path]) -> tuple[str, ...]:
    """Return the first split's classes; another may lack some but not add any."""
    first = next(iter(splits))
    classes = [f.name for f in _folders(splits[first])]
    if not classes:
        raise DataError(f"'{splits[first]}' must hold one folder per class. Got no folder")
    for split, folder in splits.items():
        other = [f.name for f in _folders(folder)]
        if not set(other) <= set(classes):
            raise DataError(
                f"the class folders of '{root}' must be the same in every split. Got {first} "
                f"{classes}, {split} {other}"
            )
    return tuple(classes)


def _folders(folder: Path) -> list[Path]:
    try:
        found = [p for p in folder.iterdir() if p.is_dir() and not p.name.startswith((".", "__"))]
    except OSError as e:
        raise DataError(f"'{folder}' must be a readable folder. Got {e.strerror}") from e
    return sorted(found, key=lambda p: p.name)


def _files(folder: Path, classes: tuple[str, ...]) -> list[tuple[Path, int]]:
    """Return every image with its label: classes in order, paths sorted, subfolders included."""
    rows = []
    for label, name in enumerate(classes):
        paths = [
            Path(at, file)
            for at, _, files in os.walk(folder / name, followlinks=True)
            for file in files
            if not file.startswith(".") and os.path.splitext(file)[1].lower() in SUFFIXES
        ]
        rows += [(path, label) for path in sorted(paths)]
    return rows


def _groups(root: Path, splits: Mapping[str, Path], images: list[Path]) -> dict[Path, int] | None:
    """Return the group number of every image, or None when no metadata.csv names groups."""
    named: dict[Path, str] = {}
    found = False
    for folder in dict.fromkeys((root, *splits.values())):
        path = folder / "metadata.csv"
        if path.is_file():
            rows = _metadata(path)
            found = found or rows is not None
            named |= rows or {}
    if not found:
        return None
    missing = [p for p in images if not named.get(p)]
    if missing:
        raise DataError(
            f"metadata.csv of '{root}' must name the group of every image. Got {len(missing)} "
            f"images without one, the first '{missing[0]}'"
        )
    ids = group_ids(named[p] for p in images)
    return {p: ids[named[p]] for p in images}


def _metadata(path: Path) -> dict[Path, str] | None:
    """Return file -> group name, or None when the file has no group column."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as f:
            reader = csv.DictReader(f)
            names = reader.fieldnames or ()
            column = next((c for c in GROUP_COLUMNS if c in names), None)
            if column is None or "file_name" not in names:
                return None
            return {path.parent / (row["file_name"] or ""): row[column] or "" for row in reader}
    except (OSError, UnicodeDecodeError, csv.Error) as e:
        raise DataError(f"'{path}' must be a readable CSV file. Got {e}") from e
