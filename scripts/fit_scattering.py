"""Fit the public projection of the shipped ``scattering`` encoder.

    python scripts/public_images.py --out public
    python scripts/fit_scattering.py --images public

writes ``src/fedgist/encoders/scattering.safetensors`` (the channels' scales, the features' mean,
int16 principal directions, public statistics of the codes for every dimension) and
``scattering.json`` (where they came from, what they explain). The held-out images at the end of
the array are measured, never fitted.
"""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedgist.encoders import files, scattering
from fedgist.encoders.base import Whitening, prepare
from fedgist.encoders.projection import write_projection

DIM = 512
SOFTNESS = 0.1  # s of log(1 + S / s), as a share of the channel's mean
BLOCK = 50

Pixels = np.ndarray[Any, Any]


def lumas(images: Pixels) -> Iterator[Tensor]:
    """Yield float32 ``[b, 1, 32, 32]`` from uint8 ``[n, 3, h, w]``."""
    for i in range(0, len(images), BLOCK):
        x = torch.tensor(images[i : i + BLOCK]).to(torch.float32) / 255
        yield scattering.luminance(prepare(x, scattering.SIZE))


def scales(images: Pixels) -> Tensor:
    """Return float32 ``[80]``: a tenth of each channel's mean."""
    total = sum(
        scattering.scatter(x).mean((2, 3)).sum(0, dtype=torch.float64) for x in lumas(images)
    )
    assert isinstance(total, Tensor)
    return (total[1:] * (SOFTNESS / len(images))).to(torch.float32)


def held_out(path: Path, images: Pixels) -> dict[str, float]:
    """Return the mean squared norm per dimension of whitened codes: 1 on the fitted images."""
    out = {}
    for d in (32, 64, 128, 256, 512):
        encoder = scattering.ScatteringEncoder(files.read(path), dim=d)
        white = Whitening(encoder.public, 0.5)
        parts = [
            white.forward(encoder.encode_task(torch.tensor(images[i : i + 250]).float() / 255))
            for i in range(0, len(images), 250)
        ]
        out[str(d)] = round(float(torch.cat(parts).square().mean()), 4)
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=Path, default=Path("public"), help="public_images.py's")
    parser.add_argument("--out", type=Path, default=scattering.PATH)
    args = parser.parse_args()

    images = np.load(args.images / "images.npy", mmap_mode="r")
    made = json.loads((args.images / "manifest.json").read_text())
    split = {k: np.ascontiguousarray(images[a:b]) for k, (a, b) in made["split"].items()}
    scale = scales(split["train"])
    x = torch.cat([scattering.features(b, scale) for b in lumas(split["train"])])
    file, explained = write_projection(
        args.out, scattering.KIND, x, DIM, scale=[float(v) for v in scale]
    )
    manifest = {
        "file": args.out.name,
        "sha256": file.digest,
        "kind": scattering.KIND,
        "dim": DIM,
        "command": "python scripts/fit_scattering.py",
        "made_with": {"torch": torch.__version__, "machine": platform.machine()},
        "fitted_on": len(split["train"]),
        "explained_variance": round(explained, 4),
        "held_out_whitened": {k: held_out(args.out, split[k]) for k in split if k != "train"},
        "images": made,
    }
    files.write_manifest(args.out, manifest)
    print(json.dumps(manifest["held_out_whitened"]), f"explained {explained:.4f}")


if __name__ == "__main__":
    torch.set_grad_enabled(False)
    main()
