"""Code lengths: how few bits a payload could take, by its own numbers alone.

What is sent over what a code would need. Which code depends on what is known of the numbers:

* **Noised integers** (`noise_bits`). A sum that carries noise of a public scale s cannot be sent in
  fewer bits than the noise itself: H(S + N) >= H(S + N | S) = H(N), and H(N_Z(0, s²)) is
  log2(s √(2πe)) to within 1e-10 from s = 2 on. A lower bound: the ratio errs upwards.
* **Exact integers** (sums under trust ``central``, labels). At most 256 distinct values, each seen
  four times on average: their zeroth-order entropy. Else a magnitude code as in JPEG: the
  zeroth-order entropy of (sign, bit length), then the bits below the leading one as they are. It is
  a real code that follows mixed scales, as of the diagonal and the rest of second moments.
* **Pixels** (uint8): the zeroth-order entropy of the bytes. Neighbours are not used, so a picture
  codec may need less.
* **float32** (weights, updates): the zeroth-order entropies of the four bytes by place. Signs and
  exponents cost what they vary, mantissas nearly all they have.

Entropies of samples are too small by (k - 1)/2n nats for k symbols seen in n numbers; that is added
(Miller, "Note on the bias of information estimates", 1955), up to log2 k.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["entropy", "noise_bits", "value_bits"]

DISTINCT = 256  # values of a table that is worth its own room
SEEN = 4  # how often each of them is seen, on average


def entropy(symbols: NDArray[np.generic]) -> float:
    """Return the zeroth-order entropy of symbols ``[n]`` in bits each; 0.0 of none."""
    if not symbols.size:
        return 0.0
    counts = np.unique(symbols, return_counts=True)[1]
    p = counts / counts.sum()
    missed = (len(counts) - 1) / (2 * symbols.size * math.log(2))
    return min(float(-(p * np.log2(p)).sum()) + missed, math.log2(len(counts)))


def value_bits(values: Tensor) -> float:
    """Return how many bits numbers without known noise need in all.

    Args:
        values: uint8, int64 or float32, any shape; integers below 2^53 in size.
    """
    flat = np.ascontiguousarray(values.detach().reshape(-1).numpy())
    if values.dtype == torch.uint8:
        return flat.size * entropy(flat)
    if values.dtype.is_floating_point:
        planes = flat.view(np.uint8).reshape(-1, flat.itemsize)
        return flat.size * sum(entropy(plane) for plane in planes.T)
    if len(np.unique(flat)) <= min(DISTINCT, flat.size // SEEN):
        return flat.size * entropy(flat)
    length = np.frexp(np.abs(flat).astype(np.float64))[1]  # bits of |v|: exact below 2^53
    return flat.size * entropy(np.sign(flat) * length) + float(np.maximum(length - 1, 0).sum())


def noise_bits(scale: float) -> float:
    """Return the entropy in bits of the discrete Gaussian N_Z(0, ``scale``²)."""
    if scale <= 0:
        return 0.0
    if scale >= 2:
        return math.log2(scale * math.sqrt(2 * math.pi * math.e))
    k = np.arange(-40, 41)
    p = np.exp(-0.5 * (k / scale) ** 2)
    p = p[p > 1e-200] / p.sum()
    return float(-(p * np.log2(p)).sum())
