"""Project a feature network's output onto leading principal directions of public images.

The directions are nested: the first d of them are the code of dimension d, for every d of ``DIMS``
that the file's D covers. Features are rounded to integers |k| <= 2^24, directions are int16, and a
code is (Σ w·k - Σ w·mean) / unit: every partial sum is an integer below 2^53, where float64
addition has no rounding. So equal features give equal codes, in any batch and on any machine.

Along principal directions public codes are uncorrelated; what is left after rounding is far below
the smallest variance kept, so the public covariance is given as its diagonal. That is what makes
one small file serve every d.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import final

import torch
from torch import Tensor

from fedgist.encoders import files
from fedgist.encoders.base import QUANTILES, TILTS, PublicCodes, Whitening
from fedgist.encoders.public import blank
from fedgist.errors import EncoderError
from fedgist.types import Tensors

__all__ = ["DIMS", "Projection", "write_projection"]

DIMS = (32, 64, 96, 128, 192, 256, 384, 512)
TOP = 2**24  # largest feature integer: the precision of float32
ROOM = 8  # how far beyond the largest public feature a feature may lie before it is cut
EXACT = 2.0**53  # integers up to here are float64 numbers, and so are their sums
BLOCK = 1000  # feature rows per step of the fit


@final
class Projection:
    """Features ``[b, features]`` to codes ``[b, dim]``, exact, with their public statistics.

    Attributes:
        dim: code dimension d.
        features: number of features that go in.
        public: statistics of the codes on public images, with a diagonal covariance.
    """

    def __init__(self, file: files.CodecFile, dim: int | None, name: str) -> None:
        """Take the first ``dim`` directions of a file that `write_projection` wrote.

        Args:
            file: the file, read.
            dim: one of ``DIMS`` that the file has; None takes them all.
            name: what error messages call the encoder.

        Raises:
            EncoderError: the file has no such dimension, its tensors do not fit, or they are too
                large for exact arithmetic.
        """
        w, mean, norms = (file.tensors.get(k) for k in ("weights", "mean", "norms"))
        bits = file.meta.get("bits")
        if w is None or w.dtype != torch.int16 or w.ndim != 2 or type(bits) is not int:
            raise EncoderError(f"weights and bits of '{name}' must be int16 [D, F] and an integer")
        most, self.features = w.shape
        dims = [d for d in DIMS if d <= most]
        shapes = (self.features,), (len(dims), len(TILTS) + 1, len(QUANTILES))
        got = tuple(None if t is None else tuple(t.shape) for t in (mean, norms))
        if mean is None or norms is None or got != shapes or most not in dims:
            raise EncoderError(
                f"mean and norms of '{name}' must have shapes {shapes} and D be one of {DIMS}. "
                f"Got {got} and {most}"
            )
        self.dim = most if dim is None else dim
        if self.dim not in dims:
            raise EncoderError(f"the dimension of '{name}' must be one of {dims}. Got {dim}")
        weights = w[: self.dim].to(torch.float64)
        bound = 2 * TOP * float(weights.abs().sum(1).max())
        if bound >= EXACT or not bool((mean.abs() <= TOP).all()):
            raise EncoderError(
                f"sums of '{name}' must stay below 2^53 and its mean in "
                f"-2^24..2^24. Got {bound:.3g}"
            )
        self._scale = 2.0**bits
        self._weights = weights.T.contiguous()  # [features, dim]
        self._offset = mean.to(torch.float64) @ self._weights
        self._unit = weights.norm(dim=1) * self._scale
        self.public = _nested(files.public_of(file, most, name), norms, dims.index(self.dim), dims)

    def __call__(self, f: Tensor) -> Tensor:
        """Map float ``[b, features]`` to float64 ``[b, dim]``."""
        k = f.to(torch.float64).mul(self._scale).round_().clamp_(-TOP, TOP)
        return (k @ self._weights).sub_(self._offset).div_(self._unit)


def write_projection(
    path: Path, kind: str, features: Tensor, dim: int, **meta: object
) -> tuple[files.CodecFile, float]:
    """Fit the leading directions of public features and write them with their statistics.

    Args:
        path: the ``.safetensors`` file to write.
        kind: which encoder reads it.
        features: float32 ``[n, features]`` of public images, n > dim.
        dim: the largest code dimension D, one of ``DIMS``.
        meta: further entries of the file's JSON object.

    Returns:
        The file, and the share of the features' variance that D directions keep.
    """
    centre, directions, explained = _leading(features, dim)
    top = float(features.abs().max())
    bits = math.floor(math.log2(TOP / (ROOM * top)))
    # each direction has its own scale: rounding it to int16 costs the least
    w = (directions * (32_767 / directions.abs().amax(1, keepdim=True))).round().to(torch.int16)
    dims = [d for d in DIMS if d <= dim]
    tensors: Tensors = {
        "weights": w,
        "mean": (centre * 2.0**bits).round().to(torch.int32),
        "norms": torch.zeros(len(dims), len(TILTS) + 1, len(QUANTILES), dtype=torch.float64),
    }
    draft = files.write(path, kind, tensors, _thin(blank(dim)), bits=bits, **meta)
    project = Projection(draft, dim, kind)
    codes = torch.cat([project(f) for f in torch.split(features, BLOCK)])
    public = _diagonal(codes)
    tensors["norms"] = torch.stack([_norms(public, codes, d) for d in dims])
    public = _nested(public, tensors["norms"], len(dims) - 1, dims)
    return files.write(path, kind, tensors, _thin(public), bits=bits, **meta), explained


def _leading(features: Tensor, dim: int) -> tuple[Tensor, Tensor, float]:
    """Return the mean, ``[dim, features]`` leading eigenvectors and their share of the variance."""
    mean = features.mean(0, dtype=torch.float64)
    cov = torch.zeros(len(mean), len(mean), dtype=torch.float64)
    for block in torch.split(features, BLOCK):
        x = block.to(torch.float64) - mean
        cov.addmm_(x.T, x)
    values, vectors = torch.linalg.eigh(cov)
    top = vectors.flip(1)[:, :dim].T
    top = top * top.gather(1, top.abs().argmax(1, keepdim=True)).sign()  # a sign is free: fix it
    return mean, top, float(values.flip(0)[:dim].sum() / values.sum())


def _diagonal(codes: Tensor) -> PublicCodes:
    """Measure mean and variances; the covariance is taken as diagonal."""
    values = codes.var(0)
    eye = torch.eye(codes.shape[1], dtype=torch.float64)
    return PublicCodes(codes.mean(0), eye * values, values, eye, torch.empty(0), torch.empty(0))


def _norms(public: PublicCodes, codes: Tensor, d: int) -> Tensor:
    """Return float64 ``[4, 99]``: quantiles of the norms of d-dimensional codes.

    One row for each whitening exponent, the last for codes as they are.
    """
    q = torch.tensor(QUANTILES, dtype=torch.float64)
    some, z = _cut(public, d), codes[:, :d]
    rows = [Whitening(some, t).forward(z).norm(dim=1) for t in TILTS] + [z.norm(dim=1)]
    return torch.stack([torch.quantile(r, q) for r in rows])


def _nested(public: PublicCodes, norms: Tensor, index: int, dims: list[int]) -> PublicCodes:
    """Return the statistics of the first ``dims[index]`` codes."""
    p, table = _cut(public, dims[index]), norms[index].to(torch.float64)
    return PublicCodes(p.mean, p.cov, p.values, p.vectors, table[:-1], table[-1])


def _cut(p: PublicCodes, d: int) -> PublicCodes:
    values = p.values[:d]
    eye = torch.eye(d, dtype=torch.float64)
    return PublicCodes(p.mean[:d], eye * values, values, eye, p.norms, p.raw_norms)


def _thin(p: PublicCodes) -> PublicCodes:
    """Store the two diagonal matrices in few bytes; `_cut` makes them anew from the values."""
    return PublicCodes(
        p.mean, p.cov.to(torch.float32), p.values, p.vectors.to(torch.uint8), p.norms, p.raw_norms
    )
