"""DENSE: the clients' ensemble distilled on images that a generator makes for it. Not private.

Zhang et al., "DENSE: Data-Free One-Shot Federated Learning", NeurIPS 2022,
https://arxiv.org/abs/2112.12371. With D(x) = mean_k f_k(x) of m clients, a student f_S and images
x = G(z) that are to be of a random class y, the generator minimises

    L_gen = CE(D(x), y) + λ_1 L_BN(x) - λ_2 ω KL(D(x) ‖ f_S(x))     ω = 1[argmax D ≠ argmax f_S]

so its images lie between the decision boundaries of ensemble and student, and the student then
minimises KL(D(x) ‖ f_S(x)) on them.

Differences from the paper: L_BN, which draws the statistics of a batch to the running ones of batch
normalisation, does not exist for networks without any, as here (λ_1 = 0; the experiments of
Co-Boosting leave it out as well). As in the authors' program the inputs z are trained with the
generator and earlier images stay in a pool; unlike there the generator goes on from epoch to epoch,
as in the paper's algorithm 1, and the last of its images are taken, not those of least loss. The
student may begin at the clients' average. Epochs and steps are what one core carries, far below the
paper's 200 epochs of 30 steps.

Each client's own weights reach the server without noise: the claim is ε = inf.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor
from torch.nn import functional as F

from fedgist.methods._datafree import DataFree
from fedgist.methods._oneshot import divergence

__all__ = ["Dense"]


@dataclass(frozen=True)
class Dense(DataFree):
    """Heads ``dense`` and ``ensemble``; fields as in `DataFree`, ``adversarial`` is λ_2."""

    def loss(self, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """Return L_gen."""
        differ = teacher.argmax(1) != student.argmax(1)
        apart = (differ * divergence(teacher, student)).mean()
        return F.cross_entropy(teacher, labels) - self.adversarial * apart
