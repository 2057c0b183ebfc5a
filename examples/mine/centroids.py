"""Nearest class mean on frozen public features: one noised sum, and the means are the classifier.

After Snell, Swersky and Zemel, "Prototypical Networks for Few-shot Learning", NeurIPS 2017,
https://arxiv.org/abs/1703.05175, with a frozen public encoder in place of a trained one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from fedgist.encoders import load_encoder
from fedgist.heads.linear import CodeClassifier, CodeSpace
from fedgist.method import Gist, Method
from fedgist.privacy.client import Client
from fedgist.queries import SumQuery
from fedgist.types import Outcome, Round, State, Task, Tensors


@dataclass(frozen=True)
class Centroids(Method):
    """One sum round; head ``centroids``.

    Attributes:
        features: name of a frozen public encoder.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}
    features: str = "scattering:64"

    @property
    def track(self) -> str:
        """The encoder's: which public data it has seen."""
        return load_encoder(self.features).track

    def encoders(self) -> tuple[str, ...]:
        """The task pins the hash of each."""
        return (self.features,)

    def plan(self, task: Task) -> Sequence[Round]:
        """One sum over records: its code (norm 1) and a 1, into the block of its class."""
        return [Round("sum", (self._query(task),))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """The only function that meets images; the guard clips, sums and counts."""

        def rows(x: torch.Tensor, y: torch.Tensor) -> Tensors:
            return {"rows": torch.cat([self._space.codes(x), torch.ones(len(x), 1)], dim=1)}

        return client.sum(rows, self._query(task))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Post-processing: noised sums over noised counts. No image is in reach."""
        query, space = self._query(task), self._space
        sums = state.server.tensors["rows"].double() * (query.clip / query.levels)
        mean = sums[:, :-1] / sums[:, -1:].clamp(min=1)
        spread = space.encoder.dim  # whitened codes of norm 1 have variance 1/d in every direction
        bias = -0.5 * spread * mean.square().sum(1)
        head = CodeClassifier("lda", space, bias, spread * mean)
        return Outcome(classifiers={"centroids": head}, details={"counts": sums[:, -1].tolist()})

    @property
    def _space(self) -> CodeSpace:
        return CodeSpace(load_encoder(self.features), whitening=0.5, clip=1.0, normalise=True)

    def _query(self, task: Task) -> SumQuery:
        shape = (len(task.classes), load_encoder(self.features).dim + 1)
        return SumQuery(clip=2**0.5, per_class=True, shape=shape)
