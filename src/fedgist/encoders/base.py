"""The encoder interface: a frozen public map from images to codes, and what is public about it.

An encoder's rows must not depend on the batch they came in: the integer sums of a client are
exact only if each record's code is the same in every batch, at every site. `PcaCodec` is exact by
integer arithmetic; networks are always run at one fixed batch shape (`encode_task`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.errors import ConfigError, EncoderError
from fedgist.types import BATCH

__all__ = ["GRID", "TILTS", "Encoder", "PublicCodes", "Whitening", "prepare", "restore"]

INTEGERS = 2.0**26  # norm of integer codes and columns: their products stay below 2^53
GRID = 65_535  # pixels are k / 65535: holds 8-bit and 16-bit images exactly
TAP = 2**14  # resizing weights are multiples of 1 / TAP, so that resizing is exact in float64
TILTS = (0.0, 0.25, 0.5)  # whitening exponents t whose public norms an encoder file carries
QUANTILES = tuple(i / 100 for i in range(1, 100))


@dataclass(frozen=True)
class PublicCodes:
    """What is public about an encoder's codes, measured once on public images.

    Attributes:
        mean: float64 ``[d]``.
        cov: float64 ``[d, d]``.
        values, vectors: float64 ``[d]`` and ``[d, d]``, its eigenvalues and eigenvectors (in
            columns). Kept in the file: signs and order of eigenvectors are free, and every site
            must use the same.
        norms: float64 ``[3, 99]``: the 1 % .. 99 % quantiles of the L2 norm of centred codes
            whitened with each t of ``TILTS``.
        raw_norms: float64 ``[99]``: the same for codes as they are (not centred, not whitened).
    """

    mean: Tensor
    cov: Tensor
    values: Tensor
    vectors: Tensor
    norms: Tensor
    raw_norms: Tensor

    @staticmethod
    def of(codes: Tensor) -> PublicCodes:
        """Measure float64 ``[n, d]`` codes of public images."""
        mean = codes.mean(0)
        cov = torch.cov(codes.T)
        q = torch.tensor(QUANTILES, dtype=torch.float64)
        values, vectors = torch.linalg.eigh(cov)
        values = values.clamp(min=float(values.max()) * 1e-9)
        vectors = vectors * vectors.gather(0, vectors.abs().argmax(0, keepdim=True)).sign()
        blank = PublicCodes(mean, cov, values, vectors, torch.empty(0), torch.empty(0))
        norms = [torch.quantile(Whitening(blank, t).forward(codes).norm(dim=1), q) for t in TILTS]
        raw = torch.quantile(codes.norm(dim=1), q)
        return PublicCodes(mean, cov, values, vectors, torch.stack(norms), raw)


class Whitening:
    """Public centring and partial whitening z' = diag(l^-t) Vᵀ (z - mean), Σ_pub = V diag(l) Vᵀ.

    t = 1/4 minimises the noise's error in code space, t = 1/2 its error in whitened space.
    ``None`` leaves codes as they are (the published mechanism).
    """

    def __init__(self, public: PublicCodes, t: float | None) -> None:
        if t is not None and t not in TILTS:
            raise ConfigError(f"whitening must be one of {list(TILTS)}. Got {t}")
        self.t = t
        if t is None:
            self._mean = torch.zeros_like(public.mean)
            forward = self._backward = torch.eye(len(public.mean), dtype=torch.float64)
            self._norms = public.raw_norms
        else:
            self._mean = public.mean
            forward = public.vectors * public.values**-t  # [d, d]: z' = (z - mean) @ forward
            self._backward = (public.vectors * public.values**t).T
            self._norms = public.norms[TILTS.index(t)] if len(public.norms) else public.norms
        size = float(torch.trace(public.cov) + public.mean.square().sum()) ** 0.5 or 1.0
        self._grid = INTEGERS / (32 * size)
        columns = INTEGERS / forward.norm(dim=0) / 2  # half: rounding may lengthen a column
        self._integers = (forward * columns).round()
        self._unit = 1 / (self._grid * columns)

    def forward(self, z: Tensor) -> Tensor:
        """Map float64 codes ``[n, d]`` to centred, whitened codes.

        Codes become integers of norm at most 2^26 and the columns of the matrix integers of norm
        at most 2^26, so that by Cauchy and Schwarz every partial sum stays below 2^53, where
        float64 is exact: a row is the same in any batch. A code further out than 32 times the
        norm of the public mean and spread is drawn in to that.
        """
        k = ((z - self._mean) * self._grid).round_()
        over = torch.linalg.vecdot(k, k) > INTEGERS**2
        if bool(over.any()):
            far = k[over]
            k[over] = (far * ((INTEGERS - len(far.T)) / far.norm(dim=1, keepdim=True))).trunc()
        out: Tensor = (k @ self._integers) * self._unit
        return out

    def backward(self, z: Tensor) -> Tensor:
        """Undo `forward`."""
        return z @ self._backward + self._mean

    def radius(self, quantile: float) -> float:
        """Return the public ``quantile`` (0.01 .. 0.99) of the norm of whitened codes."""
        i = round(quantile * 100) - 1
        if not 0 <= i < len(QUANTILES) or abs(quantile * 100 - i - 1) > 1e-6:
            raise ConfigError(f"clip_quantile must be one of 0.01, 0.02 .. 0.99. Got {quantile}")
        return float(self._norms[i])


class Encoder(ABC):
    """A frozen public encoder; a codec also decodes.

    Attributes:
        name: as written in the task.
        dim: code dimension d.
        size: height and width of the RGB images that go in, in pixels.
        decodes: whether `decode` works.
        exact: whether rows are independent of the batch by construction.
        step: images per call of `encode` when it is not exact.
        track: which data made it: ``no public data``, ``public images``, ``public ImageNet``, or
            ``private images``, which no claim covers and a site's policy refuses.
        digest: SHA-256 of the weights, hex.
        public: statistics of its codes on public images.
    """

    name: str
    dim: int
    digest: str
    public: PublicCodes
    size: ClassVar[int] = 64
    decodes: ClassVar[bool] = True
    track: str = "public images"
    exact: ClassVar[bool] = False  # True: rows are independent of the batch by construction
    step: ClassVar[int] = BATCH

    @abstractmethod
    def encode(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, 3, size, size]`` in [0, 1] to float64 ``[b, dim]``.

        Row i depends on image i only. A grey image may come as an expanded view (stride 0 over
        channels), which an encoder may use to save work as long as the codes are the same.
        """

    def decode(self, z: Tensor) -> Tensor:
        """Map ``[b, dim]`` to float32 ``[b, 3, size, size]`` in [0, 1].

        Raises:
            EncoderError: it is no codec; codecs override this.
        """
        raise EncoderError(
            f"an encoder that decodes must be a codec. Got '{self.name}', which must not be asked "
            "to decode: take a codec to decode, such as 'pca'"
        )

    def encode_task(self, x: Tensor) -> Tensor:
        """Encode images in the task's format: float32 ``[b, c, h, w]``, any b up to `BATCH`.

        Runs in batches of exactly ``step`` images unless the encoder is exact, and refuses codes
        that are not finite.
        """
        n = len(x)
        if n > BATCH:
            raise ValueError(f"a batch must hold at most {BATCH} images. Got {n}")
        batches = (x,) if self.exact else (_pad(b, self.step) for b in torch.split(x, self.step))
        z = torch.cat([self.encode(prepare(b, self.size)) for b in batches])[:n]
        if not math.isfinite(float(z.sum())) and not bool(torch.isfinite(z).all()):
            bad = int((~torch.isfinite(z)).any(1).sum())
            raise EncoderError(
                f"codes of encoder '{self.name}' must be finite. Got {bad} of {n} with NaN or Inf: "
                "check its weights and its precision (use float32)"
            )
        return z


def _pad(x: Tensor, rows: int) -> Tensor:
    """Fill up to ``rows``, so that a network meets one shape only."""
    if len(x) == rows:
        return x
    return torch.cat([x, x.new_zeros(rows - len(x), *x.shape[1:])])


def prepare(x: Tensor, size: int) -> Tensor:
    """Turn task images ``[b, c, h, w]`` in [0, 1] into what encoders take.

    Returns float32 ``[b, 3, size, size]``, bilinear (triangle-filtered when shrinking, half-pixel
    centres), on the grid k/65535. Grey images are an expanded view over the channels. The
    arithmetic is exact (k has 16 bits, two weights 28: float64 holds 53), so a pixel is the same
    in any batch on any machine.
    """
    b, c, h, w = x.shape
    k = x.clamp(0, 1).mul_(GRID).round_()
    if (h, w) != (size, size):
        k = torch.matmul(_taps(h, size), k.to(torch.float64).reshape(b * c, h, w))
        k = (k.view(-1, w) @ _taps(w, size).T).round_()
    k = k.to(torch.float32).div_(GRID).view(b, c, size, size)
    return k.expand(-1, 3, -1, -1) if c == 1 else k


@lru_cache(maxsize=64)
def _taps(n: int, size: int) -> Tensor:
    """Return float64 ``[size, n]``: weights of n pixels in each of ``size``, multiples of 1/TAP."""
    support = max(1.0, n / size)
    centre = (torch.arange(size, dtype=torch.float64) + 0.5) * (n / size) - 0.5
    pixels = torch.arange(n, dtype=torch.float64)
    w = (1 - (pixels - centre[:, None]).abs() / support).clamp(min=0)
    w = (w * (TAP / w.sum(1, keepdim=True))).round()
    w[torch.arange(size), w.argmax(1)] += TAP - w.sum(1)  # a constant image stays constant
    return w / TAP


def restore(y: Tensor, channels: int, size: int) -> Tensor:
    """Turn decoded float32 ``[b, 3, s, s]`` into task images ``[b, channels, size, size]``."""
    if channels == 1:
        y = y.mean(1, keepdim=True)
    if y.shape[-1] != size:
        shrink = y.shape[-1] > size
        y = F.interpolate(y, (size, size), mode="bilinear", align_corners=False, antialias=shrink)
    return y.clamp(0, 1)
