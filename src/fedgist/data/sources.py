"""`open_source`: one word, a named set or a path, to a readable image set."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from fedgist.data.arrow import find_arrow, open_arrow
from fedgist.data.cifar import find_cifar, open_cifar
from fedgist.data.findings import reduction_of
from fedgist.data.folder import open_folder
from fedgist.data.idx import find_idx, open_idx
from fedgist.data.named import NAMED
from fedgist.data.npz import open_npz
from fedgist.data.records import Records, Source
from fedgist.errors import DataError, did_you_mean

__all__ = ["Records", "Source", "open_source"]

REDUCED = re.compile(r"(?P<where>.+\.npz)#(?P<how>\w*)", re.IGNORECASE)
SHARE = re.compile(r"(?P<where>.+)@(?P<part>\d+)/(?P<parts>\d+)")


def open_source(where: str | Path) -> Source:
    """Open a named set (``fashion-mini``, ``fashion-mnist``, ``digits``, ``mnist-5k``) or a path.

    A path may be an ``.npz`` (MedMNIST, plain arrays, a synthetic set), a ``.parquet``, or a folder
    of IDX files, CIFAR batches, Hugging Face data or class folders of images. A name wins over a
    folder of the same name; write ``./digits`` for the folder. ``WHERE@2/3`` is the second third of
    the training images (every third one): sites of a rehearsal. ``FILE.npz#any`` and
    ``FILE.npz#single`` reduce a multi-label set to one label for each image, see
    `fedgist.data.findings`; a share of one is ``FILE.npz#any@2/3``.

    Raises:
        DataError: neither a name nor an existing path, or nothing usable in it.
    """
    if isinstance(where, str) and (share := SHARE.fullmatch(where)) and not Path(where).exists():
        return _share(open_source(share["where"]), int(share["part"]), int(share["parts"]))
    if isinstance(where, str) and where in NAMED:
        return NAMED[where]()
    path = Path(where).expanduser()
    if not path.exists() and (reduced := REDUCED.fullmatch(str(where))):
        how = reduction_of(reduced["how"])
        return open_npz(Path(reduced["where"]).expanduser(), reduction=how)
    if path.is_dir():
        return _open_folder(path)
    if path.is_file():
        if path.suffix.lower() == ".npz":
            return open_npz(path)
        if path.suffix.lower() == ".parquet":
            return open_arrow(path, [path])
        raise DataError(f"a data file must be .npz or .parquet. Got '{path}'")
    hint = did_you_mean(str(where), NAMED)
    raise DataError(
        f"data must be one of {list(NAMED)} or a file or folder that exists. Got '{where}'.{hint}"
    )


def _share(source: Source, part: int, parts: int) -> Source:
    """Return a source that holds one of several equal parts of the training images."""
    if not 1 <= part <= parts:
        raise DataError(f"a part must be one of 1 to {parts}. Got {part}")

    def read(split: str) -> Records:
        whole = source.read(split)
        if split != "train":
            return whole
        groups = None if whole.groups is None else whole.groups[part - 1 :: parts]
        return Records(whole.pixels[part - 1 :: parts], whole.labels[part - 1 :: parts], groups)

    return replace(source, read=read)


def _open_folder(path: Path) -> Source:
    if (idx := find_idx(path)) is not None:
        return open_idx(idx)
    if (cifar := find_cifar(path)) is not None:
        return open_cifar(cifar)
    if tables := find_arrow(path):
        return open_arrow(path, tables)
    return open_folder(path)
