"""Whether a classifier's probabilities mean what they say, and how much of a gap is chance.

Top-label calibration: of the images that are predicted with confidence 0.8, are 80 % right? The
gap is measured in bins of equal mass (Nixon et al., CVPR workshops 2019,
https://arxiv.org/abs/1904.01685). Even perfect probabilities show a gap on few images, so beside
it stands the gap that they would show: outcomes drawn from the confidences themselves
(consistency resampling: Bröcker and Smith, Weather and Forecasting 22(3), 2007). Temperature
scaling: Guo et al., ICML 2017, https://arxiv.org/abs/1706.04599.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy.optimize import minimize_scalar
from torch import Tensor

from fedgist.errors import DataError
from fedgist.train.loop import split

__all__ = ["BINS", "Bin", "Calibration", "Tempered", "calibration"]

BINS = 15
DRAWS = 200  # simulated sets of outcomes behind the expected gap
FLOOR = math.log(1e-12)  # a class ruled out costs this much, as in `evaluate`
TEMPERATURES = (1e-2, 1e2)
MANY = 10  # more classes than this: top-5 accuracy is given too
LEAST = 2  # images on either side of the split that the temperature needs


@dataclass(frozen=True)
class Bin:
    """One row of a reliability diagram.

    Attributes:
        n: images in it.
        confidence: their mean confidence, in (0, 1].
        accuracy: share of them predicted right, in [0, 1].
    """

    n: int
    confidence: float
    accuracy: float


@dataclass(frozen=True)
class Tempered:
    """What one temperature for all scores changes; fitted on one half, measured on the other.

    Attributes:
        temperature: T > 0 of softmax(scores / T), the least negative log likelihood on the first
            half. Above 1: the classifier is too sure.
        n: images of the second half; all that follows is measured on them.
        nll_before, nll: mean negative log likelihood at T = 1 and at T, in nats.
        ece_before, ece: calibration error at T = 1 and at T.
        ece_expected: what ``ece`` would be if the confidences at T were exact.
    """

    temperature: float
    n: int
    nll_before: float
    nll: float
    ece_before: float
    ece: float
    ece_expected: float


@dataclass(frozen=True)
class Calibration:
    """What was measured of a classifier's probabilities on labelled images.

    Attributes:
        n: images.
        accuracy: share predicted right, in [0, 1].
        nll: mean negative log likelihood of the true class, in nats; one image costs at most 27.6.
        brier: mean squared distance of the probabilities from the truth, summed over classes, in
            [0, 2].
        confidence: mean probability of the predicted class.
        ece: expected calibration error over at most 15 bins of equal mass, in [0, 1].
        ece_expected: mean of the same where outcomes are drawn from the confidences: the part of
            ``ece`` that perfect calibration would show on this many images.
        ece_high: 95 % quantile of the same. A smaller ``ece`` is no evidence against calibration.
        reliability: the bins, from the least to the most confident.
        tempered: what one temperature changes; None where there are too few images to split.
        top5: share of images whose class is among the five likeliest (a tie counts against it);
            None for ten classes or fewer.
    """

    n: int
    accuracy: float
    nll: float
    brier: float
    confidence: float
    ece: float
    ece_expected: float
    ece_high: float
    reliability: tuple[Bin, ...]
    tempered: Tempered | None
    top5: float | None


def calibration(scores: Tensor, labels: Tensor, rng: torch.Generator) -> Calibration:
    """Measure the probabilities softmax(scores).

    Args:
        scores: float ``[n, C]``, log scale, as `Classifier.predict` gives them; for probabilities p
            pass ``p.log()``. ``-inf`` is a class ruled out.
        labels: int64 ``[n]``, 0..C-1.
        rng: source of the simulated outcomes and of the halves for the temperature. One seed
            gives one result, whatever else was drawn before.

    Raises:
        DataError: no image, other shapes, NaN or +inf, or a row that rules every class out.
    """
    _check(scores, labels)
    log_p = scores.detach().to(torch.float64).log_softmax(1)
    p = log_p.exp()
    confidence, guess = p.max(1)
    right = (guess == labels).to(torch.float64)
    cell = _equal_mass(confidence)
    expected = _simulated(confidence, cell, rng)
    target = torch.nn.functional.one_hot(labels, p.shape[1])
    return Calibration(
        n=len(p),
        accuracy=float(right.mean()),
        nll=_nll(log_p, labels),
        brier=float((p - target).square().sum(1).mean()),
        confidence=float(confidence.mean()),
        ece=_gap(confidence, right, cell),
        ece_expected=float(expected.mean()),
        ece_high=float(expected.quantile(0.95)),
        reliability=_bins(confidence, right, cell),
        tempered=_tempered(log_p, labels, rng),
        top5=_top(log_p, labels, 5) if p.shape[1] > MANY else None,
    )


def _check(scores: Tensor, labels: Tensor) -> None:
    n, classes = (len(labels), scores.shape[-1])
    if scores.ndim != 2 or len(scores) != n or not n or not scores.is_floating_point():
        raise DataError(
            f"scores must be float [{n}, classes] for {n} labels, n > 0. Got {scores.dtype} "
            f"{list(scores.shape)}"
        )
    if labels.dtype != torch.int64 or not 0 <= int(labels.min()) <= int(labels.max()) < classes:
        raise DataError(
            f"labels must be int64 in 0..{classes - 1}. Got {labels.dtype}, "
            f"{labels.min()}..{labels.max()}"
        )
    bad = int((~scores.amax(1).isfinite()).sum())  # amax passes NaN on
    if bad:
        raise DataError(
            f"every row of scores must have a finite largest value. Got {bad} rows with NaN, +inf "
            "or only -inf"
        )


def _nll(log_p: Tensor, labels: Tensor) -> float:
    return -float(log_p.gather(1, labels[:, None]).clamp(min=FLOOR).mean())


def _equal_mass(confidence: Tensor) -> Tensor:
    """Return the bin of every image, int64 ``[n]``; equal confidences share one.

    Otherwise the order of the images would decide which bin a tie falls into: sure classifiers
    give many a confidence of exactly 1.
    """
    n = len(confidence)
    ordered = confidence.sort().values
    edges = sorted({float(ordered[i * n // BINS]) for i in range(1, BINS)})
    cell = torch.bucketize(confidence, torch.tensor(edges, dtype=confidence.dtype), right=True)
    return ((torch.bincount(cell) > 0).cumsum(0) - 1)[cell]  # numbered without gaps


def _gap(confidence: Tensor, right: Tensor, cell: Tensor) -> float:
    sums = torch.zeros(int(cell.max()) + 1, dtype=torch.float64)
    return float(sums.index_add_(0, cell, right - confidence).abs().sum()) / len(cell)


def _bins(confidence: Tensor, right: Tensor, cell: Tensor) -> tuple[Bin, ...]:
    rows = []
    for b in range(int(cell.max()) + 1):
        here = cell == b
        rows.append(Bin(int(here.sum()), float(confidence[here].mean()), float(right[here].mean())))
    return tuple(rows)


def _simulated(confidence: Tensor, cell: Tensor, rng: torch.Generator) -> Tensor:
    """Return the gaps of `DRAWS` sets of outcomes drawn from the confidences, float64."""
    gaps = []
    for _ in range(DRAWS):
        u = torch.rand(len(cell), generator=rng, dtype=torch.float64)
        gaps.append(_gap(confidence, (u < confidence).to(torch.float64), cell))
    return torch.tensor(gaps, dtype=torch.float64)


def _tempered(log_p: Tensor, labels: Tensor, rng: torch.Generator) -> Tempered | None:
    fit, held = split(labels, 0.5, rng)
    if min(len(fit), len(held)) < LEAST:
        return None
    t = _temperature(log_p[fit], labels[fit])
    if t is None:
        return None
    before, y = log_p[held], labels[held]
    after = (before / t).log_softmax(1)
    (c0, r0), (c1, r1) = ((q.exp().amax(1), (q.argmax(1) == y).double()) for q in (before, after))
    cells = _equal_mass(c1)
    return Tempered(
        temperature=t,
        n=len(held),
        nll_before=_nll(before, y),
        nll=_nll(after, y),
        ece_before=_gap(c0, r0, _equal_mass(c0)),
        ece=_gap(c1, r1, cells),
        ece_expected=float(_simulated(c1, cells, rng).mean()),
    )


def _temperature(log_p: Tensor, labels: Tensor) -> float | None:
    """Minimise the negative log likelihood over T; it is convex in 1/T.

    Images whose class is ruled out (``-inf``) cost the same at every T and have no say.
    """
    possible = log_p.gather(1, labels[:, None])[:, 0].isfinite()
    if not bool(possible.any()):
        return None
    log_p, labels = log_p[possible], labels[possible]

    def cost(log_t: float) -> float:
        tempered = (log_p / math.exp(log_t)).log_softmax(1)
        return -float(tempered.gather(1, labels[:, None]).mean())

    low, high = (math.log(t) for t in TEMPERATURES)
    found = minimize_scalar(cost, bounds=(low, high), method="bounded", options={"xatol": 1e-4})
    return math.exp(float(found.x))


def _top(log_p: Tensor, labels: Tensor, k: int) -> float:
    own = log_p.gather(1, labels[:, None])
    return float(((log_p >= own).sum(1) <= k).double().mean())
