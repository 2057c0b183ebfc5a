from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
import pytest
import sample_report as s
import torch
from PIL import Image
from safetensors.torch import save_file
from torch import Tensor

from fedgist.errors import ConfigError, DataError
from fedgist.report.export import (
    classifier_extra,
    folder_names,
    load_classifier,
    save_classifier,
    write_synthetic,
)
from fedgist.types import Images


@pytest.mark.parametrize("channels", [1, 3])
def test_a_set_comes_back_as_it_was(tmp_path, channels):
    images = s.images(size=12, channels=channels)
    shuffled = images.take(torch.randperm(len(images), generator=torch.Generator().manual_seed(2)))
    (entry,) = write_synthetic(shuffled, tmp_path, s.claim(), "a test")
    folder = tmp_path / "synthetic"
    with np.load(folder / "synthetic.npz", allow_pickle=False) as f:
        assert sorted(f) == ["classes", "images", "labels"]
        assert f["classes"].tolist() == list(s.FASHION)
        assert f["labels"].dtype == np.int64 and f["labels"].tolist() == shuffled.labels.tolist()
        shape = (108, 12, 12) if channels == 1 else (108, 12, 12, 3)
        assert f["images"].dtype == np.uint8 and f["images"].shape == shape
        pixels = torch.from_numpy(f["images"].reshape(108, 12, 12, channels)).movedim(-1, 1)
        assert torch.equal(pixels, shuffled.pixels)
        whole = f["images"]
    table = json.loads((folder / "classes.json").read_text())["classes"]
    assert [t["name"] for t in table] == list(s.FASHION)
    for t in table:
        files = sorted((folder / "train" / t["folder"]).iterdir())
        assert len(files) == t["images"] == (12 if t["index"] < 9 else 0)
        own = whole[shuffled.labels.numpy() == t["index"]]
        assert all((np.asarray(Image.open(a)) == b).all() for a, b in zip(files, own, strict=True))
    assert entry["path"] == "synthetic/" and "108 synthetic images, 12 x 12" in entry["what"]
    assert entry["bytes"] == sum(f.stat().st_size for f in folder.rglob("*") if f.is_file())
    assert [p.name for p in tmp_path.iterdir()] == ["synthetic"]


def test_the_set_says_what_it_is(tmp_path):
    claim = s.claim()
    write_synthetic(s.images(), tmp_path, claim, "FedKT-CSD on toys")
    readme = (tmp_path / "synthetic" / "README.md").read_text()
    assert claim["line"] in readme and "not real" in readme and "FedKT-CSD on toys" in readme
    assert "Not fit for release" in readme
    write_synthetic(s.images(), tmp_path, s.claim(math.inf))
    assert "No privacy guarantee" in (tmp_path / "synthetic" / "README.md").read_text()
    meta = json.loads((tmp_path / "synthetic" / "metadata.json").read_text())
    assert meta["synthetic"] is True and meta["claim"]["epsilon"] == "inf"
    write_synthetic(s.images(), tmp_path, s.claim(noise="system"))
    readme = (tmp_path / "synthetic" / "README.md").read_text()
    assert "Not fit" not in readme and "No privacy" not in readme


def test_the_same_set_gives_the_same_bytes(tmp_path):
    for name in ("a", "b"):
        write_synthetic(s.images(), tmp_path / name, s.claim())
    a, b = (sorted((tmp_path / n).rglob("*.*")) for n in "ab")
    assert [p.read_bytes() for p in a if p.is_file()] == [p.read_bytes() for p in b if p.is_file()]


def test_float_images_are_rounded(tmp_path):
    images = s.images()
    write_synthetic(Images(images.floats(), images.labels, images.classes), tmp_path, s.claim())
    with np.load(tmp_path / "synthetic" / "synthetic.npz", allow_pickle=False) as f:
        assert (f["images"] == images.pixels[:, 0].numpy()).all()


def test_an_empty_set_keeps_its_folders(tmp_path):
    write_synthetic(s.images().take(torch.tensor([], dtype=torch.int64)), tmp_path, s.claim())
    assert len(list((tmp_path / "synthetic" / "train").iterdir())) == 10


def test_folder_names_are_safe_and_distinct():
    classes = (
        "T-shirt/top", "a", "A", "..", ".", "", "con", "NUL.txt", "x\x00y", "dot.", "é", "e\u0301",
        "../../etc", "\udc80", "ж" * 200, "ж" * 199, "-rf", "a-2",
    )  # fmt: skip
    names = folder_names(classes)
    assert names[:2] == ["T-shirt_top", "a"] and names[10] == "é"
    assert len({n.casefold() for n in names}) == len(classes)
    for name in names:
        assert name == name.strip(". ") and 0 < len(name.encode()) < 120
        assert not set(name) & set('/\\:*?"<>|\0') and name.upper() not in ("CON", "NUL.TXT")


def test_hostile_class_names_stay_inside(tmp_path):
    classes = ("../../up", "<b>", "..", *s.HOSTILE, "\udc80")
    write_synthetic(s.images(classes, 1), tmp_path / "out", s.claim())
    assert [p.name for p in tmp_path.iterdir()] == ["out"]
    assert len(list((tmp_path / "out" / "synthetic" / "train").iterdir())) == len(classes)


def count(folder) -> int:
    with np.load(folder / "synthetic" / "synthetic.npz", allow_pickle=False) as f:
        n = len(f["labels"])
    assert n == len(list(folder.rglob("*.png")))
    return n


@pytest.mark.parametrize("stop", [KeyboardInterrupt, OSError])
def test_an_interrupted_export_leaves_the_old_set(tmp_path, monkeypatch, stop):
    write_synthetic(s.images(per_class=2), tmp_path, s.claim())
    save, calls = Image.Image.save, []

    def third(self, *args, **options):
        calls.append(1)
        if len(calls) == 3:
            raise stop
        save(self, *args, **options)

    monkeypatch.setattr(Image.Image, "save", third)
    with pytest.raises(KeyboardInterrupt if stop is KeyboardInterrupt else ConfigError):
        write_synthetic(s.images(per_class=5), tmp_path, s.claim())
    assert count(tmp_path) == 18
    assert [p.name for p in tmp_path.iterdir()] == ["synthetic"]


@pytest.mark.parametrize("step", [1, 2])
def test_an_interrupted_swap_leaves_the_old_set(tmp_path, monkeypatch, step):
    write_synthetic(s.images(per_class=2), tmp_path, s.claim())
    rename, calls = os.rename, []

    def stopping(a, b):
        calls.append(1)
        if len(calls) == step:
            raise KeyboardInterrupt
        rename(a, b)

    monkeypatch.setattr("os.rename", stopping)
    with pytest.raises(KeyboardInterrupt):
        write_synthetic(s.images(per_class=5), tmp_path, s.claim())
    assert count(tmp_path) == 18
    assert [p.name for p in tmp_path.iterdir()] == ["synthetic"]


def test_what_a_killed_run_left_is_put_right(tmp_path):
    write_synthetic(s.images(per_class=2), tmp_path, s.claim())
    os.rename(tmp_path / "synthetic", tmp_path / ".synthetic-outgoing")  # killed between renames
    (tmp_path / ".synthetic-incoming" / "train").mkdir(parents=True)
    write_synthetic(s.images(per_class=3), tmp_path, s.claim())
    assert count(tmp_path) == 27
    assert [p.name for p in tmp_path.iterdir()] == ["synthetic"]


def test_somebody_elses_folder_is_refused(tmp_path):
    (tmp_path / "synthetic").mkdir()
    (tmp_path / "synthetic" / "thesis.txt").write_text("do not lose")
    with pytest.raises(ConfigError, match="synthetic' must be absent or a set that FedGist wrote"):
        write_synthetic(s.images(), tmp_path, s.claim())
    assert (tmp_path / "synthetic" / "thesis.txt").read_text() == "do not lose"


def test_an_unwritable_folder_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output folder must be writable. Got '.*/file'"):
        write_synthetic(s.images(), tmp_path / "file", s.claim())


@dataclass(frozen=True)
class Fake:
    kind: str = "network"
    parts: Mapping[str, Tensor] = field(default_factory=lambda: {"w": torch.eye(3)})

    def predict(self, x: Tensor) -> Tensor:
        return x

    def tensors(self) -> dict[str, Tensor]:
        return dict(self.parts)

    def meta(self) -> Mapping[str, str]:
        return {"b": "2", "a": "1"}


@pytest.mark.parametrize("kind", ["lda", "qda", "ridge"])
def test_closed_form_classifiers_come_back(tmp_path, kind, monkeypatch):
    from fedgist.heads import linear

    encoder = type("E", (), {"name": "pca", "digest": "d1"})()
    asked: list[tuple[str, str]] = []
    monkeypatch.setattr(linear, "load_encoder", lambda *a: asked.append(a) or encoder)
    quadratic = torch.rand(2, 3, 3, dtype=torch.float64) if kind == "qda" else None
    bias = torch.tensor([0.5, -math.inf], dtype=torch.float64)
    weight = torch.rand(2, 3, dtype=torch.float64)
    made = linear.CodeClassifier(
        kind, linear.CodeSpace(encoder, 0.25, 1.7), bias, weight, quadratic
    )
    path = tmp_path / "classifier.safetensors"
    save_classifier(made, path, {"task": "toy", "kind": "not this"})
    back = load_classifier(path)
    assert back.kind == kind and back.meta() == made.meta() and asked == [("pca", "d1")]
    assert set(back.tensors()) == set(made.tensors())
    assert all(torch.equal(v, made.tensors()[k]) for k, v in back.tensors().items())
    assert classifier_extra(path) == {"task": "toy", "kind": "not this"}
    assert [p.name for p in tmp_path.iterdir()] == ["classifier.safetensors"]


def test_a_network_comes_back(tmp_path):
    from fedgist.train import Recipe, train

    images = s.images(("a", "b", "c"), 6, size=8)
    network = train(images, Recipe(model="mlp", width=4, steps=0), torch.Generator().manual_seed(0))
    save_classifier(network, tmp_path / "c.safetensors", {})
    back = load_classifier(tmp_path / "c.safetensors")
    x = images.floats()
    assert torch.equal(back.predict(x), network.predict(x))


def test_equal_classifiers_give_equal_files(tmp_path):
    for i in range(4):
        save_classifier(Fake(), tmp_path / f"{i}", {"z": "1", "y": "2", "x": "3"})
    assert len({(tmp_path / f"{i}").read_bytes() for i in range(4)}) == 1


def test_tensors_that_share_memory_can_be_saved(tmp_path):
    w = torch.eye(3)
    save_classifier(Fake(parts={"a": w, "b": w.T, "c": w[:1].expand(4, 3)}), tmp_path / "c", {})
    assert classifier_extra(tmp_path / "c") == {}


def test_bad_classifier_files_are_one_line(tmp_path):
    path = tmp_path / "c.safetensors"
    with pytest.raises(DataError, match=r"c\.safetensors"):
        load_classifier(path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(DataError, match="must be a classifier that FedGist saved"):
        load_classifier(path)
    for header in (None, {"fedgist": "[]"}, {"fedgist": '{"kind": 3, "meta": {}, "extra": {}}'}):
        save_file({"w": torch.eye(2)}, path, header)
        with pytest.raises(DataError, match="must be a classifier that FedGist saved"):
            load_classifier(path)
    save_classifier(Fake(kind="forest"), path, {})
    with pytest.raises(
        DataError,
        match=r"network, compressed, ensemble or one of lda, qda, ridge, logistic. Got 'forest'",
    ):
        load_classifier(path)
    save_classifier(Fake(kind="qda"), path, {})
    with pytest.raises(DataError, match=r"must be complete. Got KeyError"):
        load_classifier(path)


def test_an_unwritable_classifier_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/c"):
        save_classifier(Fake(), tmp_path / "file" / "c", {})
