"""FedSumUp: clients squeeze images with a broadcast compressor, the server does all training.

"FedSumUp: User-Auditable Privacy-Aware Representation Sharing for Resource-Constrained Federated
Intelligence". In each round a client makes one forward pass: every image becomes a small image that
it can look at, and that leaves with its label. The server enlarges what it gets, trains the
classifier on it (cross-entropy, all images), and then the compressor, without any original: what is
uploaded is enlarged and compressed once more, and the compressor learns to lower

    λ · CE(classifier, enlarged again; only images that were right before)
      + SSIM(enlarged again, enlarged) + β · PSNR(enlarged again, enlarged).

The run ends when the classifier is not better by ``least_gain`` than in the round before, on a part
of the *uploads* that is held out: no test image chooses anything, and the better of the last two
rounds is kept, with the compressor that made its uploads.

**No privacy guarantee follows from that loss**: ε = ∞. Low similarity of uploads is not a bound on
what can be read from them: an inverted contrast has it too, and a network that is trained on other
images undoes it (`audit.inversion`). Labels and numbers of images leave in clear.

``release = "statistics"`` is the form with a guarantee: instead of small images a client sends,
noised, counts, sums and second moments of their pixels by class (`MomentsQuery`), which are summed
over clients; the server draws small images from the Gaussians and goes on as above. Every number
that leaves is then (ε, δ)-DP in the record, its label included, over all rounds together.

Where the paper is silent: GroupNorm has 8 groups; enlarging is bilinear, corners not aligned; β is
0.01, about what makes PSNR count as much as SSIM; the compressor takes Adam steps of 1e-3 with
gradients of norm at most 1; PSNR stops counting below 5 dB and has a floor under its error; ρ is by
a hash of each image (`_uploads.chosen`), so that the same images are used in every round. The
classifier goes on from the round before, with public constants as input statistics. No compressor
is trained in the last round: nobody would use it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.compress import (
    CompressedNetwork,
    Compressor,
    build_compressor,
    dissimilarity,
    enlarge,
    load_compressor,
)
from fedgist.errors import ConfigError
from fedgist.heads.decode import sample_codes
from fedgist.heads.estimate import covariances, estimate, pooled_covariance
from fedgist.method import Gist
from fedgist.methods._uploads import STUDENT, Uploading, enlarged, pieces, pooled, upload
from fedgist.methods._weights import fresh, network_of
from fedgist.privacy.client import Client
from fedgist.queries import MomentsQuery
from fedgist.train import Network, Recipe, evaluate, split, train
from fedgist.types import Images, Merged, Outcome, Round, State, Task, Tensors

__all__ = ["FedSumUp"]

Loss = Literal["complete", "utility"]


@dataclass(frozen=True)
class Improve:
    """How the server trains the compressor.

    Attributes:
        steps: updates in a round; 0 leaves it as it was drawn.
        batch: uploads in each.
        lr: of Adam.
        utility: λ, weight of the classifier's loss.
        beta: β, weight of PSNR.
        loss: ``complete``, or ``utility`` for the classifier's loss alone (the ablation).
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    steps: int = 150
    batch: int = 64
    lr: float = 1e-3
    utility: float = 0.03
    beta: float = 0.01
    loss: Loss = "complete"

    def __post_init__(self) -> None:
        if self.steps < 0 or self.batch < 1 or not self.lr > 0:
            raise ConfigError(
                "method.improve must have steps >= 0, batch >= 1 and lr > 0. "
                f"Got {self.steps}, {self.batch} and {self.lr}"
            )
        if self.utility < 0 or self.beta < 0:
            raise ConfigError(
                f"method.improve.utility and beta must be >= 0. Got {self.utility}, {self.beta}"
            )


IMPROVE = Improve()


@dataclass(frozen=True)
class Trained:
    """What one round gave: the classifier, the compressor it belongs to, how often it is right."""

    network: Network
    compressor: Tensors
    accuracy: float


@dataclass(frozen=True)
class Memory:
    """What the server keeps: rounds so far, the best of them, seconds by stage."""

    best: Trained
    last: Trained
    history: tuple[float, ...]
    images: int
    seconds: dict[str, float]


@dataclass(frozen=True)
class FedSumUp(Uploading):
    """Small readable uploads from a compressor that the server trains; head ``fedsumup``.

    Attributes:
        side: of an upload, in pixels.
        compressor: ``light`` or ``paper``, see `compress.learned`.
        rounds: at most.
        least_gain: the run ends with a round that gains less, in [0, 1]; 0 never ends early.
        holdout: share of the uploads that judges that.
        share: ρ, the share of every class that takes part.
        recipe: how the classifier is trained in each round; ``steps`` of the first.
        more: steps of the later rounds, as a share of the first's: they start from it.
        improve: how the compressor is trained.
        release: ``images``, or noised ``statistics`` of them.
        radius: with ``statistics``, the norm that small images are clipped to, in units of the
            norm of a wholly white or black one.
        budget: with ``statistics``, budget shares of mean, class and pooled moments, and count.
        drawn: with ``statistics``, how many small images of each class are drawn.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    side: int = 8
    compressor: Literal["light", "paper"] = "light"
    rounds: int = 5
    least_gain: float = 0.01
    holdout: float = 0.1
    share: float = 0.5
    recipe: Recipe = STUDENT
    more: float = 0.5
    improve: Improve = IMPROVE
    release: Literal["images", "statistics"] = "images"
    radius: float = 0.5
    budget: tuple[float, float, float, float] = (0.5, 0.3, 0.18, 0.02)
    drawn: int = 1000

    def __post_init__(self) -> None:
        for name, low, high in (
            ("rounds", 1, float("inf")),
            ("least_gain", 0, 1),
            ("holdout", 0, 0.9),
            ("share", 1e-9, 1),
            ("more", 0, float("inf")),
            ("radius", 1e-9, 1),
            ("drawn", 1, float("inf")),
        ):
            if not low <= (got := getattr(self, name)) <= high:
                raise ConfigError(f"method.{name} must lie in [{low:g}, {high:g}]. Got {got}")
        if self.recipe.choose != "last":
            raise ConfigError("method.recipe.choose must be 'last'. Got 'holdout'")

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the claim must know besides."""
        if self.release == "statistics":
            return ()
        return (
            "labels, and how many images a client sends, leave in clear",
            "a small image of each record leaves: how alike it looks is measured, not bounded, and "
            "a trained decoder may read what the eye does not see",
        )

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan every round that may be needed."""
        if self.release == "statistics":
            query = self._query(task)
            return [Round("sum", (query,))] * self.rounds
        return [Round("pool", raw=True, sends=pieces(task, self.side))] * self.rounds

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Draw the first compressor."""
        drawn = build_compressor(self.compressor, task.channels, task.size, self.side, rng)
        return State(_tensors(drawn))

    def uploaded(self, task: Task, shared: Tensors, x: Tensor, rng: torch.Generator) -> Tensor:
        """Return the small images of ``x``, differentiable: attacks go through it."""
        small: Tensor = self._compressor(task, shared)(x)
        return small

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """One forward pass over the images."""
        compress = self._compressor(task, shared)
        if self.release == "statistics":
            return client.moments(lambda x: _codes(compress, x), self._query(task))
        return upload(self.used(client.raw()), task, compress, self.side)

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Train the classifier on what came, then the compressor, unless this is the end."""
        before: Memory | None = state.server
        started = time.perf_counter()
        small = self._small(task, merged, rng)
        # the same rows in every round: none that judges was trained on in an earlier one
        kept, held = split(small.labels, self.holdout, torch.Generator().manual_seed(0))
        fit, judge = small.take(kept), small.take(held) if len(held) else small
        network = self._classifier(task, fit, before, rng)
        score = evaluate(network, enlarged(judge, task.size)).accuracy
        trained = Trained(network, dict(state.shared), score)
        middle = time.perf_counter()
        gain = score - before.last.accuracy if before else 1.0
        done = r + 1 == self.rounds or gain < self.least_gain
        shared = state.shared
        if not done and self.improve.steps:
            shared = self._improved(task, state.shared, network, fit, rng)
        seconds = dict(before.seconds) if before else {"classifier": 0.0, "compressor": 0.0}
        seconds["classifier"] += middle - started
        seconds["compressor"] += time.perf_counter() - middle
        best = trained if before is None or score >= before.best.accuracy else before.best
        history = (*(before.history if before else ()), score)
        return State(shared, Memory(best, trained, history, len(small), seconds), done)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the best classifier behind its own compressor, as one model."""
        memory: Memory = state.server
        compress = self._compressor(task, memory.best.compressor)
        classifier = CompressedNetwork(memory.best.network, compress)
        details = {
            "held_out_uploads": list(memory.history),
            "rounds": len(memory.history),
            "uploads": memory.images,
            "seconds": memory.seconds,
        }
        return Outcome(None, {"fedsumup": classifier}, details)

    def _compressor(self, task: Task, tensors: Tensors) -> Compressor:
        return load_compressor(self.compressor, task.channels, task.size, self.side, tensors)

    def _query(self, task: Task) -> MomentsQuery:
        dim = task.channels * self.side**2
        mean, second, both, count = self.budget
        return MomentsQuery(
            clip=self.radius * dim**0.5,
            dim=dim,
            classes=len(task.classes),
            mean=mean,
            second=second,
            pooled=both,
            count=count,
            times=1,
        )

    def _small(self, task: Task, merged: Merged, rng: torch.Generator) -> Images:
        """Return small images: those that were sent, or drawn from their statistics."""
        if self.release == "images":
            return pooled(merged.tensors, task)
        moments = estimate(merged.tensors, self._query(task), merged.sigma)
        shared = pooled_covariance(moments)
        covs = covariances(moments, shared, mix=0.3)
        sizes = torch.where(moments.present, self.drawn, 0)
        codes, labels = sample_codes(moments, covs, sizes, rng)
        shape = (-1, task.channels, self.side, self.side)
        pixels = ((codes.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        return Images(pixels.view(shape), labels, task.classes)

    def _classifier(
        self, task: Task, fit: Images, before: Memory | None, rng: torch.Generator
    ) -> Network:
        recipe = self.recipe
        if before is None:
            start = network_of(task, recipe, fresh(task, recipe, rng))
        else:
            start = before.last.network
            recipe = replace(recipe, steps=round(recipe.steps * self.more))
        return train(enlarged(fit, task.size), recipe, rng, start=start)

    def _improved(
        self, task: Task, tensors: Tensors, network: Network, fit: Images, rng: torch.Generator
    ) -> Tensors:
        """Train a copy of the compressor in the closed loop; the classifier is frozen."""
        compress = self._compressor(task, tensors).requires_grad_(True)
        optimiser = torch.optim.Adam(compress.parameters(), self.improve.lr)
        for _ in range(self.improve.steps):
            rows = torch.randint(len(fit), (min(self.improve.batch, len(fit)),), generator=rng)
            once, labels = enlarge(fit.floats(rows), task.size), fit.labels[rows]
            with torch.no_grad():
                right = network.logits(once).argmax(1) == labels
            optimiser.zero_grad()
            loss = self._loss(compress, network, once, labels, right)
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(compress.parameters(), 1.0)
            optimiser.step()
        return _tensors(compress)

    def _loss(
        self, compress: Compressor, network: Network, once: Tensor, labels: Tensor, right: Tensor
    ) -> Tensor:
        """Return the compressor's loss on images that were compressed ``once`` and enlarged."""
        again = enlarge(compress(once), once.shape[-1])
        loss: Tensor = 0 * again.sum()  # something to differentiate even where nothing was right
        if bool(right.any()):
            kept = F.cross_entropy(network.logits(again[right]), labels[right])
            loss = loss + self.improve.utility * kept
        if self.improve.loss == "complete":
            loss = loss + dissimilarity(again, once, self.improve.beta)
        return loss


def _codes(compress: Compressor, x: Tensor) -> Tensor:
    """Return small images as rows in [-1, 1], float64."""
    with torch.no_grad():
        rows: Tensor = (2 * compress(x) - 1).flatten(1).to(torch.float64)
    return rows


def _tensors(model: torch.nn.Module) -> Tensors:
    return {k: v.detach().clone() for k, v in model.state_dict().items()}
