"""From one noised release to what heads start from: counts, means and covariances per class."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedgist.heads.shrinkage import (
    clamp_eigenvalues,
    james_stein,
    linear_shrinkage,
    noise_edge,
    reconcile,
    rie,
)
from fedgist.privacy.noise import noise_scales
from fedgist.privacy.statistics import from_triangle
from fedgist.queries import MomentsQuery
from fedgist.types import Tensors

__all__ = [
    "ClassMoments",
    "covariances",
    "estimate",
    "excess_length",
    "pooled_covariance",
    "spectra",
]

ODDS = 5.0  # how much likelier than "of mean size" an unclear count must make "absent"


@dataclass(frozen=True)
class ClassMoments:
    """Debiased estimates in (whitened) code units, float64, with their known noise.

    Attributes:
        count: ``[C]``, at least 1; shrunk towards the mean of the classes that are present.
        present: bool ``[C]``: false where the noisy count says clearly that there are no images.
            Absent classes make no synthetic images and no predictions.
        mean: ``[C, d]``; ``mean_var`` ``[C]`` is the noise variance per coordinate.
        cov: ``[C, d, d]`` within-class covariance, or None; ``cov_var`` ``[C]`` is the
            off-diagonal noise variance.
        pooled: ``[d, d]`` within-class covariance over all classes; ``pooled_var`` likewise.
        grain: variance of rounding to the grid: no eigenvalue is trusted below it.
    """

    count: Tensor
    present: Tensor
    mean: Tensor
    mean_var: Tensor
    cov: Tensor | None
    cov_var: Tensor
    pooled: Tensor
    pooled_var: float
    grain: float

    @property
    def dim(self) -> int:
        """Code dimension."""
        return self.mean.shape[1]


def estimate(sums: Tensors, query: MomentsQuery, sigma: float) -> ClassMoments:
    """Turn noised sums (int64, grid units) into debiased moments.

    The outer product of a noisy mean has expectation mean·meanᵀ + τ²I, and rounding to the grid
    adds 1/12 of a squared grid unit to every variance (Sheppard); both are taken out.
    """
    unit = query.clip / query.levels
    scales = noise_scales(query, sigma) if sigma > 0 else {}
    count_std = scales.get("count", (0.0, 0.0))[0] / query.count_weight
    count, present = _counts(sums["count"].to(torch.float64) / query.count_weight, count_std)
    mean_std = scales.get("mean", (0.0, 0.0))[0] * unit
    mean = sums["mean"].to(torch.float64) * unit / count[:, None]
    tau2 = (mean_std / count) ** 2
    eye = torch.eye(query.dim, dtype=torch.float64)
    rounding = unit**2 / 12

    def moment(name: str) -> tuple[Tensor, float]:
        matrix = from_triangle(sums[name].to(torch.float64)) * unit**2
        return matrix, (scales.get(name, (0.0, 0.0))[1] * unit**2) ** 2

    cov = None
    cov_var = torch.zeros_like(count)
    if "second" in sums:
        second, var = moment("second")
        total, total_var = second.sum(0), len(second) * var
        if "pooled" in sums:
            pooled, pooled_var = moment("pooled")
            second = reconcile(second, pooled, var, pooled_var)
            total = second.sum(0)
            if var:
                var *= 1 - var / (total_var + pooled_var)  # what the agreement takes off each part
                total_var = 1 / (1 / total_var + 1 / pooled_var)
        bias = (tau2 - rounding)[:, None, None] * eye
        cov = second / count[:, None, None] - mean[:, :, None] * mean[:, None, :] + bias
        cov_var = var / count**2
    else:
        total, total_var = moment("pooled")
    n = float(count[present].sum())
    between = mean[:, :, None] * mean[:, None, :] - tau2[:, None, None] * eye
    between = between[present] * count[present, None, None]
    pooled_cov = (total - between.sum(0)) / n - rounding * eye
    return ClassMoments(
        count, present, mean, tau2, cov, cov_var, pooled_cov, total_var / n**2, rounding
    )


def _counts(noisy: Tensor, std: float) -> tuple[Tensor, Tensor]:
    """Return counts, at least 1, and which classes are present, from counts with known noise.

    A class is present when its count is above three deviations of the noise. Where classes of mean
    size m do not stand out so far, it is absent only if no images are `ODDS` times as likely to
    give its count y as m images:

        N(y; 0, s²) > ODDS · N(y; m, s²)    or    y < m/2 - s² ln(ODDS) / m.

    m is the mean of the classes that are present; taken from all of them first, it only grows as
    absent ones leave, and so does the bound. All are present when m is not above zero.
    """
    present = torch.ones_like(noisy, dtype=torch.bool)
    for _ in range(len(noisy)):
        m = float(noisy[present].mean())
        if m <= 0:
            break
        present = noisy > min(3 * std, m / 2 - std**2 * math.log(ODDS) / m)
    count = noisy.clone()
    count[present] = james_stein(noisy[present], std**2)
    return count.clamp(min=1.0), present


def excess_length(m: ClassMoments, covariance: Tensor) -> Tensor:
    """Return how much too long noise makes each class mean, float64 ``[C]``; 0 without noise.

    A linear discriminant compares q_c = δ_cᵀΣ⁻¹δ_c, δ_c the distance of a class mean from their
    common one. Noise of variance v_c in every number of δ_c leaves w·z unbiased, but

        E q_c = true + v_c tr Σ⁻¹        Var q_c = 2 v_c² tr Σ⁻² + 4 v_c δ_cᵀΣ⁻²δ_c

    In hundreds of dimensions the first outweighs what tells classes apart, and a class of few
    images loses all to a larger one; the second does where all are small. So the excess is taken
    out, and what is left shrinks to its mean over classes by its variance (`james_stein`). The
    common mean weighs classes by w_c ~ 1/τ_c², so that v_c = τ_c² (1 - w_c).

    Args:
        m: the estimates, with τ_c² in ``mean_var``.
        covariance: Σ, positive definite ``[d, d]``.

    Returns:
        q_c less its estimate; 0 for absent classes.
    """
    out = torch.zeros_like(m.count)
    mean, tau2 = m.mean[m.present], m.mean_var[m.present]
    if not bool((tau2 > 0).all()):
        return out
    w = (1 / tau2) / (1 / tau2).sum()
    gap, v = mean - w @ mean, tau2 * (1 - w)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(covariance))
    weight, energy = gap @ inverse, (inverse**2).sum()
    q = (weight * gap).sum(1)
    signal = ((weight**2).sum(1) - v * energy).clamp(min=0)
    unbiased = q - v * inverse.diagonal().sum()
    out[m.present] = q - james_stein(unbiased, 2 * v**2 * energy + 4 * v * signal)
    return out


def pooled_covariance(m: ClassMoments, *, floor: float = 0.5, least: float = 1e-3) -> Tensor:
    """Return the shrunk pooled within-class covariance, positive definite.

    Args:
        m: the estimates.
        floor: eigenvalues are raised to this many noise edges: the level comes from the known
            noise, not from labels.
        least: and to at least this share of the mean eigenvalue.
    """
    d = m.dim
    average = max(float(m.pooled.diagonal().mean()), m.grain)
    shrunk = rie(m.pooled, m.pooled_var, average * torch.eye(d, dtype=torch.float64))
    return clamp_eigenvalues(
        shrunk, max(floor * noise_edge(m.pooled_var, d), least * average, m.grain)
    )


def covariances(
    m: ClassMoments,
    pooled: Tensor,
    *,
    mix: float,
    method: Literal["rie", "linear", "clamp"] = "rie",
    least: float = 0.01,
    edges: float = 0.05,
) -> Tensor:
    """Return one positive definite covariance per class, ``[C, d, d]``.

    A class whose noise drowns its covariance falls back on the pooled one, step by step, so that
    small classes cost accuracy slowly: its share of ``pooled`` grows from ``mix`` to 1 as
    ``edges`` noise edges grow to the mean variance of the codes.

    Args:
        m: the estimates. Without class second moments every class gets ``pooled``.
        pooled: from `pooled_covariance`: the target, and what is mixed in.
        mix: share of ``pooled`` in the result of a class without noise.
        method: ``rie`` or ``linear`` shrinkage towards ``pooled``, or none (``clamp``).
        least: eigenvalues are raised to this share of the mean eigenvalue of ``pooled``.
        edges: and to this many noise edges of the class.
    """
    average = float(pooled.diagonal().mean())
    signal = max(float(m.pooled.diagonal().mean()), m.grain)
    out = []
    for c in range(len(m.count)):
        v = float(m.cov_var[c])
        noise = edges * noise_edge(v, m.dim)
        own = m.cov is not None and bool(m.present[c])
        trust = (1 - mix) * max(0.0, 1 - noise / signal) if own else 0.0
        cov = _shrunk(m.cov[c], v, pooled, method) if m.cov is not None and trust > 0 else pooled
        floor = max(least * average, trust * noise, m.grain)
        out.append(clamp_eigenvalues((1 - trust) * pooled + trust * cov, floor))
    return torch.stack(out)


def _shrunk(cov: Tensor, v: float, target: Tensor, method: str) -> Tensor:
    if method == "rie":
        return rie(cov, v, target)
    return linear_shrinkage(cov, v, target) if method == "linear" else cov


def spectra(m: ClassMoments, shrunk: Tensor) -> dict[str, Any]:
    """Return eigenvalues, falling, of the largest class's covariance as released and shrunk.

    Args:
        m: the estimates.
        shrunk: ``[C, d, d]``, from `covariances`.

    Returns:
        ``class`` (its number, None for the pooled covariance where no class has its own),
        ``released``, ``shrunk`` and ``noise_edge``.
    """
    c = int(torch.where(m.present, m.count, 0).argmax())
    released, v = (m.pooled, m.pooled_var) if m.cov is None else (m.cov[c], float(m.cov_var[c]))
    return {
        "class": None if m.cov is None else c,
        "released": torch.linalg.eigvalsh(released).flip(0).tolist(),
        "shrunk": torch.linalg.eigvalsh(shrunk[c]).flip(0).tolist(),
        "noise_edge": noise_edge(v, m.dim),
    }
