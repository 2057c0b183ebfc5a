"""One-shot FedAvg: clients train the broadcast network, the server averages, once. Not private.

FedAvg (McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629) with a single round and long
local training: the lower reference of every one-shot method, for example in DENSE (Zhang et al.,
NeurIPS 2022, https://arxiv.org/abs/2112.12371). With equal epochs it is ``fedavg`` of one round,
bit for bit.

Differences: those comparisons start each client from weights of its own or do not say; here all
start alike, without which a mean of weights means little. They weigh clients alike
(``weighting = "equal"``); McMahan et al. weigh by images. No running statistics exist that would
have to be averaged (GroupNorm). Weights that were trained on images are read from those images
without noise: the claim is ε = inf.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

from fedgist.errors import ConfigError
from fedgist.method import Gist
from fedgist.methods._oneshot import EPOCHS
from fedgist.methods.fedavg import FedAvg
from fedgist.privacy.client import Client
from fedgist.types import Task, Tensors

__all__ = ["OneShotFedAvg"]


@dataclass(frozen=True)
class OneShotFedAvg(FedAvg):
    """One round of FedAvg.

    Attributes:
        rounds: 1.
        recipe, epochs, mu, server_lr: as in `Averaging`.
        weighting: each client counts by its ``images``, or all that have any count ``equal``.
    """

    rounds: int = 1
    epochs: float = EPOCHS
    weighting: Literal["images", "equal"] = "images"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rounds != 1:
            raise ConfigError(f"method.rounds must be 1: use 'fedavg'. Got {self.rounds}")

    def summarize(
        self, r: int, task: Task, shared: Tensors, client: Client, rng: torch.Generator
    ) -> Gist:
        """Send as in FedAvg; with equal weights, as if there were one image."""
        sent = super().summarize(r, task, shared, client, rng)
        assert isinstance(sent, dict)
        if self.weighting == "images":
            return sent
        return {k: v / sent["images"].clamp(min=1) for k, v in sent.items()}
