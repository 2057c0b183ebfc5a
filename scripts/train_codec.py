"""Train the ``gist-ae`` codec on public images.

    python scripts/public_images.py --times 4 --out public4
    python scripts/train_codec.py --images public4

writes ``src/fedgist/encoders/gist_ae128.safetensors`` (float16 weights, public statistics of the
codes), ``gist_ae128.json`` (where it came from, what it reaches) and ``gist_ae128.log``. It may be
stopped at any time; run again, it goes on. The held-out images are measured, never trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path

import numpy as np
import torch

from fedgist.encoders.make import grey, make_codec
from fedgist.encoders.training import Schedule

HERE = Path(__file__).resolve().parents[1] / "src" / "fedgist" / "encoders"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--images", type=Path, default=Path("public4"), help="public_images.py's")
    parser.add_argument("--out", type=Path, default=HERE / "gist_ae128.safetensors")
    parser.add_argument("--shown", type=int, default=300_000, help="images shown in all")
    parser.add_argument("--batch", type=int, default=48)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)

    made = json.loads((args.images / "manifest.json").read_text())
    images = np.load(args.images / "images.npy", mmap_mode="r")
    split = {k: images[a:b] for k, (a, b) in made["split"].items()}
    train = split.pop("train")
    split["held_grey_objects"] = grey(split["held_objects"])
    start, log = time.time(), args.out.with_suffix(".log")

    def note(shown: int, db: float) -> None:
        line = f"{shown} images, {db:.2f} dB with noise on codes, {time.time() - start:.0f} s"
        print(line, flush=True)
        with log.open("a") as f:
            f.write(line + "\n")

    words = f"--seed {args.seed} --shown {args.shown} --batch {args.batch}"
    origin = {"command": f"python scripts/train_codec.py {words}", "images": made}
    schedule = Schedule(images=args.shown, batch=args.batch, seed=args.seed)
    codec = make_codec(train, split, args.out, schedule, note, origin)
    print(f"{codec.digest} -> {args.out}")


if __name__ == "__main__":
    main()
