"""FedSynth: clients send synthetic data in place of updates; the server replays them. Not private.

Hu et al., "FedSynth: Gradient Compression via Synthetic Data in Federated Learning", FL workshop at
NeurIPS 2022, https://arxiv.org/abs/2204.01273, after Goetz and Tewari, "Federated Learning via
Synthetic Data", 2020, https://arxiv.org/abs/2008.04489. In every round a client trains the
broadcast network w as in FedAvg, to w + Δ, and learns K small batches of inputs, soft labels and
rates, so that K steps of gradient descent on them lead from w to θ_K in its place:

    update:  ‖θ_K - w - Δ‖² / ‖Δ‖² is small        loss:  the loss of its real images at θ_K is

`update` is what compression asks for; `loss` is FedSynth's own aim, that training on the synthetic
data does well on the real ones, and needs no Δ. The server takes the K steps itself and adds the
mean of θ_K - w, weighted by images.

Differences: the gradient goes through all K steps with the memory of one (`_unroll`); a client goes
on from its synthetic data of the last round; a cosine takes Adam's rate to 0 in every round; every
client takes part; numbers of steps and sizes are our own. Only θ_K reaches the server, so what
cannot be reproduced is lost, not carried over. Data fitted to an update made without noise have its
privacy, which is none: the claim is ε = inf.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from fedgist.method import Gist, Method
from fedgist.methods._distil import check_options
from fedgist.methods._unroll import (
    Aim,
    Steps,
    fit_of,
    learned,
    loss_of,
    pieces,
    replay,
    steady,
    uploads,
)
from fedgist.methods._weights import LOCAL, check, finite, fresh, local_update, network_of
from fedgist.privacy.client import Client
from fedgist.train import Recipe
from fedgist.types import Images, Merged, Outcome, Piece, Round, State, Task, Tensors

__all__ = ["FedSynth", "towards"]

REAL = 128  # real images that judge an iteration of ``loss``
MEMORY = ("inputs", "targets", "rates")


@dataclass(frozen=True)
class FedSynth(Method):
    """FedAvg whose updates travel as synthetic data; head ``fedsynth``.

    Attributes:
        rounds: how often clients train and the server averages.
        recipe: model and local training, by ``sgd``.
        epochs: a client's passes over its images in a round; 0 for ``recipe.steps`` updates.
        steps: K, batches that a client sends in a round.
        batch: inputs in each.
        iterations: of learning them, in every round.
        lr: highest rate of Adam; falls to 0 along a cosine.
        rate: every step's own rate in the beginning.
        aim: what synthetic data are learned for, see the module's text.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    rounds: int = 10
    recipe: Recipe = LOCAL
    epochs: float = 1.0
    steps: int = 3
    batch: int = 3
    iterations: int = 60
    lr: float = 0.1
    rate: float = 0.05
    aim: Literal["update", "loss"] = "update"

    def __post_init__(self) -> None:
        check(self.recipe, self.epochs)
        check_options(self, "rounds", "steps", "batch", "iterations", "lr", "rate")

    @property
    def unfit(self) -> str:
        """Why real data must not be given to it."""
        return "fedsynth: synthetic data are fitted to updates made from records without noise"

    def plan(self, task: Task) -> Sequence[Round]:
        """Plan ``rounds`` raw pools."""
        images = Piece("images", (1,), "float32")
        sends = (*pieces(task, self.steps, self.batch), images)
        return [Round("pool", raw=True, sends=sends)] * self.rounds

    def start(self, task: Task, rng: torch.Generator) -> State:
        """Broadcast a fresh network."""
        return State({"weights": fresh(task, self.recipe, rng)})

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Learn the steps and keep them; send them and n, zeros where there are no images.

        Raises:
            ConfigError: training diverged.
        """
        images = client.raw()
        if not len(images):
            made = Steps.nothing(task, self.steps, self.batch)
        else:
            made = self._learned(task, shared["weights"], images, client, rng)
        return made.gist() | {"images": torch.tensor([float(len(images))])}

    def update(
        self, r: int, task: Task, state: State, merged: Merged, rng: torch.Generator
    ) -> State:
        """Take every client's steps from the broadcast network; add the weighted mean."""
        loss, start = loss_of(task, self.recipe), state.shared["weights"]
        images, mean = merged.tensors["images"], torch.zeros_like(start)
        for n, steps in zip(images, uploads(merged.tensors, self.steps, self.batch), strict=True):
            ended = replay(loss, start, steps, range(self.steps))[-1]
            mean += n * (steady(ended) - start)
        return State({"weights": start + mean / images.sum().clamp(min=1)})

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the network."""
        network = network_of(task, self.recipe, state.shared["weights"])
        return Outcome(None, {"fedsynth": network}, {"seconds": {}})

    def _learned(
        self, task: Task, start: Tensor, images: Images, client: Client, rng: torch.Generator
    ) -> Steps:
        loss = loss_of(task, self.recipe)
        if "rates" in client.memory:
            begun = Steps(*(client.memory[k] for k in MEMORY))
        else:
            held = (images.counts() > 0).nonzero()[:, 0]
            begun = Steps.noise(task, self.steps, self.batch, self.rate, held, rng)
        if self.aim == "loss":
            aim = fit_of(loss, images, REAL, rng)
        else:
            moved = local_update(task, self.recipe, start, images, rng, epochs=self.epochs)
            aim = towards(start + finite(moved, self.recipe), float(moved.norm()))
        order = range(self.steps)
        made = learned(
            loss, begun, aim, lambda: (start, order), lr=self.lr, iterations=self.iterations
        )
        client.memory.update(zip(MEMORY, (made.inputs, made.targets, made.rates), strict=True))
        return made


def towards(goal: Tensor, distance: float) -> Aim:
    """Return the aim of ‖θ - goal‖² / distance²."""
    return lambda weights: 2 * (weights - goal) / max(distance, 1e-12) ** 2
