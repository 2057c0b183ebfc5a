"""Named sets that come from packages."""

import gzip
import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgist.data import open_source
from fedgist.data.named import ANIMALS
from fedgist.errors import DataError


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Stand in for animal-shape-mnist: 12 bears, 6 birds, the last two of each the same."""
    folder = tmp_path / "animal_shape_mnist" / "data" / "Animal Shape"
    folder.mkdir(parents=True)
    pixels = np.zeros((18, 28, 28), np.uint8)
    pixels[:, 10, 10] = 7 * (np.arange(18) + 1)
    pixels[11], pixels[17] = pixels[10], pixels[16]
    put(folder / "animal_data_version_3.gz", pixels)
    put(folder / "animal_label_version_3.gz", np.repeat([0, 1], [12, 6]))
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "animal_shape_mnist", raising=False)
    return folder


def put(path: Path, thing: Any) -> None:
    path.write_bytes(gzip.compress(pickle.dumps(thing)))


def test_animals_are_split_once_and_no_image_is_on_both_sides(package: Path) -> None:
    s = open_source("animal-shapes")
    assert (s.name, s.channels, s.size, s.licence) == ("animal-shapes", 1, 28, "MIT")
    task = s.task()
    with pytest.warns(UserWarning, match="mean of"):  # these drawings are one dot each
        train, test = s.images("train", task), s.images("test", task)
    assert train.counts().tolist() == [9, 4] + [0] * 8  # 11 and 5 distinct ones
    assert test.counts().tolist() == [2, 1] + [0] * 8
    dots = [x.pixels[:, 0, 10, 10].tolist() for x in (train, test)]
    assert dots[1] == [7 * 5, 7 * 10, 7 * 17] and not set(dots[0]) & set(dots[1])


def test_the_real_animals() -> None:
    pytest.importorskip("animal_shape_mnist")  # a namespace: importing it runs nothing
    s = open_source("animal-shapes")
    train, test = s.images("train", s.task()), s.images("test", s.task())
    assert s.classes == ANIMALS and (len(train), len(test)) == (7775, 1941)
    assert test.counts().min() >= 162
    seen = {x.numpy().tobytes() for x in train.pixels} | {x.numpy().tobytes() for x in test.pixels}
    assert len(seen) == 9716


def test_animals_without_their_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedgist.data.named.find_spec", lambda name: None)
    with pytest.raises(DataError, match=r"Run: pip install --no-deps animal-shape-mnist"):
        open_source("animal-shapes")


class Evil:
    def __reduce__(self) -> Any:
        return (print, ("run",))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (Evil(), r"builtins.print, which is refused"),
        ([1, 2], r"must hold an array of uint8 with 3 axes"),
        (np.zeros((2, 28, 28)), r"must hold an array of uint8"),
    ],
)
def test_only_arrays_are_unpickled(
    package: Path, capsys: pytest.CaptureFixture[str], content: Any, message: str
) -> None:
    put(package / "animal_data_version_3.gz", content)
    with pytest.raises(DataError, match=message):
        open_source("animal-shapes")
    assert capsys.readouterr().out == ""


def test_a_truncated_file_is_named(package: Path) -> None:
    path = package / "animal_label_version_3.gz"
    path.write_bytes(path.read_bytes()[:40])
    with pytest.raises(DataError, match=r"animal_label_version_3.gz' must be a compressed pickle"):
        open_source("animal-shapes")
