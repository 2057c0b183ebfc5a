"""Sample a Gaussian per class, decode: images that all may share (FedKT-CSD)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.encoders.base import restore
from fedgist.heads.estimate import ClassMoments
from fedgist.heads.linear import CodeSpace
from fedgist.types import BATCH, Images, Task

__all__ = ["decode", "sample_codes", "through_codec"]


def sample_codes(
    m: ClassMoments, covs: Tensor, sizes: Tensor, rng: torch.Generator
) -> tuple[Tensor, Tensor]:
    """Draw codes from N(mean_c, covs_c).

    Args:
        m: the estimates.
        covs: float64 ``[C, d, d]``, positive definite.
        sizes: int64 ``[C]``, how many of each class.
        rng: source of the draws.

    Returns:
        float64 ``[n, d]`` and int64 labels ``[n]``, by class.
    """
    codes = []
    for c, n in enumerate(sizes.tolist()):
        root = torch.linalg.cholesky(covs[c])
        xi = torch.randn(n, m.dim, generator=rng, dtype=torch.float64)
        codes.append(m.mean[c] + xi @ root.T)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), sizes)
    return torch.cat(codes), labels


def decode(codes: Tensor, labels: Tensor, space: CodeSpace, task: Task) -> Images:
    """Decode whitened codes to uint8 images in the task's format."""
    out = torch.empty(len(codes), task.channels, task.size, task.size, dtype=torch.uint8)
    for i in range(0, len(codes), BATCH):
        y = restore(space.decode(codes[i : i + BATCH]), task.channels, task.size)
        out[i : i + BATCH] = (y * 255).round().to(torch.uint8)
    return Images(out, labels, task.classes)


def through_codec(x: Tensor, space: CodeSpace, task: Task) -> Tensor:
    """Pass task images ``[b, c, h, w]`` through the codec: what a synthetic image could show."""
    parts = []
    for part in torch.split(x, BATCH):
        y = restore(space.decode(space.clipped(part)), task.channels, task.size)
        parts.append((y * 255).round() / 255)
    return torch.cat(parts)
