"""Fit the shipped ``pca`` codec on public images.

    python scripts/public_images.py --out public
    python scripts/fit_pca.py --images public

writes ``src/fedgist/encoders/pca128.safetensors`` (int16 components, integer mean, public
statistics of the codes) and ``pca128.json`` (where they came from, what they explain). The
held-out images at the end of the array are measured, never fitted.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.encoders import files
from fedgist.encoders.base import GRID
from fedgist.encoders.make import grey, psnr
from fedgist.encoders.pca import PcaCodec
from fedgist.encoders.public import blank, measure_public

HERE = Path(__file__).resolve().parents[1] / "src" / "fedgist" / "encoders"
BLOCK = 1000  # images per block


def blocks(images: np.ndarray[Any, Any], mean: Tensor) -> Iterator[Tensor]:
    """Yield centred float32 ``[b, 3 * 64 * 64]`` in image units."""
    for i in range(0, len(images), BLOCK):
        yield torch.tensor(images[i : i + BLOCK]).flatten(1).to(torch.float32) / 255 - mean


def components(
    images: np.ndarray[Any, Any], mean: Tensor, dim: int, sweeps: int, seed: int
) -> tuple[Tensor, float]:
    """Return (float64 ``[dim, pixels]`` orthonormal, the share of variance they explain).

    Subspace iteration: each sweep multiplies the error beyond component d by the ratio of
    eigenvalues (oversampled: l_160 / l_128), so a dozen sweeps leave nothing that int16 shows.
    """
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(mean.numel(), dim + dim // 4, generator=g)
    variance = sum(float(x.square().sum(dtype=torch.float64)) for x in blocks(images, mean))
    for sweep in range(sweeps):
        q = torch.linalg.qr(q.double())[0].float()
        total = torch.zeros(q.shape, dtype=torch.float64)
        for x in blocks(images, mean):
            total += x.T @ (x @ q)
        q, before = total.float(), q
        print(f"sweep {sweep + 1} of {sweeps}", file=sys.stderr)
    values, vectors = torch.linalg.eigh(before.double().T @ total)
    top = (before.double() @ vectors.flip(1)[:, :dim]).T
    top = top * top.sum(1, keepdim=True).sign()  # an eigenvector's sign is free: fix it
    return top, float(values.flip(0)[:dim].sum()) / variance


def integers(basis: Tensor) -> tuple[Tensor, int]:
    """Return int16 components and the exponent of the one power of two that scales them."""
    bits = math.floor(math.log2(32_767 / float(basis.abs().max())))
    return (basis * 2**bits).round().to(torch.int16), bits


def write_both(
    out: Path, w: Tensor, mean: Tensor, bits: int, images: np.ndarray[Any, Any]
) -> PcaCodec:
    """Write the codec file with the statistics of its own codes."""
    tensors = {"weights": w, "mean": mean}
    draft = files.write(out, "pca", tensors, blank(len(w)), bits=bits)
    public = measure_public(PcaCodec(draft), torch.from_numpy(images))
    return PcaCodec(files.write(out, "pca", tensors, public, bits=bits))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=Path, default=Path("public"), help="public_images.py's")
    parser.add_argument("--out", type=Path, default=HERE / "pca128.safetensors")
    parser.add_argument("--dim", type=int, default=128)
    parser.add_argument("--sweeps", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    images = np.load(args.images / "images.npy", mmap_mode="r")
    made = json.loads((args.images / "manifest.json").read_text())
    split = {k: np.ascontiguousarray(images[a:b]) for k, (a, b) in made["split"].items()}
    train = split["train"]
    pixels = train.reshape(len(train), -1)
    mean = torch.from_numpy((pixels.mean(0, dtype=np.float64) / 255 * GRID).round()).to(torch.int32)
    basis, explained = components(train, mean.float() / GRID, args.dim, args.sweeps, args.seed)
    w, bits = integers(basis)
    codec = write_both(args.out, w, mean, bits, train)

    manifest = {
        "file": args.out.name,
        "sha256": codec.digest,
        "kind": "pca",
        "dim": codec.dim,
        "bits": bits,
        "command": f"python scripts/fit_pca.py --seed {args.seed} --sweeps {args.sweeps}",
        "made_with": {"torch": torch.__version__, "machine": platform.machine()},
        "fitted_on": len(train),
        "explained_variance": round(explained, 4),
        "psnr": {
            "held_photos": round(psnr(codec, split["held_photos"]), 2),
            "held_objects": round(psnr(codec, split["held_objects"]), 2),
            "held_grey_objects": round(psnr(codec, grey(split["held_objects"])), 2),
        },
        "images": made,
    }
    files.write_manifest(args.out, manifest)
    print(json.dumps(manifest["psnr"]), f"explained {explained:.4f}", f"-> {args.out}")


if __name__ == "__main__":
    main()
