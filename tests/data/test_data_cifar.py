"""CIFAR batches, written opcode by opcode as Python 2 wrote them, and hostile pickles."""

import pickle
import pickletools
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgist.data import open_source
from fedgist.data.cifar import read_batch
from fedgist.errors import DataError

RNG = np.random.default_rng(0)


def python2(value: Any) -> bytes:
    """Write protocol 2 with Python 2's opcodes: byte strings, and numpy's old module name."""
    return b"\x80\x02" + _put(value) + b"."


def _put(value: Any) -> bytes:
    if isinstance(value, str):
        raw = value.encode("latin1")
        if len(raw) < 256:
            return b"U" + bytes([len(raw)]) + raw  # SHORT_BINSTRING
        return b"T" + struct.pack("<i", len(raw)) + raw  # BINSTRING
    if isinstance(value, int):
        return b"K" + bytes([value]) if value < 256 else b"J" + struct.pack("<i", value)
    if isinstance(value, list):
        return b"](" + b"".join(map(_put, value)) + b"e"
    if isinstance(value, dict):
        return b"}(" + b"".join(_put(k) + _put(v) for k, v in value.items()) + b"u"
    assert isinstance(value, np.ndarray) and value.dtype == np.uint8
    minus_one = b"J\xff\xff\xff\xff"
    state = b"(K\x03U\x01|NNN" + minus_one + minus_one + b"K\x00tb"
    dtype = b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R" + state
    shape = b"(" + b"".join(_put(s) for s in value.shape) + b"t"
    data = _put(value.tobytes().decode("latin1"))
    start = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85U\x01b\x87R"
    return start + b"(K\x01" + shape + dtype + b"\x89" + data + b"tb"


def batch(labels: list[int], key: str) -> tuple[np.ndarray, dict[str, Any]]:
    data = RNG.integers(0, 256, (len(labels), 3072), np.uint8)
    return data, {"batch_label": "b", key: labels, "data": data, "filenames": ["x.png"] * 3}


def cifar10(root: Path) -> list[np.ndarray]:
    folder = root / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = ["airplane", "automobile", "bird"]
    meta = {"num_cases_per_batch": 3, "label_names": names, "num_vis": 3072}
    (folder / "batches.meta").write_bytes(python2(meta))
    arrays = []
    for i, name in enumerate([*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"]):
        data, content = batch([i % 3, 1, 2], "labels")
        (folder / name).write_bytes(python2(content))
        arrays.append(data)
    return arrays


def test_the_fixture_is_a_python_2_pickle(tmp_path: Path) -> None:
    cifar10(tmp_path)
    raw = (tmp_path / "cifar-10-batches-py" / "data_batch_1").read_bytes()
    ops = {op.name for op, _, _ in pickletools.genops(raw)}
    assert {"SHORT_BINSTRING", "BINSTRING", "GLOBAL", "BUILD"} <= ops
    assert "BINUNICODE" not in ops and "BINBYTES" not in ops


def test_cifar_10(tmp_path: Path) -> None:
    arrays = cifar10(tmp_path)
    for where in (tmp_path, tmp_path / "cifar-10-batches-py"):
        source = open_source(where)
        assert source.classes == ("airplane", "automobile", "bird")
        assert (source.name, source.size, source.splits) == ("cifar-10", 32, ("train", "test"))
        train = source.images("train", source.task())
        expected = np.concatenate(arrays[:5]).reshape(-1, 3, 32, 32)  # planes R, G, B
        np.testing.assert_array_equal(train.pixels.numpy(), expected)
        assert train.labels[:6].tolist() == [0, 1, 2, 1, 1, 2]
        assert len(source.images("test", source.task())) == 3


def test_cifar_100_has_fine_labels(tmp_path: Path) -> None:
    folder = tmp_path / "cifar-100-python"
    folder.mkdir()
    meta = {"fine_label_names": ["apple", "bee", "cup"], "coarse_label_names": ["food", "other"]}
    (folder / "meta").write_bytes(python2(meta))
    for name in ("train", "test"):
        _, content = batch([2, 0, 1], "fine_labels")
        (folder / name).write_bytes(python2(content | {"coarse_labels": [1, 0, 1]}))
    source = open_source(tmp_path)
    assert source.classes == ("apple", "bee", "cup")
    assert source.images("train", source.task()).labels.tolist() == [2, 0, 1]


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_python_3_pickles_are_read_too(tmp_path: Path, protocol: int) -> None:
    data, content = batch([0, 1, 2], "labels")
    (tmp_path / "b").write_bytes(pickle.dumps(content, protocol))
    if protocol == 5:  # rebuilds arrays through another function, which published files never use
        with pytest.raises(DataError, match="_frombuffer, which is refused"):
            read_batch(tmp_path / "b")
    else:
        np.testing.assert_array_equal(read_batch(tmp_path / "b")["data"], data)


class Attack:
    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize("where", ["data", "labels", "top"])
def test_malicious_pickles_are_refused(tmp_path: Path, protocol: int, where: str) -> None:
    cifar10(tmp_path)
    canary = tmp_path / "pwned"
    attack: Any = Attack(eval, f"open({str(canary)!r}, 'w')")
    content = attack if where == "top" else {"data": np.zeros(3), "labels": [0]} | {where: attack}
    (tmp_path / "cifar-10-batches-py" / "data_batch_3").write_bytes(pickle.dumps(content, protocol))
    source = open_source(tmp_path)
    with pytest.raises(DataError, match=r"data_batch_3.*eval, which is refused"):
        source.images("train", source.task())
    assert not canary.exists()


@pytest.mark.parametrize(
    "name", ["os\nsystem", "builtins\ngetattr", "numpy\nload", "numpy.core.multiarray\nscalar"]
)
def test_every_other_global_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "b").write_bytes(b"\x80\x02c" + name.encode() + b"\n.")
    with pytest.raises(DataError, match="which is refused"):
        read_batch(tmp_path / "b")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"labels": [0, 1]}, "one label per image. Got 3 images and 2 labels"),
        ({"labels": ["0", "1", "2"]}, "list of integers"),
        ({"labels": [0, 1, 7]}, r"must lie in 0\.\.2. Got 0\.\.7"),
        ({"data": np.zeros((3, 100), np.uint8)}, r"must be \[n, 3072\]. Got \[3, 100\]"),
        ({"data": [1, 2]}, "must be a uint8 array"),
    ],
)
def test_unusable_batches(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    cifar10(tmp_path)
    _, content = batch([0, 1, 2], "labels")
    path = tmp_path / "cifar-10-batches-py" / "test_batch"
    path.write_bytes(python2(content | change))
    source = open_source(tmp_path)
    with pytest.raises(DataError, match=message):
        source.images("test", source.task())


def test_truncated_batch(tmp_path: Path) -> None:
    cifar10(tmp_path)
    path = tmp_path / "cifar-10-batches-py" / "data_batch_2"
    path.write_bytes(path.read_bytes()[:900])
    source = open_source(tmp_path)
    with pytest.raises(DataError, match="data_batch_2"):
        source.images("train", source.task())
