"""From public images to a codec file with its manifest: what ``fedgist encoder train`` runs."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from fedgist.data.images import Encoded, stack
from fedgist.encoders import files
from fedgist.encoders.base import Encoder, prepare
from fedgist.encoders.gist_ae import KIND, GistCodec, GistNet, Shape
from fedgist.encoders.public import blank, measure_public
from fedgist.encoders.training import Log, Schedule, train_codec
from fedgist.errors import ConfigError, DataError
from fedgist.types import BATCH, Task

__all__ = ["grey", "make_codec", "psnr", "read_public", "train_own", "write_codec"]

Pixels = NDArray[np.uint8]
MEASURED = 20_000  # training images whose codes give the public statistics
HELD = 1_000  # held-out images that are measured, at most
SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff")


def make_codec(
    train: Pixels,
    held: Mapping[str, Pixels],
    out: Path,
    schedule: Schedule,
    log: Log,
    origin: Mapping[str, Any],
    track: str = "public images",
) -> GistCodec:
    """Train a ``gist-ae`` codec, write it, and write what it reaches and where it came from.

    Args:
        train: uint8 ``[n, 3, 64, 64]``, public.
        held: the same, never trained on; the PSNR of each goes into the manifest.
        out: the ``.safetensors`` file. Beside it stand ``.json`` and, until the training is over,
            ``.checkpoint``, from which an interrupted training goes on.
        schedule: how long and how.
        log: called every 50 steps with (images shown, running PSNR in dB).
        origin: command, sources and licences, for the manifest.
        track: what the images are, stated in the file itself; see `Encoder.track`.

    Raises:
        DataError: the images have another shape, or are too few.
        ConfigError: the checkpoint belongs to another training.
    """
    shape, checkpoint = Shape(), out.with_suffix(".checkpoint")
    net = train_codec(train, schedule, checkpoint, log, shape)
    codec = write_codec(net, shape, train[:MEASURED], out, track)
    manifest = {
        "file": out.name,
        "sha256": codec.digest,
        "kind": KIND,
        "dim": codec.dim,
        "shape": shape.meta(),
        "made_with": {"torch": torch.__version__, "machine": platform.machine()},
        "fitted_on": len(train),
        "shown": schedule.steps * schedule.batch,
        "psnr": {k: round(psnr(codec, v[:: -(-len(v) // HELD)]), 2) for k, v in held.items()},
        **origin,
    }
    files.write_manifest(out, manifest)
    checkpoint.unlink()
    return codec


def train_own(
    source: Path,
    out: Path,
    *,
    shown: int,
    held_out: float,
    seed: int,
    log: Log,
    private: bool = False,
) -> GistCodec:
    """Train a codec on a user's own images.

    Args:
        source: see `read_public`.
        out: the ``.safetensors`` file.
        shown: images shown in all.
        held_out: share of the images that is measured and never trained on.
        seed: of the split and the training.
        log: see `make_codec`.
        private: the images are not public. The codec says so wherever it goes: a claim does not
            cover what it remembers of them, and a site's policy refuses it by default.

    Raises:
        ConfigError: an option is out of range.
        DataError: the images cannot be used.
    """
    if out.suffix != ".safetensors":
        raise ConfigError(f"--out must end in .safetensors. Got {out}")
    if not 0 < held_out < 1:
        raise ConfigError(f"--held-out must lie between 0 and 1. Got {held_out}")
    schedule = Schedule(images=shown, seed=seed)
    images = read_public(source)
    order = np.random.default_rng(seed).permutation(len(images))
    cut = max(1, round(len(images) * held_out))
    held, train = images[np.sort(order[:cut])], images[np.sort(order[cut:])]
    origin = {
        "command": f"fedgist encoder train {source} --out {out} --shown {shown} "
        f"--held-out {held_out} --seed {seed}",
        "images": {"sources": [{"folder": str(source), "images": len(images)}]},
    }
    track = "private images" if private else "public images"
    return make_codec(train, {"held_out": held}, out, schedule, log, origin, track)


def write_codec(
    net: GistNet, shape: Shape, images: Pixels, path: Path, track: str = "public images"
) -> GistCodec:
    """Write float16 weights and the public statistics of their own codes; read them back.

    Args:
        net: from `train_codec`.
        shape: its architecture.
        images: uint8 ``[n, 3, 64, 64]`` whose codes are measured.
        path: the codec file.
        track: what the images are; see `Encoder.track`.
    """
    meta: dict[str, Any] = {"shape": shape.meta()}
    if track != "public images":
        meta["trained_on"] = track
    weights = {k: v.to(torch.float16) for k, v in net.state_dict().items()}
    draft = files.write(path, KIND, weights, blank(shape.dim), **meta)
    public = measure_public(GistCodec(draft), torch.from_numpy(np.array(images)))
    return GistCodec(files.write(path, KIND, weights, public, **meta))


def psnr(codec: Encoder, images: Pixels) -> float:
    """Return the mean PSNR in dB of uint8 ``[n, c, h, w]`` images seen through a codec."""
    out = []
    for i in range(0, len(images), BATCH):
        x = torch.from_numpy(np.array(images[i : i + BATCH])).to(torch.float32) / 255
        y = codec.decode(codec.encode_task(x))
        mse = (y - prepare(x, codec.size)).square().flatten(1).mean(1)
        out.append(-10 * mse.clamp(min=1e-10).log10())
    return float(torch.cat(out).mean())


def grey(images: Pixels) -> Pixels:
    """Return only the images whose three channels agree."""
    same: NDArray[np.bool_] = (images[:, :1] == images).all((1, 2, 3))
    return images[same]


def read_public(path: Path) -> Pixels:
    """Read public images: a ``.npy`` array or a folder of pictures, at any depth.

    Returns:
        uint8 ``[n, 3, 64, 64]``; an array of that shape as a memory map, pictures cropped to a
        square and resized.

    Raises:
        DataError: nothing there, or something that is not an image.
    """
    if path.suffix == ".npy":
        try:
            array: Pixels = np.load(path, mmap_mode="r", allow_pickle=False)
        except (OSError, ValueError) as e:
            raise DataError(f"public images must be a readable .npy file. Got '{path}': {e}") from e
        return array
    found = sorted(p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES)
    if not found:
        raise DataError(f"public images must be a .npy file or a folder of pictures. Got '{path}'")
    square = Task("public", ("public", "images"), 3, GistCodec.size, "crop")
    parts = []
    for i in range(0, len(found), BATCH):
        pixels = stack([Encoded(str(p), p.read_bytes()) for p in found[i : i + BATCH]], square)
        parts.append(pixels if pixels.dtype == torch.uint8 else (pixels * 255).round().byte())
    return torch.cat(parts).numpy()
