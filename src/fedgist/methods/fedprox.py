"""FedProx: FedAvg whose clients are pulled back to the broadcast network. Not private.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020,
https://arxiv.org/abs/1812.06127: clients minimise their loss + mu/2 ‖w - w_t‖². Here they run a
fixed number of epochs and none straggles, and the mean is weighted by images where the paper
samples clients by that weight. With mu = 0 it is FedAvg, bit for bit. The claim is ε = inf.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.methods.fedavg import FedAvg

__all__ = ["FedProx"]


@dataclass(frozen=True)
class FedProx(FedAvg):
    """The server averages as in FedAvg; fields as in `Averaging`."""

    mu: float = 0.01
