"""FedKT-CSD: class statistics of frozen public encoders' codes, one round, summable.

Hoefler, Müller, Samek, "Collaborative Synthetic Data Generation for Knowledge Transfer in
Federated Learning", arXiv 2607.07565. Each client encodes its images once and sends, per class, the
count, the sum and the sum of outer products of its clipped codes. The server sees the noised sum,
samples a Gaussian per class, decodes, and trains. The same release also gives closed-form heads.

Differences from the paper, all with the same or a stronger guarantee:

* one joint release of means, second moments and counts instead of ε/2 + ε/2 with exact counts;
* codes are centred and partially whitened by public statistics before clipping;
* records are quantised, sums are exact integers, noise is a discrete Gaussian;
* a pooled second moment takes part of the budget; covariances are shrunk by their known noise
  before they are made positive definite;
* up to three views of the images share the budget: a codec's codes for synthetic images, a feature
  encoder's for the discriminant (`heads.linear`), random networks' for `heads.match`. A view that
  no head asks for is not sent.

``parity="paper"`` runs the published mechanism: raw codes, radius as given, (ε/2, δ/2) twice, exact
counts, eigenvalues clamped at 1e-4.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedgist.encoders import RandomConv, load_encoder
from fedgist.errors import ConfigError
from fedgist.heads.linear import CodeSpace, whitening_of
from fedgist.heads.match import Matching
from fedgist.method import Gist, Method
from fedgist.methods._fedkt_heads import Builder
from fedgist.privacy.client import Client
from fedgist.queries import MomentsQuery, Query, SumQuery
from fedgist.train import Recipe
from fedgist.types import Images, Merged, Outcome, Round, State, Task, Tensors

__all__ = ["FedKTCSD"]

Head = Literal["lda", "qda", "ridge", "decode", "match"]
View = Literal["codes", "features", "match"]
# An MLP reads decoded Gaussians better than a convolutional network, at a third of the time
# (held-out part of Fashion-MNIST's training images: 84 % against 81 %).
STUDENT = Recipe(model="mlp", width=512, steps=800, batch=128, lr=1e-3)
SHARES = {  # mean, class second moment, pooled second moment, count
    "both": (0.50, 0.30, 0.18, 0.02),
    "class": (0.50, 0.48, 0.00, 0.02),
    "pooled": (0.70, 0.00, 0.28, 0.02),
}
FEATURE_SHARES = (0.45, 0.0, 0.53, 0.02)
MATCHING = Matching()


@dataclass(frozen=True)
class FedKTCSD(Method):
    """One upload of class statistics; heads ``lda``, ``qda``, ``ridge``, ``decode``, ``match``.

    Attributes:
        encoder: the codec: name, path or dotted name of a frozen public encoder. ``qda`` and the
            synthetic images come from its codes.
        encoder_sha256: its hash, when the task pins one.
        features: the encoder that ``lda`` and ``ridge`` read; empty for the codec itself.
        features_sha256: its hash, when the task pins one.
        heads: what to build from the one release; the first is the classifier that is saved as
            the outcome's own.
        budget: relative shares of codes, features and match in the squared budget; the views that
            no head needs leave theirs to the others.
        second: which second moments of codes are sent. ``auto`` takes the class ones when
            ``class_size`` is at least a quarter of σ·d^1.5, where their noise would drown them,
            else ``pooled``.
        class_size: images per class over all clients, a public number or a guess stated by the
            user; never measured on private data.
        shares: budget of (mean, class second moment, pooled second moment, count) within the
            codes; they sum to 1.
        feature_shares: the same within the features.
        whitening: exponent t of the public whitening of codes: 0, 0.25 or 0.5.
        clip_quantile: the radius is this quantile of the public norms.
        radius: the radius itself, instead.
        shrink: ``rie``, ``linear`` or ``clamp``.
        mix: share of the pooled covariance in each class's own, for ``qda``.
        floor: eigenvalues for ``qda`` are raised to this share of their mean.
        feature_floor: eigenvalues for ``lda`` on features are raised to this many noise edges.
        decode_mix, decode_floor: as mix and floor, for the Gaussians that ``decode`` samples.
        synthetic_size: images in the synthetic set.
        teacher: ``soft``: the discriminant on features gives the synthetic images their class
            probabilities; ``none``: they keep the class that they were drawn from, which is better
            where decoded images are to the features unlike any real one.
        temper: the discriminant's scores times this, since those of Gaussians are too sure.
        prior: ``balanced`` classes, or in proportion to the noisy ``counts``.
        recipe: how the network of the ``decode`` and ``match`` heads is trained.
        nets, net_width: random networks that ``match`` compares images with.
        matching: how ``match`` moves images.
        matched: how many images of each class are moved; as many that are only decoded join them.
        parity: ``paper`` for the published mechanism.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    encoder: str = "pca"
    encoder_sha256: str | None = None
    features: str = "scattering"
    features_sha256: str | None = None
    heads: tuple[Head, ...] = ("lda", "qda", "decode")
    budget: tuple[float, float, float] = (0.5, 0.5, 0.5)
    second: Literal["auto", "both", "class", "pooled"] = "auto"
    class_size: int | None = None
    shares: tuple[float, float, float, float] | None = None
    feature_shares: tuple[float, float, float, float] = FEATURE_SHARES
    whitening: float = 0.25
    clip_quantile: float = 0.8
    radius: float | None = None
    levels: int = 128
    count_weight: int = 1
    shrink: Literal["rie", "linear", "clamp"] = "rie"
    mix: float = 0.5
    floor: float = 0.4
    feature_floor: float = 0.25
    decode_mix: float = 0.3
    decode_floor: float = 0.01
    synthetic_size: int = 10_000
    teacher: Literal["none", "soft"] = "none"
    temper: float = 0.5
    prior: Literal["balanced", "counts"] = "balanced"
    recipe: Recipe = STUDENT
    nets: int = 16
    net_width: int = 32
    matching: Matching = MATCHING
    matched: int = 100
    parity: Literal["none", "paper"] = "none"

    def __post_init__(self) -> None:
        if not self.heads or len(set(self.heads)) != len(self.heads):
            raise ConfigError(f"method.heads must be distinct and not empty. Got {self.heads}")
        if self.radius is not None and not self.radius > 0:
            raise ConfigError(f"method.radius must be positive. Got {self.radius}")
        if not (0 <= self.mix <= 1 and 0 <= self.decode_mix <= 1):
            raise ConfigError(
                f"method.mix and decode_mix must lie in [0, 1]. Got {self.mix}, {self.decode_mix}"
            )
        if self.synthetic_size < 1:
            raise ConfigError(f"method.synthetic_size must be positive. Got {self.synthetic_size}")
        if not min(self.budget) > 0:
            raise ConfigError(f"method.budget must be three positive shares. Got {self.budget}")
        if self.matched < 1:
            raise ConfigError(f"method.matched must be at least 1. Got {self.matched}")
        if not self.temper > 0:
            raise ConfigError(f"method.temper must be positive. Got {self.temper}")

    @cached_property
    def space(self) -> CodeSpace:
        """How images become codes of the codec: public, the same at every site."""
        encoder = load_encoder(self.encoder, self.encoder_sha256)
        if {"decode", "match"} & set(self.heads) and not encoder.decodes:
            raise ConfigError(
                "method.heads must not hold 'decode' or 'match' with encoder "
                f"'{encoder.name}', which has no decoder. Got {list(self.heads)}"
            )
        t = None if self.parity == "paper" else self.whitening
        clip = self.radius or whitening_of(encoder, t).radius(self.clip_quantile)
        return CodeSpace(encoder, t, clip)

    @cached_property
    def feature_space(self) -> CodeSpace:
        """How images become features: fully whitened, each scaled to norm 1."""
        return CodeSpace(load_encoder(self.features, self.features_sha256), 0.5, 1.0, True)

    @cached_property
    def networks(self) -> RandomConv:
        """The random networks of ``match``: public, the same at every site."""
        return RandomConv(0, self.nets, self.net_width)

    @property
    def views(self) -> tuple[View, ...]:
        """What is sent: the views that the heads need."""
        heads = set(self.heads)
        apart = bool(self.features) and self.parity == "none"
        drawn = bool(heads & {"decode", "match"})
        closed = bool(heads & {"lda", "ridge"})
        wanted: dict[View, bool] = {
            "codes": drawn or "qda" in heads or (closed and not apart),
            "features": apart and (closed or (drawn and self.teacher == "soft")),
            "match": "match" in heads,
        }
        return tuple(view for view, want in wanted.items() if want)

    @property
    def track(self) -> str:
        """Which public data the encoders have seen, the most of them."""
        order = ("no public data", "public images", "public ImageNet")
        spaces = [self._space(v).encoder.track for v in self.views if v != "match"]
        return max(spaces, key=lambda t: order.index(t) if t in order else len(order))

    def encoders(self) -> tuple[str, ...]:
        """The codec and the features, whichever of them the views need."""
        names = {"codes": self.encoder, "features": self.features}
        return tuple(names[v] for v in self.views if v in names)

    def plan(self, task: Task) -> Sequence[Round]:
        """One sum round: one joint query for each view."""
        return [Round("sum", tuple(self._queries(task).values()))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """One forward pass for each view: counts, sums and second moments of clipped codes."""
        answers = []
        for view, query in self._queries(task).items():
            if isinstance(query, SumQuery):
                answers.append(client.sum(lambda x, y: {"rows": self.networks.rows(x)}, query))
            else:
                answers.append(client.moments(self._space(view).codes, query))
        return tuple(answers)

    def records(self, task: Task) -> list[tuple[Query, Callable[[Tensor], Tensor]]]:
        """Return each query with what it makes of images: float64 rows, not yet clipped."""
        return [
            (query, self._embedded if view == "match" else self._space(view).codes)
            for view, query in self._queries(task).items()
        ]

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Estimate, shrink, and build every head that was asked for."""
        return self._builder(task, state.server).outcome(self.heads, rng)

    def ceiling(self, task: Task, exact: Merged, rng: torch.Generator) -> Outcome | None:
        """Build the closed-form heads from sums without noise, for comparison."""
        closed = tuple(h for h in self.heads if h not in ("decode", "match"))
        return self._builder(task, exact).outcome(closed, rng) if closed else None

    def pictures(
        self, task: Task, merged: Merged, per_class: int, rng: torch.Generator
    ) -> Images | None:
        """Sample the Gaussian of each class and decode; None when no codes of a codec are sent."""
        if "codes" not in self.views or not self.space.encoder.decodes:
            return None
        return self._builder(task, merged).pictures(per_class, rng)

    def _builder(self, task: Task, merged: Merged) -> Builder:
        return Builder(self, task, merged, self._queries(task))

    def _queries(self, task: Task) -> dict[str, Query]:
        """Return what is asked of each view; together they have the whole budget."""
        out: dict[str, Query] = {}
        total = sum(self._share(v) for v in self.views)
        for view in self.views:
            scale = math.sqrt(total / self._share(view))
            name = view if len(self.views) > 1 else ""
            if view == "match":
                shape = (len(task.classes), self.nets, self.networks.features)
                out[view] = SumQuery(1.0, 4096, scale, per_class=True, name=name, shape=shape)
            else:
                out[view] = self._moments(view, task, scale, name)
        return out

    def _embedded(self, x: Tensor) -> Tensor:
        return self.networks.rows(x).flatten(1).to(torch.float64)

    def _share(self, view: View) -> float:
        return self.budget[("codes", "features", "match").index(view)]

    def _space(self, view: str) -> CodeSpace:
        return self.feature_space if view == "features" else self.space

    def _moments(self, view: str, task: Task, scale: float, name: str) -> MomentsQuery:
        space = self._space(view)
        common: dict[str, Any] = {
            "clip": space.clip,
            "dim": space.encoder.dim,
            "classes": len(task.classes),
            "levels": self.levels,
        }
        if self.parity == "paper":
            return MomentsQuery(
                **common, mean=0.5, second=0.5, pooled=0, count=0, exact_counts=True, basic=True
            )
        if view == "features":
            # many dimensions share the norm: a finer grid keeps rounding below the noise
            common["levels"] = 2 * self.levels
            shares = self.feature_shares
        else:
            shares = self.shares or SHARES[self._second()]
        common |= dict(zip(("mean", "second", "pooled", "count"), shares, strict=True))
        return MomentsQuery(**common, count_weight=self.count_weight, scale=scale, name=name)

    def _second(self) -> str:
        if self.second != "auto":
            return self.second
        if self.class_size is None:
            return "both"
        # The rule n_c against σ·d^1.5 with σ ≈ 1: the plan must not depend on its own noise.
        return "both" if 4 * self.class_size >= self.space.encoder.dim**1.5 else "pooled"
