"""A trained network as a classifier: what it predicts, and how it is written down and read back."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedgist.errors import DataError
from fedgist.train.models import blank_model
from fedgist.types import BATCH, Tensors

__all__ = ["Network"]


@dataclass(frozen=True, eq=False)
class Network:
    """A model of the zoo with the statistics that normalise its inputs; a `Classifier`.

    Attributes:
        model: the module; in evaluation mode, treated as read-only.
        name: its name in the zoo.
        width: its width in the zoo.
        channels: 1 or 3.
        size: height and width of its images in pixels.
        classes: class names; output i is class i.
        mean: float32 ``[channels]``, subtracted from every pixel.
        std: float32 ``[channels]``, > 0; every pixel is divided by it.
    """

    model: nn.Module
    name: str
    width: int
    channels: int
    size: int
    classes: tuple[str, ...]
    mean: Tensor
    std: Tensor

    @property
    def kind(self) -> str:
        """Name of this class of model in a file."""
        return "network"

    def logits(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, h, w]`` in [0, 1] to logits ``[b, classes]``; differentiable in x.

        Raises:
            DataError: images of another shape.
        """
        if x.shape[1:] != (self.channels, self.size, self.size):
            raise DataError(
                f"images for this network must have shape [b, {self.channels}, {self.size}, "
                f"{self.size}]. Got {list(x.shape)}"
            )
        logits: Tensor = self.model((x - self.mean[:, None, None]) / self.std[:, None, None])
        return logits

    def predict(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, h, w]`` in [0, 1] to float32 log-probabilities ``[b, classes]``.

        Raises:
            DataError: images of another shape.
        """
        with torch.no_grad():
            return torch.cat([self.logits(part).log_softmax(1) for part in torch.split(x, BATCH)])

    def tensors(self) -> Tensors:
        """Return copies of the parameters and the input statistics, contiguous float32."""
        named = {f"model.{key}": value for key, value in self.model.state_dict().items()}
        named |= {"mean": self.mean, "std": self.std}
        return {
            k: v.detach().clone(memory_format=torch.contiguous_format) for k, v in named.items()
        }

    def meta(self) -> dict[str, str]:
        """Return what `load` needs beside the tensors."""
        return {
            "model": self.name,
            "width": str(self.width),
            "channels": str(self.channels),
            "size": str(self.size),
            "classes": json.dumps(self.classes),
        }

    @staticmethod
    def load(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> Network:
        """Rebuild the network that gave these `tensors` and this `meta`, bit for bit.

        Raises:
            DataError: a tensor or an entry is missing, superfluous or of the wrong form.
            ConfigError: the model is not in the zoo.
        """
        name, width, channels, size, classes = _parse(meta)
        model = blank_model(name, channels, size, len(classes), width)
        wanted = {f"model.{key}": list(value.shape) for key, value in model.state_dict().items()}
        wanted |= {"mean": [channels], "std": [channels]}
        for key in sorted(wanted.keys() | tensors.keys()):
            have = f"{tensors[key].dtype} {list(tensors[key].shape)}" if key in tensors else "none"
            want = f"{torch.float32} {wanted[key]}" if key in wanted else "none"
            if have != want:
                raise DataError(f"tensor '{key}' of a {name} network must be {want}. Got {have}")
        own = {key: value.detach().clone() for key, value in tensors.items()}
        mean, std = own.pop("mean"), own.pop("std")
        state = {key.removeprefix("model."): value for key, value in own.items()}
        model.load_state_dict(state, assign=True)
        model.requires_grad_(False).eval()
        return Network(model, name, width, channels, size, classes, mean, std)


def _parse(meta: Mapping[str, str]) -> tuple[str, int, int, int, tuple[str, ...]]:
    try:
        width, channels, size = (int(meta[key]) for key in ("width", "channels", "size"))
        name, classes = meta["model"], json.loads(meta["classes"])
    except (KeyError, ValueError) as error:
        raise DataError(
            "meta of a network must hold model, width, channels, size and classes (a JSON list). "
            f"Got {dict(meta)}"
        ) from error
    if not isinstance(classes, list) or not all(isinstance(c, str) for c in classes):
        raise DataError(f"classes of a network must be a JSON list of names. Got {classes!r}")
    return name, width, channels, size, tuple(classes)
