"""Gradient matching with DP-SGD on the synthetic images, distilled on every client: PPFL-DC.

Zhang et al., "Privacy-Preserving Federated Learning Based on Dataset Condensation", IEEE
Transactions on Consumer Electronics 71(1), 2025, doi 10.1109/TCE.2024.3510694: dataset
condensation (Zhao et al., "Dataset Condensation with Gradient Matching", ICLR 2021,
https://arxiv.org/abs/2006.05929), with the gradient that moves the images clipped per record and
noised. No code of it is public; this follows its description.

What is matched is the gradient of the training loss of a random network. With ψ(x) = ∇_θ ℓ(θ; x, y)
the loss per record, ‖ψ(x) - ψ̄(S_c)‖², is that of `_descent`, and a record's gradient with respect
to the images one vector-Jacobian product through ψ̄. (The published distance is a sum of cosines
over layers, which is not a sum over records and so has no per-record gradient to clip.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap
from torch.nn import functional as F

from fedgist.method import Gist, Method
from fedgist.methods._descent import Descent, Features, Rule, View, descend, gradient_query
from fedgist.methods._distil import Canvas, Server, check_options, gist, pieces
from fedgist.methods._siamese import Policy
from fedgist.methods._start import Beginning
from fedgist.methods._sums import rates_of, signal_level
from fedgist.privacy.client import Client
from fedgist.queries import SumQuery
from fedgist.train import build_model
from fedgist.types import Outcome, Round, State, Task, Tensors

__all__ = ["PPFLDC"]

CANVAS, SERVER = Canvas(), Server()


@dataclass(frozen=True)
class PPFLDC(Method):
    """Distilled images from every client, once; head ``distilled``.

    Attributes:
        canvas: images per class and how they are stored.
        rounds: gradients that are released, each under a fresh network.
        batch, class_size: the sampling rate is ``batch / class_size``, as in `anis`.
        lr: the highest step, root mean square over a class's pixels.
        clip: C: every record's gradient is clipped to it. Public.
        width: channels of the random networks.
        augment: `_siamese.siamese`.
        server: how pooled images are chosen and trained on.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    canvas: Canvas = CANVAS
    rounds: int = 20
    batch: float = 16.0
    class_size: tuple[int, ...] = (600,)
    lr: float = 0.15
    clip: float = 0.1
    width: int = 8
    augment: Policy = "flip"
    server: Server = SERVER

    def __post_init__(self) -> None:
        check_options(self, "rounds", "batch", "lr", "clip", "width")

    @property
    def rule(self) -> Rule:
        """A fixed clip, as in DP-SGD."""
        return Rule("fixed", self.clip)

    def plan(self, task: Task) -> Sequence[Round]:
        """One pool round: noised counts, then ``rounds`` noised sums of clipped gradients."""
        queries = (*self._beginning(task).queries, self._gradient(task))
        return [Round("pool", queries, sends=pieces(self.canvas, task))]

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Distil: release a noised sum of gradients, move the images, again."""
        counts, free = self._beginning(task).begin(client, rng)
        descent = Descent(free, self.lr, self.rounds)

        def view() -> View:
            features = _loss_gradients(task, self.width, rng)
            return View(features, self.canvas, task, self.augment, rng)

        descend(client, self._gradient(task), self.rule, descent, counts, view)
        return gist(descent.free, counts)

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Pool the images and train on them."""
        level = signal_level(self._gradient(task), state.server.sigma)
        return self.server.outcome(state.server.tensors, self.canvas, task, level, rng)

    def _beginning(self, task: Task) -> Beginning:
        return Beginning(task, self.canvas, "noise", rates=(1.0,))

    def _gradient(self, task: Task) -> SumQuery:
        rates = rates_of(self.batch, self.class_size, task)
        return gradient_query(task, self.canvas, self.rule, rates, self.rounds)


def _loss_gradients(task: Task, width: int, rng: torch.Generator) -> Features:
    """Draw a network; return the map from images to gradients of its loss, ``[b, P]``."""
    network = build_model("convnet3", task.channels, task.size, len(task.classes), width, rng)
    parameters = {k: v.detach() for k, v in network.named_parameters()}

    def loss(weights: Tensors, x: Tensor, y: Tensor) -> Tensor:
        logits = functional_call(network, weights, (2 * x[None] - 1,))
        return F.cross_entropy(logits, y[None])

    def features(x: Tensor, y: Tensor) -> Tensor:
        each = vmap(grad(loss), in_dims=(None, 0, 0))(parameters, x, y)
        return torch.cat([g.flatten(1) for g in each.values()], dim=1)

    return features
