"""One model from the image to the label: compress, round to bytes, enlarge, classify."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.compress.fixed import build
from fedgist.compress.learned import Compressor, load_compressor
from fedgist.compress.small import enlarge, quantised
from fedgist.errors import DataError
from fedgist.train import Network
from fedgist.types import BATCH, Tensors

__all__ = ["CompressedNetwork"]

Compress = Callable[[Tensor], Tensor]


@dataclass(frozen=True, eq=False)
class CompressedNetwork:
    """A network that sees images as the server has seen them; a `Classifier`.

    Attributes:
        network: trained on enlarged small images.
        compress: maps float32 ``[b, c, s, s]`` in [0, 1] to ``[b, c, y, y]`` in [0, 1].
        spec: what rebuilds a fixed ``compress`` (`fixed.build`); empty for a learned one.
    """

    network: Network
    compress: Compress
    spec: str = ""

    @property
    def kind(self) -> str:
        """Name of this class of model in a file."""
        return "compressed"

    def predict(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, s, s]`` in [0, 1] to float32 log-probabilities ``[b, classes]``."""
        return torch.cat([self.network.predict(self.seen(part)) for part in torch.split(x, BATCH)])

    @torch.no_grad()
    def seen(self, x: Tensor) -> Tensor:
        """Return the images that the network sees, of the size of ``x``."""
        return enlarge(quantised(self.compress(x)), self.network.size)

    def tensors(self) -> Tensors:
        """Return the parameters of both."""
        out = {f"network.{k}": v for k, v in self.network.tensors().items()}
        if isinstance(self.compress, Compressor):
            out |= {f"compressor.{k}": v for k, v in self.compress.state_dict().items()}
        return out

    def meta(self) -> dict[str, str]:
        """Return what `load` needs beside the tensors."""
        own = {"compressor": self.spec}
        if isinstance(self.compress, Compressor):
            own = {"compressor": f"{self.compress.kind}:{self.compress.side}"}
        return self.network.meta() | own

    @staticmethod
    def load(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> CompressedNetwork:
        """Rebuild the classifier that gave these `tensors` and this `meta`.

        Raises:
            DataError: a tensor or an entry is missing, superfluous or of the wrong form.
            ConfigError: a model that is not known.
        """
        parts: dict[str, Tensors] = {"network": {}, "compressor": {}}
        for key, value in tensors.items():
            head, _, rest = key.partition(".")
            if head not in parts:
                raise DataError(f"tensors must be of network or compressor. Got '{key}'")
            parts[head][rest] = value
        network = Network.load(parts["network"], meta)
        spec = meta["compressor"]
        if not parts["compressor"]:
            return CompressedNetwork(network, build(spec), spec)
        kind, _, side = spec.partition(":")
        facts = (kind, network.channels, network.size, int(side))
        return CompressedNetwork(network, load_compressor(*facts, parts["compressor"]))
