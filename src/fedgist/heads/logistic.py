"""Logistic regression in a few noised rounds, started and preconditioned by released moments.

A discriminant from moments errs where classes are not Gaussian; the logistic loss does not assume
it. Its gradient is a sum over records, so each round is one clipped, noised sum:

    G = Σ_i clip((p_i - e_{y_i}) ⊗ (z_i - c, b)),    W ← W - G M⁻¹ / (h n).

The moments of the first round give all the rest without further cost: the start (half the linear
discriminant, whose scores are too sure), the centre c, the count n, and the preconditioner
M = Σ_total + δ·(noise edge)·I. Preconditioned steps reach the optimum in a handful of rounds, each
of which may then spend a good share of the budget; every round also moves towards the optimum from
noise of earlier rounds. The curvature h bounds p (1 - p): steps are stable for h >= 1/4, and in
practice, where most records are far from a boundary, for much less.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import final

import torch
from torch import Tensor

from fedgist.heads.estimate import ClassMoments
from fedgist.heads.shrinkage import noise_edge

__all__ = ["Logistic", "preconditioner"]

LEVER = 0.2  # the constant beside centred codes of norm about 1: keeps gradients of biases short


@final
@dataclass(frozen=True)
class Logistic:
    """Scores weight_c·(z - centre) + bias_c, and one descent step from a noised gradient.

    Attributes:
        weight: float64 ``[C, d]``.
        bias: float64 ``[C]``; ``-inf`` for classes that are absent.
        centre: float64 ``[d]``: mean of the released class means.
    """

    weight: Tensor
    bias: Tensor
    centre: Tensor

    @staticmethod
    def start(m: ClassMoments, pooled: Tensor, *, temper: float = 0.5) -> Logistic:
        """Return ``temper`` times the balanced linear discriminant.

        Args:
            m: estimates from a release of moments.
            pooled: positive definite ``[d, d]``, from `pooled_covariance`.
            temper: 1 for the discriminant itself.
        """
        centre = m.mean[m.present].mean(0)
        mean = m.mean - centre
        weight = temper * torch.linalg.solve(pooled, mean.T).T
        bias = torch.where(m.present, -0.5 * (weight * mean).sum(1), -torch.inf)
        return Logistic(weight, bias, centre)

    def rows(self, z: Tensor, labels: Tensor) -> Tensor:
        """Return each record's gradient, float64 ``[b, C, d + 1]``, not yet clipped.

        Args:
            z: codes as the moments were made of, float64 ``[b, d]``.
            labels: int64 ``[b]``.
        """
        x = z - self.centre
        p = torch.softmax(x @ self.weight.T + self.bias, dim=1)
        p[torch.arange(len(z)), labels] -= 1
        lever = x.new_full((len(x), 1), LEVER)
        return p[:, :, None] * torch.cat([x, lever], dim=1)[:, None, :]

    def step(
        self, gradient: Tensor, inverse: Tensor, count: float, *, curvature: float = 0.04
    ) -> Logistic:
        """Move against a noised sum of rows.

        Args:
            gradient: float64 ``[C, d + 1]``, in code units.
            inverse: from `preconditioner`.
            count: noisy number of records behind the sum, positive.
            curvature: h; smaller steps further.
        """
        g = gradient / (curvature * max(count, 1.0))
        return replace(
            self, weight=self.weight - g[:, :-1] @ inverse, bias=self.bias - g[:, -1] / LEVER
        )

    def affine(self) -> tuple[Tensor, Tensor]:
        """Return (bias ``[C]``, weight ``[C, d]``) for codes that are not centred."""
        return self.bias - self.weight @ self.centre, self.weight


def preconditioner(m: ClassMoments, pooled: Tensor, *, damping: float = 0.25) -> Tensor:
    """Return (Σ_total + damping·(noise edge)·I)⁻¹, float64 ``[d, d]``.

    Directions whose variance is lost in the noise of the moments move little, instead of carrying
    the gradient's noise.
    """
    share = torch.where(m.present, m.count, 0.0)
    share = share / share.sum()
    gap = m.mean - share @ m.mean
    eye = torch.eye(m.dim, dtype=torch.float64)
    total = (
        pooled + (gap * share[:, None]).T @ gap + damping * noise_edge(m.pooled_var, m.dim) * eye
    )
    return torch.cholesky_inverse(torch.linalg.cholesky(total))
