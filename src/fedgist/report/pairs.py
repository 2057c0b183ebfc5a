"""Images beside what was made of each: how alike they are."""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.audit.similarity import psnr, ssim
from fedgist.compress import enlarge
from fedgist.types import BATCH, Images

__all__ = ["Pairs"]


class Pairs:
    """Images beside their uploads, enlarged: PSNR and SSIM of all, pixels of some."""

    def __init__(self, images: Images, pixels: Tensor, rows: Tensor) -> None:
        self.rows, self._originals, self._pixels = rows, images, pixels
        parts = [self.take(i) for i in torch.split(torch.arange(len(rows)), BATCH)]
        with torch.no_grad():
            self.psnr = torch.cat([psnr(a, b) for a, b in parts if len(a)] or [torch.empty(0)])
            self.ssim = torch.cat([ssim(a, b) for a, b in parts if len(a)] or [torch.empty(0)])

    def take(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Return float32 ``[b, c, h, w]`` in [0, 1]: images, and their uploads enlarged."""
        real = self._originals.floats(self.rows[which])
        return real, enlarge(_floats(self._pixels[which]), real.shape[-1])


def _floats(x: Tensor) -> Tensor:
    return x.to(torch.float32) / 255 if x.dtype == torch.uint8 else x.to(torch.float32)
