"""Measure a DC-AE's codes on public images: the statistics that FedGist needs beside its weights.

    python scripts/public_images.py --out public
    python scripts/measure_public.py mit-han-lab/dc-ae-f32c32-in-1.0-diffusers

The argument is a folder written by ``save_pretrained`` or a hub id. Writes
``fedgist_public.safetensors`` beside the weights.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch

from fedgist.encoders import DcAeCodec
from fedgist.errors import FedGistError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("source", help="folder or hub id")
    parser.add_argument("--images", type=Path, default=Path("public"), help="public_images.py's")
    parser.add_argument("--take", type=int, default=4000, help="how many of the images to encode")
    parser.add_argument("--out", type=Path, help="file to write instead of the one beside them")
    args = parser.parse_args()
    images = np.load(args.images / "images.npy", mmap_mode="r")
    pixels = torch.from_numpy(images[: args.take].copy())  # the training images, already shuffled
    try:
        print(DcAeCodec.measure(args.source, pixels, args.out))
    except FedGistError as e:
        sys.exit(f"{type(e).__name__}: {e}")


if __name__ == "__main__":
    main()
