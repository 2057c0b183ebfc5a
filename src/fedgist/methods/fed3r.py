"""Fed3R: ridge regression on frozen features, from sums sent once.

Fanì, Camoriano, Caputo and Ciccone, "Accelerating Heterogeneous Federated Learning with Closed-form
Classifiers", ICML 2024, https://arxiv.org/abs/2406.01116. With a 1 put to every feature vector and
one-hot labels y, the sums A = Σ (z, 1)(z, 1)ᵀ and B = Σ (z, 1) yᵀ over all clients give

    W = (A + λ I)⁻¹ B,        each column of W divided by its norm

which is the solution on all images in one place, whatever the split and the order of the clients.

``fedkt_csd``'s head ``ridge`` weighs classes alike, leaves the bias out of the penalty and scales
the penalty with the features; here every image weighs alike, the bias is penalised as any other
weight, and λ is absolute.

Differences from the paper: features are those of FedGist's public encoders, whitened and scaled to
norm 1 (see `FeatureSums`), not a network's that was trained on ImageNet; no random features (its
kernel variant) and no fine-tuning afterwards. The paper sends A and B in clear, which is ε = inf
here; with a finite ε they are noised, and eigenvalues of A + λ I are raised to where the noise
ends, of which the paper says nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.heads.estimate import ClassMoments
from fedgist.heads.linear import CodeClassifier
from fedgist.heads.shrinkage import clamp_eigenvalues, noise_edge
from fedgist.methods._features import FeatureSums

__all__ = ["Fed3R"]


@dataclass(frozen=True)
class Fed3R(FeatureSums):
    """Head ``fed3r``.

    Attributes:
        features, features_sha256, shares, count_weight, levels, floor: as in `FeatureSums`.
        ridge: λ.
        columns: whether columns of W are divided by their norms, which raises rare classes.
    """

    ridge: float = 0.01
    columns: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.ridge > 0:
            raise ConfigError(f"method.ridge must be positive. Got {self.ridge}")

    def head(self, m: ClassMoments, gram: Tensor) -> CodeClassifier:
        """Return the least squares solution."""
        count = torch.where(m.present, m.count, 0)
        right = torch.cat([count[:, None] * m.mean, count[:, None]], dim=1)  # [C, d + 1]: Bᵀ
        a = torch.zeros(m.dim + 1, m.dim + 1, dtype=torch.float64)
        a[:-1, :-1] = gram
        a[-1] = a[:, -1] = right.sum(0)
        a += self.ridge * torch.eye(m.dim + 1, dtype=torch.float64)
        if m.pooled_var > 0:
            variance = m.pooled_var * float(m.count[m.present].sum()) ** 2
            a = clamp_eigenvalues(a, self.ridge + self.floor * noise_edge(variance, m.dim))
        w = torch.linalg.solve(a, right.T).T
        if self.columns:
            w = w / w.norm(dim=1, keepdim=True).clamp(min=1e-300)
        bias = torch.where(m.present, w[:, -1], -torch.inf)
        return CodeClassifier("ridge", self.space, bias, w[:, :-1].contiguous())
