"""`GistCodec`: FedGist's own convolutional codec, 3x64x64 to 32x2x2 = 128 numbers and back.

A plain residual autoencoder: 4x4 pixels are folded into channels, then blocks of two convolutions
work at 16x16, 8x8, 4x4 and 2x2. No normalisation layers, so a row depends on its own image only.
Trained by `fedgist.encoders.training` on freely licensed public images (``scripts/train_codec.py``,
``fedgist encoder train``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar, final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.encoders import files
from fedgist.encoders.base import Encoder
from fedgist.errors import EncoderError

__all__ = ["GistCodec", "GistNet", "Shape"]

KIND = "gist-ae"
FOLD = 4  # pixels folded into channels on each side
CELLS = 4  # cells of the 2x2 code


@dataclass(frozen=True)
class Shape:
    """Architecture of a `GistNet`.

    Attributes:
        dim: code dimension, a multiple of 4: dim / 4 channels of 2x2.
        widths: channels at 16x16, 8x8, 4x4 and 2x2.
        encoder: residual blocks at each of them.
        decoder: the same on the way back.
    """

    dim: int = 128
    widths: tuple[int, ...] = (48, 96, 144, 192)
    encoder: tuple[int, ...] = (1, 1, 1, 1)
    decoder: tuple[int, ...] = (1, 2, 2, 1)

    def meta(self) -> dict[str, Any]:
        """Return the fields, ready for JSON."""
        return asdict(self)

    @staticmethod
    def of(meta: Mapping[str, Any], source: str) -> Shape:
        """Rebuild from `meta`; EncoderError when it is not one."""
        try:
            levels = {k: tuple(int(n) for n in meta[k]) for k in ("widths", "encoder", "decoder")}
            shape = Shape(int(meta["dim"]), **levels)
        except (KeyError, TypeError, ValueError) as e:
            raise EncoderError(f"the shape of '{source}' must be complete. Got {e!r}") from e
        blocks = shape.encoder + shape.decoder
        numbers = (shape.dim, *shape.widths, *(n + 1 for n in blocks))
        if min(numbers) < 1 or max(numbers) > 4096 or len(numbers) != 13 or shape.dim % CELLS:
            raise EncoderError(f"the shape of '{source}' must be four small levels. Got {meta}")
        return shape


@final
class Conv(nn.Module):
    """A convolution whose weight is a matrix ``[out, in * k * k]``, as the optimiser sees it."""

    def __init__(self, inputs: int, outputs: int, k: int, stride: int = 1) -> None:
        super().__init__()
        self.k, self.stride = k, stride
        self.weight = nn.Parameter(torch.empty(outputs, inputs * k * k))
        self.bias = nn.Parameter(torch.empty(outputs))

    def forward(self, x: Tensor) -> Tensor:
        w = self.weight.view(len(self.weight), -1, self.k, self.k)
        return F.conv2d(x, w, self.bias, self.stride, padding=1 if self.k == 3 else 0)


@final
class Block(nn.Module):
    """x + conv(relu(conv(relu(x)))), whose last convolution starts small."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = Conv(width, width, 3), Conv(width, width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.last(F.relu(self.first(F.relu(x))))
        return out


@final
class GistNet(nn.Module):
    """The autoencoder: ``encode`` float32 ``[b, 3, 64, 64]`` to ``[b, dim]``, ``decode`` back."""

    def __init__(self, shape: Shape) -> None:
        """Build on whatever device is current, without values; see `initialise`."""
        super().__init__()
        pixels, code, w = 3 * FOLD**2, shape.dim // CELLS, shape.widths
        down: list[nn.Module] = [nn.PixelUnshuffle(FOLD), Conv(pixels, w[0], 3)]
        for i, blocks in enumerate(shape.encoder):
            down += [Conv(w[i - 1], w[i], 2, 2)] if i else []
            down += [Block(w[i]) for _ in range(blocks)]
        down += [nn.ReLU(), Conv(w[-1], code, 1), nn.Flatten()]
        up: list[nn.Module] = [nn.Unflatten(1, (code, 2, 2)), Conv(code, w[-1], 1)]
        for i in reversed(range(len(w))):
            up += [Block(w[i]) for _ in range(shape.decoder[i])]
            up += [Conv(w[i], 4 * w[i - 1], 1), nn.PixelShuffle(2)] if i else []
        up += [nn.ReLU(), Conv(w[0], pixels, 3), nn.PixelShuffle(FOLD)]
        self.down, self.up = nn.Sequential(*down), nn.Sequential(*up)

    def encode(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, 3, 64, 64]`` in [0, 1] to codes ``[b, dim]``."""
        z: Tensor = self.down(2 * x - 1)
        return z

    def decode(self, z: Tensor) -> Tensor:
        """Map codes to float32 ``[b, 3, 64, 64]``, not yet clamped."""
        y: Tensor = self.up(z)
        return y / 2 + 0.5

    @torch.no_grad()
    def initialise(self, seed: int) -> None:
        """Draw the weights; blocks start near the identity."""
        g = torch.Generator().manual_seed(seed)
        for module in self.modules():
            if isinstance(module, Conv):
                module.weight.normal_(0, 1 / math.sqrt(module.weight.shape[1]), generator=g)
                module.bias.zero_()
            if isinstance(module, Block):
                module.last.weight.mul_(0.2)


@final
class GistCodec(Encoder):
    """A trained `GistNet`, in float32, frozen."""

    step: ClassVar[int] = 50

    def __init__(self, file: files.CodecFile, name: str = KIND) -> None:
        """Build from a codec file of kind ``gist-ae`` (weights in float16).

        Raises:
            EncoderError: its tensors do not fit its shape or are not finite.
        """
        self.name, self.digest, self.track = name, file.digest, file.track
        shape = Shape.of(file.meta.get("shape", {}), name)
        with torch.device("meta"):
            net = GistNet(shape)
        weights = {}
        for key, like in net.state_dict().items():
            found = file.tensors.get(key)
            if found is None or found.shape != like.shape or not bool(torch.isfinite(found).all()):
                got = None if found is None else list(found.shape)
                raise EncoderError(
                    f"'{key}' of '{name}' must be finite with shape {list(like.shape)}. Got {got}"
                )
            weights[key] = found.to(torch.float32)
        net.load_state_dict(weights, assign=True)
        self._net = net.eval().requires_grad_(False)
        self.dim = shape.dim
        self.public = files.public_of(file, self.dim, name)

    def encode(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, 3, 64, 64]`` in [0, 1] to float64 ``[b, dim]``."""
        # one memory layout: convolutions round differently in another
        return self._net.encode(x.contiguous()).to(torch.float64)

    def decode(self, z: Tensor) -> Tensor:
        """Map ``[b, dim]`` to float32 ``[b, 3, 64, 64]`` in [0, 1]; gradients flow to ``z``."""
        codes = torch.split(z.to(torch.float32), self.step)
        return torch.cat([self._net.decode(c) for c in codes]).clamp(0, 1)
