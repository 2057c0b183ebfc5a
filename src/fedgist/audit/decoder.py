"""A network that learns to undo a compressor: the strongest attack on small uploads that is here.

It is trained on images of the attacker's own, pushed through the compressor, and begins as the mean
image (of each class, where it may see labels). Images are float32 ``[b, c, h, w]`` in [0, 1].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.audit.similarity import Compress
from fedgist.compress import enlarge, quantised
from fedgist.errors import DataError
from fedgist.train.models import initialise
from fedgist.types import BATCH, Images

__all__ = ["Decoder", "mean_images", "train_decoder"]

CELL = 4  # pixels: the decoder works on cells of 4x4, sixteen times less work than on pixels
BLOCKS = 2  # residual blocks of the decoder
FLOOR = 1 / 255  # smallest deviation that an upload's channel is divided by: one grey level


class _Inverse(nn.Module):
    """A linear map of 3x3 cells beside a residual network; both begin at zero."""

    def __init__(self, inputs: int, outputs: int, width: int, classes: int) -> None:
        super().__init__()
        conv = partial(nn.Conv2d, kernel_size=3, padding=1)
        self.linear = conv(inputs * CELL**2, outputs * CELL**2)
        self.stem = conv(inputs * CELL**2, width)
        self.label = nn.Linear(classes, width, bias=False) if classes else None
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.ReLU(), conv(width, width), nn.ReLU(), conv(width, width))
            for _ in range(BLOCKS)
        )
        self.head = conv(width, outputs * CELL**2)

    def initialise(self, rng: torch.Generator) -> None:
        initialise(self, rng)
        for layer in (self.linear, self.head):
            nn.init.zeros_(layer.weight)

    def forward(self, z: Tensor, labels: Tensor | None) -> Tensor:
        """Map ``[b, inputs, s, s]``, s a multiple of the cell, to ``[b, outputs, s, s]``."""
        z = F.pixel_unshuffle(z, CELL)
        x = self.stem(z)
        if self.label is not None:
            assert labels is not None
            x = x + self.label.weight.T[labels][:, :, None, None]
        for block in self.blocks:
            x = x + block(x) / 2
        out: Tensor = F.pixel_shuffle(self.linear(z) + self.head(F.relu(x)), CELL)
        return out


@dataclass(frozen=True, eq=False)
class Decoder:
    """A learned inverse; `train_decoder` makes it.

    Attributes:
        net: maps standardised views to what is added to ``base``.
        mean: ``[1, k, s, s]``, of the upsampled views of the training images.
        std: ``[1, k, 1, 1]``, of each channel of them, at least 1/255.
        base: ``[1 or classes, c, S, S]``: the mean training image, of each class where labels are
            used.
        labelled: whether it sees labels.
    """

    net: nn.Module
    mean: Tensor
    std: Tensor
    base: Tensor
    labelled: bool

    def __call__(self, uploads: Tensor | Sequence[Tensor], labels: Tensor | None = None) -> Tensor:
        """Rebuild images.

        Args:
            uploads: ``[b, c, y, y]``, or one for each compressor it was trained through.
            labels: int64 ``[b]``, when it was trained with labels.

        Returns:
            float32 ``[b, c, S, S]`` in [0, 1].

        Raises:
            DataError: labels left out, or uploads of another number.
        """
        z = _stacked(_several(uploads), self.mean.shape[-1])
        if z.shape[1] != self.mean.shape[1]:
            raise DataError(f"uploads must have {self.mean.shape[1]} channels. Got {z.shape[1]}")
        if (labels is not None) != self.labelled:
            wanted = "given" if self.labelled else "left out"
            raise DataError(f"labels must be {wanted}, as in training. Got the contrary")
        with torch.no_grad():
            at = torch.split(torch.arange(len(z)), BATCH)
            parts = [self.raw(z[i], None if labels is None else labels[i]) for i in at]
        return torch.cat(parts).clamp(0, 1)

    def raw(self, z: Tensor, labels: Tensor | None) -> Tensor:
        """Map stacked views ``[b, k, s, s]`` to images that may leave [0, 1]; differentiable."""
        size = self.base.shape[-1]
        added: Tensor = self.net((z - self.mean) / self.std, labels)[..., :size, :size]
        return added + (self.base if labels is None else self.base[labels])


def train_decoder(
    compress: Compress | Sequence[Compress],
    images: Images,
    rng: torch.Generator,
    steps: int = 1500,
    batch: int = 64,
    width: int = 48,
    lr: float = 2e-3,
    *,
    labelled: bool = False,
    fresh: bool = False,
) -> Decoder:
    """Learn to undo one compressor, or several whose views of an image are seen together.

    The white-box attacker trains through the compressor that made the uploads, one who is late
    through an older one, and the server of several rounds through all of them. Uploads are
    quantised to uint8 in training as they are in use. The loss is MSE + 0.1 L1; Adam, one cycle.
    Holds 4 k S² bytes an image, k channels of all views.

    Args:
        compress: V, or one of each round; need not be differentiable.
        images: the attacker's own, square, of the size and kind of the private ones.
        rng: of weights and batches.
        steps: updates.
        batch: images of an update.
        width: channels of the network.
        lr: highest learning rate.
        labelled: let it see labels too, as the server does.
        fresh: compress every batch anew, for a compressor that draws at random.

    Raises:
        DataError: no images, or images that are not square.
    """
    if not len(images) or images.pixels.shape[2] != images.pixels.shape[3]:
        raise DataError(
            f"a decoder's images must be square, one or more. Got {list(images.pixels.shape)}"
        )
    compressors = _several(compress)
    side = -(-images.pixels.shape[3] // CELL) * CELL
    stacked = _views(compressors, images, side)
    decoder = _begin(stacked, images, width, rng, labelled)
    adam = torch.optim.Adam(decoder.net.parameters(), lr, fused=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(adam, lr, total_steps=max(steps, 1))
    for _ in range(steps):
        at = torch.randint(len(images), (min(batch, len(images)),), generator=rng)
        x, y = images.floats(at), images.labels[at]
        z = _views(compressors, images.take(at), side) if fresh else stacked[at]
        error = decoder.raw(z, y if labelled else None) - x
        loss = error.square().mean() + 0.1 * error.abs().mean()
        adam.zero_grad()
        torch.autograd.backward(loss)
        adam.step()
        schedule.step()
    decoder.net.requires_grad_(False)
    return decoder


def _begin(
    stacked: Tensor, images: Images, width: int, rng: torch.Generator, labelled: bool
) -> Decoder:
    """Return the untrained decoder: it answers with mean images."""
    classes = len(images.classes) if labelled else 0
    with torch.device("meta"):  # layers would otherwise draw from the global generator
        net = _Inverse(stacked.shape[1], images.pixels.shape[1], width, classes)
    net.to_empty(device="cpu").initialise(rng)
    mean = stacked.mean(0, keepdim=True)
    std = (stacked - mean).square().mean((0, 2, 3), keepdim=True).sqrt().clamp(min=FLOOR)
    return Decoder(net, mean, std, mean_images(images, classes), labelled)


def mean_images(images: Images, classes: int) -> Tensor:
    """Return the mean image, ``[1, c, h, w]``, or that of each class, float32 ``[C, c, h, w]``."""
    total = torch.zeros(max(classes, 1), *images.pixels.shape[1:])
    for x, y in images.batches():
        total.index_add_(0, y if classes else torch.zeros_like(y), x)
    overall = total.sum(0, keepdim=True) / len(images)
    if not classes:
        return overall
    counts = images.counts()[:, None, None, None]
    return torch.where(counts > 0, total / counts.clamp(min=1), overall)


def _several(x: Any) -> list[Any]:
    return list(x) if isinstance(x, Sequence) else [x]


def _stacked(uploads: Sequence[Tensor], side: int) -> Tensor:
    return torch.cat([enlarge(u, side) for u in uploads], 1)


def _views(compressors: Sequence[Compress], images: Images, side: int) -> Tensor:
    """Compress images as clients do: float32 ``[n, k, side, side]``, views side by side."""
    with torch.no_grad():
        parts = [[quantised(v(x)) for v in compressors] for x, _ in images.batches()]
        return torch.cat([_stacked(part, side) for part in parts])
