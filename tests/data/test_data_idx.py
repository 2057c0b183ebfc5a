"""IDX files in torchvision's and Debian's layout."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest

from fedgist.data import open_source
from fedgist.data.idx import FASHION_CLASSES, read_idx
from fedgist.errors import DataError

IMAGES = np.random.default_rng(0).integers(0, 256, (6, 28, 28), np.uint8)
LABELS = np.array([3, 1, 4, 1, 5, 9], np.uint8)


def idx(array: np.ndarray) -> bytes:
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.tobytes()


def write(folder: Path, zipped: bool = False, splits: tuple[str, ...] = ("train", "t10k")) -> Path:
    folder.mkdir(parents=True)
    for k, prefix in enumerate(splits):
        for kind, array in (("images-idx3", IMAGES[k:]), ("labels-idx1", LABELS[k:])):
            path = folder / f"{prefix}-{kind}-ubyte{'.gz' if zipped else ''}"
            path.write_bytes(gzip.compress(idx(array)) if zipped else idx(array))
    return folder


@pytest.mark.parametrize("zipped", [False, True])
@pytest.mark.parametrize("below", ["", "raw", "MNIST/raw"])
def test_mnist(tmp_path: Path, zipped: bool, below: str) -> None:
    write(tmp_path / "m" / below, zipped)
    source = open_source(tmp_path / "m")
    assert source.classes == tuple("0123456789")
    assert (source.channels, source.size, source.splits) == (1, 28, ("train", "test"))
    train, test = (source.images(s, source.task()) for s in source.splits)
    np.testing.assert_array_equal(train.pixels[:, 0].numpy(), IMAGES)
    assert train.labels.tolist() == LABELS.tolist()
    assert len(test) == 5 and test.labels.tolist() == LABELS[1:].tolist()


def test_fashion_mnist_has_names(tmp_path: Path) -> None:
    write(tmp_path / "FashionMNIST" / "raw")
    for where in (tmp_path, tmp_path / "FashionMNIST"):
        source = open_source(where)
        assert (source.classes, source.licence) == (FASHION_CLASSES, "MIT")


def test_one_split_alone(tmp_path: Path) -> None:
    source = open_source(write(tmp_path / "m", splits=("t10k",)))
    assert source.splits == ("test",)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\0\0\x0d\x01" + bytes(8), "IDX file of bytes .*Got 00000d01"),
        (b"PK", "IDX file of bytes"),
        (b"\0\0\x08\x03" + bytes(4), "as its header states"),
        (idx(IMAGES)[:-5], "must hold 4704 values as its header states. Got 4699"),
        (idx(IMAGES) + b"x", "Got 4705"),
    ],
)
def test_wrong_magic_or_length(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "x-ubyte"
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(path)


def test_truncated_gzip(tmp_path: Path) -> None:
    path = write(tmp_path / "m", zipped=True) / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:2000])
    source = open_source(tmp_path / "m")
    with pytest.raises(DataError, match=r"train-images-idx3-ubyte\.gz' must be a readable IDX"):
        source.images("train", source.task())


def test_labels_missing_or_too_few(tmp_path: Path) -> None:
    folder = write(tmp_path / "m")
    (folder / "train-labels-idx1-ubyte").write_bytes(idx(LABELS[:4]))
    source = open_source(folder)
    with pytest.raises(DataError, match=r"one label per image. Got 6 images and 4 labels"):
        source.images("train", source.task())
    (folder / "train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match="must hold train-labels-idx1-ubyte"):
        open_source(folder)
