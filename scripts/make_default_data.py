"""Make the embedded default set: a balanced slice of Fashion-MNIST.

Takes the official files (Debian package ``dataset-fashion-mnist``) and writes 600 training and 100
test images of each class, in the order of the official files, to
``src/fedgist/data/fashion_mini.npz``. A second run writes the same bytes.

    python scripts/make_default_data.py [FOLDER_WITH_THE_FOUR_IDX_FILES]
"""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import numpy as np

from fedgist.data.idx import FASHION_CLASSES, read_idx
from fedgist.data.images import Array

OFFICIAL = Path("/usr/share/datasets/fashion-mnist")
OUT = Path(__file__).parents[1] / "src" / "fedgist" / "data" / "fashion_mini.npz"
SEED = 2017
PER_CLASS = {"train": 600, "test": 100}
PREFIXES = {"train": "train", "test": "t10k"}


def choose(labels: Array, per_class: int, rng: np.random.RandomState) -> Array:
    """Return the ascending positions of ``per_class`` random images of each class."""
    rows = [rng.permutation(np.flatnonzero(labels == c))[:per_class] for c in np.unique(labels)]
    return np.sort(np.concatenate(rows))


def main(folder: Path) -> None:
    # RandomState's stream is frozen by numpy; that of a Generator may change between releases.
    rng = np.random.RandomState(SEED)
    arrays: dict[str, Array] = {}
    for split, prefix in PREFIXES.items():
        images = read_idx(folder / f"{prefix}-images-idx3-ubyte.gz")
        labels = read_idx(folder / f"{prefix}-labels-idx1-ubyte.gz")
        rows = choose(labels, PER_CLASS[split], rng)
        arrays[f"{split}_images"] = images[rows]
        arrays[f"{split}_labels"] = labels[rows]
    arrays["classes"] = np.array(FASHION_CLASSES)
    aside = OUT.with_suffix(".partial")
    with aside.open("wb") as f:
        np.savez_compressed(f, allow_pickle=False, **arrays)
    os.replace(aside, OUT)
    data = OUT.read_bytes()
    print(f"{OUT}: {len(data):,} bytes, sha256 {hashlib.sha256(data).hexdigest()}")


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else OFFICIAL)
