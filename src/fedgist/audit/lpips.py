"""LPIPS, AlexNet v0.1, from weights that the user has on disk.

Zhang, Isola, Efros, Shechtman and Wang, "The Unreasonable Effectiveness of Deep Features as a
Perceptual Metric", CVPR 2018 (https://arxiv.org/abs/1801.03924), eq. 1: channel-normalised maps
after the five ReLUs of AlexNet, squared differences weighted by the published linear heads, summed
over channels, averaged over positions, added over layers. The heads come with torchmetrics; the
backbone is torchvision's ``alexnet-owt-7be5be79.pth``, which no package carries and which nothing
here downloads.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import final

import safetensors.torch
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.audit.similarity import three_channels
from fedgist.compress import enlarge
from fedgist.errors import DataError
from fedgist.types import Tensors

__all__ = ["Lpips", "load_lpips"]

LAYERS = (  # key in torchvision's state, shape of the filters, stride, padding
    ("features.0", (64, 3, 11, 11), 4, 2),
    ("features.3", (192, 64, 5, 5), 1, 2),
    ("features.6", (384, 192, 3, 3), 1, 1),
    ("features.8", (256, 384, 3, 3), 1, 1),
    ("features.10", (256, 256, 3, 3), 1, 1),
)
POOLED = (1, 2)  # layers with a 3x3 max-pooling of stride 2 before them
LEAST, SIDE = 31, 64  # below 31 pixels the second pooling has nothing left: resized to 64
SHIFT, SCALE = (-0.030, -0.088, -0.188), (0.458, 0.448, 0.450)  # of pixels in [-1, 1]
HEADS = Path("functional", "image", "lpips_models", "alex.pth")


@final
class Lpips:
    """The distance; build it with `load_lpips`.

    Attributes:
        name: "LPIPS (AlexNet v0.1, weights XXXXXXXX)", the first digits of their file's SHA-256:
            7be5be79 for torchvision's own file.
    """

    def __init__(self, backbone: Tensors, heads: Tensors, digest: str) -> None:
        """Take checked tensors."""
        self.name = f"LPIPS (AlexNet v0.1, weights {digest[:8]})"
        self._backbone, self._heads = backbone, heads

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        """Map two float32 ``[b, c, h, w]`` in [0, 1] to float32 ``[b]``; differentiable.

        Images with a side below 31 pixels are first resized to 64x64 (bilinear); grey is repeated.

        Raises:
            DataError: the shapes differ.
        """
        if a.ndim != 4 or a.shape != b.shape:
            raise DataError(
                "images to compare must have one shape [b, c, h, w]. "
                f"Got {list(a.shape)} and {list(b.shape)}"
            )
        x = three_channels(torch.cat([a, b]))
        if min(x.shape[2:]) < LEAST:
            x = enlarge(x, SIDE)
        x = (2 * x - 1 - x.new_tensor(SHIFT)[:, None, None]) / x.new_tensor(SCALE)[:, None, None]
        total = x.new_zeros(len(a))
        for i, (key, _, stride, padding) in enumerate(LAYERS):
            if i in POOLED:
                x = F.max_pool2d(x, 3, 2)
            w, bias = self._backbone[f"{key}.weight"], self._backbone[f"{key}.bias"]
            x = F.relu(F.conv2d(x, w, bias, stride, padding))
            first, second = F.normalize(x, dim=1, eps=1e-10).chunk(2)
            weighted = F.conv2d((first - second).square(), self._heads[f"lin{i}.model.1.weight"])
            total = total + weighted.mean((1, 2, 3))
        return total


def load_lpips(path: str | Path) -> Lpips:
    """Read AlexNet's weights and the published heads.

    Args:
        path: the state of torchvision's ``alexnet`` (``.pth``), or the same tensors in
            ``.safetensors``; entries of its classifier are not looked at.

    Raises:
        DataError: no such file, or not those tensors.
    """
    path = Path(path)
    if not path.is_file():
        raise DataError(
            f"LPIPS weights must be torchvision's alexnet-owt-7be5be79.pth. Got no file '{path}'"
        )
    data = path.read_bytes()
    backbone: Tensors = {}
    found = _read(data, path)
    for key, shape, _, _ in LAYERS:
        backbone[f"{key}.weight"] = _taken(found, f"{key}.weight", shape, path)
        backbone[f"{key}.bias"] = _taken(found, f"{key}.bias", shape[:1], path)
    return Lpips(backbone, _heads(), hashlib.sha256(data).hexdigest())


def _read(data: bytes, path: Path) -> Mapping[str, object]:
    try:
        if path.suffix == ".safetensors":
            return dict(safetensors.torch.load(data))
        state = torch.load(io.BytesIO(data), map_location="cpu", weights_only=True)
    except Exception as e:  # damaged files fail in many ways
        raise DataError(
            f"'{path}' must be a readable .pth or .safetensors of tensors. Got {type(e).__name__}"
        ) from e
    return state if isinstance(state, Mapping) else {}


def _taken(found: Mapping[str, object], key: str, shape: tuple[int, ...], path: Path) -> Tensor:
    tensor = found.get(key)
    if not isinstance(tensor, Tensor) or tensor.shape != shape:
        got = list(tensor.shape) if isinstance(tensor, Tensor) else "none"
        raise DataError(f"tensor '{key}' of '{path}' must be {list(shape)}. Got {got}")
    return tensor.detach().to(torch.float32)


def _heads() -> Tensors:
    """Read the heads from torchmetrics' data; the package is located, not imported."""
    spec = find_spec("torchmetrics")
    places = spec.submodule_search_locations if spec else None
    path = Path(places[0] if places else "torchmetrics", HEADS)
    found = _read(path.read_bytes() if path.is_file() else b"", path)
    wanted = {f"lin{i}.model.1.weight": shape[0] for i, (_, shape, _, _) in enumerate(LAYERS)}
    return {key: _taken(found, key, (1, n, 1, 1), path) for key, n in wanted.items()}
