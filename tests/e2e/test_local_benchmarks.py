"""Benchmarks of data that has to be brought along: each file reads its set's own layout on disk.

Stand-ins of a few images have the layouts that the sets are published in; `tests/data` tests the
readers. That every case names options that exist, and that a slice of each file runs without the
data, is tested for all files in `test_benchmark`.
"""

from __future__ import annotations

import json
import pickle
import tomllib
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import tomli_w
from PIL import Image
from typer.testing import CliRunner

from fedgist.bench import load_suite, planned
from fedgist.cli import app
from fedgist.encoders import load_encoder
from fedgist.setup import prepare_run
from fedgist.setup import test_images as images_to_test_on

pytestmark = pytest.mark.usefixtures("one_thread")
FOLDER = Path(__file__).parents[2] / "benchmarks"
SYNSETS = (
    *("n01440764", "n02102040", "n02979186", "n03000684", "n03028079"),
    *("n03394916", "n03417042", "n03425413", "n03445777", "n03888257"),
)
LAND = (
    *("AnnualCrop", "Forest", "HerbaceousVegetation", "Highway", "Industrial"),
    *("Pasture", "PermanentCrop", "Residential", "River", "SeaLake"),
)
FEW = 3  # training images of a class
CHEAP = [
    *("method.epochs=1", "method.recipe.width=4", "data.clients=2"),
    *("data.partition=iid", "privacy.noise=seeded"),
]


def pictures(rng, labels, height, width, channels=3):
    """Return uint8 ``[n, h, w, c]``, brighter the larger the label."""
    noise = rng.integers(0, 80, (len(labels), height, width, channels))
    return (noise + 15 * (np.asarray(labels)[:, None, None, None] % 10)).astype(np.uint8)


def cifar(folder, rng, ten):
    """Write python batches of ten or a hundred classes, as dicts in pickles of protocol 2."""
    folder.mkdir(parents=True)
    names = [f"class {i}" for i in range(10 if ten else 100)]
    meta, key = ("batches.meta", "label_names") if ten else ("meta", "fine_label_names")
    (folder / meta).write_bytes(pickle.dumps({key: names}, protocol=2))
    train = [f"data_batch_{i}" for i in range(1, 6)] if ten else ["train"]
    for file in [*train, "test_batch" if ten else "test"]:
        labels = list(range(len(names))) * (FEW if file == "train" else 1)
        rows = pictures(rng, labels, 32, 32).transpose(0, 3, 1, 2).reshape(len(labels), -1)
        said = {"labels": labels} if ten else {"fine_labels": labels, "coarse_labels": labels}
        content = {"data": rows, "filenames": [f"{i}.png" for i in labels]} | said
        (folder / file).write_bytes(pickle.dumps(content, protocol=2))


def eurosat(folder, rng):
    """Write class folders of JPEG files below ``2750``, without a test split."""
    for label, name in enumerate(LAND):
        (folder / "2750" / name).mkdir(parents=True)
        for i, picture in enumerate(pictures(rng, [label] * (FEW + 1), 64, 64), 1):
            Image.fromarray(picture).save(folder / "2750" / name / f"{name}_{i}.jpg")


def imagenette(folder, rng):
    """Write folders of synsets of oblong photographs, one of them grey, and the csv beside them."""
    for split, n in (("train", FEW), ("val", 1)):
        for label, name in enumerate(SYNSETS):
            (folder / split / name).mkdir(parents=True)
            for i, picture in enumerate(pictures(rng, [label] * n, 160, 213)):
                image = Image.fromarray(picture)
                image = image.convert("L") if label == i == 0 else image
                image.save(folder / split / name / f"{name}_{i}.JPEG", "JPEG")
    (folder / "noisy_imagenette.csv").write_text("path,noisy_labels_0\n")


def medmnist(path, rng, size, label):
    """Write an npz of three splits; ``label`` makes labels ``[n, k]`` of n."""
    path.parent.mkdir(parents=True)
    arrays = {}
    for split, n in (("train", 8 * FEW), ("val", 8), ("test", 8)):
        labels = label(n).astype(np.uint8)
        shown = pictures(rng, labels.sum(1), size, size)
        arrays[f"{split}_images"] = shown if labels.shape[1] == 1 else shown[..., 0]
        arrays[f"{split}_labels"] = labels
    np.savez_compressed(path, **arrays)


def findings(n):
    """Return which of fourteen findings n X-rays have: every other one none, every eighth two."""
    table = np.zeros((n, 14), int)
    odd = np.arange(1, n, 2)
    table[odd, odd % 14] = 1
    table[::8, :2] = 1
    return table


WRITERS = {
    "cifar10": lambda at, rng: cifar(at / "cifar-10-batches-py", rng, True),
    "cifar100": lambda at, rng: cifar(at / "cifar-100-python", rng, False),
    "eurosat": lambda at, rng: eurosat(at / "eurosat", rng),
    "imagenette": lambda at, rng: imagenette(at / "imagenette2-160", rng),
    "bloodmnist": lambda at, rng: medmnist(
        at / "bloodmnist_64.npz", rng, 64, lambda n: (np.arange(n) % 8)[:, None]
    ),
    "chestmnist": lambda at, rng: medmnist(at / "chestmnist.npz", rng, 28, findings),
}
# Classes, channels, size, test images of each stand-in.
SHAPES = {
    "cifar10": (10, 3, 32, 10),
    "cifar100": (100, 3, 32, 100),
    "eurosat": (10, 3, 64, 6),  # 0.148148 of forty
    "imagenette": (10, 3, 64, 10),
    "bloodmnist": (8, 3, 64, 8),
    "chestmnist": (2, 1, 28, 8),
}


@cache
def runs(name):
    """Return every run of a set's file."""
    return planned(load_suite(file_of(name)))


def file_of(name):
    return FOLDER / f"local_{name}.toml"


@pytest.fixture(params=SHAPES)
def there(request, tmp_path, monkeypatch):
    """A working folder with a stand-in of one set in ``data``; yields the set's name."""
    WRITERS[request.param](tmp_path / "data", np.random.default_rng(0))
    monkeypatch.chdir(tmp_path)
    return request.param


def test_there_is_one_stand_in_for_each_file():
    assert {p.stem for p in FOLDER.glob("local_*.toml")} == {f"local_{n}" for n in WRITERS}
    assert WRITERS.keys() == SHAPES.keys()


@pytest.mark.slow
def test_a_private_and_a_plain_case_run_from_the_files_of_the_set(there, tmp_path):
    """The file's own data, sizes and cases; the networks are small and see each image once."""
    spec = tomllib.loads(file_of(there).read_text("utf-8"))
    names = {"one-shot FedAvg", "FedKT-CSD, lda, ε = 10"}
    spec["case"] = [
        c | {"sweep": {}, "set": [*c["set"], *(s for s in CHEAP if fits(s, c))]}
        for c in spec["case"]
        if c["name"] in names
    ]
    path = tmp_path / f"local_{there}.toml"
    path.write_text(tomli_w.dumps(spec), encoding="utf-8")
    done = CliRunner().invoke(app, ["bench", str(path), "--json"])
    assert done.exit_code == 0, done.stderr
    fedavg, lda = json.loads(done.stdout)
    assert (fedavg["case"], lda["case"]) == ("one-shot FedAvg", "FedKT-CSD, lda, ε = 10")
    assert set(fedavg["mean"]) == {"oneshot_fedavg"} and set(lda["mean"]) == {"lda", "lda_ceiling"}
    assert all(0 <= v <= 1 for row in (fedavg, lda) for v in row["mean"].values())
    lines = (tmp_path / "results" / f"local_{there}.jsonl").read_text("utf-8").splitlines()
    claims = {r["case"]: r["claim"] for r in map(json.loads, lines)}
    assert claims[lda["case"]]["epsilon"] == pytest.approx(10)
    assert claims[fedavg["case"]]["epsilon"] == "inf"


def fits(setting, case):
    """Say whether a case has this option: statistics have neither epochs nor a network."""
    return not (setting.startswith("method.") and "FedKT" in case["name"])


def test_every_case_finds_its_data(there):
    classes, channels, size, test = SHAPES[there]
    todo = runs(there)
    sources = {p.run.data.source: p.run for p in todo}
    assert all(where.startswith("data/") for where in sources)
    made = prepare_run(todo[0].run)
    assert (len(made.task.classes), made.task.channels, made.task.size) == (classes, channels, size)
    assert len(images_to_test_on(made)) == test
    for run in sources.values():
        assert prepare_run(run).source.splits[0] == "train"


def test_findings_are_reduced_in_both_ways(tmp_path, monkeypatch):
    WRITERS["chestmnist"](tmp_path / "data", np.random.default_rng(0))
    monkeypatch.chdir(tmp_path)
    todo = {p.run.data.source.partition("#")[2]: p for p in runs("chestmnist")}
    assert todo.keys() == {"any", "single"}
    task = prepare_run(todo["single"].run).task
    assert len(task.classes) == 15 and task.classes[:2] == ("no finding", "atelectasis")


@pytest.mark.parametrize("name", SHAPES)
def test_trained_networks_are_alike_and_nothing_is_chosen(name):
    """One model, one recipe, as many updates at servers as epochs make of all training images."""
    steps, recipes, epochs = set(), set(), set()
    for p in runs(name):
        method = p.run.method
        kind = method["name"]
        drawn = {"decode", "match"} & set(method.get("heads", ()))
        if kind == "fedkt_csd" and not drawn:
            continue
        if "epochs" in method:
            epochs.add(method["epochs"])
        for key in ("recipe", "local"):
            if key in method:
                recipe = dict(method[key])
                if kind == "fedkt_csd" or (kind, key) == ("fedsd2c", "recipe"):
                    steps.add(recipe["steps"])
                recipes.add(tuple(sorted((k, v) for k, v in recipe.items() if k != "steps")))
    assert len(recipes) == len(steps) == len(epochs) == 1
    (recipe,), (updates,), (passes,) = recipes, steps, epochs
    assert dict(recipe)["choose"] == "last" and dict(recipe)["model"] == "convnet3"
    images = {"cifar10": 50_000, "cifar100": 50_000, "eurosat": 23_000, "imagenette": 9_469}
    images |= {"bloodmnist": 11_959, "chestmnist": 78_468}
    assert updates == round(passes * images[name] / dict(recipe)["batch"])


@pytest.mark.parametrize("name", SHAPES)
def test_the_table_is_the_same_for_every_set(name):
    """Every comparison over the same kinds of splits, every head at ε = 10 and 1."""
    cases = load_suite(file_of(name)).cases
    stems = {c.stem for c in cases}
    swept = {c.sweep["split"] for c in cases if c.sweep}
    assert {s.partition(":")[0] for s in swept} in (
        {"dirichlet", "pathological"},
        {"dirichlet", "shards"},  # two classes: sorted by label
    )
    assert {"dirichlet:0.5", "dirichlet:0.3", "dirichlet:0.1"} < swept
    for stem in ("one-shot FedAvg", "ensemble of probabilities", "DENSE", "Co-Boosting", "FedSD2C"):
        assert {c.sweep["split"] for c in cases if c.stem == stem} == swept
    wanted = {
        f"FedKT-CSD, {h}, ε = {e}" for h in ("lda", "qda", "decode", "match") for e in (10, 1)
    }
    assert wanted | {"centralised"} <= stems
    for p in runs(name):
        _, _, said = p.case.name.partition("ε = ")
        assert p.run.privacy.epsilon == float(said.partition(",")[0] or "inf")


def test_an_encoder_that_has_seen_the_images_is_not_used_on_them():
    """ImageNette's photographs are ImageNet's."""
    tracks = {name: set(map(track, encoders(name))) for name in SHAPES}
    assert tracks.pop("imagenette") == {"public images"}
    assert all(t == {"public images", "public ImageNet"} for t in tracks.values())


def encoders(name):
    """Return the names of all encoders that a file uses."""
    methods = [p.run.method for p in runs(name)]
    return {m[k] for m in methods for k in ("encoder", "features") if m.get(k)}


def track(encoder):
    return load_encoder(encoder).track
