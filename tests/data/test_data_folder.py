"""Image folders: ImageFolder, EuroSAT, ImageNette, splits, groups, damage."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from fedgist.data import open_source
from fedgist.errors import DataError


def put(path: Path, value: int = 100, size: tuple[int, int] = (8, 8), mode: str = "RGB") -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, value if mode == "L" else (value, value, value)).save(path)


def test_root_class_files(tmp_path: Path) -> None:
    for i, name in enumerate(("ant", "bee", "cat")):
        for j in range(i + 1):
            put(tmp_path / name / f"{j}.PNG", 50 * (i + 1))
    (tmp_path / "dog").mkdir()  # an empty class folder is a class
    (tmp_path / "ant" / "notes.txt").write_text("not an image")
    (tmp_path / ".cache" / "x").mkdir(parents=True)
    source = open_source(tmp_path)
    assert source.classes == ("ant", "bee", "cat", "dog")
    assert (source.channels, source.size, source.splits) == (3, 8, ("train",))
    images = source.images("train", source.task())
    assert images.counts().tolist() == [1, 2, 3, 0]
    assert images.pixels.shape == (6, 3, 8, 8)
    assert images.pixels[:, 0, 0, 0].tolist() == [50, 100, 100, 150, 150, 150]
    assert images.groups is None


def test_splits_by_folder(tmp_path: Path) -> None:
    for split, n in (("train", 3), ("test", 2), ("Validation", 1)):
        for name in "ab":
            for j in range(n):
                put(tmp_path / split / name / "deep" / f"{j}.jpg")
    source = open_source(tmp_path)
    assert source.splits == ("train", "val", "test")
    task = source.task()
    assert [len(source.images(s, task)) for s in source.splits] == [6, 2, 4]


def test_imagenette_s_val_is_its_test_split(tmp_path: Path) -> None:
    root = tmp_path / "data" / "imagenette2-160"
    for split in ("train", "val"):
        for wnid in ("n01440764", "n02102040"):
            put(root / split / wnid / f"{wnid}_1.JPEG", size=(20, 16))
            put(root / split / wnid / f"{wnid}_2.JPEG", size=(16, 20))
    for where in (root, tmp_path / "data"):
        source = open_source(where)
        assert source.splits == ("train", "test")
        assert (source.channels, source.size) == (3, 64)
        assert source.images("test", source.task(fit="crop")).pixels.shape == (4, 3, 64, 64)


def test_eurosat(tmp_path: Path) -> None:
    for name in ("AnnualCrop", "Forest"):
        put(tmp_path / "eurosat" / "2750" / name / f"{name}_1.jpg", size=(64, 64))
    for where in (tmp_path, tmp_path / "eurosat", tmp_path / "eurosat" / "2750"):
        source = open_source(where)
        assert source.classes == ("AnnualCrop", "Forest")
        assert (source.size, source.splits) == (64, ("train",))


def test_a_client_with_one_class_in_subfolders(tmp_path: Path) -> None:
    put(tmp_path / "n01443537" / "images" / "n01443537_0.JPEG")  # Tiny-ImageNet's layout
    put(tmp_path / "n01443537" / "more" / "n01443537_1.JPEG")
    source = open_source(tmp_path)
    assert source.classes == ("n01443537",)
    task = source.task(classes=("n0", "n01443537"))
    assert source.images("train", task).labels.tolist() == [1, 1]


def test_classes_called_train_and_test_are_classes(tmp_path: Path) -> None:
    put(tmp_path / "train" / "0.png")
    put(tmp_path / "test" / "0.png")
    source = open_source(tmp_path)
    assert (source.classes, source.splits) == (("test", "train"), ("train",))


def test_a_split_may_lack_a_class_but_not_add_one(tmp_path: Path) -> None:
    for name in "abc":
        put(tmp_path / "train" / name / "0.png")
    put(tmp_path / "test" / "c" / "0.png")
    source = open_source(tmp_path)
    assert source.images("test", source.task()).labels.tolist() == [2]
    put(tmp_path / "test" / "d" / "0.png")
    with pytest.raises(DataError, match=r"train \['a', 'b', 'c'\], test \['c', 'd'\]"):
        open_source(tmp_path)


def test_mixed_sizes_are_brought_to_the_task_s(tmp_path: Path) -> None:
    put(tmp_path / "a" / "0.png", size=(10, 30))
    put(tmp_path / "b" / "1.png", size=(90, 70), mode="L")
    source = open_source(tmp_path)
    assert (source.channels, source.size) == (3, 64)
    assert source.images("train", source.task()).pixels.shape == (2, 3, 64, 64)
    assert source.images("train", source.task(size=16, channels=1)).pixels.shape == (2, 1, 16, 16)


def test_a_sixteen_bit_file_in_a_folder(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    ramp = (np.arange(64) * 1000).astype(np.uint16).reshape(8, 8)
    Image.fromarray(ramp).save(tmp_path / "a" / "0.tif")
    put(tmp_path / "b" / "1.png", 51, mode="L")
    source = open_source(tmp_path)
    x = source.images("train", source.task()).floats()
    np.testing.assert_allclose(x[0, 0].numpy(), ramp / 65_535, atol=1e-7)
    np.testing.assert_allclose(x[1, 0].numpy(), 0.2, atol=1e-7)


def test_a_truncated_file_is_named(tmp_path: Path) -> None:
    put(tmp_path / "a" / "0.png")
    put(tmp_path / "b" / "1.png", size=(64, 64))
    whole = (tmp_path / "b" / "1.png").read_bytes()
    (tmp_path / "b" / "1.png").write_bytes(whole[: len(whole) // 2])
    source = open_source(tmp_path)
    with pytest.raises(DataError, match=r"b.1\.png' must be a readable image"):
        source.images("train", source.task())
    (tmp_path / "b" / "1.png").write_bytes(b"")
    with pytest.raises(DataError, match=r"b.1\.png' must be a readable image"):
        open_source(tmp_path)


def test_no_image_at_all(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"one folder per class. Got no folder"):
        open_source(tmp_path)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with pytest.raises(DataError, match=r"at least one image in a class folder. Got none"):
        open_source(tmp_path)


def test_groups_from_metadata(tmp_path: Path) -> None:
    for name in ("a/0.png", "a/1.png", "b/0.png"):
        put(tmp_path / name)
    csv = tmp_path / "metadata.csv"
    csv.write_text("file_name,age,person\na/0.png,4,zoe\na/1.png,5,adam\nb/0.png,6,zoe\n")
    source = open_source(tmp_path)
    groups = source.images("train", source.task()).groups
    assert groups is not None and groups.tolist() == [1, 0, 1]
    csv.write_text("file_name,person\na/0.png,zoe\na/1.png,\n")
    with pytest.raises(DataError, match=r"every image. Got 2 images without one, .*a.1\.png"):
        open_source(tmp_path)
    csv.write_text("file_name,text\na/0.png,hello\n")
    assert open_source(tmp_path).images("train", source.task()).groups is None


def test_groups_of_both_splits_share_their_numbers(tmp_path: Path) -> None:
    for split, person in (("train", "p2"), ("test", "p1")):
        put(tmp_path / split / "a" / "0.png")
        put(tmp_path / split / "b" / "0.png")
        (tmp_path / split / "metadata.csv").write_text(
            f"file_name,group\na/0.png,{person}\nb/0.png,p3\n"
        )
    source = open_source(tmp_path)
    task = source.task()
    assert source.images("train", task).groups.tolist() == [1, 2]  # type: ignore[union-attr]
    assert source.images("test", task).groups.tolist() == [0, 2]  # type: ignore[union-attr]
