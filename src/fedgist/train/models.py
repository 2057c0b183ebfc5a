"""A small zoo of image classifiers: ConvNet-3, a CIFAR-style ResNet-18 and an MLP.

Every model is ``nn.Sequential(features, head)``: ``features`` maps images to flat embeddings,
``head`` is the last linear layer. None has buffers or draws random numbers when it runs, so a
row of the output depends on its own image and on the parameters only.

The two convolutional nets use GroupNorm, not BatchNorm: a batch of one image works, a client
with a handful of images can fine-tune without wrecking running averages, and statistics of
synthetic images are never carried over to real ones.

ConvNet-3: Zhao and Bilen, "Dataset Condensation with Distribution Matching", WACV 2023,
https://arxiv.org/abs/2110.04181 (three blocks of 3x3 convolution, one normalisation group per
channel, ReLU, 2x2 average pooling; there a grey 28x28 image is padded to 32x32, here the pooling
keeps odd borders, which gives the same 4x4 cells). ResNet-18: He et al., CVPR 2016,
https://arxiv.org/abs/1512.03385, with the usual changes for small images: a 3x3 stem of stride 1
and no max-pooling.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.errors import ConfigError, did_you_mean

__all__ = ["MODELS", "blank_model", "build_model", "initialise"]

GROUPS = 8  # of the ResNet's GroupNorm


def build_model(
    name: str, channels: int, size: int, classes: int, width: int, rng: torch.Generator
) -> nn.Sequential:
    """Build a classifier with freshly drawn parameters.

    Args:
        name: ``convnet3``, ``resnet18`` or ``mlp``.
        channels: 1 or 3.
        size: height and width of the images in pixels; 8 or more.
        classes: number of outputs.
        width: channels of every block (``convnet3``), of the first stage (``resnet18``, which
            doubles them three times; 64 is the published size), units of both hidden layers
            (``mlp``).
        rng: source of all parameters; the global generator is left alone.

    Returns:
        A module that maps float32 ``[b, channels, size, size]`` to logits ``[b, classes]``.

    Raises:
        ConfigError: unknown name, or a number that is too small.
    """
    model = blank_model(name, channels, size, classes, width).to_empty(device="cpu")
    initialise(model, rng)
    return model


def blank_model(name: str, channels: int, size: int, classes: int, width: int) -> nn.Sequential:
    """Build a classifier on the meta device, shapes without values; see `build_model`."""
    if name not in MODELS:
        raise ConfigError(
            f"model must be one of {', '.join(MODELS)}. Got '{name}'.{did_you_mean(name, MODELS)}"
        )
    for what, value, least in (
        ("channels", channels, 1),
        ("size", size, 8),
        ("classes", classes, 1),
        ("width", width, 1),
    ):
        if value < least:
            raise ConfigError(f"{what} of model '{name}' must be at least {least}. Got {value}")
    with torch.device("meta"):  # layers would otherwise draw from the global generator
        features, dim = MODELS[name](channels, size, width)
        return nn.Sequential(OrderedDict(features=features, head=nn.Linear(dim, classes)))


def _convnet3(channels: int, size: int, width: int) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = []
    for inputs in (channels, width, width):
        layers += [
            nn.Conv2d(inputs, width, 3, padding=1),
            nn.GroupNorm(width, width),
            nn.ReLU(inplace=True),
            nn.AvgPool2d(2, ceil_mode=True),
        ]
    return nn.Sequential(*layers, nn.Flatten()), width * math.ceil(size / 8) ** 2


def _resnet18(channels: int, size: int, width: int) -> tuple[nn.Sequential, int]:
    layers: list[nn.Module] = [
        nn.Conv2d(channels, width, 3, padding=1, bias=False),
        _norm(width),
        nn.ReLU(inplace=True),
    ]
    inputs = width
    for stage in range(4):
        outputs = width * 2**stage
        layers += [_Residual(inputs, outputs, 1 if stage == 0 else 2), _Residual(outputs, outputs)]
        inputs = outputs
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten()), inputs


def _mlp(channels: int, size: int, width: int) -> tuple[nn.Sequential, int]:
    layers = [
        nn.Flatten(),
        nn.Linear(channels * size**2, width),
        nn.ReLU(inplace=True),
        nn.Linear(width, width),
        nn.ReLU(inplace=True),
    ]
    return nn.Sequential(*layers), width


MODELS: dict[str, Callable[[int, int, int], tuple[nn.Sequential, int]]] = {
    "convnet3": _convnet3,
    "resnet18": _resnet18,
    "mlp": _mlp,
}


def _norm(channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(GROUPS if channels % GROUPS == 0 else 1, channels)


class _Residual(nn.Module):
    """Two 3x3 convolutions beside a shortcut, which is a 1x1 convolution when the shape changes."""

    def __init__(self, inputs: int, outputs: int, stride: int = 1) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False),
            _norm(outputs),
            nn.ReLU(inplace=True),
            nn.Conv2d(outputs, outputs, 3, padding=1, bias=False),
            _norm(outputs),
        )
        self.shortcut = (
            nn.Identity()
            if stride == 1 and inputs == outputs
            else nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), _norm(outputs))
        )

    def forward(self, x: Tensor) -> Tensor:
        """Map ``[b, inputs, h, w]`` to ``[b, outputs, ceil(h/stride), ceil(w/stride)]``."""
        return F.relu(self.body(x) + self.shortcut(x), inplace=True)


def initialise(model: nn.Module, rng: torch.Generator) -> None:
    """Fill all parameters: He initialisation, zero biases, unit normalisation."""
    for layer in model.modules():
        if isinstance(layer, nn.Conv2d | nn.Linear):
            nn.init.kaiming_normal_(layer.weight, nonlinearity="relu", generator=rng)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
        elif isinstance(layer, nn.GroupNorm):
            nn.init.ones_(layer.weight)
            nn.init.zeros_(layer.bias)
