"""Gather public images from freely licensed packages: what every shipped encoder is fitted on.

    python scripts/public_images.py --out public

writes ``images.npy`` (uint8 ``[n, 3, 64, 64]``, RGB) and ``manifest.json`` (sources, versions,
licences, counts, seed, SHA-256). Photographs give patches at several scales. Drawings and cut-out
objects are kept whole on plain grounds, because that is what users' images look like; about half of
everything is turned grey. The rows are ordered: training images first, then held-out photographs,
then held-out objects, split by source file so that no file is on both sides.

Fashion-MNIST, digits and the Google and Twitter emoji are private data in the benchmarks and must
never be read here.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.metadata
import importlib.util
import json
import os
import re
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

SIZE = 64
FLAT = 8.0  # grey levels: what varies less is dropped
THUMB_STEP = 12  # grey levels: images whose 8x8 thumbnails agree to this step are duplicates
LARGEST = 40_000_000  # pixels: a few drawings have hundreds of millions
HELD_OUT = 0.08  # share of source files that the fit never sees
LEVELS = {64: 2, 96: 6, 160: 16, 256: 32, 448: 48, 768: 56}  # short side in pixels -> patches

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Source:
    """One package and what to take from it."""

    package: str
    licence: str
    folder: str
    kind: Literal["photo", "object"]
    views: int = 1  # images per object
    keep: str = ""  # regular expressions on the path below the folder
    drop: str = r"(?!)"
    pip: bool = False


SOURCES = (
    Source(
        "openclipart-png",
        "public domain",
        "/usr/share/openclipart/png",
        "object",
        views=3,
        # near-blank icons, flags and cards teach nothing; logos are trademarks; smilies and
        # numbers are the nearest things here to the private emoji and digits
        drop=r"(^|/)(shapes|flat-theme|flags|cards|logos|gradients|smil[^/]*"
        r"|[^/]*(alphabet|digit|number)[^/]*)(/|$)",
    ),
    Source(
        "tuxpaint-stamps-default",
        "GPL-2",
        "/usr/share/tuxpaint/stamps",
        "object",
        views=5,
        drop=r"^symbols/",  # letters, numbers, money
    ),
    Source(
        "lomiri-wallpapers-16.04",
        "CC-BY-4.0, CC-BY-SA-4.0, CC0-1.0",
        "/usr/share/backgrounds",
        "photo",
        keep=r"^[^/]+$",
    ),
    Source(
        "lomiri-wallpapers-20.04",
        "CC-BY-SA-3.0",
        "/usr/share/backgrounds",
        "photo",
        keep=r"^[^/]+$",
    ),
    Source("mate-backgrounds", "GPL-2+", "/usr/share/backgrounds/mate", "photo"),
    Source(
        "plasma-workspace-wallpapers",
        "GPL-2+",
        "/usr/share/wallpapers",
        "photo",
        keep=r"/images[^/]*/",
    ),
    Source(
        "scikit-image",
        "CC0 or public domain",
        "skimage/data",
        "photo",
        keep=r"^(astronaut|brick|camera|cell|chelsea|coffee|coins|grass|gravel|hubble_deep_field"
        r"|ihc|retina|rocket)\.",
        pip=True,
    ),
)


def locate(source: Source) -> tuple[Path, str, list[str]]:
    """Return (folder, version, image paths below it, sorted); exit with one line if missing."""
    if source.pip:
        found = importlib.util.find_spec("skimage")
        if found is None or found.origin is None:
            sys.exit(f"{source.package} must be installed. Run: pip install {source.package}")
        folder = Path(found.origin).parent / "data"
        return folder, importlib.metadata.version(source.package), select(source, folder)
    query = ["dpkg-query", "-W", "-f", "${Version}\n", source.package]
    listing = ["dpkg", "-L", source.package]
    try:
        version = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
        owned = subprocess.run(listing, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError):
        packages = " ".join(s.package for s in SOURCES if not s.pip)
        sys.exit(
            f"{source.package} must be installed. "
            f"Run: apt-get install -y --no-install-recommends {packages}"
        )
    folder = Path(source.folder)
    files = set(owned.splitlines())
    return folder, version, [f for f in select(source, folder) if str(folder / f) in files]


def select(source: Source, folder: Path) -> list[str]:
    """Return the images wanted, the largest of each picture that comes in several sizes."""
    best: dict[str, tuple[int, str]] = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.suffix.lower() not in (".png", ".jpg", ".jpeg") or path.is_symlink():
            continue
        if not re.search(source.keep, name) or re.search(source.drop, name):
            continue
        picture = re.sub(r"_?\d+x\d+$", "", name.rsplit(".", 1)[0])
        best[picture] = max(best.get(picture, (0, "")), (path.stat().st_size, name))
    return sorted(name for _, name in best.values())


def levels(im: Image.Image) -> list[tuple[int, int]]:
    """Return what a photograph is shrunk to, its short side in pixels, and patches from each."""
    return [(short, patches) for short, patches in LEVELS.items() if short <= min(im.size)]


def photo_views(im: Image.Image, times: int, rng: np.random.Generator) -> Iterator[Pixels]:
    """Yield random patches at several scales, about half of them grey."""
    flat = Image.new("RGBA", im.size, "white")
    flat.alpha_composite(im.convert("RGBA"))
    rgb = flat.convert("RGB")
    for short, patches in levels(im):
        shape = tuple(round(side * short / min(rgb.size)) for side in rgb.size)
        level = rgb.resize((shape[0], shape[1]), Image.Resampling.LANCZOS, reducing_gap=3.0)
        for _ in range(patches * times):
            x = int(rng.integers(0, level.width - SIZE + 1))
            y = int(rng.integers(0, level.height - SIZE + 1))
            patch = level.crop((x, y, x + SIZE, y + SIZE))
            yield tone(patch, rng, grey=0.45, invert=0.1)


def object_views(im: Image.Image, views: int, rng: np.random.Generator) -> Iterator[Pixels]:
    """Yield the whole object, scaled to fit, on ``views`` plain grounds."""
    rgba, ground = cut_out(im.convert("RGBA"))
    for _ in range(views):
        scale = SIZE * rng.uniform(0.75, 1.0) / max(rgba.size)
        w, h = (max(1, min(SIZE, round(side * scale))) for side in rgba.size)
        if rng.random() < 0.25:  # tasks may stretch images to a square
            w = h = max(w, h)
        small = rgba.resize((w, h), Image.Resampling.LANCZOS, reducing_gap=3.0)
        if rng.random() < 0.5:
            small = ImageOps.mirror(small)
        canvas = Image.new("RGBA", (SIZE, SIZE), ground or plain(rng))
        corner = (SIZE - w) // 2, (SIZE - h) // 2
        canvas.alpha_composite(small, corner)
        image = canvas.convert("RGB")
        if rng.random() < 0.3:  # users' images are often smaller than 64 pixels
            side = int(rng.integers(24, 49))
            image = image.resize((side, side), Image.Resampling.BILINEAR)
            image = image.resize((SIZE, SIZE), Image.Resampling.BILINEAR)
        yield tone(image, rng, grey=0.55, invert=0.35)


def cut_out(im: Image.Image) -> tuple[Image.Image, tuple[int, int, int] | None]:
    """Return the object in its bounding box, and its own ground if it has a plain one."""
    alpha = np.asarray(im)[..., 3]
    if alpha.min() < 16:
        mask, ground = alpha >= 16, None
    else:
        rgb = np.asarray(im)[..., :3].astype(np.int16)
        corners = rgb[[0, 0, -1, -1], [0, -1, 0, -1]]
        if np.abs(corners - corners[0]).max() > THUMB_STEP:
            return im, None
        mask = np.abs(rgb - corners[0]).max(2) > THUMB_STEP
        ground = (int(corners[0, 0]), int(corners[0, 1]), int(corners[0, 2]))
    rows, cols = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    if len(rows) == 0:
        return im, ground
    return im.crop((int(cols[0]), int(rows[0]), int(cols[-1]) + 1, int(rows[-1]) + 1)), ground


def plain(rng: np.random.Generator) -> tuple[int, int, int]:
    """Draw a ground: white, black, a grey or a colour."""
    kind = rng.random()
    if kind < 0.6:
        return (255, 255, 255) if kind < 0.3 else (0, 0, 0)
    r, g, b = (int(v) for v in rng.integers(0, 256, 3))
    return (r, r, r) if kind < 0.75 else (r, g, b)


def tone(im: Image.Image, rng: np.random.Generator, grey: float, invert: float) -> Pixels:
    """Turn grey and invert with the given probabilities; return uint8 ``[3, 64, 64]``."""
    if rng.random() < grey:
        im = im.convert("L").convert("RGB")
    if rng.random() < invert:
        im = ImageOps.invert(im)
    return np.asarray(im).transpose(2, 0, 1)


def is_new(x: Pixels, seen: set[bytes]) -> bool:
    """Return whether nothing with the same coarse thumbnail was seen, and remember it."""
    small = x.reshape(3, 8, SIZE // 8, 8, SIZE // 8).mean((2, 4))
    key = (small / THUMB_STEP).round().astype(np.uint8).tobytes()
    fresh = key not in seen
    seen.add(key)
    return fresh


def is_kept(x: Pixels, seen: set[bytes]) -> bool:
    """Return whether an image shows something, and nothing like it was seen."""
    return bool(x.std((1, 2)).max() >= FLAT) and is_new(x, seen)


def draws(source: Source, name: str, seed: int) -> tuple[np.random.Generator, bool]:
    """Return a file's own generator, and whether the file is held out.

    One generator per file: adding a file changes no other file's draws.
    """
    rng = np.random.default_rng([seed, zlib.crc32(f"{source.package}/{name}".encode())])
    return rng, bool(rng.random() < HELD_OUT)


def gather(
    source: Source, seed: int, times: int, seen: set[bytes]
) -> tuple[dict[str, object], list[Pixels], list[Pixels]]:
    """Return the source's manifest entry, its training and its held-out images."""
    folder, version, names = locate(source)
    train: list[Pixels] = []
    held: list[Pixels] = []
    used = 0
    for name in names:
        rng, is_held = draws(source, name, seed)
        side = held if is_held else train
        with Image.open(folder / name) as im:
            if im.width * im.height > LARGEST:
                continue
            if source.kind == "photo":
                views = photo_views(im, times, rng)
            else:
                views = object_views(im, source.views * times, rng)
            fresh = [x for x in views if is_kept(x, seen)]
        used += bool(fresh)
        side += fresh
    print(f"{source.package}: {used} files, {len(train)} + {len(held)} images", file=sys.stderr)
    entry: dict[str, object] = {
        "package": source.package,
        "version": version,
        "licence": source.licence,
        "kind": source.kind,
        "files": used,
        "train": len(train),
        "held_out": len(held),
    }
    return entry, train, held


def write_aside(path: Path, write: Callable[[BinaryIO], object]) -> None:
    aside = path.with_name(path.name + ".part")
    with aside.open("wb") as f:
        write(f)
    os.replace(aside, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path("public"), help="folder to write to")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--times", type=int, default=1, help="this many times the views per file")
    args = parser.parse_args()
    Image.MAX_IMAGE_PIXELS = None  # installed packages are trusted; LARGEST keeps it quick
    args.out.mkdir(parents=True, exist_ok=True)

    entries: list[dict[str, object]] = []
    training: list[Pixels] = []
    held_out: dict[str, list[Pixels]] = {"photo": [], "object": []}
    seen: set[bytes] = set()
    for source in SOURCES:
        entry, train, held = gather(source, args.seed, args.times, seen)
        entries.append(entry)
        training += train
        held_out[source.kind] += held
    order = np.random.default_rng(args.seed).permutation(len(training))
    a, b = len(training), len(training) + len(held_out["photo"])
    images = np.stack(
        [training[i] for i in order.tolist()] + held_out["photo"] + held_out["object"]
    )
    manifest = {
        "command": f"python scripts/public_images.py --seed {args.seed} --times {args.times}",
        "seed": args.seed,
        "pillow": importlib.metadata.version("pillow"),
        "images": len(images),
        "shape": list(images.shape),
        "sha256": hashlib.sha256(images.tobytes()).hexdigest(),
        "split": {"train": [0, a], "held_photos": [a, b], "held_objects": [b, len(images)]},
        "sources": entries,
    }
    text = json.dumps(manifest, indent=2) + "\n"
    write_aside(args.out / "images.npy", lambda f: np.save(f, images))
    write_aside(args.out / "manifest.json", lambda f: f.write(text.encode()))
    print(f"wrote {len(images)} images to {args.out}/images.npy")


if __name__ == "__main__":
    main()
