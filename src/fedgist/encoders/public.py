"""Measuring and keeping what is public about an encoder's codes."""

from __future__ import annotations

from pathlib import Path

import torch

from fedgist.encoders import files
from fedgist.encoders.base import QUANTILES, TILTS, Encoder, PublicCodes
from fedgist.errors import DataError
from fedgist.types import BATCH

__all__ = ["blank", "load_public", "measure_public", "save_public"]

KIND = "public"


def blank(dim: int) -> PublicCodes:
    """Return zeros: what an encoder carries only while its codes are being measured."""
    square, table = torch.eye(dim, dtype=torch.float64), (len(TILTS), len(QUANTILES))
    norms = torch.zeros(table, dtype=torch.float64)
    return PublicCodes(square[0] * 0, square, square[0] * 0 + 1, square, norms, norms[0])


def measure_public(encoder: Encoder, pixels: torch.Tensor) -> PublicCodes:
    """Encode public images and measure the codes.

    Args:
        encoder: `encode_task` is all that is used of it.
        pixels: uint8 ``[n, 1 or 3, h, w]``, n at least 2. Never private: what is measured here is
            shipped with the encoder.

    Raises:
        DataError: fewer than two images.
        EncoderError: a code is not finite.
    """
    if len(pixels) < 2:
        raise DataError(f"public images must be at least 2. Got {len(pixels)}")
    with torch.no_grad():
        codes = [
            encoder.encode_task(pixels[i : i + BATCH].to(torch.float32).div_(255))
            for i in range(0, len(pixels), BATCH)
        ]
    return PublicCodes.of(torch.cat(codes))


def save_public(public: PublicCodes, path: Path, encoder: str) -> None:
    """Write statistics to a file of their own; ``encoder`` is the hash of the weights measured."""
    files.write(path, KIND, {}, public, encoder=encoder)


def load_public(path: Path, dim: int) -> tuple[PublicCodes, str]:
    """Read what `save_public` wrote: the statistics and the hash of the weights measured."""
    file = files.read(path)
    return files.public_of(file, dim, str(path)), str(file.meta.get("encoder"))
