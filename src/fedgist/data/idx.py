"""IDX files: MNIST and Fashion-MNIST, gzipped or raw, in torchvision's or Debian's layout."""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from functools import partial
from pathlib import Path

import numpy as np

from fedgist.data.images import Array
from fedgist.data.records import Records, Source
from fedgist.errors import DataError

__all__ = ["FASHION_CLASSES", "find_idx", "open_idx", "read_idx"]

FASHION_CLASSES = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
PREFIXES = {"train": "train", "test": "t10k"}
UNSIGNED_BYTE = 8


def read_idx(path: Path) -> Array:
    """Read an IDX file of unsigned bytes, gzipped if its name ends in ``.gz``.

    Raises:
        DataError: wrong magic number, or more or fewer bytes than the header states.
    """
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as f:
            raw = f.read()
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"'{path}' must be a readable IDX file. Got {e}") from e
    if len(raw) < 4 or raw[:2] != b"\0\0" or raw[2] != UNSIGNED_BYTE:
        raise DataError(f"'{path}' must be an IDX file of bytes (0000 08..). Got {raw[:4].hex()}")
    start = 4 + 4 * raw[3]
    shape = struct.unpack(f">{raw[3]}I", raw[4:start]) if len(raw) >= start else (0,)
    if len(raw) != start + math.prod(shape):
        raise DataError(
            f"'{path}' must hold {math.prod(shape)} values as its header states. Got "
            f"{max(0, len(raw) - start)}: copy or download it again"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def find_idx(folder: Path) -> Path | None:
    """Return the folder at or below ``folder`` that holds IDX images, or None."""
    for below in ("", "raw", "MNIST/raw", "FashionMNIST/raw"):
        if any(_file(folder / below, p, "images-idx3") for p in PREFIXES.values()):
            return folder / below
    return None


def open_idx(folder: Path, name: str | None = None) -> Source:
    """Open the folder that holds ``{train,t10k}-{images-idx3,labels-idx1}-ubyte[.gz]``.

    IDX files carry no class names. A path that mentions ``fashion`` has Fashion-MNIST's, any other
    the digits (more, if there are more labels).
    """
    found = {s: p for s, p in PREFIXES.items() if _file(folder, p, "images-idx3")}
    labels = {s: read_idx(_require(folder, p, "labels-idx1")) for s, p in found.items()}
    fashion = "fashion" in str(folder.absolute()).lower()
    top = max((int(y.max()) for y in labels.values() if len(y)), default=0)
    classes = FASHION_CLASSES if fashion else tuple(str(i) for i in range(max(10, top + 1)))
    first = _require(folder, next(iter(found.values())), "images-idx3")
    return Source(
        name=name or ("fashion-mnist" if fashion else folder.name),
        classes=classes,
        channels=1,
        size=_side(first),
        splits=tuple(found),
        licence="MIT" if fashion else "not stated",
        read=partial(_read, folder, labels),
    )


def _read(folder: Path, labels: dict[str, Array], split: str) -> Records:
    path = _require(folder, PREFIXES[split], "images-idx3")
    images = read_idx(path)
    if images.ndim != 3:
        raise DataError(f"'{path}' must hold images [n, h, w]. Got shape {list(images.shape)}")
    return Records(images, labels[split])


def _file(folder: Path, prefix: str, kind: str) -> Path | None:
    names = (f"{prefix}-{kind}-ubyte", f"{prefix}-{kind}-ubyte.gz")
    return next((folder / n for n in names if (folder / n).is_file()), None)


def _require(folder: Path, prefix: str, kind: str) -> Path:
    path = _file(folder, prefix, kind)
    if path is None:
        raise DataError(f"'{folder}' must hold {prefix}-{kind}-ubyte or .gz beside its images")
    return path


def _side(path: Path) -> int:
    """Return the common side from the header of an image file, or 64 when h and w differ."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as f:
            head = f.read(16)
    except (OSError, EOFError, zlib.error) as e:
        raise DataError(f"'{path}' must be a readable IDX file. Got {e}") from e
    if len(head) < 16 or head[3] != 3:
        raise DataError(f"'{path}' must be an IDX file of images (00000803). Got {head[:4].hex()}")
    h, w = struct.unpack(">2I", head[8:])
    return int(h) if h == w else 64
