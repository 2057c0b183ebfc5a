"""`open_source`: one word, a named set or a path, to a readable image set."""

from __future__ import annotations

from pathlib import Path

from fedgist.data.arrow import find_arrow, open_arrow
from fedgist.data.cifar import find_cifar, open_cifar
from fedgist.data.folder import open_folder
from fedgist.data.idx import find_idx, open_idx
from fedgist.data.named import NAMED
from fedgist.data.npz import open_npz
from fedgist.data.records import Records, Source
from fedgist.errors import DataError, did_you_mean

__all__ = ["Records", "Source", "open_source"]


def open_source(where: str | Path) -> Source:
    """Open a named set (``fashion-mini``, ``fashion-mnist``, ``digits``, ``mnist-5k``) or a path.

    A path may be an ``.npz`` (MedMNIST, plain arrays, a synthetic set), a ``.parquet``, or a folder
    of IDX files, CIFAR batches, Hugging Face data or class folders of images. A name wins over a
    folder of the same name; write ``./digits`` for the folder.

    Raises:
        DataError: neither a name nor an existing path, or nothing usable in it.
    """
    if isinstance(where, str) and where in NAMED:
        return NAMED[where]()
    path = Path(where).expanduser()
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


def _open_folder(path: Path) -> Source:
    if (idx := find_idx(path)) is not None:
        return open_idx(idx)
    if (cifar := find_cifar(path)) is not None:
        return open_cifar(cifar)
    if tables := find_arrow(path):
        return open_arrow(path, tables)
    return open_folder(path)
