"""Figures: the covariance spectrum (SVG), the partition (a tiny PNG), synthetic samples.

The page's figures take their colours from its style sheet, so they follow light and dark mode.
`samples_png` is the one figure that leaves as a file of its own.
"""

from __future__ import annotations

import base64
import importlib.util
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from markupsafe import Markup
from PIL import Image, ImageDraw, ImageFont

from fedgist.types import Images
from fedgist.whole import write_whole

__all__ = [
    "ClassSamples",
    "class_samples",
    "exposure_png",
    "heat_map",
    "png_uri",
    "samples_png",
    "spectrum",
]

TINT = (42, 143, 208)  # reads on white and on near-black; strength is in the alpha channel
SHOWN = 64  # pixels: a sample on the page is not larger than that
PAGE_BYTES = 1_300_000  # of pixels in all samples on the page; base64 adds a third at worst
MOST_COLUMNS = 12
MOST_CLASSES = 100  # rows in a figure of samples
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont


@dataclass(frozen=True)
class ClassSamples:
    """A few images of one class.

    Attributes:
        name: the class.
        total: how many images of it there are in the whole set.
        uris: ``data:image/png`` addresses.
        width: pixels at which each is shown.
    """

    name: str
    total: int
    uris: tuple[str, ...]
    width: int


def class_samples(images: Images, per_class: int = 10) -> list[ClassSamples]:
    """Return the first ``per_class`` images of each class, fewer where the page would grow large.

    Nothing is chosen by its looks. At most 100 classes are shown.
    """
    side = images.pixels.shape[-1]
    drawn = min(side, SHOWN)
    pixels = drawn**2 * images.pixels.shape[1] * min(len(images.classes), MOST_CLASSES)
    rows = _first_rows(images, max(1, min(per_class, PAGE_BYTES // pixels)))
    width = drawn * (SHOWN // drawn)
    counts = images.counts().tolist()
    return [
        ClassSamples(
            images.classes[c],
            counts[c],
            tuple(_uri(_tile(x, SHOWN)) for x in images.pixels[row]),
            width,
        )
        for c, row in enumerate(rows)
    ]


def heat_map(table: Sequence[Sequence[int]]) -> str:
    """Draw a partition, ``[clients][classes]`` counts, as a ``data:`` PNG.

    One pixel column a client, one row a class. The strength of the tint is the square root of the
    count over the largest count, so that small holdings still show.
    """
    counts = np.asarray(table, dtype=np.float64).T
    pixels = np.zeros((*counts.shape, 4), dtype=np.uint8)
    pixels[..., :3] = TINT
    pixels[..., 3] = np.round(255 * np.sqrt(counts / max(1.0, float(counts.max(initial=0)))))
    return _uri(Image.fromarray(pixels))


def spectrum(spectra: Mapping[str, Any]) -> Markup | None:
    """Draw eigenvalues in falling order on a log axis, or return None if none is positive.

    Args:
        spectra: ``released`` and ``shrunk``, maybe ``exact`` (lists of eigenvalues) and
            ``noise_edge``. Values that are not positive cannot be drawn; the page counts them.
    """
    series = {k: list(spectra[k]) for k in ("released", "exact", "shrunk") if spectra.get(k)}
    edge = spectra.get("noise_edge") or 0.0
    drawn = [v for values in series.values() for v in [*values, edge] if 0 < v < math.inf]
    if not drawn:
        return None
    low = math.floor(math.log10(max(min(drawn), max(drawn) * 1e-6)))
    high = max(low + 1, math.ceil(math.log10(max(drawn))))
    n = max(len(values) for values in series.values())
    axes = _Axes(low, high, n)
    parts = [*axes.grid()]
    if 10**low <= edge:
        y = axes.y(edge)
        parts.append(f'<line class="edge" x1="{axes.left}" x2="{axes.right}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="edge-text" x="{axes.right}" y="{y - 6:.1f}">noise alone</text>')
    for name, values in series.items():
        points = [(axes.x(i), axes.y(v)) for i, v in enumerate(values) if 10**low <= v < math.inf]
        if name == "released":
            parts += [f'<circle class="released" cx="{x}" cy="{y}" r="2.2"/>' for x, y in points]
        else:
            path = " ".join(f"{x},{y}" for x, y in points)
            parts.append(f'<polyline class="{name}" points="{path}"/>')
    # Markup is safe here: nothing but numbers and our own words went in.
    return Markup("".join(parts))


@dataclass(frozen=True)
class _Axes:
    """Log-linear axes in a 480 x 300 box."""

    low: int
    high: int
    n: int
    left: float = 48
    right: float = 472
    top: float = 28
    bottom: float = 258

    def x(self, i: int) -> float:
        """Place eigenvalue number i, counted from zero."""
        return round(self.left + 8 + (self.right - self.left - 16) * i / max(self.n - 1, 1), 1)

    def y(self, value: float) -> float:
        """Place a positive value."""
        share = (math.log10(value) - self.low) / (self.high - self.low)
        return round(self.bottom - (self.bottom - self.top) * share, 1)

    def grid(self) -> list[str]:
        """Draw decades, ranks and the axis titles."""
        out = []
        step = max(1, math.ceil((self.high - self.low) / 7))
        for k in range(self.low, self.high + 1, step):
            y = self.y(10.0**k)
            out.append(f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{y}" y2="{y}"/>')
            label = f'10<tspan dy="-5" font-size="9">{str(k).replace("-", "−")}</tspan>'
            out.append(f'<text class="y-tick" x="{self.left - 7}" y="{y + 4:.1f}">{label}</text>')
        for i in sorted({0, *(max(0, round(self.n * k / 4) - 1) for k in range(1, 5))}):
            x = self.x(i)
            out.append(f'<text class="x-tick" x="{x}" y="{self.bottom + 18}">{i + 1}</text>')
        out.append(f'<text x="{self.left}" y="13">eigenvalue</text>')
        middle = (self.left + self.right) / 2
        out.append(f'<text class="x-tick" x="{middle}" y="294">rank of the eigenvalue</text>')
        return out


def samples_png(images: Images, path: Path, per_class: int = 10) -> None:
    """Write a grid of the first ``per_class`` images of each class, one labelled row a class.

    Small images are enlarged by a whole factor without smoothing. At most 100 classes are drawn;
    the last line says so.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = _first_rows(images, per_class)
    side = images.pixels.shape[-1]
    cell = side * max(1, round(56 / side)) if side < 128 else 128
    gap, edge = 4, 16
    font, small = _font(15), _font(12)
    names = [_shorten(f"{c}  {images.classes[c]}", font, 260) for c in range(len(rows))]
    label = math.ceil(max(font.getlength(n) for n in names)) + 16
    width = max(edge * 2 + label + per_class * (cell + gap) - gap, 420)
    height = edge * 2 + len(rows) * (cell + gap) + 22
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    for c, row in enumerate(rows):
        top = edge + c * (cell + gap)
        draw.text((edge, top + cell / 2), names[c], font=font, fill="#1b1f24", anchor="lm")
        if not len(row):
            at = (edge + label, top + cell / 2)
            draw.text(at, "no image of this class", font=small, fill="#6b7280", anchor="lm")
        for i, pixels in enumerate(images.pixels[row]):
            tile = _tile(pixels, cell).resize((cell, cell), Image.Resampling.NEAREST)
            sheet.paste(tile, (edge + label + i * (cell + gap), top))
    note = f"Synthetic images, not photographs. {len(images):,} in the set"
    more = f"; {len(rows)} of {len(images.classes)} classes shown" if _cut(images) else ""
    draw.text((edge, height - edge), note + more, font=small, fill="#6b7280", anchor="ls")
    write_whole(path, _encode(sheet))


def exposure_png(pictures: Mapping[str, torch.Tensor], path: Path) -> None:
    """Write what attacks rebuild: one labelled row an attack, one column an image.

    Args:
        pictures: name -> float32 ``[n, c, s, s]`` in [0, 1], originals first.
        path: the file.

    Raises:
        ConfigError: the file cannot be written.
    """
    rows = {name: images[:MOST_COLUMNS] for name, images in pictures.items()}
    side = next(iter(rows.values())).shape[-1]
    cell = side * max(1, round(56 / side)) if side < 128 else 128
    gap, edge, font = 4, 16, _font(15)
    label = math.ceil(max(font.getlength(n) for n in rows)) + 16
    columns = max(len(images) for images in rows.values())
    width = edge * 2 + label + columns * (cell + gap) - gap
    sheet = Image.new("RGB", (width, edge * 2 + len(rows) * (cell + gap) - gap), "white")
    draw = ImageDraw.Draw(sheet)
    for k, (name, images) in enumerate(rows.items()):
        top = edge + k * (cell + gap)
        draw.text((edge, top + cell / 2), name, font=font, fill="#1b1f24", anchor="lm")
        for i, pixels in enumerate(images):
            tile = _tile(pixels.clamp(0, 1), cell).resize((cell, cell), Image.Resampling.NEAREST)
            sheet.paste(tile, (edge + label + i * (cell + gap), top))
    write_whole(path, _encode(sheet))


def _cut(images: Images) -> bool:
    return len(images.classes) > MOST_CLASSES


def _first_rows(images: Images, per_class: int) -> list[torch.Tensor]:
    """Return positions of the first few images of each of the first 100 classes."""
    order = torch.argsort(images.labels, stable=True)
    parts = torch.split(order, images.counts().tolist())
    return [part[:per_class] for part in parts[:MOST_CLASSES]]


def _tile(pixels: torch.Tensor, most: int) -> Image.Image:
    """Turn one image ``[c, h, w]`` into a picture at most ``most`` pixels wide."""
    a = pixels.movedim(0, -1).numpy()
    a = a if a.dtype == np.uint8 else np.rint(a * 255).astype(np.uint8)
    tile = Image.fromarray(np.ascontiguousarray(a[..., 0] if a.shape[-1] == 1 else a))
    return tile if tile.width <= most else tile.resize((most, most), Image.Resampling.BOX)


def _encode(image: Image.Image) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", optimize=True)
    return out.getvalue()


def _uri(image: Image.Image) -> str:
    return png_uri(_encode(image))


def png_uri(png: bytes) -> str:
    """Return the bytes of a PNG as a data URI, so that a page can hold it."""
    return "data:image/png;base64," + base64.b64encode(png).decode()


def _font(height: int) -> Font:
    """Return DejaVu Sans (Latin, Greek, Cyrillic, ...), which matplotlib carries.

    Pillow's own font knows ASCII only. Finding the file does not import matplotlib.
    """
    spec = importlib.util.find_spec("matplotlib")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        file = Path(folder, "mpl-data", "fonts", "ttf", "DejaVuSans.ttf")
        if file.is_file():
            return ImageFont.truetype(str(file), height)
    return ImageFont.load_default(height)


def _shorten(text: str, font: Font, width: float) -> str:
    text = "".join(c if c.isprintable() else "?" for c in text)  # a line break has no length
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text + "…"
