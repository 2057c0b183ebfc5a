"""Parquet files and save_to_disk folders, written by `datasets` and pyarrow themselves."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from fedgist.data import open_source
from fedgist.errors import DataError

NAMES = ["cat", "dog", "emu"]


def png(value: int) -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (8, 8), (value, 0, 200)).save(buffer, "PNG")
    return buffer.getvalue()


def write(
    path: Path,
    labels: list[Any],
    columns: tuple[str, str] = ("image", "label"),
    names: list[str] | None = NAMES,
) -> None:
    """Write what `Dataset.to_parquet` writes: image structs and the features in the schema."""
    path.parent.mkdir(parents=True, exist_ok=True)
    images = [{"bytes": png(10 * i), "path": f"{i}.png"} for i in range(len(labels))]
    table = pa.table({columns[0]: images, columns[1]: labels})
    if names:
        features = {
            columns[0]: {"_type": "Image"},
            columns[1]: {"names": names, "_type": "ClassLabel"},
        }
        meta = {"huggingface": json.dumps({"info": {"features": features}})}
        table = table.replace_schema_metadata(meta)
    pq.write_table(table, path)


@pytest.mark.parametrize(
    "columns", [("image", "label"), ("img", "label"), ("image", "labels"), ("img", "fine_label")]
)
def test_one_file(tmp_path: Path, columns: tuple[str, str]) -> None:
    write(tmp_path / "train-00000-of-00001.parquet", [2, 0, 2], columns)
    source = open_source(tmp_path / "train-00000-of-00001.parquet")
    assert source.classes == tuple(NAMES)
    assert (source.channels, source.size, source.splits) == (3, 8, ("train",))
    images = source.images("train", source.task())
    assert images.labels.tolist() == [2, 0, 2]
    assert images.pixels[:, 0, 0, 0].tolist() == [0, 10, 20]


@pytest.mark.parametrize("folder", ["", "data", "plain_text"])
def test_a_snapshot_folder(tmp_path: Path, folder: str) -> None:
    write(tmp_path / folder / "train-00000-of-00002.parquet", [0, 1])
    write(tmp_path / folder / "train-00001-of-00002.parquet", [2])
    write(tmp_path / folder / "test-00000-of-00001.parquet", [1])
    write(tmp_path / folder / "validation-00000-of-00001.parquet", [1, 1])
    source = open_source(tmp_path)
    assert source.splits == ("train", "val", "test")
    assert source.images("train", source.task()).labels.tolist() == [0, 1, 2]
    assert len(source.images("val", source.task())) == 2


def test_split_folders(tmp_path: Path) -> None:
    write(tmp_path / "default" / "train" / "0000.parquet", [0, 1])
    write(tmp_path / "default" / "validation" / "0000.parquet", [2])
    source = open_source(tmp_path)
    assert source.splits == ("train", "test")
    assert source.images("test", source.task()).labels.tolist() == [2]


def test_labels_without_names(tmp_path: Path) -> None:
    write(tmp_path / "a" / "x.parquet", [4, 0], names=None)
    assert open_source(tmp_path / "a").classes == tuple("01234")
    write(tmp_path / "b" / "x.parquet", ["emu", "cat", "emu"], names=None)
    source = open_source(tmp_path / "b")
    assert source.classes == ("cat", "emu")
    assert source.images("train", source.task()).labels.tolist() == [1, 0, 1]


def test_what_datasets_itself_writes(tmp_path: Path) -> None:
    import datasets

    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=NAMES)}
    )
    pixels = [np.full((8, 8), 40 * (i + 1), np.uint8) for i in range(4)]
    rows = {"image": [Image.fromarray(p) for p in pixels], "label": [0, 2, 1, 2]}
    data = datasets.Dataset.from_dict(rows, features=features)
    data.to_parquet(tmp_path / "p" / "train.parquet")
    data.save_to_disk(tmp_path / "one", num_shards=2)
    both = datasets.DatasetDict({"train": data, "test": data.select([3, 0])})
    both.save_to_disk(tmp_path / "dict")
    for name in ("p", "one", "dict"):
        source = open_source(tmp_path / name)
        assert (source.classes, source.channels, source.size) == (tuple(NAMES), 1, 8)
        images = source.images("train", source.task())
        assert images.labels.tolist() == [0, 2, 1, 2]
        np.testing.assert_array_equal(images.pixels[:, 0].numpy(), pixels)
    assert source.splits == ("train", "test")
    assert source.images("test", source.task()).labels.tolist() == [2, 0]


def test_class_lists_that_differ(tmp_path: Path) -> None:
    write(tmp_path / "train.parquet", [0])
    write(tmp_path / "test.parquet", [0], names=["dog", "cat", "emu"])
    with pytest.raises(DataError, match=r"\['cat', 'dog', 'emu'\].*\['dog', 'cat', 'emu'\]"):
        open_source(tmp_path)


def test_two_data_sets_in_one_folder(tmp_path: Path) -> None:
    write(tmp_path / "en" / "train.parquet", [0])
    write(tmp_path / "fr" / "train.parquet", [0])
    with pytest.raises(DataError, match=r"must hold one data set. Got .*en.*fr"):
        open_source(tmp_path)


def test_unusable_files(tmp_path: Path) -> None:
    path = tmp_path / "train.parquet"
    write(path, [0, 1], columns=("photo", "label"))
    with pytest.raises(
        DataError, match=r"a column of \['image', 'img'\].*Got \['photo', 'label'\]"
    ):
        open_source(path)
    write(path, [None, 1], names=None)
    with pytest.raises(DataError, match=r"all integers or all strings. Got \['NoneType', 'int'\]"):
        open_source(path)
    write(path, [0, 5])
    source = open_source(path)
    with pytest.raises(DataError, match=r"must lie in 0\.\.2. Got 0\.\.5"):
        source.images("train", source.task())
    pq.write_table(pa.table({"image": [{"bytes": None, "path": "/x.png"}], "label": [0]}), path)
    with pytest.raises(DataError, match=r"image 0 of .* must be embedded as bytes. Got NoneType"):
        open_source(path)
    pq.write_table(pa.table({"image": [{"bytes": b"junk"}], "label": [0]}), path)
    with pytest.raises(DataError, match=r"image 0 of .*train\.parquet' must be a readable image"):
        open_source(path)
    write(path, [])
    with pytest.raises(DataError, match="at least one image"):
        open_source(path)
    write(path, [0, 1])
    path.write_bytes(path.read_bytes()[:-40])
    with pytest.raises(DataError, match=r"train\.parquet' must be a readable Parquet"):
        open_source(path)
