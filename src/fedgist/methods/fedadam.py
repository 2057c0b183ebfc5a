"""FedAdam: clients train as in FedAvg, the server takes an Adam step along the mean update.

Reddi et al., "Adaptive Federated Optimization", ICLR 2021, https://arxiv.org/abs/2003.00295,
algorithm 2 (FedOpt with SGD at clients and Adam at the server):

    m <- β1 m + (1 - β1) Δ        v <- β2 v + (1 - β2) Δ²        w <- w + server_lr m / (√v + τ)

from m = 0 and v = τ², without bias correction, as there. Δ is the mean over images, as in the
paper's experiments. Only the weights are broadcast; m and v stay at the server. Not private: the
claim is ε = inf.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.methods._weights import Averaging
from fedgist.types import State

__all__ = ["FedAdam"]


@dataclass(frozen=True)
class FedAdam(Averaging):
    """The server takes steps of Adam.

    Attributes:
        rounds, recipe, epochs, mu, server_lr: as in `Averaging`.
        beta1: decay of the mean update, in [0, 1).
        beta2: decay of its square, in [0, 1).
        tau: degree of adaptivity, > 0: coordinates whose updates are far below it are not scaled.
    """

    server_lr: float = 0.03
    beta1: float = 0.9
    beta2: float = 0.99
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.beta1 < 1 and 0 <= self.beta2 < 1 and 0 < self.tau < math.inf):
            raise ConfigError(
                "method.beta1 and method.beta2 must lie in [0, 1) and method.tau must be positive. "
                f"Got {self.beta1}, {self.beta2} and {self.tau}"
            )

    def step(self, state: State, mean: Tensor) -> State:
        """Take one step of Adam without bias correction."""
        m, v = state.server or (torch.zeros_like(mean), torch.full_like(mean, self.tau**2))
        m = self.beta1 * m + (1 - self.beta1) * mean
        v = self.beta2 * v + (1 - self.beta2) * mean.square()
        weights = state.shared["weights"] + self.server_lr * m / (v.sqrt() + self.tau)
        return State({"weights": weights}, (m, v))
