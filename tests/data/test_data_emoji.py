"""Emoji: styles, labels, one split for all styles; on a handful of drawings made here."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedgist.data import open_source, partition
from fedgist.data.emoji import CATEGORIES, open_emoji
from fedgist.errors import DataError

FOOD, FLAGS = CATEGORIES.index("Food & Drink"), CATEGORIES.index("Flags")
ON_DISK = (("google", 64, "png"), ("twitter", 64, "png"), ("fluent", 96, "webp"))


def entry(i: int, category: str, tones: int = 0) -> dict[str, Any]:
    skins = {f"1F3F{k}": {"image": f"{i:04x}-{k}.png"} for k in range(tones)}
    return {"image": f"{i:04x}.png", "category": category} | (
        {"skin_variations": skins} if tones else {}
    )


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Six food emoji, six flags of which one has skin tones, one component; colours tell which."""
    monkeypatch.setenv("FEDGIST_DATA", str(tmp_path))
    root = tmp_path / "emoji"
    entries = [entry(20, "Component")]
    for k in range(6):
        entries += [entry(k, "Food & Drink"), entry(10 + k, "Flags", tones=2 if k == 4 else 0)]
    for green, (style, side, suffix) in zip((0, 90, 180), ON_DISK, strict=True):
        (root / style).mkdir(parents=True)
        for e in entries:
            for one in (e, *e.get("skin_variations", {}).values()):
                stem = Path(one["image"]).stem
                im = Image.new("RGBA", (side, side), (10 * int(stem[:4], 16), green, 0, 255))
                im.paste((0, 0, 0, 0), (0, 0, side // 2, side // 2))  # a transparent quarter
                im.save(root / style / f"{stem}.{suffix}", lossless=True)
    (root / "fluent" / "0001.webp").unlink()  # no style draws every emoji
    (root / "emoji.json").write_text(json.dumps(entries))
    return root


def ids(pixels: torch.Tensor) -> list[int]:
    """Read back which emoji an image is, from its colour."""
    return (pixels[:, 0, 48, 48].double() / 10).round().int().tolist()


def test_one_style_has_labels_a_split_and_a_licence(folder: Path) -> None:
    s = open_source("emoji-google")
    assert (s.name, s.channels, s.size, s.licence) == ("emoji-google", 3, 64, "Apache-2.0")
    assert s.classes == CATEGORIES and s.splits == ("train", "test")
    train, test = s.images("train", s.task()), s.images("test", s.task())
    assert ids(train.pixels) == [0, 10, 1, 11, 2, 12, 3, 13, 5, 15]
    assert ids(test.pixels) == [4, 14]  # the fifth of each category; the component is nowhere
    assert train.labels.tolist() == [FOOD, FLAGS] * 5 and test.labels.tolist() == [FOOD, FLAGS]
    assert train.groups is None and train.pixels.dtype == torch.uint8


def test_transparency_lies_over_white(folder: Path) -> None:
    s = open_source("emoji-fluent")
    x = s.images("test", s.task()).pixels
    assert x.shape == (2, 3, 64, 64)  # 96 pixels on disk
    assert bool((x[:, :, :28, :28] == 255).all()) and bool((x[:, 1, 36:, 36:] == 180).all())


def test_all_styles_share_one_split_and_are_groups(folder: Path) -> None:
    s = open_source("emoji")
    assert s.licence == "Apache-2.0, CC-BY-4.0, MIT"
    train, test = s.images("train", s.task()), s.images("test", s.task())
    assert ids(test.pixels) == [4, 14] * 3
    assert train.groups is not None and test.groups is not None
    assert test.groups.tolist() == [0, 0, 1, 1, 2, 2]
    assert train.groups.bincount().tolist() == [10, 10, 9]
    clients = partition(train, 3, "natural", 0).clients
    green = [set(train.pixels[rows, 1, 48, 48].tolist()) for rows in clients]
    assert green == [{0}, {90}, {180}]


def test_skin_tones_stay_with_their_emoji(folder: Path) -> None:
    s = open_source("emoji-twitter-skins")
    assert s.name == "emoji-twitter-skins"
    assert len(s.images("train", s.task())) == 10
    assert ids(s.images("test", s.task()).pixels) == [4, 14, 14, 14]
    assert len(open_source("emoji-skins").images("test", s.task())) == 12


def test_a_style_that_is_not_there_is_left_out(folder: Path) -> None:
    (folder / "google").rename(folder / "elsewhere")
    s = open_source("emoji")
    groups = s.images("test", s.task()).groups
    assert groups is not None and groups.tolist() == [1, 1, 2, 2]
    with pytest.raises(DataError, match=r"must hold emoji.json and google/\..*get_emoji.sh"):
        open_source("emoji-google")


def test_no_emoji_say_how_to_get_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDGIST_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"emoji.json and a style's folder.*run scripts/get_emoji"):
        open_source("emoji")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[", "must be the emoji.json of emoji-datasource"),
        ('[{"category": "Flags"}]', "Got KeyError: 'image'"),
        ('[{"category": "Flags", "image": 3}]', "Got TypeError"),
        ("3", "Got TypeError"),
        ('[{"category": "Birds", "image": "0001.png"}]', r"Got also \['Birds'\]"),
    ],
)
def test_damaged_labels_are_refused(folder: Path, text: str, message: str) -> None:
    (folder / "emoji.json").write_text(text)
    with pytest.raises(DataError, match=message):
        open_emoji(folder)


def test_names_in_the_labels_cannot_leave_the_folder(folder: Path) -> None:
    Image.fromarray(np.zeros((64, 64, 3), np.uint8)).save(folder / "secret.png")
    entries = [{"category": "Flags", "image": "../secret.png"}]
    (folder / "emoji.json").write_text(json.dumps(entries))
    s = open_emoji(folder, "google")
    assert len(s.read("train").pixels) == 0
