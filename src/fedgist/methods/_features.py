"""Sums of frozen public features: one round of which closed-form classifiers are made.

With z the features of an image, scaled to norm 1, all clients together release

    n_c = Σ 1        s_c = Σ z        G = Σ z zᵀ        (the first two by class, G over all)

as one joint Gaussian release, as `fedkt_csd` does; with ε = inf nothing is noised and the sums are
exact, whatever the split. The papers of the methods that build on it (`fedcgs`, `fed3r`) send such
sums in clear and state no ε: that a finite one can be asked for is FedGist's addition.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor

from fedgist.encoders import load_encoder
from fedgist.errors import ConfigError
from fedgist.heads.estimate import ClassMoments, estimate
from fedgist.heads.linear import CodeClassifier, CodeSpace
from fedgist.method import Gist, Method
from fedgist.privacy.client import Client
from fedgist.privacy.statistics import from_triangle
from fedgist.queries import MomentsQuery, Query
from fedgist.types import Merged, Outcome, Round, State, Task, Tensors

__all__ = ["FeatureSums"]


@dataclass(frozen=True)
class FeatureSums(Method):
    """One sum round of moments; subclasses make one classifier of them (`head`).

    Attributes:
        features: name, path or dotted name of a frozen public encoder.
        features_sha256: its hash, when the task pins one.
        shares: budget of (class sums, G, counts); they sum to 1.
        count_weight: what a record adds to its class's count: finer noise for many noise shares.
        levels: integer radius of a feature vector: rounding stays below 1 / (2 levels) in each
            number, beside features of norm 1.
        floor: eigenvalues are raised to this many noise edges; without noise it has no effect.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    features: str = "scattering"
    features_sha256: str | None = None
    shares: tuple[float, float, float] = (0.45, 0.53, 0.02)
    count_weight: int = 1
    levels: int = 1024
    floor: float = 0.25

    def __post_init__(self) -> None:
        if not self.floor > 0:
            raise ConfigError(f"method.floor must be positive. Got {self.floor}")

    @abstractmethod
    def head(self, m: ClassMoments, gram: Tensor) -> CodeClassifier:
        """Build the classifier.

        Args:
            m: counts and means of the classes, and whether they are there.
            gram: G, float64 ``[d, d]``; the variance of the noise in an off-diagonal number is
                ``m.pooled_var`` n², n the images of the classes that are there.
        """

    @cached_property
    def space(self) -> CodeSpace:
        """How images become features: whitened by public statistics, each scaled to norm 1."""
        return CodeSpace(load_encoder(self.features, self.features_sha256), 0.5, 1.0, True)

    @property
    def track(self) -> str:
        """Which public data the encoder has seen."""
        return self.space.encoder.track

    def encoders(self) -> tuple[str, ...]:
        """The features."""
        return (self.features,)

    def plan(self, task: Task) -> Sequence[Round]:
        """One sum round: one joint query."""
        return [Round("sum", (self._query(task),))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """One forward pass."""
        return client.moments(self.space.codes, self._query(task))

    def records(self, task: Task) -> list[tuple[Query, Callable[[Tensor], Tensor]]]:
        """Return the query with what it makes of images: float64 rows, not yet clipped."""
        return [(self._query(task), self.space.codes)]

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Build the classifier, under the method's name."""
        return self.ceiling(task, state.server, rng)

    def ceiling(self, task: Task, exact: Merged, rng: torch.Generator) -> Outcome:
        """The same from any sums, noised or not."""
        query = self._query(task)
        m = estimate(exact.tensors, query, exact.sigma)
        unit = query.clip / query.levels
        gram = from_triangle(exact.tensors["pooled"].to(torch.float64)) * unit**2
        name = type(self).__module__.rpartition(".")[2]
        details = {
            "counts": [round(n, 1) for n in m.count.tolist()],
            "present": m.present.tolist(),
            "seconds": {},
        }
        return Outcome(None, {name: self.head(m, gram)}, details)

    def _query(self, task: Task) -> MomentsQuery:
        mean, pooled, count = self.shares
        return MomentsQuery(
            clip=1.0,
            dim=self.space.encoder.dim,
            classes=len(task.classes),
            mean=mean,
            second=0.0,
            pooled=pooled,
            count=count,
            count_weight=self.count_weight,
            levels=self.levels,
        )
