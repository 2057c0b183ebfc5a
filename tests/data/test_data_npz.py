"""Arrays in an npz: MedMNIST, plain, synthetic."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedgist.data import open_source
from fedgist.errors import DataError

RNG = np.random.default_rng(0)


def medmnist(path: Path, shape: tuple[int, ...], classes: int = 8) -> dict[str, np.ndarray]:
    arrays = {}
    for split, n in (("train", 9), ("val", 3), ("test", 4)):
        arrays[f"{split}_images"] = RNG.integers(0, 256, (n, *shape), np.uint8)
        arrays[f"{split}_labels"] = (np.arange(n) % classes).astype(np.uint8)[:, None]
    np.savez_compressed(path, **arrays)  # type: ignore[arg-type]
    return arrays


@pytest.mark.parametrize("size", [28, 64, 128, 224])
@pytest.mark.parametrize("colour", [True, False])
def test_medmnist(tmp_path: Path, size: int, colour: bool) -> None:
    stem = ("bloodmnist" if colour else "tissuemnist") + (f"_{size}" if size != 28 else "")
    path = tmp_path / f"{stem}.npz"
    arrays = medmnist(path, (size, size, 3) if colour else (size, size))
    source = open_source(path)
    assert (source.name, source.size) == (stem, size)
    assert source.channels == (3 if colour else 1)
    assert source.splits == ("train", "val", "test") and len(source.classes) == 8
    images = source.images("test", source.task())
    expected = arrays["test_images"]
    expected = expected.transpose(0, 3, 1, 2) if colour else expected[:, None]
    np.testing.assert_array_equal(images.pixels.numpy(), expected)
    assert images.labels.tolist() == [0, 1, 2, 3]


def test_medmnist_names_do_not_depend_on_what_a_client_holds(tmp_path: Path) -> None:
    medmnist(tmp_path / "bloodmnist.npz", (28, 28, 3), classes=2)
    assert open_source(tmp_path / "bloodmnist.npz").classes[7] == "platelet"


def test_multi_label_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "chestmnist.npz"
    np.savez(
        path,
        train_images=np.zeros((5, 28, 28), np.uint8),
        train_labels=np.zeros((5, 14), np.uint8),
    )
    with pytest.raises(
        DataError, match=r"one label per image. Got \[5, 14\]: of a multi-label set"
    ):
        open_source(path)


def test_three_dimensional_images_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "organmnist3d.npz"
    medmnist(path, (28, 28, 28), classes=3)
    source = open_source(path)
    with pytest.raises(DataError, match=r"must have shape .*Got \[9, 28, 28, 28\]"):
        source.images("train", source.task())


def test_plain_arrays_with_classes_and_groups(tmp_path: Path) -> None:
    path = tmp_path / "ward.npz"
    np.savez(
        path,
        images=np.full((4, 12, 12), 60_000, np.uint16),
        labels=np.array([1, 0, 1, 1]),
        classes=np.array(["ill", "well"]),
        groups=np.array(["p9", "p1", "p9", "p3"]),
    )
    source = open_source(path)
    assert (source.classes, source.splits, source.size) == (("ill", "well"), ("train",), 12)
    images = source.images("train", source.task())
    assert images.labels.tolist() == [1, 0, 1, 1]
    assert images.groups is not None and images.groups.tolist() == [2, 0, 2, 1]
    np.testing.assert_allclose(images.pixels.numpy(), 60_000 / 65_535, rtol=1e-6)


def test_a_synthetic_set(tmp_path: Path) -> None:
    path = tmp_path / "synthetic.npz"
    pixels = RNG.integers(0, 256, (6, 3, 16, 16), np.uint8)  # as tensors are: channels first
    np.savez_compressed(path, images=pixels, labels=np.arange(6) % 3, classes=np.array(list("xyz")))
    source = open_source(path)
    assert (source.channels, source.size) == (3, 16)
    np.testing.assert_array_equal(source.images("train", source.task()).pixels.numpy(), pixels)


def test_classes_are_numbers_when_nothing_names_them(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, images=np.zeros((2, 8, 8), np.uint8), labels=np.array([0, 3], np.int16))
    assert open_source(path).classes == ("0", "1", "2", "3")


IMAGES = np.zeros((2, 8, 8), np.uint8)


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        ({"x": IMAGES}, r"must hold images and labels.*Got the keys \['x'\]"),
        ({"images": IMAGES}, "must hold 'labels'"),
        ({"images": IMAGES, "labels": np.zeros(2)}, "must be integers"),
        ({"images": IMAGES, "labels": np.array([0, {}], object)}, "without objects"),
        ({"images": IMAGES, "labels": np.zeros(3, int)}, "Got 2 images and 3 labels"),
        ({"images": IMAGES, "labels": np.array([0, -1])}, r"must lie in 0\.\.0. Got -1\.\.0"),
        (
            {"images": IMAGES, "labels": np.array([0, 5]), "classes": np.array(["a", "b"])},
            r"must lie in 0\.\.1. Got 0\.\.5",
        ),
        (
            {"images": IMAGES, "labels": np.array([0, 1]), "groups": np.zeros(5)},
            "one entry per image. Got 5 for 2 labels",
        ),
    ],
)
def test_unusable_files(tmp_path: Path, arrays: dict[str, Any], message: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, **arrays)
    with pytest.raises(DataError, match=message):
        source = open_source(path)
        source.images("train", source.task(classes=("0", "1", "a", "b")))


def test_truncated_or_not_an_archive(tmp_path: Path) -> None:
    path = tmp_path / "bloodmnist.npz"
    medmnist(path, (28, 28, 3))
    path.write_bytes(path.read_bytes()[:3000])
    with pytest.raises(DataError, match=r"bloodmnist\.npz' must be a readable npz"):
        open_source(path)
    path.write_bytes(b"\x80\x04cos\nsystem\n.")
    with pytest.raises(DataError, match="must be a readable npz"):
        open_source(path)
    with path.open("wb") as f:
        np.save(f, IMAGES)
    with pytest.raises(DataError, match="Got a single array"):
        open_source(path)


def test_damaged_pixels_are_found_when_read(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    np.savez(path, images=RNG.integers(0, 256, (900, 8, 8), np.uint8), labels=np.arange(900) % 2)
    raw = bytearray(path.read_bytes())
    raw[40_000] ^= 255  # the archive's checksum no longer holds
    path.write_bytes(raw)
    source = open_source(path)
    with pytest.raises(DataError, match=r"x\.npz' must be a readable npz.*CRC"):
        source.images("train", source.task())


FINDINGS = np.array(
    [[0] * 14, [1] + [0] * 13, [0] * 13 + [1], [1, 1] + [0] * 12, [0, 1] + [0] * 12, [1] * 14],
    np.uint8,
)


@pytest.fixture
def chest(tmp_path: Path) -> str:
    """ChestMNIST's format: pixel values tell the images apart."""
    arrays: dict[str, Any] = {}
    for split in ("train", "val", "test"):
        pixels = np.arange(6, dtype=np.uint8)[:, None, None] * 40
        arrays[f"{split}_images"] = np.broadcast_to(pixels, (6, 28, 28))
        arrays[f"{split}_labels"] = FINDINGS
    path = tmp_path / "chestmnist_28.npz"
    np.savez_compressed(path, **arrays, train_groups=np.arange(6) // 2)
    return str(path)


def test_findings_as_any_or_none(chest: str) -> None:
    source = open_source(f"{chest}#any")
    assert (source.name, source.size, source.channels) == ("chestmnist_28-any", 28, 1)
    assert source.classes == ("no finding", "any finding")
    assert source.splits == ("train", "val", "test")
    images = source.images("train", source.task())
    assert images.labels.tolist() == [0, 1, 1, 1, 1, 1]
    assert images.groups is not None and images.groups.tolist() == [0, 0, 1, 1, 2, 2]


def test_single_findings_leave_out_images_with_more_and_say_how_many(chest: str) -> None:
    source = open_source(f"{chest}#single")
    assert len(source.classes) == 15
    assert source.classes[0] == "no finding" and source.classes[-1] == "hernia"
    with pytest.warns(UserWarning, match="Got 2 of 6 train images with two or more"):
        images = source.images("train", source.task())
    assert images.labels.tolist() == [0, 1, 14, 2]
    assert images.pixels[:, 0, 0, 0].tolist() == [0, 40, 80, 160]  # rows and labels stay together
    assert images.groups is not None and images.groups.tolist() == [0, 0, 1, 2]


def test_a_share_of_a_reduced_set(chest: str) -> None:
    source = open_source(f"{chest}#any@2/3")
    assert source.images("train", source.task()).pixels[:, 0, 0, 0].tolist() == [40, 160]


def test_a_bare_multi_label_file_names_both_ways_to_open_it(chest: str) -> None:
    with pytest.raises(DataError, match=r"\[6, 14\].*npz#any .*npz#single"):
        open_source(chest)


def test_an_existing_file_of_that_name_wins(chest: str, tmp_path: Path) -> None:
    path = tmp_path / "x.npz#any"
    path.write_bytes(b"x")
    with pytest.raises(DataError, match=r"must be \.npz or \.parquet"):
        open_source(str(path))


@pytest.mark.parametrize(
    ("labels", "how", "message"),
    [
        (FINDINGS[:2], "sngle", "one of any, single. Got 'sngle'. Did you mean 'single'"),
        (FINDINGS[:2], "", "one of any, single. Got ''"),
        (np.array([0, 1]), "any", r"\[n, k\], k > 1.*Got int64 \[2\]"),
        (np.array([[0], [1]]), "single", r"\[n, k\], k > 1.*Got int64 \[2, 1\]"),
        (np.array([[0, 2], [1, 0]]), "any", r"must be 0 or 1. Got 0\.\.2"),
        (np.array([[0, -1], [1, 0]]), "any", r"must be 0 or 1. Got -1\.\.1"),
        (np.zeros((2, 3)), "any", r"must be integers.*Got float64"),
        (FINDINGS[:1], "any", "Got 2 train images and 1 labels"),
        (FINDINGS[[0, 5, 1]], "single", "Got 2 train images and 3 labels"),
    ],
)
def test_wrong_reductions(tmp_path: Path, labels: Any, how: str, message: str) -> None:
    path = tmp_path / "bad.npz"
    np.savez(path, images=IMAGES, labels=labels)
    with pytest.raises(DataError, match=message):
        source = open_source(f"{path}#{how}")
        source.images("train", source.task())


def test_named_findings_must_be_as_many_as_columns(tmp_path: Path) -> None:
    path = tmp_path / "x.npz"
    arrays = {"images": IMAGES, "labels": np.eye(2, dtype=np.int64)}
    np.savez(path, **arrays)  # type: ignore[arg-type]
    assert open_source(f"{path}#single").classes == ("no finding", "0", "1")
    np.savez(path, **arrays, classes=np.array(["a", "b"]))
    assert open_source(f"{path}#single").classes == ("no finding", "a", "b")
    np.savez(path, **arrays, classes=np.array(["a"]))
    with pytest.raises(DataError, match="the 1 named findings"):
        open_source(f"{path}#single")
