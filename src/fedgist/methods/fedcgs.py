"""FedCGS: one Gaussian for each class with the covariance of all features, from sums sent once.

Guan, Zhou and Gu, "Capture Global Feature Statistics for One-Shot Federated Learning", AAAI 2025,
https://arxiv.org/abs/2503.06962. From Σ z by class, Σ z zᵀ and the counts the server has the mean
μ_c of every class and the covariance of all features around their common mean,

    Σ = G / n - μ μᵀ,        w_c = Σ⁻¹ μ_c,        b_c = -½ μ_cᵀ Σ⁻¹ μ_c + log(n_c / n)

It is `heads.linear.lda` with this *total* covariance and counted classes as prior, where
``fedkt_csd``'s head ``lda`` has the covariance *within* classes, shrunk, and balanced classes.

Differences from the paper: features are those of FedGist's public encoders, whitened and scaled to
norm 1 (see `FeatureSums`), not a ResNet-18's; Σ divides by n and not by n - 1; its eigenvalues are
raised to a millionth of their mean, so that it can be inverted where there are fewer images than
dimensions; the personalised variant, which trains at clients, is left out. The paper sends the sums
in clear, which is ε = inf here; with a finite ε they are noised, and Σ is shrunk by the known
noise, of which the paper says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from fedgist.heads.estimate import ClassMoments, pooled_covariance
from fedgist.heads.linear import CodeClassifier, lda
from fedgist.methods._features import FeatureSums

__all__ = ["FedCGS"]

LEAST = 1e-6


@dataclass(frozen=True)
class FedCGS(FeatureSums):
    """Head ``fedcgs``; fields as in `FeatureSums`."""

    def head(self, m: ClassMoments, gram: Tensor) -> CodeClassifier:
        """Return the discriminant with the total covariance."""
        share = torch.where(m.present, m.count, 0) / m.count[m.present].sum()
        mean = share @ m.mean
        total = gram / float(m.count[m.present].sum()) - torch.outer(mean, mean)
        every = replace(m, pooled=total)
        covariance = pooled_covariance(every, floor=self.floor, least=LEAST)
        return lda(m, self.space, covariance, priors=True)
