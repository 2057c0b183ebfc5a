"""Gradient steps on synthetic data, and gradients through all of them with the memory of one.

From weights θ_0, steps of plain SGD on synthetic batches, each with a rate of its own:

    θ_{s+1} = θ_s - η_s ∇ℓ(θ_s; x_s, y_s)

From λ = ∂L/∂θ_S the chain rule runs backwards over the steps. With g_s = ∇ℓ(θ_s; x_s, y_s),

    ∂L/∂η_s = -λᵀ g_s    ∂L/∂(x_s, y_s) = -η_s ∂(λᵀ g_s)/∂(x_s, y_s)    λ <- λ - η_s ∂(λᵀ g_s)/∂θ_s

(Maclaurin et al., ICML 2015, https://arxiv.org/abs/1502.03492; Wang et al., "Dataset Distillation",
2018, https://arxiv.org/abs/1811.10959, algorithm 1). The weights along the way are kept, one vector
a step; every step's graph is built anew, so that memory does not grow with activations times steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError
from fedgist.methods._weights import CENTRE, SPREAD
from fedgist.train import Recipe
from fedgist.train.models import blank_model
from fedgist.types import Images, Piece, Task, Tensors

__all__ = [
    "Aim",
    "Learner",
    "Loss",
    "Steps",
    "fit_of",
    "learned",
    "loss_of",
    "pieces",
    "pull_back",
    "replay",
    "steady",
    "uploads",
]

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]  # (weights [P], inputs, targets) -> []
Aim = Callable[[Tensor], Tensor]  # weights at the end of the steps -> the gradient of L there


@dataclass(frozen=True)
class Steps:
    """Synthetic batches and the rates of the steps taken on them.

    Attributes:
        inputs: float32 ``[S, b, channels, size, size]``; of no fixed range, images are in [0, 1].
        targets: float32 ``[S, b, classes]``, soft labels; they need not be distributions.
        rates: float32 ``[S]``, η; 0 for a step that changes nothing.
    """

    inputs: Tensor
    targets: Tensor
    rates: Tensor

    def __len__(self) -> int:
        return len(self.rates)

    @staticmethod
    def nothing(task: Task, steps: int, batch: int) -> Steps:
        """Return steps that change nothing: what a client without images sends."""
        shape = steps, batch, task.channels, task.size, task.size
        return Steps(
            torch.zeros(shape), torch.zeros(*shape[:2], len(task.classes)), torch.zeros(steps)
        )

    @staticmethod
    def noise(
        task: Task, steps: int, batch: int, rate: float, held: Tensor, rng: torch.Generator
    ) -> Steps:
        """Return white noise with the hard labels of the classes ``held``, int64, in turn."""
        blank = Steps.nothing(task, steps, batch)
        inputs = CENTRE + SPREAD * torch.randn(blank.inputs.shape, generator=rng)
        labels = held[torch.arange(steps * batch) % len(held)].view(steps, batch)
        targets = F.one_hot(labels, len(task.classes)).to(torch.float32)
        return Steps(inputs, targets, torch.full((steps,), rate))

    def gist(self) -> Tensors:
        """Return what is sent, as `pieces` says."""
        return {
            "inputs": self.inputs.flatten(0, 1),
            "targets": self.targets.flatten(0, 1),
            "rates": self.rates,
        }


def pieces(task: Task, steps: int, batch: int) -> tuple[Piece, ...]:
    """Return what a client sends."""
    gist = Steps.nothing(task, steps, batch).gist()
    return tuple(Piece(name, tuple(t.shape), "float32") for name, t in gist.items())


def uploads(tensors: Tensors, steps: int, batch: int) -> list[Steps]:
    """Take joined gists apart, one entry for each client."""
    if "rates" not in tensors:
        return []
    inputs, targets = (
        tensors[k].view(-1, steps, batch, *tensors[k].shape[1:]) for k in ("inputs", "targets")
    )
    rates = tensors["rates"].view(-1, steps)
    return [Steps(*parts) for parts in zip(inputs, targets, rates, strict=True)]


def loss_of(task: Task, recipe: Recipe) -> Loss:
    """Return the mean soft cross-entropy -Σ_c y_c log p_c of the recipe's model, by its weights.

    Inputs go through the same public normalisation as those of `_weights.network_of`.
    """
    classes = len(task.classes)
    model = blank_model(recipe.model, task.channels, task.size, classes, recipe.width)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    sizes = [s.numel() for s in shapes.values()]

    def loss(weights: Tensor, inputs: Tensor, targets: Tensor) -> Tensor:
        parts = zip(shapes.items(), torch.split(weights, sizes), strict=True)
        own = {name: part.view(shape) for (name, shape), part in parts}
        logits = torch.func.functional_call(model, own, ((inputs - CENTRE) / SPREAD,))
        entropies: Tensor = -(targets * logits.log_softmax(1)).sum(1)
        return entropies.mean()

    return loss


def replay(loss: Loss, weights: Tensor, steps: Steps, order: Sequence[int]) -> list[Tensor]:
    """Take the steps in this order; return the weights before the first and after each.

    Args:
        loss: of one batch.
        weights: θ_0, ``[P]``.
        steps: batches and rates.
        order: positions in ``steps``; one may be left out, or come several times.
    """
    path = [weights.detach()]
    for s in order:
        before = path[-1].requires_grad_()
        (g,) = torch.autograd.grad(loss(before, steps.inputs[s], steps.targets[s]), before)
        path[-1] = before.detach()
        path.append(path[-1] - steps.rates[s] * g)
    return path


def pull_back(
    loss: Loss, path: Sequence[Tensor], steps: Steps, order: Sequence[int], cotangent: Tensor
) -> Steps:
    """Return the gradient of L with respect to the steps' data and rates.

    Args:
        loss: as in `replay`.
        path: what `replay` returned.
        steps: as in `replay`.
        order: as in `replay`.
        cotangent: ∂L/∂θ at the end of the path, ``[P]``.
    """
    out = Steps(*(torch.zeros_like(t) for t in (steps.inputs, steps.targets, steps.rates)))
    for s, before in reversed(list(zip(order, path, strict=False))):
        free = [t.detach().requires_grad_() for t in (before, steps.inputs[s], steps.targets[s])]
        (g,) = torch.autograd.grad(loss(*free), free[0], create_graph=True)
        out.rates[s] -= cotangent @ g.detach()
        pulled = torch.autograd.grad(g, free, -steps.rates[s] * cotangent)
        cotangent = cotangent + pulled[0]
        out.inputs[s] += pulled[1]
        out.targets[s] += pulled[2]
    return out


class Learner:
    """Steps that are moved by Adam: inputs, targets, and the logarithms of the rates."""

    def __init__(self, steps: Steps, lr: float, iterations: int) -> None:
        """Begin at ``steps``, rates > 0; ``lr`` falls to 0 along a cosine over ``iterations``."""
        self._free = [steps.inputs.clone(), steps.targets.clone(), steps.rates.log()]
        self._optimiser = torch.optim.Adam(self._free, lr)
        self._lr, self._iterations, self._done = lr, iterations, 0

    @property
    def steps(self) -> Steps:
        """The steps as they are now."""
        return Steps(self._free[0], self._free[1], self._free[2].exp())

    def move(self, gradient: Steps) -> None:
        """Move against what `pull_back` returned."""
        rate = self._lr * (1 + math.cos(math.pi * self._done / self._iterations)) / 2
        self._done += 1
        self._optimiser.param_groups[0]["lr"] = rate
        along = gradient.inputs, gradient.targets, gradient.rates * self.steps.rates
        for free, grad in zip(self._free, along, strict=True):
            free.grad = grad
        self._optimiser.step()


def learned(
    loss: Loss,
    begun: Steps,
    aim: Aim,
    draw: Callable[[], tuple[Tensor, Sequence[int]]],
    *,
    lr: float,
    iterations: int,
) -> Steps:
    """Move steps so that they lead to where L is small.

    Args:
        loss: what the steps descend.
        begun: where to begin.
        aim: the gradient of L.
        draw: an iteration's first weights, and the order of its steps.
        lr: of `Learner`.
        iterations: of `Learner`.

    Raises:
        ConfigError: NaN or Inf on the way.
    """
    learner = Learner(begun, lr, iterations)
    for _ in range(iterations):
        start, order = draw()
        steps = learner.steps
        path = replay(loss, start, steps, order)
        cotangent = aim(steady(path[-1]))
        learner.move(pull_back(loss, path, steps, order, steady(cotangent)))
    return learner.steps


def fit_of(loss: Loss, images: Images, many: int, rng: torch.Generator) -> Aim:
    """Return the aim of fitting real images, ``many`` at a time, drawn anew for every call."""

    def aim(weights: Tensor) -> Tensor:
        rows = torch.randint(len(images), (min(many, len(images)),), generator=rng)
        truth = F.one_hot(images.labels[rows], len(images.classes)).to(torch.float32)
        end = weights.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(loss(end, images.floats(rows), truth), end)
        return gradient

    return aim


def steady(value: Tensor) -> Tensor:
    """Return ``value`` as it is.

    Raises:
        ConfigError: NaN or Inf in it.
    """
    if not bool(value.isfinite().all()):
        raise ConfigError(
            "steps on synthetic data must stay finite. Got NaN or Inf: use a smaller method.rate "
            "or method.lr"
        )
    return value
