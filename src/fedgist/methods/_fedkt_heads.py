"""The server of FedKT-CSD: from one noised release to every head that was asked for."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Any, final

import torch
from torch import Tensor

from fedgist.heads.decode import decode, sample_codes
from fedgist.heads.estimate import (
    ClassMoments,
    covariances,
    estimate,
    pooled_covariance,
    spectra,
)
from fedgist.heads.linear import CodeClassifier, lda, qda, ridge
from fedgist.heads.match import match, net_means, ranks
from fedgist.heads.shrinkage import clamp_eigenvalues
from fedgist.queries import MomentsQuery, Query, SumQuery, blocks_of
from fedgist.train import train
from fedgist.types import Classifier, Images, Merged, Outcome, Task

if TYPE_CHECKING:
    from fedgist.methods.fedkt_csd import FedKTCSD

__all__ = ["Builder"]


@final
class Builder:
    """Post-processing of one release; nothing here sees an image of a client."""

    def __init__(
        self, method: FedKTCSD, task: Task, merged: Merged, queries: Mapping[str, Query]
    ) -> None:
        """Estimate the moments of every view.

        Args:
            method: the options.
            task: what images look like.
            merged: the noised sums.
            queries: view -> what was asked.
        """
        self._method, self._task, self._merged, self._queries = method, task, merged, queries
        self.seconds: dict[str, float] = {}
        with self._clock("estimate"):
            self._moments: dict[str, ClassMoments] = {
                view: estimate(blocks_of(q, merged.tensors), q, merged.sigma)
                for view, q in queries.items()
                if isinstance(q, MomentsQuery)
            }
        self._details: dict[str, Any] = {}
        self._decoded_images: Images | None = None

    def outcome(self, heads: Sequence[str], rng: torch.Generator) -> Outcome:
        """Build ``heads`` in their order."""
        classifiers: dict[str, Classifier] = {}
        synthetic: Images | None = None
        for head in heads:
            if head in ("decode", "match"):
                synthetic = self._decoded(rng) if head == "decode" else self._matched(rng)
                with self._clock("train"):
                    soft = self._soft_labels(synthetic)
                    recipe = self._method.recipe
                    classifiers[head] = train(synthetic, recipe, rng, soft_labels=soft)
            else:
                with self._clock(head):
                    classifiers[head] = self._closed(head)
        return Outcome(synthetic, classifiers, self._described())

    def pictures(self, per_class: int, rng: torch.Generator) -> Images:
        """Return ``per_class`` decoded images of every class that the release shows."""
        m = self._moments["codes"]
        codes, labels = sample_codes(m, self._wide, m.present.to(torch.int64) * per_class, rng)
        return decode(codes, labels, self._method.space, self._task)

    def _closed(self, head: str) -> Classifier:
        method, priors = self._method, self._method.prior == "counts"
        if head == "qda":
            m = self._moments["codes"]
            covs = self._covariances(method.mix, method.floor)
            return qda(m, method.space, covs, priors=priors)
        m, pooled = self._moments[self._main], self._pooled(self._main)
        space = method.feature_space if self._main == "features" else method.space
        if head == "ridge":
            return ridge(m, space, pooled, strength=0.01)
        return lda(m, space, pooled, priors=priors)

    def _decoded(self, rng: torch.Generator) -> Images:
        """Sample codes of every class and decode them, once."""
        if self._decoded_images is None:
            with self._clock("decode"):
                m = self._moments["codes"]
                codes, labels = sample_codes(m, self._wide, self._sizes(m), rng)
                self._decoded_images = decode(codes, labels, self._method.space, self._task)
        return self._decoded_images

    def _matched(self, rng: torch.Generator) -> Images:
        """Move decoded images to what the random networks saw of the classes.

        As many that were not moved join them: those are sharper, these are more varied, and a
        convolutional network learns more from both than from either.
        """
        images, query, method = self._decoded(rng), self._queries["match"], self._method
        assert isinstance(query, SumQuery)
        start, others = (
            images.take(_ranked(images.labels, i * method.matched, (i + 1) * method.matched))
            for i in (0, 1)
        )
        with self._clock("match"):
            sums = blocks_of(query, self._merged.tensors)["rows"]
            release = net_means(sums, self._moments["codes"].count, query, self._merged.sigma)
            done = match(release, method.networks, start, method.matching, rng)
        self._details["match"] = {"history": done.history, "noise": done.noise}
        pixels = torch.cat([done.images.pixels, others.pixels])
        labels = torch.cat([start.labels, others.labels])
        return Images(pixels, labels, self._task.classes)

    def _soft_labels(self, images: Images) -> Tensor | None:
        """Return class probabilities ``[n, C]`` by the discriminant on features, if it is."""
        if self._method.teacher == "none" or "features" not in self._moments:
            return None
        scores = torch.cat([self._teacher.predict(x) for x, _ in images.batches()])
        return torch.softmax(self._method.temper * scores, dim=1)

    @cached_property
    def _teacher(self) -> CodeClassifier:
        pooled = self._pooled("features")
        return lda(self._moments["features"], self._method.feature_space, pooled)

    @property
    def _main(self) -> str:
        """The view that closed-form heads read."""
        return "features" if "features" in self._moments else "codes"

    @cached_property
    def _wide(self) -> Tensor:
        """Covariances of the Gaussians that are sampled."""
        return self._covariances(self._method.decode_mix, self._method.decode_floor)

    def _pooled(self, view: str) -> Tensor:
        m = self._moments[view]
        if self._method.parity == "paper":
            return clamp_eigenvalues(m.pooled, 1e-4)
        if view == "features":
            return pooled_covariance(m, floor=self._method.feature_floor)
        return pooled_covariance(m)

    def _covariances(self, mix: float, floor: float) -> Tensor:
        m = self._moments["codes"]
        if self._method.parity == "paper":
            assert m.cov is not None
            return torch.stack([clamp_eigenvalues(cov, 1e-4) for cov in m.cov])
        shrink = self._method.shrink
        return covariances(m, self._pooled("codes"), mix=mix, method=shrink, least=floor)

    def _sizes(self, m: ClassMoments) -> Tensor:
        weight = m.present.to(torch.float64)
        if self._method.prior == "counts":
            weight = weight * m.count
        share = weight / weight.sum() * self._method.synthetic_size
        sizes = share.floor().to(torch.int64)
        short = self._method.synthetic_size - int(sizes.sum())
        sizes[torch.argsort(share - sizes, descending=True, stable=True)[:short]] += 1
        return sizes

    def _described(self) -> dict[str, Any]:
        """Return what the report shows of the release."""
        view = "codes" if "codes" in self._moments else self._main
        m = self._moments[view]
        shrunk = self._wide if view == "codes" else self._pooled(view).expand(len(m.count), -1, -1)
        return {
            "counts": [round(n, 1) for n in m.count.tolist()],
            "present": m.present.tolist(),
            "spectra": spectra(m, shrunk),
            "signal_to_noise": signal_to_noise(m),
            "seconds": self.seconds,
            **self._details,
        }

    @contextmanager
    def _clock(self, stage: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.seconds[stage] = self.seconds.get(stage, 0.0) + time.perf_counter() - started


def _ranked(labels: Tensor, low: int, high: int) -> Tensor:
    """Return the rows whose place within their class is in low .. high - 1, in order."""
    place = ranks(labels)
    return ((place >= low) & (place < high)).nonzero()[:, 0]


def signal_to_noise(m: ClassMoments) -> list[float]:
    """Return per class the energy of the mean over the energy of its noise (inf without noise)."""
    noise = m.mean_var * m.dim
    signal = ((m.mean**2).sum(1) - noise).clamp(min=0)
    return [math.inf if float(n) == 0 else float(s / n) for s, n in zip(signal, noise, strict=True)]
