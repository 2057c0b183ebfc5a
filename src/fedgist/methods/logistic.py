"""Logistic regression on frozen public features: moments first, then a few noised gradients.

A discriminant from moments (`fedkt_csd`, head ``lda``) errs where classes are not Gaussian. A few
more rounds, each one clipped and noised sum, move it to the optimum of the logistic loss; the
moments of the first round give the start, the centre and the preconditioner (`heads.logistic`).
The budget is shared by all rounds as one Gaussian release: zCDP adds up for adaptive rounds too.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgist.encoders import load_encoder
from fedgist.errors import ConfigError
from fedgist.heads.estimate import ClassMoments, estimate, pooled_covariance
from fedgist.heads.linear import CodeClassifier, CodeSpace
from fedgist.heads.logistic import Logistic, preconditioner
from fedgist.method import Gist, Method
from fedgist.privacy.client import Client
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Merged, Outcome, Round, State, Task, Tensors

__all__ = ["LogisticRegression"]


@dataclass(frozen=True)
class LogisticRegression(Method):
    """A classifier in ``1 + steps`` rounds; no synthetic images.

    Attributes:
        features: name, path or dotted name of a frozen public encoder.
        features_sha256: its hash, when the task pins one.
        steps: rounds of gradients after the round of moments.
        moments: share of the squared budget that the moments take; the gradients share the rest.
        shares: budget of (mean, pooled second moment, count) within the moments; they sum to 1.
        count_weight: what a record adds to its class's count: finer noise for many noise shares.
        clip: L2 bound of one record's gradient.
        curvature: h: steps are gradients over h, in whitened units.
        floor: eigenvalues of the pooled covariance are raised to this many noise edges.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    features: str = "scattering"
    features_sha256: str | None = None
    steps: int = 6
    moments: float = 0.5
    shares: tuple[float, float, float] = (0.40, 0.58, 0.02)
    count_weight: int = 1
    clip: float = 0.3
    curvature: float = 0.04
    floor: float = 0.25

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ConfigError(f"method.steps must be at least 1. Got {self.steps}")
        if not 0 < self.moments < 1:
            raise ConfigError(f"method.moments must lie between 0 and 1. Got {self.moments}")
        if not (self.clip > 0 and self.curvature > 0 and self.floor > 0):
            raise ConfigError(
                "method.clip, curvature and floor must be positive. "
                f"Got {self.clip}, {self.curvature}, {self.floor}"
            )

    @cached_property
    def space(self) -> CodeSpace:
        """How images become features: fully whitened, each scaled to norm 1."""
        return CodeSpace(load_encoder(self.features, self.features_sha256), 0.5, 1.0, True)

    @property
    def track(self) -> str:
        """Which public data the encoder has seen."""
        return self.space.encoder.track

    def encoders(self) -> tuple[str, ...]:
        """The features."""
        return (self.features,)

    def plan(self, task: Task) -> Sequence[Round]:
        """One round of moments, ``steps`` rounds of gradients."""
        mean, pooled, count = self.shares
        classes, dim = len(task.classes), self.space.encoder.dim
        moments = MomentsQuery(
            clip=1.0,
            dim=dim,
            classes=classes,
            mean=mean,
            second=0.0,
            pooled=pooled,
            count=count,
            count_weight=self.count_weight,
            levels=256,
            scale=1 / math.sqrt(self.moments),
        )
        scale = math.sqrt(self.steps / (1 - self.moments))
        gradient = SumQuery(self.clip, 1024, scale, shape=(classes, dim + 1))
        return [Round("sum", (moments,)), *[Round("sum", (gradient,))] * self.steps]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Sum moments of features, then gradients of the broadcast model."""
        (query,) = self.plan(task)[r].queries
        if isinstance(query, MomentsQuery):
            return client.moments(lambda x: self._features(x, client.memory), query)
        model = Logistic(shared["weight"], shared["bias"], shared["centre"])

        def rows(x: Tensor, y: Tensor) -> Tensors:
            return {"rows": model.rows(self._features(x, client.memory), y)}

        return client.sum(rows, query)

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Start from the discriminant, then step against each noised gradient."""
        (query,) = self.plan(task)[r].queries
        if isinstance(query, MomentsQuery):
            m = estimate(merged.tensors, query, merged.sigma)
            pooled = pooled_covariance(m, floor=self.floor)
            return _state(Logistic.start(m, pooled), m, preconditioner(m, pooled))
        model, m, inverse = state.server
        gradient = merged.tensors["rows"].to(torch.float64) * (query.clip / query.levels)
        count = float(m.count[m.present].sum())
        return _state(model.step(gradient, inverse, count, curvature=self.curvature), m, inverse)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the classifier."""
        model, m, _ = state.server
        classifier = CodeClassifier("logistic", self.space, *model.affine())
        details = {
            "counts": [round(n, 1) for n in m.count.tolist()],
            "present": m.present.tolist(),
            "seconds": {},
        }
        return Outcome(None, {"logistic": classifier}, details)

    def _features(self, x: Tensor, memory: Tensors) -> Tensor:
        """Encode a batch once: later rounds find it in the client's memory, by its content."""
        key = hashlib.sha256(x.contiguous().numpy().data).hexdigest()
        if key not in memory:
            memory[key] = self.space.codes(x)
        return memory[key]


def _state(model: Logistic, m: ClassMoments, inverse: Tensor) -> State:
    shared = {"weight": model.weight, "bias": model.bias, "centre": model.centre}
    return State(shared, (model, m, inverse))
