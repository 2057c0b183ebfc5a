from __future__ import annotations

import importlib.util
import io
import json
import tarfile
from dataclasses import dataclass

import numpy as np
import pytest
import sample_report as s
import torch
from huggingface_hub import DatasetCard, ModelCard
from PIL import Image
from torch import nn
from typer.testing import CliRunner

from fedgist.cli import app
from fedgist.compress import CompressedNetwork
from fedgist.compress.fixed import build
from fedgist.compress.learned import build_compressor
from fedgist.data import open_source
from fedgist.encoders import load_encoder
from fedgist.errors import ConfigError, DataError, MissingExtra
from fedgist.heads.linear import CodeClassifier, CodeSpace
from fedgist.report import formats, portable
from fedgist.report.export import load_classifier, save_classifier, write_synthetic
from fedgist.report.formats import IMAGES, export, read_synthetic
from fedgist.report.portable import as_module, difference, probes
from fedgist.report.readme import Terms
from fedgist.report.record import read_json, write_json
from fedgist.train import Network
from fedgist.train.models import build_model
from fedgist.types import Images


def network(name: str = "mlp", channels: int = 1, size: int = 28) -> Network:
    rng = torch.Generator().manual_seed(3)
    model = build_model(name, channels, size, 10, 8, rng).requires_grad_(False).eval()
    mean, std = torch.full((channels,), 0.3), torch.full((channels,), 0.2)
    return Network(model, name, 8, channels, size, s.FASHION, mean, std)


def compressed(spec: str) -> CompressedNetwork:
    rng = torch.Generator().manual_seed(4)
    if spec == "light":
        learned = build_compressor("light", 1, 28, 14, rng).requires_grad_(False).eval()
        return CompressedNetwork(network(), learned)
    return CompressedNetwork(network(), build(spec), spec)


def head(encoder: str, kind: str, whitening: float | None, clip: float) -> CodeClassifier:
    """Return a discriminant of some class means and covariances; the last class is absent."""
    rng = torch.Generator().manual_seed(5)
    space = CodeSpace(load_encoder(encoder), whitening, clip)
    d = space.encoder.dim
    weight = torch.randn(10, d, generator=rng, dtype=torch.float64) / 10
    bias = torch.randn(10, generator=rng, dtype=torch.float64)
    bias[9] = -torch.inf
    square = torch.randn(10, d, d, generator=rng, dtype=torch.float64) / d
    return CodeClassifier(kind, space, bias, weight, square @ square.mT if kind == "qda" else None)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    claim = s.claim()
    write_json(folder / "report.json", s.report())
    write_synthetic(s.images(per_class=3), folder, claim, "FedKT-CSD on toys")
    save_classifier(network(), folder / "classifier.safetensors", {"head": "decode"})
    pca = head("random-conv:0", "ridge", None, 1.0)
    save_classifier(pca, folder / "classifier-ridge.safetensors", {"head": "ridge"})
    return folder


@pytest.fixture(scope="module")
def out(run, tmp_path_factory):
    folder = tmp_path_factory.mktemp("out")
    rows = export(run, tuple(IMAGES), folder, terms=Terms("cc-by-4.0", "Us", "https://x.org"))
    assert [row["format"] for row in rows] == list(IMAGES)
    for row in rows:
        there = folder / row["format"]
        assert row["bytes"] == sum(f.stat().st_size for f in there.rglob("*") if f.is_file())
        assert (there / "privacy-card.json").is_file() and (there / "metadata.json").is_file()
        card = DatasetCard((there / "README.md").read_text())
        assert card.data.license == "cc-by-4.0" and s.claim()["line"] in card.text
        names = json.loads((there / "classes.json").read_text())["classes"]
        assert [c["name"] for c in names] == list(s.FASHION)
    return folder


def same(held, images: Images) -> bool:
    pixels = np.asarray(held.pixels)
    wanted = images.pixels.movedim(1, -1).numpy()
    return (pixels.reshape(wanted.shape) == wanted).all() and held.labels.tolist() == (
        images.labels.tolist()
    )


def read(path, task_of: Images):
    """Return classes and images as FedGist's own readers give them."""
    source = open_source(path)
    size = task_of.pixels.shape[-1]
    return source.classes, source.images("train", source.task(size=size))


def equal(a: Images, b: Images) -> bool:
    return torch.equal(a.pixels, b.pixels) and torch.equal(a.labels, b.labels)


def test_a_run_gives_its_set_back(run):
    back = read_synthetic(run)
    assert equal(back, s.images(per_class=3)) and back.classes == s.FASHION


def test_parquet_reads_in_fedgist_and_in_datasets(out):
    datasets = pytest.importorskip("datasets")
    images = s.images(per_class=3)
    classes, held = read(out / "parquet", images)
    assert classes == s.FASHION and equal(held, images)
    (path,) = (out / "parquet" / "data").iterdir()
    assert path.name == "train-00000-of-00001.parquet"
    cache = out.parent / "cache"
    table = datasets.load_dataset(
        "parquet", data_files={"train": str(path)}, split="train", cache_dir=str(cache)
    )
    assert table.features["label"].names == list(s.FASHION)
    assert table["label"] == images.labels.tolist()
    first = np.asarray(table[0]["image"])
    assert (first == images.pixels[0, 0].numpy()).all()


def test_image_folder_reads_in_fedgist(out):
    images = s.images(per_class=3)
    source = open_source(out / "imagefolder")
    held = source.images("train", source.task(size=28))
    names = [source.classes[y] for y in held.labels.tolist()]
    wanted = [s.FASHION[y].replace("/", "_") for y in images.labels.tolist()]
    assert sorted(names) == sorted(wanted)
    about = json.loads((out / "imagefolder" / "croissant.json").read_text())
    assert about["license"] == "https://spdx.org/licenses/cc-by-4.0"
    assert about["creator"]["name"] == "Us" and about["dateCreated"] == "2026-11-29T22:41:00Z"


def test_webdataset_shards_hold_pairs(out):
    images = s.images(per_class=3)
    pixels, labels = [], []
    with tarfile.open(out / "webdataset" / "train-000000.tar") as tar:
        for member in tar.getmembers():
            key, end = member.name.split(".")
            assert key == f"{len(labels):08d}" and member.mtime == 0 and member.uid == 0
            data = tar.extractfile(member).read()
            if end == "png":
                pixels.append(np.asarray(Image.open(io.BytesIO(data))))
            else:
                labels.append(int(data))
    assert labels == images.labels.tolist()
    assert (np.stack(pixels) == images.pixels[:, 0].numpy()).all()


def test_medmnist_has_no_split_to_test_on(out):
    images = s.images(per_class=3)
    path = out / "medmnist" / "medmnist.npz"
    with np.load(path, allow_pickle=False) as z:
        assert sorted(z) == ["classes", "train_images", "train_labels"]
        assert z["train_images"].dtype == np.uint8 and z["train_images"].shape == (27, 28, 28)
        assert z["train_labels"].shape == (27, 1) and z["train_labels"].dtype == np.uint8
    classes, held = read(path, images)
    assert classes == s.FASHION and equal(held, images)
    assert open_source(path).splits == ("train",)


def test_gen_npz_is_what_dpimagebench_feeds_to_networks(out):
    images = s.images(per_class=3)
    with np.load(out / "dpimagebench" / "gen.npz", allow_pickle=False) as z:
        assert sorted(z) == ["x", "y"]
        assert z["x"].dtype == np.float32 and z["x"].shape == (27, 1, 28, 28)
        assert ((z["x"] * 255).round().astype(np.uint8) == images.pixels.numpy()).all()
        assert z["x"].max() <= 1 and z["y"].dtype == np.int64
        assert z["y"].tolist() == images.labels.tolist()


def test_colour_and_shards_come_back(tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "SHARD", 10)
    monkeypatch.setattr(formats, "GROUP", 4)
    images = s.images(per_class=3, size=12, channels=3)
    write_json(tmp_path / "report.json", s.report())
    write_synthetic(images, tmp_path, s.claim())
    export(tmp_path, ["parquet", "webdataset", "medmnist"], tmp_path / "out")
    names = sorted(p.name for p in (tmp_path / "out" / "parquet" / "data").iterdir())
    assert names == [f"train-{i:05d}-of-00003.parquet" for i in range(3)]
    for path in ("parquet", "medmnist/medmnist.npz"):
        classes, held = read(tmp_path / "out" / path, images)
        assert classes == s.FASHION and equal(held, images)
    counts = []
    for i in range(3):
        with tarfile.open(tmp_path / "out" / "webdataset" / f"train-{i:06d}.tar") as tar:
            counts.append(len(tar.getmembers()) // 2)
    assert counts == [10, 10, 7]


def test_hostile_class_names_are_kept(tmp_path):
    classes = ("../../up", *s.HOSTILE, "last")
    write_json(tmp_path / "report.json", s.report(classes))
    images = s.images(classes, 2, size=8)
    write_synthetic(images, tmp_path / "run", s.claim())
    write_json(tmp_path / "run" / "report.json", s.report(classes))
    export(tmp_path / "run", ["parquet", "medmnist"], tmp_path / "out")
    assert read(tmp_path / "out" / "parquet", images)[0] == classes
    assert read(tmp_path / "out" / "medmnist" / "medmnist.npz", images)[0] == classes


def test_the_same_set_gives_the_same_bytes(run, out, tmp_path):
    export(run, ["parquet", "webdataset"], tmp_path)
    for name in ("parquet/data/train-00000-of-00001.parquet", "webdataset/train-000000.tar"):
        assert (tmp_path / name).read_bytes() == (out / name).read_bytes()


def test_an_interrupted_export_leaves_the_old_folder(run, tmp_path, monkeypatch):
    export(run, ["medmnist"], tmp_path)
    before = (tmp_path / "medmnist" / "medmnist.npz").read_bytes()

    def stop(folder, images):
        (folder / "medmnist.npz").write_bytes(b"half")
        raise KeyboardInterrupt

    monkeypatch.setitem(formats.IMAGES, "medmnist", stop)
    with pytest.raises(KeyboardInterrupt):
        export(run, ["medmnist"], tmp_path)
    assert (tmp_path / "medmnist" / "medmnist.npz").read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["medmnist"]


def test_somebody_elses_folder_is_left_alone(run, tmp_path):
    (tmp_path / "parquet").mkdir()
    (tmp_path / "parquet" / "mine").write_text("mine")
    with pytest.raises(ConfigError, match="must be absent or a set that FedGist wrote"):
        export(run, ["parquet"], tmp_path)
    assert [p.name for p in (tmp_path / "parquet").iterdir()] == ["mine"]


def test_errors_are_one_line(run, tmp_path):
    with pytest.raises(ConfigError, match=r"Got 'parket'. Did you mean 'parquet'"):
        export(run, ["parket"], tmp_path)
    with pytest.raises(ConfigError, match="must name a format"):
        export(run, [], tmp_path)
    with pytest.raises(DataError, match="a report must be a JSON file"):
        export(tmp_path, ["parquet"], tmp_path)
    write_json(tmp_path / "report.json", s.report())
    with pytest.raises(DataError, match="must have left synthetic images"):
        export(tmp_path, ["parquet"], tmp_path)
    with pytest.raises(DataError, match="must have left a classifier"):
        export(tmp_path, ["safetensors"], tmp_path)
    with pytest.raises(ConfigError, match="--head must be one of"):
        export(run, ["safetensors"], tmp_path, head="qda")
    assert [p.name for p in tmp_path.iterdir()] == ["report.json"]


def test_safetensors_are_the_runs_own(run, tmp_path):
    (row,) = export(run, ["safetensors"], tmp_path)
    assert row["head"] == "decode" and "difference" not in row
    path = tmp_path / "safetensors" / "classifier.safetensors"
    assert path.read_bytes() == (run / "classifier.safetensors").read_bytes()
    assert load_classifier(path).kind == "network"
    card = ModelCard((tmp_path / "safetensors" / "README.md").read_text())
    assert card.data.pipeline_tag == "image-classification" and "`decode`" in card.text
    meta = read_json(tmp_path / "safetensors" / "metadata.json")
    assert meta["task"]["classes"] == list(s.FASHION)
    card = read_json(tmp_path / "safetensors" / "privacy-card.json")
    assert card["utility"]["told"] is False


CASES = {
    "mlp": network,
    "convnet3": lambda: network("convnet3"),
    "resnet18": lambda: network("resnet18", 3, 16),
    "area": lambda: compressed("area:14"),
    "bicubic": lambda: compressed("bicubic:9"),
    "wavelet": lambda: compressed("wavelet:2:3"),
    "learned": lambda: compressed("light"),
    "random-conv": lambda: head("random-conv:0", "ridge", None, 1.0),
    "pca": lambda: head("pca", "qda", 0.25, 8.0),
    "scattering": lambda: head("scattering:32", "lda", 0.25, 8.0),
}


@pytest.mark.parametrize("name", CASES)
def test_a_module_is_the_classifier(name):
    classifier = CASES[name]()
    size, channels = (16, 3) if name == "resnet18" else (28, 1)
    x = probes(channels, size)
    with torch.no_grad():
        assert difference(classifier.predict(x), as_module(classifier)(x)) < 1e-6


def test_a_module_without_its_clipping_is_another_one():
    classifier = head("pca", "lda", 0.25, 0.5)
    wide = head("pca", "lda", 0.25, 50.0)
    x = probes(1, 28)
    assert difference(classifier.predict(x), as_module(wide)(x)) > portable.LIMIT


def test_difference_of_infinities():
    inf = torch.tensor([-torch.inf, 0.0])
    assert difference(inf, inf) == 0
    assert difference(inf, torch.tensor([0.0, 0.0])) == float("inf")
    assert difference(inf, torch.tensor([-torch.inf, torch.nan])) == float("inf")
    assert difference(inf, torch.zeros(3)) == float("inf")


def test_torch_archive_gives_the_same_scores(run, tmp_path):
    (row,) = export(run, ["torch"], tmp_path, head="ridge")
    assert row["head"] == "ridge" and row["difference"] <= 1e-5
    program = torch.export.load(tmp_path / "torch" / "classifier.pt2").module()
    classifier = load_classifier(run / "classifier-ridge.safetensors")
    for batch in (1, 7):
        x = torch.rand(batch, 1, 28, 28, generator=torch.Generator().manual_seed(batch))
        assert difference(program(x), classifier.predict(x)) <= 1e-5


def test_onnx_gives_the_same_scores(run, tmp_path):
    onnxruntime = pytest.importorskip("onnxruntime")
    pytest.importorskip("onnxscript")
    (row,) = export(run, ["onnx"], tmp_path)
    assert row["difference"] <= 1e-4
    path = tmp_path / "onnx" / "classifier.onnx"
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    classifier = load_classifier(run / "classifier.safetensors")
    for batch in (1, 7):
        x = torch.rand(batch, 1, 28, 28, generator=torch.Generator().manual_seed(batch))
        (got,) = session.run(["log_probabilities"], {"images": x.numpy()})
        assert difference(torch.from_numpy(got), classifier.predict(x)) <= 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("write", [portable.write_torch, portable.write_onnx])
def test_every_kind_exports(name, write, tmp_path):
    if write is portable.write_onnx:
        pytest.importorskip("onnxruntime")
        pytest.importorskip("onnxscript")
    size, channels = (16, 3) if name == "resnet18" else (28, 1)
    assert write(CASES[name](), tmp_path / "file", channels, size) <= 1e-4
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_a_file_that_disagrees_is_not_written(run, tmp_path, monkeypatch):
    monkeypatch.setattr(portable, "difference", lambda a, b: 2e-4)
    with pytest.raises(DataError, match=r"must agree with classifier 'network'.*of 0.0002"):
        export(run, ["torch"], tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_onnx_says_what_to_install(run, tmp_path, monkeypatch):
    def find(name, package=None):
        return None if name == "onnxscript" else importlib.util.find_spec("json")

    monkeypatch.setattr(portable, "find_spec", find)
    with pytest.raises(MissingExtra, match=r"onnxscript must be installed.*fedgist\[onnx\]"):
        export(run, ["onnx"], tmp_path)
    assert list(tmp_path.iterdir()) == []


@dataclass(frozen=True)
class Own:
    kind: str = "own"


def test_a_kind_that_cannot_be_expressed_says_so(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"must be network, compressed or closed-form. Got 'own'"):
        as_module(Own())

    class Loop(nn.Module):
        def forward(self, x):
            return x if float(x.sum()) > 0 else -x

    monkeypatch.setattr(portable, "as_module", lambda c: Loop())
    with pytest.raises(ConfigError, match=r"^a classifier to export as torch.export") as e:
        portable.write_torch(network(), tmp_path / "file", 1, 28)
    assert "\n" not in str(e.value) and list(tmp_path.iterdir()) == []


def test_the_command(run, tmp_path):
    command = ["export", str(run), "--as", "medmnist", "--as", "safetensors", "--out"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "out")])
    assert done.exit_code == 0, done.output
    lines = done.stdout.splitlines()
    assert len(lines) == 2 and "bytes" in lines[0] and "head decode" in lines[1]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "out"), "--scores", "--json"])
    assert [row["format"] for row in json.loads(done.stdout)] == ["medmnist", "safetensors"]
    card = read_json(tmp_path / "out" / "medmnist" / "privacy-card.json")
    assert card["utility"]["heads"]["qda"]["accuracy"] == 0.8128
    done = CliRunner().invoke(app, ["export", str(run), "--as", "tfds", "--out", str(tmp_path)])
    assert done.exit_code == 2
