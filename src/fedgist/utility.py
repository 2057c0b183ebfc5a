"""What an outcome is good for: its classifiers, classifiers trained on its images, the images.

Real test images are used for measuring only: nothing is trained on them, chosen by them or tuned to
them. But every number here depends on them, and on the images of ``train`` where they are given:
if those are private, the numbers are *not covered by ε*. They say what a person who holds the
images may look at; whoever publishes them releases something about those images besides the gist.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.data import open_source
from fedgist.encoders import Encoder, load_encoder
from fedgist.errors import ConfigError, DataError, EncoderError, MissingExtra
from fedgist.evaluation import task_of
from fedgist.progress import Progress
from fedgist.report.export import classifier_extra, load_classifier
from fedgist.report.folder import Clock
from fedgist.report.formats import find_synthetic
from fedgist.report.record import versions, write_json
from fedgist.run import generator
from fedgist.train.accuracy import accuracies, agreement
from fedgist.train.calibration import calibration
from fedgist.train.distances import compare, public_features, room
from fedgist.train.tstr import RECIPES, TSTR_MODELS, check_models, fit_predict, recipe_text
from fedgist.types import Classifier, Images, Task

__all__ = ["evaluate_utility"]

FIRST = "classifier.safetensors"  # the one to use; others are called classifier-HEAD
ENCODERS = ("efficientnet-lite0", "scattering")  # the first that can be loaded
MOST = 20_000  # images to train on; of more, so many are drawn
PER_CLASS = 50  # images of a class on either side, for distances of its own
MEANING = {
    "lda": "softmax of the scores: posteriors, were classes Gaussian with one covariance",
    "qda": "softmax of the scores: posteriors, were classes Gaussian",
    "ridge": "softmax of least-squares scores, which are no log probabilities",
    "logistic": "softmax of the scores of a logistic model",
    "network": "softmax of the network's outputs",
}
PRIVATE = (
    "Measured on real images, for measuring only: nothing was chosen by them. If they are private, "
    "these numbers are not covered by ε."
)


def evaluate_utility(
    folder: Path,
    test: str,
    split: str = "test",
    *,
    models: Sequence[str] = TSTR_MODELS,
    seeds: int = 1,
    seed: int = 0,
    train: str | None = None,
    encoder: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Measure the outcome in ``folder`` on real images; write ``utility.json`` into it.

    Args:
        folder: of a run or of a federation's result.
        test: named set, file or folder of real images.
        split: of ``test``.
        models: what to train on the synthetic images, of `TSTR_MODELS`.
        seeds: how often every network is trained; the other models draw nothing.
        seed: of training, of simulated outcomes, of the images drawn.
        train: real images; the models are trained on its training split too, for the ratio.
        encoder: of the features; None takes the first of `ENCODERS` that can be loaded.
        progress: told of stages.

    Returns:
        ``classifiers`` (rows: accuracy with its 95 % interval, balanced accuracy, accuracy by
        class, calibration), ``tstr`` (one row per model, with ``trtr`` and ``ratio`` or None),
        ``agreement`` (rows, see `agreement`, against the classifier ``own``), ``distances``
        (``overall`` and ``per_class``, see `fedgist.train.distances.Distances`; None without
        synthetic images), ``notes``, ``settings``, ``versions`` and ``seconds``.

    Raises:
        ConfigError: no classifier there, an unknown model, or no seed.
        DataError: a file cannot be used, the classes are not the task's, or there is no image.
        EncoderError: the encoder that was named cannot be loaded.
    """
    check_models(tuple(models))
    if seeds < 1:
        raise ConfigError(f"seeds must be at least 1. Got {seeds}")
    tell, clock = progress or Progress(), Clock()
    found, task = _classifiers(folder)
    real = _read(test, split, task)
    synthetic, notes = find_synthetic(folder), [PRIVATE]
    clock.lap("load")
    tell.stage("classifiers")
    scores = {head: _predict(c, real) for head, (_, c) in found.items()}
    rows = [_row(head, *pair, scores[head], real, seed) for head, pair in found.items()]
    own, *others = scores
    said = {f"classifier {h}": [scores[h].argmax(1)] for h in others}
    clock.lap("classifiers")
    tstr, distances = list[dict[str, Any]](), None
    if synthetic is None:
        notes.append("There are no synthetic images: nothing was trained, no distance taken.")
    else:
        extra = {} if train is None else {"real": _read(train, "train", task)}
        tell.stage("features")
        bench = _bench({"synthetic": synthetic} | extra, real, encoder, "linear" in models, seed)
        clock.lap("features")
        tstr, answers, distances = _of_images(bench, models, seeds, seed, tell, clock)
        said |= answers
    ours = scores[own].argmax(1)
    record = {
        "folder": str(folder),
        "test": test,
        "images": len(real),
        "classes": list(task.classes),
        "own": own,
        "classifiers": rows,
        "tstr": tstr,
        "agreement": [{"name": n} | agreement(g, ours, real.labels) for n, g in said.items()],
        "distances": distances,
        "notes": notes,
        "settings": {"split": split, "train": train, "seed": seed, "seeds": seeds}
        | {"models": {m: recipe_text(m) for m in models}},
        "versions": versions(),
        "seconds": clock.laps,
    }
    write_json(folder / "utility.json", record)
    return record


@dataclass(frozen=True)
class _Bench:
    """What models are trained and tested on, and its features."""

    sources: Mapping[str, Images]
    test: Images
    encoder: Encoder
    features: Mapping[str, Tensor]


def _classifiers(folder: Path) -> tuple[dict[str, tuple[Path, Classifier]], Task]:
    """Read every classifier, the one to use first, and the task that they were made for."""
    files = sorted(folder.glob("classifier*.safetensors"), key=lambda p: (p.name != FIRST, p.name))
    if not files:
        raise ConfigError(f"the folder must hold {FIRST}. Got {folder}")
    found = {}
    for path in files:
        head = classifier_extra(path).get("head", path.stem)
        found[head] = (path, load_classifier(path))
    return found, task_of(classifier_extra(files[0]), files[0])


def _read(where: str, split: str, task: Task) -> Images:
    images = open_source(where).images(split, task)
    if not len(images):
        raise DataError(f"'{where}' must have images to measure on. Got 0 in its split '{split}'")
    return images


def _predict(classifier: Classifier, images: Images) -> Tensor:
    return torch.cat([classifier.predict(x) for x, _ in images.batches()]).to(torch.float64)


def _row(
    head: str, path: Path, classifier: Classifier, scores: Tensor, images: Images, seed: int
) -> dict[str, Any]:
    meaning = MEANING.get(classifier.kind, "softmax of the scores")
    measured = calibration(scores, images.labels, generator(seed, "utility", "calibration"))
    row = {"head": head, "file": path.name, "kind": classifier.kind, "probabilities": meaning}
    return row | accuracies(scores, images) | {"calibration": asdict(measured)}


def _bench(
    sources: Mapping[str, Images], test: Images, encoder: str | None, linear: bool, seed: int
) -> _Bench:
    """Draw what is trained on and encode it once, real training images only for ``linear``."""
    frozen = _encoder(encoder)
    drawn = {}
    for name, images in sources.items():
        rows = torch.randperm(len(images), generator=generator(seed, "utility", name))[:MOST]
        drawn[name] = images.take(rows.sort().values)
    encoded = {"test": test} | {k: v for k, v in drawn.items() if linear or k == "synthetic"}
    features = {k: public_features(frozen, v) for k, v in encoded.items()}
    return _Bench(drawn, test, frozen, features)


def _encoder(name: str | None) -> Encoder:
    if name is not None:
        return load_encoder(name)
    try:
        return load_encoder(ENCODERS[0])
    except (MissingExtra, EncoderError):
        return load_encoder(ENCODERS[1])


def _of_images(
    bench: _Bench, models: Sequence[str], seeds: int, seed: int, tell: Progress, clock: Clock
) -> tuple[list[dict[str, Any]], dict[str, list[Tensor]], dict[str, Any]]:
    """Train every model, then measure distances; return rows, predictions, distances."""
    rows, said = [], {}
    for name in models:
        tell.stage(f"train {name}")
        row, said[f"tstr {name}"] = _tstr(bench, name, seeds, seed)
        rows.append(row)
        clock.lap(f"tstr {name}")
    tell.stage("distances")
    distances = _distances(bench, seed)
    clock.lap("distances")
    return rows, said, distances


def _tstr(bench: _Bench, name: str, seeds: int, seed: int) -> tuple[dict[str, Any], list[Tensor]]:
    """Train one model on every source; return its row and what it predicts, by seed."""
    found, said = {}, []
    for source, fit in bench.sources.items():
        scored = []
        for i in range(seeds if name in RECIPES else 1):
            both = bench.features.get(source), bench.features["test"]
            features = None if both[0] is None else (both[0], both[1])
            rng = generator(seed, "utility", name, i)
            scores = fit_predict(name, fit, bench.test, rng, features)
            scored.append(accuracies(scores, bench.test))
            if source == "synthetic":
                said.append(scores.argmax(1))
        found[source] = _mean(scored) | {"trained_on": len(fit)}
    trtr = found.get("real")
    best = trtr["accuracy"] if trtr else 0.0
    ratio = found["synthetic"]["accuracy"] / best if best > 0 else None
    return {"model": name} | found["synthetic"] | {"trtr": trtr, "ratio": ratio}, said


def _mean(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Average over seeds; the interval, averaged too, is of the test images and not of seeds."""
    all_ = [r["accuracy"] for r in rows]
    spans = [r["interval"] for r in rows]
    classes = zip(*(r["per_class"] for r in rows), strict=True)
    return {
        "accuracy": sum(all_) / len(all_),
        "accuracies": all_,
        "interval": [sum(ends) / len(ends) for ends in zip(*spans, strict=True)],
        "balanced_accuracy": sum(r["balanced_accuracy"] for r in rows) / len(rows),
        "per_class": [None if c[0] is None else sum(c) / len(c) for c in classes],
    }


def _distances(bench: _Bench, seed: int) -> dict[str, Any]:
    """Compare synthetic with real test images, overall and class by class in as many dimensions."""
    real, made = bench.features["test"], bench.features["synthetic"]
    labels = bench.test.labels, bench.sources["synthetic"].labels
    rng = generator(seed, "utility", "distances")
    overall = asdict(compare(real, made, rng))
    parts = {}
    for c, name in enumerate(bench.test.classes):
        x, y = real[labels[0] == c], made[labels[1] == c]
        parts[name] = (x, y) if min(len(x), len(y)) >= PER_CLASS else None
    rooms = [room(len(p[0]), len(p[1]), real.shape[1]) for p in parts.values() if p]
    k = min((r for r in rooms if r), default=0)
    return {
        "encoder": bench.encoder.name,
        "digest": bench.encoder.digest,
        "public_data": bench.encoder.track,
        "overall": overall,
        "per_class": {n: asdict(compare(*p, rng, k)) if p else None for n, p in parts.items()},
    }
