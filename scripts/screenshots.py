"""Take pictures of pages for the documentation, with a headless Chromium.

Usage: python scripts/screenshots.py docs/figures NAME=PAGE.html[:TOP-BOTTOM] ...

Each page is drawn 1,000 pixels wide; rows TOP to BOTTOM (the first 1,400 unless given) become
``NAME.png``, at three quarters of the size and with 160 colours.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from pathlib import Path

from PIL import Image

FLAGS = "--headless --no-sandbox --disable-gpu --hide-scrollbars --no-first-run"
WIDTH, TALL = 1000, 12_000


def main() -> int:
    """Take the pictures named on the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("pages", nargs="+")
    args = parser.parse_args()
    for text in args.pages:
        name, _, rest = text.partition("=")
        page, _, rows = rest.partition(".html:")
        top, _, bottom = (rows or "0-1400").partition("-")
        file = Path(page if page.endswith(".html") else page + ".html")
        picture(file, args.folder / f"{name}.png", int(top), int(bottom))
    return 0


def picture(page: Path, out: Path, top: int, bottom: int) -> None:
    """Write rows ``top`` to ``bottom`` of a page as a small PNG."""
    with tempfile.TemporaryDirectory() as folder:
        shot = Path(folder) / "page.png"
        command = ["chromium", *FLAGS.split(), "--blink-settings=preferredColorScheme=1"]
        command += [f"--user-data-dir={folder}/profile", f"--screenshot={shot}"]
        command += [f"--window-size={WIDTH},{TALL}", page.resolve().as_uri()]
        subprocess.run(command, check=True, capture_output=True, timeout=120)
        image = Image.open(shot).convert("RGB").crop((0, top, WIDTH, bottom))
    small = image.resize((3 * WIDTH // 4, 3 * (bottom - top) // 4), Image.Resampling.LANCZOS)
    small.quantize(160, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE).save(
        out, optimize=True
    )


if __name__ == "__main__":
    raise SystemExit(main())
