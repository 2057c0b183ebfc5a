"""From scores of two neighbouring worlds to bounds on what a mechanism leaks.

An adversary says "in" when a score exceeds a threshold. Its false-positive rate α and its
false-negative rate β are bounded from above by Clopper and Pearson (1934), each at half of the
error allowed.

* Read as Gaussian differential privacy (Dong, Roth, Su 2022; Nasr et al., "Tight Auditing of
  Differentially Private Machine Learning", USENIX Security 2023): μ >= Φ⁻¹(1-α) - Φ⁻¹(β). If the
  mechanism is μ-GDP, that is sound; the ε that follows at δ is of that Gaussian.
* Without any assumption: (ε, δ)-DP gives 1-β <= e^ε α + δ and 1-α <= e^ε β + δ. Looser.

Thresholds (and learned scores) are chosen on other trials than those that are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from scipy import stats
from torch import Tensor

from fedgist.errors import DataError

__all__ = ["Rates", "choose_threshold", "count_errors", "discriminant"]

CUTS = 200  # thresholds that are tried on the trials set apart for choosing
ROUNDING = 1e-6  # of a gap, in claimed units
LEAST = 1e-10  # variance in claimed units below which a direction counts as without noise


@dataclass(frozen=True)
class Rates:
    """Upper bounds on both error rates of one adversary, and the trials of each world."""

    false_positive: float
    false_negative: float
    trials: int

    @property
    def mu(self) -> float:
        """Lower bound on the Gaussian-DP distance, at least 0."""
        gap = stats.norm.isf(self.false_positive) - stats.norm.ppf(self.false_negative)
        return max(0.0, float(gap))

    def epsilon(self, delta: float) -> float:
        """Lower bound on ε at ``delta`` that assumes nothing of the mechanism."""
        pairs = (
            (self.false_positive, self.false_negative),
            (self.false_negative, self.false_positive),
        )
        hits = [(1 - miss - delta, false) for false, miss in pairs]
        return max([0.0, *(math.log(hit / false) for hit, false in hits if hit > 0)])


def count_errors(out: Tensor, into: Tensor, threshold: float, alpha: float) -> Rates:
    """Bound the rates of "in when the score is above ``threshold``".

    Args:
        out: float64 ``[n]``: scores of trials without the record.
        into: float64 ``[n]``: scores of trials with it.
        threshold: fixed before these scores were seen.
        alpha: the chance that either bound is wrong is at most this.
    """
    positive, negative = int((out > threshold).sum()), int((into <= threshold).sum())
    return Rates(
        _upper(positive, len(out), alpha / 2),
        _upper(negative, len(into), alpha / 2),
        min(len(out), len(into)),
    )


def choose_threshold(out: Tensor, into: Tensor, alpha: float) -> float:
    """Return the threshold whose bound on μ is largest on these scores.

    Args:
        out: float64 ``[n]``, as in `count_errors`, of trials that no bound is read from.
        into: the same with the record.
        alpha: as it will be used.
    """
    if len(out) < 2 or len(into) < 2:
        raise DataError(f"trials must be two or more of each world. Got {len(out)}, {len(into)}")
    low, high = out.sort().values, into.sort().values
    pooled = torch.cat([low, high]).sort().values
    places = torch.linspace(0, len(pooled) - 1, CUTS, dtype=torch.float64).round().long()
    # between neighbours, so that a lattice of scores does not decide ties
    cuts = (pooled[places] + pooled[(places + 1).clamp(max=len(pooled) - 1)]) / 2
    cuts = torch.cat([cuts, (low[-1:] + high[:1]) / 2])  # where the worlds do not overlap
    positive = len(low) - torch.searchsorted(low, cuts, right=True)
    negative = torch.searchsorted(high, cuts, right=True)
    # half of alpha for each rate; a rate of 1 is as good as one just below
    p, n = (k.clamp(max=m - 1).numpy() for k, m in ((positive, len(low)), (negative, len(high))))
    fpr, fnr = (
        stats.beta.ppf(1 - alpha / 2, k + 1, m - k) for k, m in ((p, len(low)), (n, len(high)))
    )
    mu = stats.norm.isf(fpr) - stats.norm.ppf(fnr)
    return float(cuts[int(mu.argmax())])


def discriminant(out: Tensor, into: Tensor) -> Tensor:
    """Return Fisher's direction between two worlds, float64 ``[d]``, learned from trials of both.

    For Gaussian noise of any covariance it is the likelihood ratio. Directions without noise (noise
    left out, or the same noise twice) get a weight so large that nothing else counts.

    Args:
        out: float64 ``[n, d]``: trials without the record, in units of the claimed noise.
        into: float64 ``[n, d]``: trials with it.
    """
    gap = into.mean(0) - out.mean(0)
    values, vectors = torch.linalg.eigh((out.T.cov() + into.T.cov()) / 2)
    along = vectors.T @ gap
    # rounding alone: a variance of nothing would blow it up
    along = torch.where(along.abs() > ROUNDING, along, 0.0)
    direction: Tensor = vectors @ (along / values.clamp(min=LEAST))
    return direction


def _upper(k: int, n: int, alpha: float) -> float:
    """Return the upper Clopper-Pearson bound on a rate, k of n seen."""
    return float(stats.beta.ppf(1 - alpha, k + 1, n - k)) if k < n else 1.0
