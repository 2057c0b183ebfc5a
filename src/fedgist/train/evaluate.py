"""How well a classifier does on labelled images: accuracy, confusion, calibration."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.errors import DataError
from fedgist.types import Classifier, Images

__all__ = ["Score", "evaluate"]

BINS = (
    15  # equal-width bins of confidence (Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599)
)
FLOOR = math.log(1e-12)  # a class ruled out costs this much, not infinity


@dataclass(frozen=True, eq=False)
class Score:
    """What was measured on one set of images.

    Attributes:
        n: number of images.
        accuracy: share predicted right, in [0, 1].
        per_class: the same for each true class (recall); None where no image is of that class.
        confusion: int64 ``[C, C]``, images by true class (row) and predicted class (column).
        nll: mean negative log-likelihood of the true class, in nats; one image costs at most 27.6.
        ece: expected calibration error over 15 bins of confidence, in [0, 1].
    """

    n: int
    accuracy: float
    per_class: tuple[float | None, ...]
    confusion: Tensor
    nll: float
    ece: float


def evaluate(
    classifier: Classifier, images: Images, transform: Callable[[Tensor], Tensor] | None = None
) -> Score:
    """Measure ``classifier`` on ``images``, a batch at a time.

    Args:
        classifier: scores are normalised here, so unnormalised log scores are fine.
        images: the test set; left as it is.
        transform: applied to float32 ``[b, c, h, w]`` in [0, 1] before the classifier sees it. A
            number measured through one (say, a codec's round trip) goes by another name.

    Raises:
        DataError: no image, or scores of the wrong shape or with NaN.
    """
    if not len(images):
        raise DataError("evaluation needs at least one image. Got 0")
    classes = len(images.classes)
    confusion = torch.zeros(classes * classes, dtype=torch.int64)
    bins = torch.zeros(3, BINS, dtype=torch.float64)  # images, right ones, summed confidence
    nll = 0.0
    for x, truth in images.batches():
        scores = classifier.predict(x if transform is None else transform(x))
        if scores.shape != (len(x), classes) or bool(scores.isnan().any()):
            raise DataError(
                f"scores of classifier '{classifier.kind}' must be [{len(x)}, {classes}] without "
                f"NaN. Got {list(scores.shape)} with {int(scores.isnan().sum())} NaN"
            )
        log_p = scores.to(torch.float64).log_softmax(1)
        confidence, guess = log_p.exp().max(1)
        confusion += torch.bincount(truth * classes + guess, minlength=classes**2)
        nll -= float(log_p.gather(1, truth[:, None]).clamp(min=FLOOR).sum())
        cell = (confidence * BINS).ceil().long().sub(1).clamp(0, BINS - 1)  # bins (k/15, (k+1)/15]
        rows = torch.stack([torch.ones_like(confidence), (guess == truth).double(), confidence])
        bins.index_add_(1, cell, rows)
    return _score(confusion.view(classes, classes), bins, nll)


def _score(confusion: Tensor, bins: Tensor, nll: float) -> Score:
    n = int(confusion.sum())
    right: list[int] = confusion.diagonal().tolist()
    seen: list[int] = confusion.sum(1).tolist()
    return Score(
        n=n,
        accuracy=sum(right) / n,
        per_class=tuple(r / m if m else None for r, m in zip(right, seen, strict=True)),
        confusion=confusion,
        nll=nll / n,
        ece=float((bins[1] - bins[2]).abs().sum()) / n,
    )
