"""The neural tangent kernel of infinitely wide networks, in closed form, and regression with it.

Jacot, Gabriel and Hongler, "Neural Tangent Kernel", NeurIPS 2018, https://arxiv.org/abs/1806.07572.
In the NTK parametrisation, W ~ N(0, 1) times σ_w / √fan-in and b ~ N(0, 1) times σ_b, a fully
connected ReLU network has, with q = Σ(x, x) Σ(x', x'), c = Σ(x, x') / √q = cos θ,

    Σ = σ_w² xᵀx' / d + σ_b²,   Θ = Σ                                        before the first ReLU
    Σ <- σ_w² √q (sin θ + (π - θ) cos θ) / 2π + σ_b²,   Θ <- Σ + σ_w² Θ (π - θ) / 2π     after each

(arc-cosine kernels: Cho and Saul, NeurIPS 2009; Arora et al., NeurIPS 2019,
https://arxiv.org/abs/1904.11955, section 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.errors import ConfigError

__all__ = ["Kernel", "regression"]

# cos θ stays this far from ±1, where its angle has no derivative: an image with itself. The kernel
# is off by less than 1e-6 of itself there, and the derivative through the angle is 0, as it should.
EDGE = 1e-12


@dataclass(frozen=True)
class Kernel:
    """Θ of a fully connected ReLU network with one linear output.

    Attributes:
        depth: hidden layers.
        weight: σ_w.
        bias: σ_b; positive, so that an input of zeros has a kernel.
    """

    depth: int = 4
    weight: float = math.sqrt(2)
    bias: float = 0.1

    def __post_init__(self) -> None:
        if self.depth < 1:
            raise ConfigError(f"method.depth must be at least 1. Got {self.depth}")

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Return Θ of rows: float64 ``[m, d]`` and ``[n, d]`` to ``[m, n]``; differentiable."""
        w, shift = self.weight**2, self.bias**2
        scale = w / a.shape[1]
        cross = scale * a @ b.T + shift
        own_a, own_b = (scale * x.square().sum(1) + shift for x in (a, b))
        tangent = cross
        for _ in range(self.depth):
            size = (own_a[:, None] * own_b).sqrt()
            cos = (cross / size).clamp(EDGE - 1, 1 - EDGE)
            left = math.pi - cos.acos()
            cross = w * size * ((1 - cos.square()).sqrt() + left * cos) / (2 * math.pi) + shift
            tangent = cross + w * tangent * left / (2 * math.pi)
            # half of the mass of a centred Gaussian is above zero
            own_a, own_b = (w * own / 2 + shift for own in (own_a, own_b))
        return tangent


def regression(
    kernel: Kernel, support: Tensor, labels: Tensor, targets: Tensor, ridge: float
) -> Tensor:
    """Return what kernel ridge regression on the support says of the targets.

    K_ts (K_ss + λ tr(K_ss) / m I)⁻¹ y: Nguyen et al., "Dataset Meta-Learning from Kernel Ridge
    Regression", ICLR 2021, https://arxiv.org/abs/2011.00050, equation 7, the ridge λ in units of
    the mean of the kernel's diagonal.

    Args:
        kernel: K.
        support: float64 ``[m, d]``.
        labels: float64 ``[m, C]``.
        targets: float64 ``[n, d]``.
        ridge: λ > 0.

    Returns:
        float64 ``[n, C]``.
    """
    own = kernel(support, support)
    within = own + ridge * own.trace() / len(own) * torch.eye(len(own), dtype=own.dtype)
    weights = torch.cholesky_solve(labels, torch.linalg.cholesky(within))
    said: Tensor = kernel(targets, support) @ weights
    return said
