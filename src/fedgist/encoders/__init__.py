"""Frozen public encoders: images to codes and, for codecs, back.

>>> from fedgist.encoders import load_encoder
>>> codec = load_encoder("pca")
>>> codec.dim
128
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from fedgist.encoders import files
from fedgist.encoders.base import Encoder, PublicCodes, Whitening, prepare, restore
from fedgist.encoders.dc_ae import DEFAULT, DcAeCodec
from fedgist.encoders.dct import DctCodec
from fedgist.encoders.efficientnet import EfficientNetEncoder
from fedgist.encoders.gist_ae import GistCodec
from fedgist.encoders.pca import PcaCodec
from fedgist.encoders.public import measure_public
from fedgist.encoders.random_conv import RandomConv
from fedgist.encoders.scattering import ScatteringEncoder
from fedgist.errors import EncoderError, did_you_mean

__all__ = [
    "DcAeCodec",
    "DctCodec",
    "EfficientNetEncoder",
    "Encoder",
    "GistCodec",
    "PcaCodec",
    "PublicCodes",
    "RandomConv",
    "ScatteringEncoder",
    "Whitening",
    "encoder_info",
    "encoder_names",
    "load_encoder",
    "measure_public",
    "prepare",
    "restore",
]

# name -> codec file beside this module
SHIPPED = {"pca": "pca128.safetensors", "gist-ae": "gist_ae128.safetensors"}
MEASURED = {
    "scattering": "scattering.safetensors",
    "efficientnet-lite0": "efficientnet_lite0.safetensors",
}


def encoder_names() -> tuple[str, ...]:
    """Return the names that `load_encoder` knows without a path."""
    return (*SHIPPED, "dct", "dc-ae", *MEASURED, "random-conv:SEED")


def load_encoder(spec: str, digest: str | None = None) -> Encoder:
    """Load an encoder.

    Args:
        spec: a codec: ``pca``, ``gist-ae``, ``dct`` (with ``:D`` for other dimensions than 128),
            ``dc-ae``, ``dc-ae:FOLDER_OR_HUB_ID`` or the path of a ``.safetensors`` codec file;
            features: ``scattering``, ``efficientnet-lite0`` (each with ``:D`` for fewer dimensions
            than 512), ``random-conv:SEED``; or a dotted name ``package.module:factory`` of your own
            (a callable without arguments that returns an `Encoder`).
        digest: the hash that the task names; None accepts any.

    Raises:
        EncoderError: there is no such encoder, it is damaged, or its hash is not ``digest``.
        MissingExtra: it needs a package that is not installed.
    """
    encoder = _load(spec)
    if digest is not None and encoder.digest != digest:
        raise EncoderError(
            f"the hash of encoder '{spec}' must be the task's, {digest}. Got {encoder.digest}: "
            "use the very file that the task was made with"
        )
    return encoder


def encoder_info(spec: str) -> dict[str, Any]:
    """Return what is known of an encoder, ready for JSON.

    ``shipped`` tells whether it comes with FedGist (or is drawn from a seed) and not from somebody
    else's file. For codec files with a manifest beside them (same stem, ``.json``) this includes
    the sources, their licences, the explained variance and the PSNR in dB on held-out images.
    """
    encoder = load_encoder(spec)
    info: dict[str, Any] = {
        "name": encoder.name,
        "kind": type(encoder).__name__,
        "dim": encoder.dim,
        "size": encoder.size,
        "decodes": encoder.decodes,
        "exact": encoder.exact,
        "track": encoder.track,
        "shipped": spec in SHIPPED or spec.partition(":")[0] in {*MEASURED, "dct", "random-conv"},
        "digest": encoder.digest,
        "radius": {
            f"{q:.2f}": round(Whitening(encoder.public, 0.25).radius(q), 3)
            for q in (0.5, 0.8, 0.95)
        },
    }
    kind = spec.partition(":")[0]
    path = Path(__file__).parent / MEASURED[kind] if kind in MEASURED else _path(spec)
    manifest = path.with_suffix(".json") if path else None
    if path and manifest and manifest.is_file():
        made = json.loads(manifest.read_text())
        if made.get("sha256") == files.file_digest(path):
            info |= {k: made[k] for k in ("explained_variance", "psnr", "fitted_on") if k in made}
            info["sources"] = made.get("images", {}).get("sources", [])
    return info


def _path(spec: str) -> Path | None:
    if spec in SHIPPED:
        return Path(__file__).parent / SHIPPED[spec]
    return Path(spec) if spec.endswith(".safetensors") else None


def _load(spec: str) -> Encoder:
    if path := _path(spec):
        return _codec(files.read(path), spec)
    kind, _, rest = spec.partition(":")
    if kind == "dc-ae":
        return DcAeCodec.load(rest or DEFAULT, spec)
    if kind == "dct":
        return DctCodec.of(rest, spec)
    if kind == "scattering":
        return ScatteringEncoder.load(spec)
    if kind == "efficientnet-lite0":
        return EfficientNetEncoder.load(rest, spec)
    if kind == "random-conv":
        return RandomConv.of(rest, spec)
    if rest and "." in kind:
        return _dotted(kind, rest, spec)
    raise EncoderError(
        f"encoder must be one of {', '.join(encoder_names())}, dc-ae:FOLDER, a .safetensors file "
        f"or package.module:factory. Got '{spec}'.{did_you_mean(spec, encoder_names())}"
    )


def _codec(file: files.CodecFile, spec: str) -> Encoder:
    """Build the class that reads this kind of file."""
    kinds: dict[str, Callable[[files.CodecFile, str], Encoder]] = {
        "pca": PcaCodec,
        "gist-ae": GistCodec,
        "scattering": ScatteringEncoder,
    }
    if file.kind not in kinds:
        raise EncoderError(
            f"the kind of codec file '{spec}' must be one of {', '.join(kinds)}. Got '{file.kind}'"
        )
    return kinds[file.kind](file, spec)


def _dotted(module: str, factory: str, spec: str) -> Encoder:
    try:
        make = getattr(importlib.import_module(module), factory)
    except (ImportError, AttributeError) as e:
        raise EncoderError(f"encoder '{spec}' must be importable. Got {e}") from e
    encoder = make()
    if not isinstance(encoder, Encoder):
        raise EncoderError(f"'{spec}' must return an Encoder. Got {type(encoder).__name__}")
    return encoder
