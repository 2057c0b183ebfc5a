"""Codec files: safetensors that carry weights, their public statistics and what kind they are.

One metadata key, ``fedgist``, holds a JSON object with at least ``kind``. (One key only: the order
of several would change from one writing to the next, and with it the file's hash.) The tensors
``public.mean``, ``public.cov`` and so on are a `PublicCodes`.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

from fedgist.encoders.base import QUANTILES, TILTS, PublicCodes
from fedgist.errors import EncoderError
from fedgist.types import Tensors

__all__ = [
    "CodecFile",
    "file_digest",
    "public_of",
    "public_tensors",
    "read",
    "tensors_digest",
    "write",
    "write_manifest",
]

KEY = "fedgist"
PREFIX = "public."


@dataclass(frozen=True)
class CodecFile:
    """What a codec file holds.

    Attributes:
        kind: which class reads it, e.g. ``pca``.
        meta: the rest of the JSON object.
        tensors: all tensors, the public statistics included.
        digest: SHA-256 of the file's bytes, hex.
    """

    kind: str
    meta: Mapping[str, Any]
    tensors: Tensors
    digest: str

    @property
    def track(self) -> str:
        """Which data its maker says it was trained on; see `Encoder.track`."""
        return str(self.meta.get("trained_on", "public images"))


def read(path: Path) -> CodecFile:
    """Read a codec file; nothing in it is ever executed.

    Raises:
        EncoderError: it does not exist, is damaged, or is not a FedGist codec file.
    """
    if not path.is_file():
        raise EncoderError(f"a codec file must exist. Got '{path}'")
    try:
        with safe_open(path, framework="pt") as f:
            header = f.metadata() or {}
            tensors = {k: f.get_tensor(k) for k in f.keys()}  # noqa: SIM118 (not a mapping)
        meta = json.loads(header[KEY])
        kind = str(meta.pop("kind"))
    except (SafetensorError, OSError, ValueError, KeyError, AttributeError, TypeError) as e:
        raise EncoderError(
            f"'{path}' must be a FedGist codec file (safetensors with a '{KEY}' entry). Got "
            f"{type(e).__name__}: {e}"
        ) from e
    return CodecFile(kind, meta, tensors, file_digest(path))


def write(
    path: Path, kind: str, tensors: Tensors, public: PublicCodes, **meta: object
) -> CodecFile:
    """Write a codec file aside, put it in place and read it back."""
    joined = {k: v.contiguous().clone() for k, v in {**tensors, **public_tensors(public)}.items()}
    aside = path.with_name(path.name + ".part")
    aside.write_bytes(save(joined, {KEY: json.dumps({"kind": kind, **meta}, sort_keys=True)}))
    os.replace(aside, path)
    return read(path)


def public_tensors(public: PublicCodes) -> Tensors:
    """Return public statistics under the names that they have in a codec file."""
    return {PREFIX + f.name: getattr(public, f.name) for f in fields(public)}


def write_manifest(path: Path, manifest: Mapping[str, Any]) -> None:
    """Write what a codec file at ``path`` was made of beside it, as ``.json``."""
    aside = path.with_name(path.stem + ".json.part")
    aside.write_text(json.dumps(manifest, indent=2) + "\n")
    os.replace(aside, path.with_suffix(".json"))


def public_of(file: CodecFile, dim: int, source: str) -> PublicCodes:
    """Return the public statistics of a codec file, their shapes and values checked.

    Raises:
        EncoderError: one is missing, has another shape, or is not finite.
    """
    shapes = {
        "mean": (dim,),
        "cov": (dim, dim),
        "values": (dim,),
        "vectors": (dim, dim),
        "norms": (len(TILTS), len(QUANTILES)),
        "raw_norms": (len(QUANTILES),),
    }
    found = {name: file.tensors.get(PREFIX + name) for name in shapes}
    good = {
        name: t.to(torch.float64)
        for name, t in found.items()
        if t is not None and t.shape == shapes[name] and bool(torch.isfinite(t).all())
    }
    if bad := sorted(set(shapes) - set(good)):
        shape = None if found[bad[0]] is None else list(found[bad[0]].shape)  # type: ignore[union-attr]
        raise EncoderError(
            f"'{PREFIX}{bad[0]}' of '{source}' must be finite with shape {list(shapes[bad[0]])}. "
            f"Got {shape}"
        )
    return PublicCodes(**good)


def file_digest(path: Path) -> str:
    """Return the SHA-256 of a file, hex."""
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


def tensors_digest(tensors: Tensors) -> str:
    """Return the SHA-256 of named tensors, hex: the same wherever and however they are stored."""
    h = hashlib.sha256()
    for name in sorted(tensors):
        t = tensors[name].detach().cpu().contiguous()
        h.update(f"{name} {t.dtype} {list(t.shape)}\n".encode())
        h.update(t.reshape(-1).view(torch.uint8).numpy().data)
    return h.hexdigest()
