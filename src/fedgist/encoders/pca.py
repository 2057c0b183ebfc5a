"""`PcaCodec`: 128 principal components of public images, computed in exact integers.

Pixels are integers k = 0..65535 (`GRID`), the components integers |w| <= 32767 (their entries
times 2^bits), and a code is (Σ w·k - Σ w·mean) / (2^bits · 65535). Every partial sum is an integer
below 2^53 (checked when a file is loaded; about 2^41 for the shipped one), where float64 addition
has no rounding. So a code is bit-identical in any batch, any order, on any number of threads and
with any BLAS; the one rounding, the last division, concerns a single number.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from fedgist.encoders import files
from fedgist.encoders.base import GRID, Encoder
from fedgist.errors import EncoderError

__all__ = ["PcaCodec"]

KIND = "pca"
EXACT = 2.0**53  # integers up to here are float64 numbers, and so are their sums


class PcaCodec(Encoder):
    """A linear codec with integer weights: encode and decode are one matrix product each."""

    exact: ClassVar[bool] = True

    def __init__(self, file: files.CodecFile, name: str = KIND) -> None:
        """Build from a codec file of kind ``pca``.

        Raises:
            EncoderError: its tensors do not fit, or are too large for exact arithmetic.
        """
        self.name, self.digest, self.track = name, file.digest, file.track
        pixels = 3 * self.size**2
        w, mean, bits = (
            file.tensors.get("weights"),
            file.tensors.get("mean"),
            file.meta.get("bits"),
        )
        if w is None or mean is None or w.dtype != torch.int16 or w.shape[1:] != (pixels,):
            got = None if w is None else f"{w.dtype} {list(w.shape)}"
            raise EncoderError(f"weights of '{name}' must be int16 [dim, {pixels}]. Got {got}")
        if mean.shape != (pixels,) or mean.dtype != torch.int32 or type(bits) is not int:
            raise EncoderError(
                f"mean and bits of '{name}' must be int32 [{pixels}] and an integer. "
                f"Got {mean.dtype} {list(mean.shape)}, {bits!r}"
            )
        self.dim = len(w)
        self.public = files.public_of(file, self.dim, name)
        self._weights = w.to(torch.float64)  # [dim, pixels]
        self._grey = self._weights.view(self.dim, 3, -1).sum(1)
        bound = 2 * GRID * float(self._weights.abs().sum(1).max())
        if bound >= EXACT or not 0 <= int(mean.min()) <= int(mean.max()) <= GRID:
            raise EncoderError(
                f"sums of '{name}' must stay below 2^53 and its mean in 0..{GRID}. "
                f"Got {bound:.3g}, {int(mean.min())}..{int(mean.max())}"
            )
        self._offset = self._weights @ mean.to(torch.float64)
        self._unit = float(2**bits * GRID)
        self._basis = w.to(torch.float32) / 2**bits  # [dim, pixels], orthonormal to 1e-4
        self._mean = mean.to(torch.float32) / GRID

    def encode(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, 3, 64, 64]`` on the grid k/65535 to float64 ``[b, dim]``."""
        grey = x.stride(1) == 0  # one channel seen three times: a third of the work, same integers
        k = (x[:, 0] if grey else x).flatten(1).mul(GRID).round_().to(torch.float64)
        w = self._grey if grey else self._weights
        return (k @ w.T).sub_(self._offset).div_(self._unit)

    def decode(self, z: Tensor) -> Tensor:
        """Map ``[b, dim]`` to float32 ``[b, 3, 64, 64]`` in [0, 1]."""
        y = torch.addmm(self._mean, z.to(torch.float32), self._basis)
        return y.clamp_(0, 1).view(-1, 3, self.size, self.size)
