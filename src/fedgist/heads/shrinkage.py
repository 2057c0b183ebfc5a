"""Shrinkage by a known noise level: numbers towards their mean, covariances, which become PSD.

The noise on a released symmetric matrix is GOE: off-diagonal variance v, diagonal 2v, invariant
under rotation, spectrum a semicircle of radius 2√(dv). Everything here is post-processing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = [
    "clamp_eigenvalues",
    "james_stein",
    "linear_shrinkage",
    "noise_edge",
    "reconcile",
    "rie",
    "signal_share",
]


def james_stein(y: Tensor, v: Tensor | float) -> Tensor:
    """Return ȳ + max(0, 1 - a·v / Σ(y - ȳ)²)(y - ȳ), a = max(C - 3, 1): numbers towards their mean.

    With y_c = x_c + noise of variance v, Σ(y - ȳ)² is (C - 1)v and the spread of the x_c on top:
    numbers that differ by no more than noise become one, numbers far apart stay as they are. From
    C = 4 on the expected squared error is below that of y, whatever the x_c (Lindley 1962; Efron
    and Morris 1973). For two or three numbers no estimator does that; a = 1 then gains where they
    are close and loses a little where they are not.

    Args:
        y: float64 ``[C]``.
        v: noise variance of each number, >= 0; float64 ``[C]`` where it differs: their mean counts.
    """
    gap = y - y.mean()
    energy = float((gap**2).sum())
    level = float(torch.as_tensor(v, dtype=torch.float64).mean())
    if level <= 0 or energy == 0:
        return y
    return y.mean() + max(0.0, 1 - max(len(y) - 3, 1) * level / energy) * gap


def noise_edge(v: float, d: int) -> float:
    """Return 2√(dv): the largest eigenvalue that pure noise shows."""
    return 2 * math.sqrt(d * v)


def rie(y: Tensor, v: float, target: Tensor | None = None) -> Tensor:
    """Rotation-invariant estimator: the best eigenvalues for the eigenvectors that ``y`` has.

    ξ_i = λ_i - 2vd Re G(λ_i - iη), G(x) = mean_{j≠i} 1/(x - λ_j), η = 2√v, applied to y - target
    (Bun, Allez, Bouchaud, Potters 2016, additive noise).

    Args:
        y: symmetric float64 ``[d, d]``.
        v: off-diagonal noise variance.
        target: what to shrink towards; zero when None.
    """
    if v <= 0:
        return y
    d = len(y)
    base = torch.zeros_like(y) if target is None else target
    lam, vectors = torch.linalg.eigh(y - base)
    eta = 2 * v**0.5
    gap = lam[:, None] - lam[None, :]
    real = gap / (gap**2 + eta**2)  # the own term is 0 in its real part
    xi = lam - 2 * v * real.sum(1) * d / max(d - 1, 1)
    shrunk: Tensor = base + (vectors * xi) @ vectors.T
    return shrunk


def linear_shrinkage(y: Tensor, v: float, target: Tensor) -> Tensor:
    """Return T + (1-α)(y - T) with `signal_share` 1-α: the known noise energy out."""
    return target + signal_share(y, v, target) * (y - target)


def signal_share(y: Tensor, v: float, target: Tensor) -> float:
    """Return 1-α, α = min(1, v·d(d+1) / ‖y - T‖²): the part of y - T that is not known noise."""
    energy = float(((y - target) ** 2).sum())
    d = len(y)
    return 0.0 if energy == 0 else 1 - min(1.0, v * d * (d + 1) / energy)


def clamp_eigenvalues(a: Tensor, floor: float) -> Tensor:
    """Return the symmetric matrix with eigenvalues raised to at least ``floor``."""
    lam, vectors = torch.linalg.eigh((a + a.T) / 2)
    raised: Tensor = (vectors * lam.clamp(min=floor)) @ vectors.T
    return raised


def reconcile(parts: Tensor, total: Tensor, var_part: float, var_total: float) -> Tensor:
    """Make noisy parts agree with a separately noised total: generalised least squares.

    Given x_c with variance a each and y = Σ x_c with variance b, the best linear estimates are
    x_c + (y - Σx)·a / (C·a + b); their sum is the best estimate of the total.

    Args:
        parts: ``[C, ...]``.
        total: ``[...]``.
        var_part: a >= 0.
        var_total: b >= 0.
    """
    weight = len(parts) * var_part + var_total
    if weight == 0:
        return parts
    return parts + (total - parts.sum(0)) * (var_part / weight)
