"""From one noised release to what heads start from: counts, means and covariances per class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedgist.heads.shrinkage import clamp_eigenvalues, linear_shrinkage, noise_edge, reconcile, rie
from fedgist.privacy.noise import noise_scales
from fedgist.privacy.statistics import from_triangle
from fedgist.queries import MomentsQuery
from fedgist.types import Tensors

__all__ = ["ClassMoments", "covariances", "estimate", "pooled_covariance", "spectra"]


@dataclass(frozen=True)
class ClassMoments:
    """Debiased estimates in (whitened) code units, float64, with their known noise.

    Attributes:
        count: ``[C]``, at least 1.
        present: bool ``[C]``: the noisy count is clearly above zero. Absent classes make no
            synthetic images and no predictions. All are taken as present when none is.
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
    noisy = sums["count"].to(torch.float64) / query.count_weight
    count = noisy.clamp(min=1.0)
    present = noisy > max(0.5, 3 * count_std)
    if not bool(present.any()):
        present = torch.ones_like(present)
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
