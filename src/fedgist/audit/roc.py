"""ROC curves of attacks on single records, and the curve that a claim lets no attack rise above.

A curve is true-positive rates at a fixed grid of false-positive rates a, ten a decade from 1e-4 to
1: on logarithmic axes, since what harms people is the few who are found with certainty (Carlini et
al., "Membership Inference Attacks From First Principles", S&P 2022).

What a claim allows:

* noise of one Gaussian, or of several that add up to one: Φ(Φ⁻¹(a) + μ), the trade-off of μ-GDP
  (Dong, Roth, Su, "Gaussian Differential Privacy", JRSS B 2022, eq. 6), μ = sensitivity/σ. Integer
  noise is read as the continuous law of the same scale, as in `audit.membership`;
* anything else, such as sampled releases: min(e^ε a + δ, 1 - e^-ε (1 - δ - a)), all that (ε, δ)
  says (Wasserman and Zhou, JASA 2010; Kairouz, Oh, Viswanath 2015). It is the weaker of the two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

__all__ = ["GRID", "Bound", "Curve", "approximate_dp", "area", "closed_form", "empirical"]

Bound = Literal["gaussian", "approximate"]
LEAST, DECADES, STEPS = 1e-4, 4, 10
DIGITS = 6  # of every rate: a curve is for looking at
GRID: tuple[float, ...] = tuple(
    float(f"{LEAST * 10 ** (i / STEPS):.4g}") for i in range(DECADES * STEPS + 1)
)


@dataclass(frozen=True)
class Curve:
    """True-positive rates ``tpr`` at rising false-positive rates ``fpr``, both in [0, 1]."""

    fpr: tuple[float, ...]
    tpr: tuple[float, ...]

    def record(self) -> dict[str, list[float]]:
        """Return plain lists, rounded to six digits."""
        return {k: [round(v, DIGITS) for v in getattr(self, k)] for k in ("fpr", "tpr")}


def closed_form(mu: Tensor | float) -> Curve:
    """Return the curve of N(0, 1) against N(``mu``, 1); of several mu, the mean of their curves."""
    mu = torch.as_tensor(mu, dtype=torch.float64).reshape(-1, 1)
    at = torch.special.ndtri(torch.tensor(GRID, dtype=torch.float64))
    return Curve(GRID, tuple(torch.special.ndtr(at + mu).mean(0).tolist()))


def empirical(members: Tensor, others: Tensor) -> Curve:
    """Return the curve of scores (higher means "used") of ``[m]`` used and ``[n]`` unused records.

    The threshold of rate a is the k-th largest unused score, k = a (n + 1) rounded down: above it
    lies k/(n+1) of their distribution, in expectation. Rates below 1/(n+1) cannot be told and are
    left out.
    """
    n, falling = len(others), others.sort(descending=True).values
    allowed = [(a, int(a * (n + 1) + 1e-9)) for a in GRID]
    points = [
        (a, 1.0 if k > n else float((members > falling[k - 1]).double().mean()))
        for a, k in allowed
        if k
    ]
    return Curve(tuple(a for a, _ in points), tuple(t for _, t in points))


def approximate_dp(epsilon: float, delta: float, at: Sequence[float] = GRID) -> Curve:
    """Return what (``epsilon``, ``delta``) alone allows at the rates ``at``."""
    rise, fall = math.exp(min(epsilon, 700.0)), math.exp(-epsilon)
    tpr = (min(1.0, rise * a + delta, 1 - fall * (1 - delta - a)) for a in at)
    return Curve(tuple(at), tuple(max(0.0, t) for t in tpr))


def area(epsilon: float, delta: float) -> float:
    """Return the area under the curve of `approximate_dp`: its corners joined by straight lines."""
    corner = (1 - delta) / (1 + math.exp(min(epsilon, 700.0)))
    curve = approximate_dp(epsilon, delta, (0.0, corner, 1 - delta, 1.0))
    x, y = (torch.tensor(v, dtype=torch.float64) for v in (curve.fpr, curve.tpr))
    return float(torch.trapezoid(y, x))
