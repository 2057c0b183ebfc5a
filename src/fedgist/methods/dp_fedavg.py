"""DP-FedAvg and DP-FedSGD: parameter averaging with clipped, noised sums.

``release = "update"``: McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent
Language Models", ICLR 2018, https://arxiv.org/abs/1710.06963, algorithm 1 with flat clipping, every
client in every round. What one client adds is one row of norm at most ``clip``: with unit
``client`` it hides who has data. For one image alone, the row may move across the whole ball, so
the noise is twice that. Who is invited is public: an empty client adds zeros and is counted.

``release = "gradients"``: there one step of FedSGD, with gradients clipped by image as in Abadi et
al., "Deep Learning with Differential Privacy", CCS 2016, https://arxiv.org/abs/1607.00133. Each
round sums the clipped gradients of all images; it hides one image at half the noise, and the sum
is over images, not clients.

Differences from the papers: weights are equal, since a client's number of images is private; all
take part, so no sampling amplifies; rows are integers and the noise is a discrete Gaussian.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedgist.errors import ConfigError
from fedgist.method import Gist, Method
from fedgist.methods._weights import LOCAL, check, fresh, local_update, network_of, size_of
from fedgist.privacy.client import Client
from fedgist.queries import SumQuery, blocks_of
from fedgist.train import Network, Recipe
from fedgist.types import Images, Merged, Outcome, Round, State, Task, Tensors

__all__ = ["DPFedAvg", "record_gradients"]

# One grid unit is clip / 2^14. A record of P numbers is rounded by a variance of 1/12 each, n of
# them by n/12; noise has (σ · scale · LEVELS)². At σ = 0.5 and scale 1 that is 7e7: a million
# records add 0.1 % to it. A number of a row of norm 1 is 1/√P on average, 100 units for P = 24,000,
# so that few are lost to rounding. Bits: 15 more than those of the number of images.
LEVELS = 2**14
CHUNK = 25  # records whose gradients are taken at once


@dataclass(frozen=True)
class DPFedAvg(Method):
    """A network learned from noised sums over ``rounds`` that share one budget.

    Attributes:
        release: what is clipped and summed: each client's ``update``, or each image's gradient
            (``gradients``).
        rounds: how many sums.
        clip: L2 bound of one row.
        recipe: model and training. ``update``: local SGD as in `fedavg.FedAvg`. ``gradients``: its
            momentum, weight decay, label smoothing and schedule are those of the server's steps;
            nothing is augmented.
        epochs: with ``update``, a client's passes over its images in a round; 0 for
            ``recipe.steps`` updates.
        server_lr: multiplies the mean update, or is the learning rate of the server's steps; None
            takes 1 for updates and 2 for gradients, which suits clip 1.
        images: with ``gradients``, how many images all clients have, a public number or a guess
            stated by the user; None asks for a noised count in the first round.
        count: share of the squared budget that this count takes.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    release: Literal["update", "gradients"] = "update"
    rounds: int = 10
    clip: float = 1.0
    recipe: Recipe = LOCAL
    epochs: float = 1.0
    server_lr: float | None = None
    images: int | None = None
    count: float = 0.01

    def __post_init__(self) -> None:
        check(self.recipe, self.epochs)
        if self.release not in ("update", "gradients"):
            raise ConfigError(
                f"method.release must be 'update' or 'gradients'. Got '{self.release}'"
            )
        if self.rounds < 1 or (self.images is not None and self.images < 1):
            raise ConfigError(
                "method.rounds and method.images must be at least 1. "
                f"Got {self.rounds} and {self.images}"
            )
        if not (0 < self.clip < math.inf and 0 < self.rate < math.inf):
            raise ConfigError(
                "method.clip and method.server_lr must be positive. "
                f"Got {self.clip} and {self.server_lr}"
            )
        if not 0 < self.count < 1:
            raise ConfigError(f"method.count must lie between 0 and 1. Got {self.count}")

    @property
    def rate(self) -> float:
        """The server's learning rate."""
        if self.server_lr is not None:
            return self.server_lr
        return 1.0 if self.release == "update" else 2.0

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan ``rounds`` sums of one scale each; the first may hold a count besides."""
        shape = (size_of(task, self.recipe),)
        if self.release == "update":
            row = SumQuery(self.clip, LEVELS, math.sqrt(self.rounds), shape=shape, whole=True)
            return [Round("sum", (row,))] * self.rounds
        count = 0.0 if self.images is not None else self.count
        scale = math.sqrt(self.rounds / (1 - count))
        gradient = SumQuery(self.clip, LEVELS, scale, name="gradient", shape=shape)
        first: tuple[SumQuery, ...] = (gradient,)
        if count:
            first += (SumQuery(1.0, LEVELS, 1 / math.sqrt(count), name="count", shape=(1,)),)
        return [Round("sum", first), *[Round("sum", (gradient,))] * (self.rounds - 1)]

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast a fresh network; the server keeps its velocity and the number of images."""
        weights = fresh(task, self.recipe, rng)
        return State({"weights": weights}, (torch.zeros_like(weights), self.images))

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Answer with one row for all images, or with a sum of one for each."""
        queries, weights = self.plan(task)[r].queries, shared["weights"]

        def row(images: Images) -> Tensor:
            update = local_update(task, self.recipe, weights, images, rng, epochs=self.epochs)
            # Training that diverged must not stop the run: whether it does depends on the data.
            return update if bool(update.isfinite().all()) else torch.zeros_like(update)

        first, *count = (q for q in queries if isinstance(q, SumQuery))
        if self.release == "update":
            return client.row(row, first)
        network = network_of(task, self.recipe, weights)
        gradients = record_gradients(network, self.recipe.label_smoothing)
        ones = [client.sum(lambda x, y: {"rows": torch.ones(len(x), 1)}, q) for q in count]
        return client.sum(lambda x, y: {"rows": gradients(x, y)}, first), *ones

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Add the mean update, or step against the mean gradient."""
        first, *count = (q for q in self.plan(task)[r].queries if isinstance(q, SumQuery))
        weights = state.shared["weights"]
        total = _total(first, merged.tensors)
        if self.release == "update":
            mean = total / max(1, merged.clients)  # of equal weights
            return State({"weights": weights + self.rate * mean}, state.server)
        velocity, images = state.server
        for q in count:
            images = max(1.0, float(_total(q, merged.tensors)))
        gradient = total / images + self.recipe.weight_decay * weights
        velocity = self.recipe.momentum * velocity + gradient
        schedule = replace(self.recipe, lr=self.rate, steps=self.rounds)
        return State({"weights": weights - schedule.rate(r) * velocity}, (velocity, images))

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the network."""
        network = network_of(task, self.recipe, state.shared["weights"])
        return Outcome(None, {"dp_fedavg": network}, {"seconds": {}})


def record_gradients(
    network: Network, label_smoothing: float = 0.0
) -> Callable[[Tensor, Tensor], Tensor]:
    """Return the function from images and labels to each image's own gradient of the loss.

    It maps float32 ``[b, c, h, w]`` and int64 ``[b]`` to float32 ``[b, P]``. Records go through in
    chunks of one size, the last filled up with blanks: a kernel chosen by the size of a batch
    would otherwise round a record's gradient differently beside other records.
    """
    parameters = {k: v.detach() for k, v in network.model.named_parameters()}
    mean, std = network.mean[:, None, None], network.std[:, None, None]

    def loss(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(network.model, weights, (((x - mean) / std)[None],))
        return F.cross_entropy(logits, y[None], label_smoothing=label_smoothing)

    each = vmap(grad(loss), in_dims=(None, 0, 0))

    def rows(x: Tensor, y: Tensor) -> Tensor:
        missing = -len(x) % CHUNK
        x = torch.cat([x, x.new_zeros(missing, *x.shape[1:])])
        chunks = zip(torch.split(x, CHUNK), torch.split(F.pad(y, (0, missing)), CHUNK), strict=True)
        out = [torch.cat([g.flatten(1) for g in each(parameters, *c).values()], 1) for c in chunks]
        # an overflow counts as nothing: stopping the run would depend on the data
        return torch.nan_to_num(torch.cat(out)[: len(y)], 0.0, 0.0, 0.0)

    return rows


def _total(query: SumQuery, tensors: Tensors) -> Tensor:
    """Return a sum in the units of its rows, float32 in the query's shape."""
    unit = query.clip / query.levels
    return (blocks_of(query, tensors)["rows"].to(torch.float64) * unit).to(torch.float32)
