"""Measure what codecs keep of photographs, by how far these were shrunk: trained on and held out.

    python scripts/codec_by_scale.py --out benchmarks/results/codec_scale.json

A patch of 64 x 64 pixels out of a photograph whose short side was shrunk to 96 pixels is a whole
scene, one out of 768 pixels a detail. Patches and split are those of ``public_images.py``, up to
400 of each scale. Where patches that a codec was trained on score no better than the others,
neither more photographs nor longer training would help: its dimension is the limit.
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from fedgist.bench import provenance
from fedgist.encoders import load_encoder
from fedgist.encoders.make import psnr
from fedgist.report.record import write_json
from public_images import (
    LARGEST,
    SOURCES,
    Pixels,
    draws,
    is_kept,
    levels,
    locate,
    photo_views,
)

CODECS = ("gist-ae", "pca")
MOST = 400  # patches of one scale that are measured


def main() -> None:
    """Gather, measure, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    Image.MAX_IMAGE_PIXELS = None  # installed packages are trusted; LARGEST keeps it quick
    codecs = {name: load_encoder(name) for name in CODECS}
    rows = []
    for (side, scale), found in sorted(patches().items()):
        rng = np.random.default_rng(scale)
        shown = np.stack(found)[rng.permutation(len(found))[:MOST]]
        row = {"split": side, "short_side": scale, "patches": len(found), "measured": len(shown)}
        row["psnr_db"] = {name: round(psnr(codec, shown), 2) for name, codec in codecs.items()}
        print(row, flush=True)
        rows.append(row)
    record = {"benchmark": "codec_by_scale"} | provenance() | {"rows": rows, "mean_db": means(rows)}
    write_json(args.out, record)


def patches() -> dict[tuple[str, int], list[Pixels]]:
    """Return (``trained`` or ``held out``, short side) -> patches, uint8 ``[3, 64, 64]`` each."""
    out: dict[tuple[str, int], list[Pixels]] = defaultdict(list)
    seen: set[bytes] = set()
    for source in (s for s in SOURCES if s.kind == "photo"):
        folder, _, names = locate(source)
        for name in names:
            rng, is_held = draws(source, name, seed=0)
            side = "held out" if is_held else "trained"
            with Image.open(folder / name) as im:
                if im.width * im.height > LARGEST:
                    continue
                scales = [short for short, times in levels(im) for _ in range(times)]
                for scale, x in zip(scales, photo_views(im, 1, rng), strict=True):
                    if is_kept(x, seen):
                        out[side, scale].append(x)
    return dict(out)


def means(rows: list[dict[str, object]]) -> dict[str, dict[str, float]]:
    """Return split -> codec -> mean over its patches."""
    out: dict[str, dict[str, float]] = {}
    for side in sorted({str(r["split"]) for r in rows}):
        mine = [r for r in rows if r["split"] == side]
        weight = np.array([r["patches"] for r in mine], dtype=float)
        out[side] = {
            name: round(float(np.average([r["psnr_db"][name] for r in mine], weights=weight)), 2)  # type: ignore[index]
            for name in CODECS
        }
    return out


if __name__ == "__main__":
    main()
