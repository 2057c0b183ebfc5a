"""Per-record gradients Jᵀv of a matching loss with respect to synthetic images, three ways.

J_c, the Jacobian of the mean features of class c at its synthetic images, is the same for all
records of the class: the loss is linear in a record's features but for a term that does not depend
on the images. So no record needs a backward pass through its own image. The three functions give
the same rows; they differ in speed and memory (`benchmarks/record_gradients.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

__all__ = ["Gradients", "by_copies", "by_jacobian", "by_vmap"]

Means = Callable[[Tensor, Tensor], Tensor]  # ([k, tiles, c, h, w], classes [k]) -> [k, F]
Gradients = Callable[[Means, Tensor, Tensor, Tensor], Tensor]
COPIES = 16  # records whose copies of the synthetic images go through the network at once


def by_copies(means: Means, free: Tensor, labels: Tensor, cotangents: Tensor) -> Tensor:
    """Give every record a copy of its class's images; one forward and one backward pass for all.

    Args:
        means: mean features of each row of free images.
        free: float32 ``[C, tiles, channels, h, w]``.
        labels: int64 ``[b]``, each record's class.
        cotangents: float32 ``[b, F]``, each record's v.

    Returns:
        float32 ``[b, tiles, channels, h, w]``.
    """
    out = []
    rows = torch.arange(len(labels))
    for part in torch.split(rows, COPIES):
        own = free[labels[part]].requires_grad_()
        (gradient,) = torch.autograd.grad(means(own, labels[part]), own, cotangents[part])
        out.append(gradient)
    return torch.cat(out) if out else free.new_zeros(0, *free.shape[1:])


def by_vmap(means: Means, free: Tensor, labels: Tensor, cotangents: Tensor) -> Tensor:
    """As `by_copies`: one forward pass for each class, ``vmap`` of its vjp over the records."""
    out = free.new_zeros(len(labels), *free.shape[1:])
    for c in sorted(set(labels.tolist())):
        rows = (labels == c).nonzero()[:, 0]
        _, pull = torch.func.vjp(lambda f, y=labels[rows[:1]]: means(f[None], y)[0], free[c])  # type: ignore[misc]
        (out[rows],) = torch.vmap(pull, chunk_size=COPIES)(cotangents[rows])
    return out


def by_jacobian(means: Means, free: Tensor, labels: Tensor, cotangents: Tensor) -> Tensor:
    """As `by_copies`, from the Jacobian of each class: pays for more records than features."""
    out = free.new_zeros(len(labels), *free.shape[1:])
    basis = torch.eye(cotangents.shape[1], dtype=free.dtype)
    for c in sorted(set(labels.tolist())):
        rows = (labels == c).nonzero()[:, 0]
        only = torch.full((len(basis),), c)
        jacobian = by_copies(means, free, only, basis)
        out[rows] = (cotangents[rows] @ jacobian.flatten(1)).view(-1, *free.shape[1:])
    return out
