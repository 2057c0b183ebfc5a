"""`DcAeCodec`: the deep compression autoencoder that FedKT-CSD was published with.

Diffusers' `AutoencoderDC`, from a folder written by ``save_pretrained`` or from the hub. Images go
in as 2x - 1; latents are used as they are, without the scaling factor that diffusion models apply
(reference implementation of FedKT-CSD). At 64x64 the f32c32 model gives 32 x 2 x 2 = 128 numbers.

Its public statistics lie beside the weights in ``fedgist_public.safetensors``; they name the hash
of the weights they were measured with.
"""

from __future__ import annotations

import hashlib
import warnings
from pathlib import Path
from typing import Any, ClassVar, final

import torch
from torch import Tensor

from fedgist.encoders import files
from fedgist.encoders.base import Encoder, PublicCodes
from fedgist.encoders.public import blank, load_public, measure_public, save_public
from fedgist.errors import EncoderError, MissingExtra

__all__ = ["DEFAULT", "DcAeCodec"]

KIND = "dc-ae"
DEFAULT = "mit-han-lab/dc-ae-f32c32-in-1.0-diffusers"
STATISTICS = "fedgist_public.safetensors"


@final
class DcAeCodec(Encoder):
    """A diffusers `AutoencoderDC`, in float32 and evaluation mode, frozen."""

    track: str = "public ImageNet"
    step: ClassVar[int] = 25  # a client with few images should not pay for 250

    def __init__(self, net: Any, public: PublicCodes | None, name: str = KIND) -> None:
        """Wrap a loaded network; `load` is the usual way.

        Args:
            net: an `AutoencoderDC` in float32.
            public: statistics of its codes; None only to measure them.
            name: as written in the task.
        """
        self.name = name
        self._net = net.eval().requires_grad_(False)
        side = self.size // 2 ** (len(net.config.encoder_block_out_channels) - 1)
        self._shape = (net.config.latent_channels, side, side)
        self.dim = self._shape[0] * side**2
        self.public = public or blank(self.dim)
        stats = {name: getattr(self.public, name) for name in ("mean", "cov", "norms", "raw_norms")}
        self.weights_digest = files.tensors_digest(net.state_dict())
        both = f"{self.weights_digest} {files.tensors_digest(stats)}"
        self.digest = hashlib.sha256(both.encode()).hexdigest()

    @staticmethod
    def load(source: str = DEFAULT, name: str = KIND, statistics: Path | None = None) -> DcAeCodec:
        """Load weights from a folder or hub id, and the statistics measured with them.

        Raises:
            MissingExtra: diffusers is not installed.
            EncoderError: no weights, no statistics, or statistics of other weights.
        """
        bare = DcAeCodec(_network(source), None, name)
        path = statistics or _beside(source)
        if not path.is_file():
            raise EncoderError(
                f"public statistics of '{name}' must exist. Got no '{path}'. Run: "
                f"python scripts/measure_public.py {source}"
            )
        public, measured_with = load_public(path, bare.dim)
        if measured_with != bare.weights_digest:
            raise EncoderError(
                f"'{path}' must be measured with the weights of '{name}' ({bare.weights_digest}). "
                f"Got {measured_with}. Run: python scripts/measure_public.py {source}"
            )
        return DcAeCodec(bare._net, public, name)

    @staticmethod
    def measure(source: str, pixels: Tensor, statistics: Path | None = None) -> Path:
        """Measure codes of public uint8 ``[n, c, h, w]`` images and write the statistics file."""
        bare = DcAeCodec(_network(source), None)
        path = statistics or _beside(source)
        save_public(measure_public(bare, pixels), path, bare.weights_digest)
        return path

    def encode(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, 3, 64, 64]`` in [0, 1] to float64 ``[b, dim]``."""
        # one memory layout too: convolutions round differently in another
        latent: Tensor = self._net.encode((x * 2 - 1).contiguous()).latent
        return latent.flatten(1).to(torch.float64)

    def decode(self, z: Tensor) -> Tensor:
        """Map ``[b, dim]`` to float32 ``[b, 3, 64, 64]`` in [0, 1]; gradients flow to ``z``."""
        codes = z.to(torch.float32).view(-1, *self._shape)
        y = torch.cat([self._net.decode(c).sample for c in torch.split(codes, self.step)])
        return ((y + 1) / 2).clamp(0, 1)


def _network(source: str) -> Any:
    """Load an `AutoencoderDC` in float32: a folder, then the hub's cache, then the hub."""
    options = {"use_safetensors": True, "torch_dtype": torch.float32, "low_cpu_mem_usage": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # diffusers' own, about its dependencies
        try:
            from diffusers import AutoencoderDC
        except ImportError as e:
            raise MissingExtra("diffusers", "codecs") from e
        try:
            try:
                return AutoencoderDC.from_pretrained(source, local_files_only=True, **options)
            except OSError:
                if Path(source).is_dir():
                    raise
                return AutoencoderDC.from_pretrained(source, **options)
        except Exception as e:  # diffusers and the hub raise a dozen kinds
            reason = (str(e).strip() or type(e).__name__).splitlines()[0][:160].rstrip(".")
            raise EncoderError(
                "dc-ae weights must be a folder written by save_pretrained or a hub id. Got "
                f"'{source}': {reason}. Three ways: dc-ae:FOLDER; `hf download {DEFAULT}` once, "
                "where there is a network; or a network now"
            ) from e


def _beside(source: str) -> Path:
    """Return where the statistics of a folder or of a cached hub model lie."""
    if Path(source).is_dir():
        return Path(source) / STATISTICS
    from huggingface_hub import try_to_load_from_cache

    config = try_to_load_from_cache(source, "config.json")
    return Path(config).parent / STATISTICS if isinstance(config, str) else Path(STATISTICS)
