"""Train on synthetic, test on real (TSTR): several models by fixed recipes, none of them tuned.

Esteban, Hyland and Rätsch, "Real-valued (Medical) Time Series Generation with Recurrent
Conditional GANs", 2017, https://arxiv.org/abs/1706.02633. A set of images that only one model
learns from is worth less than one that all do, so the models differ in kind:

- ``convnet3``, ``mlp``: networks of the zoo, as many updates each, the last one kept;
- ``logistic``: multinomial logistic regression on pixels;
- ``knn``: the five nearest training images vote, by Euclidean distance of pixels;
- ``linear``: multinomial logistic regression on the features of a frozen public encoder.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError, DataError, did_you_mean
from fedgist.train.loop import train
from fedgist.train.recipe import Recipe
from fedgist.types import Images

__all__ = ["RECIPES", "TSTR_MODELS", "check_models", "fit_predict", "recipe_text"]

STEPS = 400  # updates of every network
RECIPES = {
    "convnet3": Recipe("convnet3", width=32, steps=STEPS, batch=64, lr=1e-2),
    "mlp": Recipe("mlp", width=512, steps=STEPS, batch=64, lr=1e-3),
}
TSTR_MODELS = (*RECIPES, "logistic", "knn", "linear")
SIDE = 32  # pixels: larger images are averaged down to it for ``logistic`` and ``knn``
NEIGHBOURS = 5
INVERSE_PENALTY, UPDATES = 1.0, 100  # of both logistic regressions: the library's own


def check_models(names: tuple[str, ...]) -> None:
    """Refuse names that are not among `TSTR_MODELS`.

    Raises:
        ConfigError: none, a name twice, or one that is not known.
    """
    for name in names:
        if name not in TSTR_MODELS:
            raise ConfigError(
                f"a model to train must be one of {', '.join(TSTR_MODELS)}. Got '{name}'."
                f"{did_you_mean(name, TSTR_MODELS)}"
            )
    if not names or len(set(names)) < len(names):
        raise ConfigError(f"models to train must be one or more, each once. Got {list(names)}")


def recipe_text(name: str) -> str:
    """Say in one line how a model is trained."""
    if name in RECIPES:
        r = RECIPES[name]
        return (
            f"{name} of width {r.width}, {r.steps} updates of {r.batch} images, {r.optimiser}, "
            f"learning rate {r.lr:g}, {r.schedule}, the last update"
        )
    if name == "knn":
        return f"{NEIGHBOURS} nearest by pixels of at most {SIDE} x {SIDE}"
    on = f"pixels of at most {SIDE} x {SIDE}" if name == "logistic" else "public features"
    return f"logistic regression on {on}, C = {INVERSE_PENALTY:g}, at most {UPDATES} L-BFGS steps"


def fit_predict(
    name: str,
    fit: Images,
    test: Images,
    rng: torch.Generator,
    features: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """Train one model on ``fit`` and return its scores of ``test``, float64 ``[n, C]``, log scale.

    Labels of ``test`` are not looked at. A class without a training image is ruled out (``-inf``)
    by all but the networks.

    Args:
        name: one of `TSTR_MODELS`.
        fit: the training images.
        test: the images to predict.
        rng: of the networks; the others draw nothing.
        features: of ``fit`` and ``test``, float64 ``[., d]``; for ``linear``.

    Raises:
        ConfigError: an unknown model, or ``linear`` without features.
        DataError: training images of fewer than two classes, or fewer than `NEIGHBOURS` images.
    """
    check_models((name,))
    seen = int((fit.counts() > 0).sum())
    if seen < 2 or len(fit) < NEIGHBOURS:
        raise DataError(
            f"training images must be {NEIGHBOURS} or more of 2 or more classes. Got {len(fit)} of "
            f"{seen}"
        )
    if name in RECIPES:
        network = train(fit, RECIPES[name], rng)
        return torch.cat([network.predict(x) for x, _ in test.batches()]).to(torch.float64)
    if name == "linear" and features is None:
        raise ConfigError("the model 'linear' needs public features. Got none")
    x, y = features if name == "linear" and features is not None else (_flat(fit), _flat(test))
    return _log_shares(_estimator(name), x, fit.labels, y, len(fit.classes))


def _flat(images: Images) -> Tensor:
    """Return float32 ``[n, pixels]`` in [0, 1], of at most `SIDE` x `SIDE` pixels."""
    parts = []
    for x, _ in images.batches():
        if x.shape[-1] > SIDE:
            x = F.interpolate(x, size=(SIDE, SIDE), mode="area")
        parts.append(x.flatten(1))
    return torch.cat(parts)


def _estimator(name: str) -> Any:
    from sklearn.linear_model import LogisticRegression  # a second that other commands can spare
    from sklearn.neighbors import KNeighborsClassifier

    if name == "knn":
        return KNeighborsClassifier(NEIGHBOURS, algorithm="brute")
    return LogisticRegression(C=INVERSE_PENALTY, max_iter=UPDATES)


def _log_shares(estimator: Any, x: Tensor, labels: Tensor, test: Tensor, classes: int) -> Tensor:
    """Fit and return log probabilities (of neighbours: log shares of votes)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the number of updates is the recipe, converged or not
        estimator.fit(x.numpy(), labels.numpy())
    shares = torch.from_numpy(estimator.predict_proba(test.numpy())).to(torch.float64)
    out = torch.full((len(test), classes), -torch.inf, dtype=torch.float64)
    out[:, torch.from_numpy(estimator.classes_)] = shares.log()
    return out
