"""Co-Boosting: generated images and the ensemble's weights improve each other. Not private.

Dai et al., "Enhancing One-Shot Federated Learning Through Data and Ensemble Co-Boosting", ICLR
2024, https://arxiv.org/abs/2402.15070. With D(x) = Σ w_k f_k(x), σ the softmax, and images x = G(z)
that are to be of a random class y, in every epoch:

1. hard images: the generator minimises  (1 - σ(D(x))_y) CE(D(x), y) - β KL(D(x) ‖ f_S(x));
2. a better ensemble: over the pool of images,  w <- clip(w - μ_e sign(∂CE(D(x), y) / ∂w), 0, 1),
   from the second epoch on, with μ_e = μ · decay^e;
3. distillation: the student minimises KL(D(x') ‖ f_S(x')) on images that are moved as they are
   used, in a random direction of the ensemble's output,  x' = x + r sign(∂ uᵀσ(D(x) / 4) / ∂x),
   u ~ U(-1, 1) for each.

Differences from the paper, where its text and the authors' program leave room: w is divided by its
sum wherever it is used and its gradient goes through that division, without which raising all
weights alike would count as progress; if all were clipped to 0 the earlier ones stay. (2) sees the
pool's images as they are, (3) keeps x' in [0, 1]. Temperatures are the program's: 3 in (1), 4 in
(3). For generator, pool and student see `_datafree`; the student may begin at the clients' average,
and epochs and steps are what one core carries, far below the paper's 200 epochs of 30 steps.

Each client's own weights reach the server without noise: the claim is ε = inf.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError
from fedgist.methods._datafree import DataFree, Pool
from fedgist.methods._oneshot import Distil, batches, divergence
from fedgist.train.ensemble import Ensemble, Mix, mixed

__all__ = ["CoBoosting", "moved", "weight_step"]

SHARP = 3.0  # temperature of the generator's KL
FLAT = 4.0  # temperature under which images are moved
DISTIL = Distil(temperature=4.0)


@dataclass(frozen=True)
class CoBoosting(DataFree):
    """Heads ``co_boosting`` and ``ensemble``, the latter with the weights that were learned.

    Attributes:
        recipe, epochs, generate, distil, mix: as in `DataFree`.
        adversarial: β.
        step: μ, of a client's weight.
        decay: of μ from epoch to epoch, in (0, 1].
        reach: r, in units of the pixel range.
    """

    distil: Distil = DISTIL
    step: float = 0.01
    decay: float = 0.99
    reach: float = 8 / 255

    def __post_init__(self) -> None:
        super().__post_init__()
        if not (0 <= self.step <= 1 and 0 < self.decay <= 1 and 0 <= self.reach <= 1):
            raise ConfigError(
                "method.step and method.reach must lie in [0, 1] and method.decay in (0, 1]. "
                f"Got {self.step}, {self.reach} and {self.decay}"
            )

    def loss(self, teacher: Tensor, student: Tensor, labels: Tensor) -> Tensor:
        """Return the generator's loss."""
        each = F.cross_entropy(teacher, labels, reduction="none")
        hard = (1 - (-each).exp()) * each
        return (hard - self.adversarial * divergence(teacher, student, SHARP)).mean()

    def reweighted(self, weights: Tensor, pool: Pool, epoch: int, rng: torch.Generator) -> Tensor:
        """Take one pass of sign steps over the pool."""
        if epoch == 0:
            return weights
        step = self.step * self.decay**epoch
        for rows in batches(len(pool), self.distil.batch, rng):
            weights = weight_step(weights, pool.each[:, rows], pool.labels[rows], step, self.mix)
        return weights

    def seen(
        self, pool: Pool, rows: Tensor, ensemble: Ensemble, rng: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        """Move the images, then ask the ensemble."""
        x = moved(pool.floats(rows), ensemble, self.reach, rng)
        with torch.no_grad():
            return x, ensemble.logits(x)


def weight_step(
    weights: Tensor, each: Tensor, labels: Tensor, step: float, mix: Mix = "logits"
) -> Tensor:
    """Return weights float32 ``[k]`` after one sign step for logits ``[k, b, classes]``."""
    free = weights.clone().requires_grad_(True)
    loss = F.cross_entropy(mixed(each, free / free.sum(), mix), labels)
    (gradient,) = torch.autograd.grad(loss, free)
    after = (weights - step * gradient.sign()).clamp(0, 1)
    return after if float(after.sum()) > 0 else weights


def moved(x: Tensor, ensemble: Ensemble, reach: float, rng: torch.Generator) -> Tensor:
    """Return images ``[b, c, h, w]`` that are moved by ``reach`` in every pixel, in [0, 1]."""
    free = x.clone().requires_grad_(True)
    output = (ensemble.logits(free) / FLAT).softmax(1)
    u = torch.rand(output.shape, generator=rng) * 2 - 1
    (gradient,) = torch.autograd.grad((u * output).sum(), free)
    return (x + reach * gradient.sign()).clamp(0, 1)
