"""`DctCodec`: the cosines of lowest frequency; a codec that has seen no data at all.

Principal components of natural images are nearly cosines, and their variance falls as 1 / (1 + f²)
with the frequency f (Field, "Relations between the statistics of natural images and the response
properties of cortical cells", JOSA A 1987). So a codec can be written down: orthonormal cosines
(DCT-II) of grey and of two colour differences, those of highest variance under that law. What
`PublicCodes` measures elsewhere follows from the law here, not from images.
"""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import final

import torch
from torch import Tensor

from fedgist.encoders import files
from fedgist.encoders.base import GRID, QUANTILES, TILTS, PublicCodes
from fedgist.encoders.pca import PcaCodec
from fedgist.errors import EncoderError

__all__ = ["DctCodec", "cosines"]

DIM = 128
COLOURS = ((1, 1, 1), (1, 0, -1), (1, -2, 1))  # grey, and two differences orthogonal to it
CHROMA = 0.06  # variance of a colour difference over grey's
PIXEL = 0.1  # variance of a pixel about mid-grey, of which the kept cosines have all
BITS = 16  # of the weights


@final
class DctCodec(PcaCodec):
    """A linear codec as `PcaCodec`, exact in the same way, with cosines for components."""

    def __init__(self, dim: int = DIM, name: str = "dct") -> None:
        """Write the codec down.

        Args:
            dim: how many cosines.
            name: as written in the task.

        Raises:
            EncoderError: fewer than 1 or more than the pixels hold.
        """
        if not 1 <= dim <= 3 * self.size**2:
            raise EncoderError(f"dct must keep 1 to {3 * self.size**2} cosines. Got {dim}")
        basis, variance = _cosines(self.size, dim)
        bits = BITS - 1 - math.ceil(math.log2(float(basis.abs().max())))
        weights = (basis * 2**bits).round().clamp(-(2**15) + 1, 2**15 - 1).to(torch.int16)
        mean = torch.full((3 * self.size**2,), GRID // 2, dtype=torch.int32)
        file = files.CodecFile(
            "dct",
            {"bits": bits, "trained_on": "no public data"},
            {"weights": weights, "mean": mean} | files.public_tensors(_public(variance)),
            files.tensors_digest({"weights": weights}),
        )
        super().__init__(file, name)

    @staticmethod
    def of(dim: str, name: str) -> DctCodec:
        """Build the codec that a task calls ``dct`` or ``dct:D``.

        Raises:
            EncoderError: D is not a whole number, or does not fit.
        """
        if dim and not dim.isdecimal():
            raise EncoderError(
                f"dct must be followed by a number of cosines, as in dct:64. Got '{name}'"
            )
        return DctCodec(int(dim) if dim else DIM, name)


def cosines(side: int, places: Tensor) -> Tensor:
    """Return orthonormal two-dimensional cosines (DCT-II), float64 ``[k, side, side]``.

    Args:
        side: pixels of a row and of a column.
        places: int64 ``[k]``: ``side`` times the frequency down, plus that across.
    """
    k = torch.arange(side, dtype=torch.float64)
    one = torch.cos(math.pi * (k + 0.5) * k[:, None] / side) * math.sqrt(2 / side)
    one[0] /= math.sqrt(2)
    return one[places // side][:, :, None] * one[places % side][:, None, :]


def _cosines(side: int, dim: int) -> tuple[Tensor, Tensor]:
    """Return the cosines of highest variance ``[dim, 3 side²]`` and those variances ``[dim]``."""
    k = torch.arange(side, dtype=torch.float64)
    falling = (1 / (1 + k[:, None] ** 2 + k**2)).flatten()
    power = torch.stack([falling, CHROMA * falling, CHROMA * falling]).flatten()
    order = power.sort(descending=True, stable=True).indices[:dim]
    colours = torch.tensor(COLOURS, dtype=torch.float64)
    colours = colours / colours.norm(dim=1, keepdim=True)
    colour, place = colours[order // side**2], order % side**2
    basis = (colour[:, :, None, None] * cosines(side, place)[:, None]).flatten(1)
    return basis, power[order] * (PIXEL * 3 * side**2) / power[order].sum()


def _public(variance: Tensor) -> PublicCodes:
    """Return the statistics of independent Gaussian codes with these variances."""
    d = len(variance)
    norms = torch.stack([_norms(variance ** (1 - 2 * t)) for t in TILTS])
    eye = torch.eye(d, dtype=torch.float64)
    zero = torch.zeros(d, dtype=torch.float64)
    return PublicCodes(zero, torch.diag(variance), variance, eye, norms, _norms(variance))


def _norms(variance: Tensor) -> Tensor:
    """Return the quantiles of the norm of independent Gaussians, float64 ``[99]``.

    Its square is Σ v_i χ²; of the χ² of the same mean and variance, Wilson and Hilferty (1931).
    """
    mean, square = float(variance.sum()), float(variance.square().sum())
    ninth = 2 * square / (9 * mean**2)
    cubes = [1 - ninth + NormalDist().inv_cdf(q) * math.sqrt(ninth) for q in QUANTILES]
    return torch.tensor([math.sqrt(mean * max(c, 0.0) ** 3) for c in cubes], dtype=torch.float64)
