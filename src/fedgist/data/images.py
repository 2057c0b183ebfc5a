"""Pixels: any image file or array to the channels, size and fit that a task declares.

The task is the record of the policy (`Task.channels`, `Task.size`, `Task.fit`); this module applies
it in one order: scale by the dtype's own range, lay transparency over white, convert channels, make
square, resize. Each image is treated alone, so a row never depends on its neighbours.

- 8-bit sources stay uint8. 16-bit and 32-bit integers and floats become float32 in [0, 1], divided
  by the largest value that their type (or their TIFF's declared depth) can hold, never by the
  largest one seen.
- Grey to RGB repeats the channel; RGB to grey is the ITU-R 601-2 luma (.299, .587, .114).
- Resizing is bicubic, with support scaled to the shrinking factor (antialiased).
- EXIF orientation is not applied, as in torchvision's ImageFolder.
- Pillow reads 16-bit *colour* files as their upper 8 bits; they are treated as 8-bit.
"""

from __future__ import annotations

import io
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from torch import Tensor

from fedgist.errors import DataError
from fedgist.types import Task

__all__ = [
    "NEAR_BLACK",
    "SUFFIXES",
    "Array",
    "Encoded",
    "convert",
    "decode",
    "native",
    "stack",
    "warn_near_black",
]

Array = NDArray[Any]

# Named so that a file's content cannot choose a decoder that runs a program (EPS) or needs one.
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "TIFF", "WEBP", "PPM", "JPEG2000", "TGA")
SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jpe", ".jfif", ".bmp", ".gif", ".tif", ".tiff"),
    *(".webp", ".pgm", ".ppm", ".pbm", ".pnm", ".jp2", ".tga"),
)
NEAR_BLACK = 0.02  # a set whose mean is below this share of the range is suspect
BITS_PER_SAMPLE, SAMPLE_FORMAT = 258, 339  # TIFF tags
MIXED_SIZE = 64  # proposed for a set whose images have no common square size


@dataclass(frozen=True)
class Encoded:
    """One image file, not yet decoded.

    Attributes:
        name: what an error message calls it.
        data: where it lies, or its bytes.
    """

    name: str
    data: Path | bytes


def decode(file: Encoded) -> Array:
    """Read one image: uint8 in 0..255 or float32 in [0, 1], ``[h, w]`` or ``[h, w, 3]``.

    Raises:
        DataError: unreadable, truncated, not finite, or outside its type's range; names the file.
    """
    try:
        with _open(file) as im:
            im.load()
            return _pixels(im, file.name)
    except DataError:
        raise
    except Exception as e:  # decoders raise almost anything on damaged files
        raise _unreadable(file, e) from e


def stack(files: Sequence[Encoded], task: Task) -> Tensor:
    """Decode files to ``[n, channels, size, size]``: uint8 if all are 8-bit, else float32."""
    out = np.empty((len(files), task.channels, task.size, task.size), np.uint8)
    for i, file in enumerate(files):
        picture = _fit(decode(file), task)
        if picture.dtype != out.dtype:  # one set has one dtype: the finer one
            out, picture = _to_float(out), _to_float(picture)
        out[i] = picture
    return torch.from_numpy(out)


def convert(array: Array, task: Task, name: str) -> Tensor:
    """Bring an array of images to ``[n, channels, size, size]``.

    Args:
        array: ``[n, h, w]``, ``[n, h, w, 1 or 3]`` or ``[n, 1 or 3, h, w]``; bool, uint8, uint16,
            or floating in [0, 1].
        task: the policy.
        name: what error messages call the array.

    Raises:
        DataError: wrong shape, dtype or range, or a value that is not finite.
    """
    pictures = _unit(_channels_last(array, name), name)
    n, h, w = pictures.shape[:3]
    out: Array
    if (h, w) == (task.size, task.size) and pictures.ndim == (3 if task.channels == 1 else 4):
        out = pictures[:, None] if pictures.ndim == 3 else pictures.transpose(0, 3, 1, 2)
        out = np.ascontiguousarray(out)
    else:
        out = np.empty((n, task.channels, task.size, task.size), pictures.dtype)
        for i in range(n):
            out[i] = _fit(pictures[i], task)
    return torch.from_numpy(out if out.flags.writeable else out.copy())


def native(files: Sequence[Encoded], sample: int = 256) -> tuple[Literal[1, 3], int]:
    """Return the channels and the size that all images share, from the headers of a sample.

    Images of different sizes, or not square, have none: 3 channels at 64 pixels are proposed.
    """
    sizes, grey = set(), True
    for file in files[:: max(1, len(files) // sample)]:
        try:
            with _open(file) as im:
                sizes.add(im.size)
                grey = grey and im.mode.startswith(("1", "L", "I", "F")) and im.mode != "LAB"
        except Exception as e:
            raise _unreadable(file, e) from e
    if len(sizes) != 1:
        return 3, MIXED_SIZE
    ((w, h),) = sizes
    return 1 if grey else 3, w if w == h else MIXED_SIZE


def warn_near_black(pixels: Tensor, name: str) -> None:
    """Warn when the mean of ``[n, c, h, w]`` is below 2 % of the range: often a wrong scale."""
    if not len(pixels):
        return
    top = 255 if pixels.dtype == torch.uint8 else 1
    mean = float(pixels.numpy().mean(dtype=np.float64)) / top
    if mean < NEAR_BLACK:
        warnings.warn(
            f"the mean of '{name}' should be at least {NEAR_BLACK:.0%} of the range. Got "
            f"{mean:.2%}: check whether the files use the whole range of their type",
            stacklevel=3,
        )


def _open(file: Encoded) -> Image.Image:
    source = io.BytesIO(file.data) if isinstance(file.data, bytes) else file.data
    return Image.open(source, formats=FORMATS)


def _unreadable(file: Encoded, e: Exception) -> DataError:
    what = "unknown format" if isinstance(e, UnidentifiedImageError) else str(e)
    return DataError(f"'{file.name}' must be a readable image. Got {type(e).__name__}: {what}")


def _pixels(im: Image.Image, name: str) -> Array:
    if im.mode.startswith("I"):
        return _integers(im, name)
    if im.mode == "F":
        return _unit(np.asarray(im, np.float32), name)
    if _tag(im, SAMPLE_FORMAT) == 2:  # Pillow wraps negative 8-bit values round to white
        raise DataError(f"'{name}' must hold unsigned integers or floats. Got signed 8-bit pixels")
    grey = im.mode in ("1", "L", "LA", "La")
    if im.mode == "La":
        im = im.convert("LA")
    if im.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in im.info:
        white = Image.new("RGBA", im.size, "white")
        white.alpha_composite(im.convert("RGBA"))
        im = white
    return np.asarray(im.convert("L" if grey else "RGB"))


def _integers(im: Image.Image, name: str) -> Array:
    """Scale modes I and I;16 to float32 by the depth that the file declares."""
    values = np.asarray(im)
    bits, signed = 16, False
    if tagged := _tag(im, BITS_PER_SAMPLE):
        bits, signed = tagged, _tag(im, SAMPLE_FORMAT) == 2
    elif im.mode == "I" and im.format not in ("PNG", "PPM"):  # those hold 16 bits at most
        bits, signed = 32, True
    if bits == 32 and not signed:
        values = values.view(np.uint32)
    if values.size and values.min() < 0:
        raise DataError(f"'{name}' must hold pixels >= 0. Got {values.min()}")
    return (values / float(2 ** (bits - signed) - 1)).astype(np.float32)


def _tag(im: Image.Image, tag: int) -> int:
    """Return the first value of a TIFF tag, or 0."""
    value = getattr(im, "tag_v2", {}).get(tag, 0)
    return int(value[0] if isinstance(value, tuple) else value)


def _channels_last(array: Array, name: str) -> Array:
    if array.ndim == 3:
        return array
    if array.ndim == 4:
        if array.shape[3] in (1, 3):
            return array[..., 0] if array.shape[3] == 1 else array
        if array.shape[1] in (1, 3):
            return array[:, 0] if array.shape[1] == 1 else array.transpose(0, 2, 3, 1)
    raise DataError(
        f"images of '{name}' must have shape [n, h, w], [n, h, w, 1 or 3] or [n, 1 or 3, h, w]. "
        f"Got {list(array.shape)}"
    )


def _unit(a: Array, name: str) -> Array:
    """Scale by the dtype's own range: uint8 stays, the rest becomes float32 in [0, 1]."""
    if a.dtype == np.uint8:
        return a
    if a.dtype == np.bool_:
        return a.astype(np.uint8) * np.uint8(255)
    if a.dtype == np.uint16:
        return a / np.float32(65_535)
    if a.dtype.kind != "f":
        raise DataError(
            f"pixels of '{name}' must be bool, uint8, uint16 or floats in [0, 1]. Got {a.dtype}"
        )
    low, high = (float(a.min()), float(a.max())) if a.size else (0.0, 0.0)
    if not np.isfinite((low, high)).all():  # NaN spreads to both
        raise DataError(f"pixels of {_first_bad(a, name)} must be finite. Got NaN or Inf")
    if low < 0 or high > 1:
        raise DataError(
            f"float pixels of '{name}' must lie in [0, 1]. Got {low:g}..{high:g}: divide by the "
            "largest value that the instrument can give"
        )
    return a.astype(np.float32, copy=False)


def _first_bad(a: Array, name: str) -> str:
    if a.ndim == 2:  # one image
        return f"'{name}'"
    return f"image {np.flatnonzero(~np.isfinite(a.reshape(len(a), -1)).all(1))[0]} of '{name}'"


def _to_float(a: Array) -> Array:
    return a / np.float32(255) if a.dtype == np.uint8 else a


def _fit(a: Array, task: Task) -> Array:
    """Bring one ``[h, w]`` or ``[h, w, 3]`` to ``[channels, size, size]``, same dtype."""
    if a.ndim == 3 and task.channels == 1:
        a = _luma(a)
    h, w = a.shape[:2]
    size = task.size
    if task.fit == "crop":
        side = min(h, w)
        top, left = (h - side) // 2, (w - side) // 2
        a = a[top : top + side, left : left + side]
    if task.fit == "pad":
        a = _pad(a, size)
    elif a.shape[:2] != (size, size):
        a = _resize(a, size, size)
    if a.ndim == 3:
        return a.transpose(2, 0, 1)
    return np.broadcast_to(a, (task.channels, size, size))


def _luma(a: Array) -> Array:
    if a.dtype == np.uint8:
        return np.asarray(Image.fromarray(a).convert("L"))
    return a @ np.array([0.299, 0.587, 0.114], np.float32)


def _pad(a: Array, size: int) -> Array:
    """Resize the longer side to ``size`` and centre on black."""
    h, w = a.shape[:2]
    h, w = (max(1, round(side * size / max(h, w))) for side in (h, w))
    top, left = (size - h) // 2, (size - w) // 2
    out = np.zeros((size, size, *a.shape[2:]), a.dtype)
    out[top : top + h, left : left + w] = a if a.shape[:2] == (h, w) else _resize(a, h, w)
    return out


def _resize(a: Array, h: int, w: int) -> Array:
    if a.dtype == np.uint8:
        return np.asarray(Image.fromarray(a).resize((w, h), Image.Resampling.BICUBIC))
    if a.ndim == 3:  # Pillow has no float RGB
        return np.stack([_resize(band, h, w) for band in a.transpose(2, 0, 1)], axis=2)
    out = np.asarray(Image.fromarray(a).resize((w, h), Image.Resampling.BICUBIC))
    return out.clip(0, 1)  # bicubic overshoots at edges
