"""The clients' networks, not averaged but asked together. Not private.

Every client trains the broadcast network on its own images and sends it, once; the classifier is
all of them and the mean of what they say:

    p(x) = Σ w_k softmax(f_k(x))    or    softmax(Σ w_k f_k(x)),        Σ w_k = 1

It is the upper reference of methods that distil such an ensemble into one network: DENSE (Zhang et
al., NeurIPS 2022, https://arxiv.org/abs/2112.12371) and Co-Boosting (Dai et al., ICLR 2024,
https://arxiv.org/abs/2402.15070) take the mean of logits with equal weights, which is what they
are given here too; means of probabilities are the default, as one network that is overly sure
cannot outvote all others. It is as large, and as slow, as all networks together.

Each client's own weights reach the server without noise: the claim is ε = inf.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from fedgist.methods._oneshot import OneShot
from fedgist.train.ensemble import Mix
from fedgist.types import Classifier, Outcome, State, Task

__all__ = ["EnsembleMethod"]


@dataclass(frozen=True)
class EnsembleMethod(OneShot):
    """Heads ``ensemble`` and, of the same networks, ``average``: one-shot FedAvg by images.

    Attributes:
        recipe, epochs: as in `OneShot`.
        mix: whether ``probabilities`` or ``logits`` are averaged.
        weighting: all clients that have images count ``equal``, or each by its ``images``.
    """

    mix: Mix = "probabilities"
    weighting: Literal["equal", "images"] = "equal"

    def finish(self, task: Task, state: State, rng: torch.Generator) -> Outcome:
        """Return the classifier."""
        ensemble = self.ensemble(task, state, self.mix)
        if self.weighting == "images":
            _, images = self.uploads(state)
            ensemble = replace(ensemble, shares=images / images.sum())
        details = {"seconds": {}, "members": len(ensemble.members)}
        heads: dict[str, Classifier] = {"ensemble": ensemble, "average": self.average(task, state)}
        return Outcome(None, heads, details)
