"""Closed-form classifiers in code space: LDA, QDA, ridge. Seconds, no training loop."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from fedgist.encoders import load_encoder
from fedgist.encoders.base import Encoder, Whitening
from fedgist.errors import DataError
from fedgist.heads.estimate import ClassMoments, excess_length
from fedgist.types import BATCH, Classifier, Images, Tensors

__all__ = ["KINDS", "CodeClassifier", "CodeSpace", "Coded", "lda", "qda", "ridge"]

Kind = Literal["lda", "qda", "ridge", "logistic"]
KINDS: tuple[str, ...] = get_args(Kind)


@dataclass(frozen=True)
class CodeSpace:
    """How images become the codes that statistics were made of.

    Attributes:
        encoder: the frozen public encoder.
        whitening: exponent t of the public whitening, or None for codes as they are.
        clip: radius R in whitened units.
        normalise: scale every code to norm R, instead of clipping those beyond it: the direction
            of a feature vector says what is shown, its length how strongly.
    """

    encoder: Encoder
    whitening: float | None
    clip: float
    normalise: bool = False

    def codes(self, x: Tensor) -> Tensor:
        """Map task images (at most 250) to float64 ``[b, d]``, whitened, not yet clipped."""
        z = self._white.forward(self.encoder.encode_task(x))
        if self.normalise:
            z = z * (self.clip / z.norm(dim=1, keepdim=True).clamp(min=1e-12))
        return z

    def clipped(self, x: Tensor) -> Tensor:
        """The same, clipped to the radius, as records were."""
        z = self.codes(x)
        factor: Tensor = self.clip / z.norm(dim=1, keepdim=True).clamp(min=self.clip)
        return z * factor

    def decode(self, z: Tensor) -> Tensor:
        """Map whitened codes to float32 ``[b, 3, s, s]`` in [0, 1]."""
        return self.encoder.decode(self._white.backward(z))

    @property
    def _white(self) -> Whitening:
        return whitening_of(self.encoder, self.whitening)


def whitening_of(encoder: Encoder, t: float | None) -> Whitening:
    """Return the encoder's whitening, made once."""
    made: dict[float | None, Whitening] = encoder.__dict__.setdefault("_whitenings", {})
    if t not in made:
        made[t] = Whitening(encoder.public, t)
    return made[t]


@dataclass(frozen=True)
class CodeClassifier:
    """score_c(z) = bias_c + w_c·z - ½ zᵀ A_c z on clipped codes z.

    Attributes:
        kind: ``lda``, ``qda``, ``ridge`` or ``logistic``.
        space: how images become codes.
        bias: float64 ``[C]``; ``-inf`` for classes that are absent.
        weight: float64 ``[C, d]``.
        quadratic: float64 ``[C, d, d]`` or None.
    """

    kind: Kind
    space: CodeSpace
    bias: Tensor
    weight: Tensor
    quadratic: Tensor | None = None

    def predict(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, h, w]`` in [0, 1] to log-probabilities ``[b, C]``."""
        return torch.cat([self.scores(self.space.clipped(part)) for part in torch.split(x, BATCH)])

    def scores(self, z: Tensor) -> Tensor:
        """Map clipped codes ``[b, d]`` to log-probabilities ``[b, C]`` (ridge: log-softmax)."""
        s = z @ self.weight.T + self.bias
        if self.quadratic is not None:
            s = s - 0.5 * torch.einsum("bi,cij,bj->bc", z, self.quadratic, z)
        return torch.log_softmax(s, dim=1)

    def tensors(self) -> Tensors:
        """Return bias, weight and, for QDA, the quadratic terms."""
        out = {"bias": self.bias, "weight": self.weight}
        return out if self.quadratic is None else out | {"quadratic": self.quadratic}

    def meta(self) -> Mapping[str, str]:
        """Return the code space, as strings."""
        return {
            "encoder": self.space.encoder.name,
            "encoder_sha256": self.space.encoder.digest,
            "whitening": json.dumps(self.space.whitening),
            "clip": repr(self.space.clip),
            "normalise": json.dumps(self.space.normalise),
        }

    @staticmethod
    def load(kind: str, tensors: Tensors, meta: Mapping[str, str]) -> CodeClassifier:
        """Rebuild from `tensors` and `meta`; the encoder's hash must be the same."""
        if kind not in KINDS:
            raise DataError(f"classifier kind must be one of {', '.join(KINDS)}. Got '{kind}'")
        encoder = load_encoder(meta["encoder"], meta["encoder_sha256"])
        whitening, normalise = json.loads(meta["whitening"]), json.loads(meta["normalise"])
        space = CodeSpace(encoder, whitening, float(meta["clip"]), normalise)
        kind_: Kind = kind  # type: ignore[assignment]
        return CodeClassifier(
            kind_, space, tensors["bias"], tensors["weight"], tensors.get("quadratic")
        )


class Coded:
    """Images that many closed-form heads are to judge: encoded once for each code space."""

    def __init__(self, images: Images) -> None:
        self.images = images
        self._codes: dict[tuple[object, ...], Tensor] = {}

    def scores(self, classifier: Classifier) -> Tensor:
        """Return log-probabilities ``[n, C]``; heads of any other kind are shown the images."""
        if not isinstance(classifier, CodeClassifier):
            return torch.cat([classifier.predict(x) for x, _ in self.images.batches()])
        space = classifier.space
        key = (space.encoder.digest, space.whitening, space.clip, space.normalise)
        if key not in self._codes:
            self._codes[key] = torch.cat([space.clipped(x) for x, _ in self.images.batches()])
        return classifier.scores(self._codes[key])

    def accuracy(self, classifier: Classifier) -> float:
        """Return the share of images that are named right."""
        right = self.scores(classifier).argmax(1) == self.images.labels
        return float(right.double().mean())


def lda(
    m: ClassMoments, space: CodeSpace, pooled: Tensor, *, priors: bool = False
) -> CodeClassifier:
    """Linear discriminant: w_c = Σ⁻¹μ_c, b_c = -½ μ_cᵀΣ⁻¹μ_c + log π_c, Σ pooled.

    What noise adds to the lengths μ_cᵀΣ⁻¹μ_c is taken out (`excess_length`).
    """
    weight = torch.linalg.solve(pooled, m.mean.T).T
    length = (weight * m.mean).sum(1) - excess_length(m, pooled)
    bias = -0.5 * length + _log_priors(m, priors)
    return CodeClassifier("lda", space, bias, weight)


def qda(m: ClassMoments, space: CodeSpace, covs: Tensor, *, priors: bool = False) -> CodeClassifier:
    """Quadratic discriminant with one covariance per class, ``[C, d, d]`` positive definite.

    Noise τ_c² in every number of a mean adds τ_c² tr Σ_c⁻¹ to μ_cᵀΣ_c⁻¹μ_c: it is taken out.
    """
    precision = torch.linalg.inv(covs)
    weight = torch.einsum("cij,cj->ci", precision, m.mean)
    excess = m.mean_var * precision.diagonal(dim1=1, dim2=2).sum(1)
    bias = -0.5 * ((weight * m.mean).sum(1) - excess) - 0.5 * torch.linalg.slogdet(covs).logabsdet
    return CodeClassifier("qda", space, bias + _log_priors(m, priors), weight, precision)


def ridge(m: ClassMoments, space: CodeSpace, pooled: Tensor, *, strength: float) -> CodeClassifier:
    """One-against-all least squares on 0/1 targets, classes weighed equally.

    Minimises Σ_c mean over class c of ‖(z, 1)W - e_c‖² + strength·tr(Σ)/d·‖W‖², from moments
    alone (Fed3R, arXiv 2406.01116, with balanced classes). ``pooled`` stands for every class.
    """
    c, d = int(m.present.sum()), m.dim
    mu = m.mean[m.present]
    centre = mu.mean(0)
    scatter = pooled + (mu - centre).T @ (mu - centre) / c
    scatter = scatter + strength * pooled.diagonal().mean() * torch.eye(d, dtype=torch.float64)
    weight = torch.zeros_like(m.mean)
    bias = torch.full_like(m.count, -torch.inf)
    weight[m.present] = torch.linalg.solve(scatter, ((mu - centre) / c).T).T
    bias[m.present] = 1 / c - weight[m.present] @ centre
    return CodeClassifier("ridge", space, bias, weight)


def _log_priors(m: ClassMoments, use: bool) -> Tensor:
    share = m.count / m.count[m.present].sum() if use else torch.ones_like(m.count)
    return torch.where(m.present, share.log(), -torch.inf)
