"""FedAvg: clients train the broadcast network, the server averages. Not private.

McMahan et al., "Communication-Efficient Learning of Deep Networks from Decentralized Data",
AISTATS 2017, https://arxiv.org/abs/1602.05629. A comparison: weights that were trained on images
are read from those images without noise, so its claim is ε = inf.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from fedgist.methods._weights import Averaging
from fedgist.types import State

__all__ = ["FedAvg"]


@dataclass(frozen=True)
class FedAvg(Averaging):
    """The mean update, times ``server_lr``, is added; fields as in `Averaging`."""

    def step(self, state: State, mean: Tensor) -> State:
        """Add the weighted mean of the updates."""
        return State({"weights": state.shared["weights"] + self.server_lr * mean})
