"""Decoding: every mode, scale, fit and kind of damage."""

import io
import struct
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedgist.data.images import (
    Encoded,
    _pixels,
    convert,
    decode,
    native,
    stack,
    warn_near_black,
)
from fedgist.errors import DataError
from fedgist.types import Task

GREY = np.arange(64, dtype=np.uint8).reshape(8, 8) * 4
COLOUR = np.stack([GREY, GREY[::-1], GREY.T], axis=2)
ALPHA = np.where(np.arange(8) < 4, 255, 0).astype(np.uint8) * np.ones((8, 1), np.uint8)


def task(size: int = 8, channels: int = 1, fit: str = "stretch") -> Task:
    return Task("t", ("a", "b"), channels=channels, size=size, fit=fit)  # type: ignore[arg-type]


def encode(im: Image.Image, fmt: str, **options: object) -> Encoded:
    buffer = io.BytesIO()
    im.save(buffer, fmt, **options)
    return Encoded(f"x.{fmt.lower()}", buffer.getvalue())


def over_white(a: np.ndarray) -> np.ndarray:
    shape = ALPHA if a.ndim == 2 else ALPHA[..., None]
    return np.where(shape > 0, a, np.uint8(255))


def with_alpha(mode: str) -> Image.Image:
    base = Image.fromarray(GREY if mode == "LA" else COLOUR)
    base.putalpha(Image.fromarray(ALPHA))
    assert base.mode == mode
    return base


def palette(transparent: bool) -> Encoded:
    im = Image.fromarray((np.arange(64) % 2).astype(np.uint8).reshape(8, 8)).convert("P")
    im.putpalette([10, 20, 30, 200, 100, 50])
    return encode(im, "PNG", **({"transparency": 1} if transparent else {}))


ODD = (np.arange(64) % 2).reshape(8, 8, 1) == 1
TWO = np.where(ODD, np.uint8([200, 100, 50]), np.uint8([10, 20, 30]))
PA = Image.merge("RGBA", [Image.fromarray(c) for c in (*np.moveaxis(TWO, 2, 0), ALPHA)])


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (encode(Image.fromarray(GREY > 99), "PNG"), np.where(GREY > 99, 255, 0)),
        (encode(Image.fromarray(GREY), "PNG"), GREY),
        (encode(with_alpha("LA"), "PNG"), over_white(GREY)),
        (palette(transparent=False), TWO),
        (palette(transparent=True), np.where(ODD, np.uint8(255), TWO)),
        (encode(Image.fromarray(COLOUR), "PNG"), COLOUR),
        (encode(with_alpha("RGBA"), "PNG"), over_white(COLOUR)),
        (encode(with_alpha("RGBA"), "TIFF"), over_white(COLOUR)),
        (encode(Image.fromarray(COLOUR), "BMP"), COLOUR),
        (encode(Image.fromarray(COLOUR), "WEBP", lossless=True), COLOUR),
        (encode(Image.fromarray(COLOUR), "TGA"), COLOUR),
        (encode(Image.fromarray(GREY), "GIF"), GREY[..., None].repeat(3, 2)),
        (encode(Image.fromarray(255 - COLOUR).convert("CMYK"), "TIFF"), 255 - COLOUR),
    ],
    ids=lambda x: x.name if isinstance(x, Encoded) else "",
)
def test_eight_bit_modes_stay_uint8(file: Encoded, expected: np.ndarray) -> None:
    out = decode(file)
    assert out.dtype == np.uint8
    np.testing.assert_array_equal(out, expected)


def test_palette_with_alpha_is_laid_over_white() -> None:
    file = encode(PA.convert("PA"), "TIFF")
    with Image.open(io.BytesIO(file.data)) as im:
        assert im.mode == "PA"
        colours = np.asarray(im.convert("RGBA"))[..., :3]
    np.testing.assert_array_equal(decode(file), over_white(colours))


@pytest.mark.parametrize(("mode", "premultiplied"), [("LA", "La"), ("RGBA", "RGBa")])
def test_premultiplied_alpha(mode: str, premultiplied: str) -> None:
    im = with_alpha(mode).convert(premultiplied)
    np.testing.assert_array_equal(_pixels(im, "x"), over_white(GREY if mode == "LA" else COLOUR))


def test_half_transparent_black_is_mid_grey() -> None:
    im = Image.new("RGBA", (2, 2), (0, 0, 0, 128))
    assert abs(int(decode(encode(im, "PNG"))[0, 0, 0]) - 127) <= 1


def test_jpeg_in_grey_rgb_and_cmyk() -> None:
    for mode, ndim in (("L", 2), ("RGB", 3), ("CMYK", 3)):
        out = decode(encode(Image.new(mode, (8, 8)), "JPEG"))
        assert (out.dtype, out.ndim) == (np.uint8, ndim)


@pytest.mark.parametrize("fmt", ["PNG", "TIFF", "PPM"])
def test_sixteen_bit_gradient_round_trips(fmt: str) -> None:
    values = np.arange(65_536, dtype=np.uint16).reshape(256, 256)
    file = encode(Image.fromarray(values), fmt)
    out = stack([file], task(256))
    assert out.dtype == torch.float32
    expected = values.astype(np.float64) / 65_535
    assert np.abs(out[0, 0].numpy() - expected).max() < 1 / 65_535 / 100
    assert not bool((out == 1).all()) and len(out.unique()) == 65_536


def test_big_endian_sixteen_bit() -> None:
    raw = np.array([[0, 1], [256, 65_535]], ">u2")
    pgm = b"P5 2 2 65535\n" + raw.tobytes()
    np.testing.assert_allclose(decode(Encoded("x.pgm", pgm)), raw / 65_535, rtol=1e-6)


def test_thirty_two_bit_integers_use_their_own_scale() -> None:
    values = np.array([[0, 2**30], [2**31 - 1, 1]], np.int32)
    out = decode(encode(Image.fromarray(values), "TIFF"))
    np.testing.assert_allclose(out, values / (2**31 - 1), rtol=1e-6)


def tiff(data: bytes, bits: int, sample_format: int) -> Encoded:
    """Write the smallest grey TIFF of 2 x 2 pixels: a header, its data and one directory."""
    tags = {256: 2, 257: 2, 258: bits, 259: 1, 262: 1, 273: 8, 277: 1, 278: 2, 279: len(data)}
    entries = [struct.pack("<HHII", t, 4, 1, v) for t, v in (tags | {339: sample_format}).items()]
    directory = struct.pack("<H", len(entries)) + b"".join(entries) + bytes(4)
    return Encoded("x.tif", struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + directory)


def test_integer_tiffs_use_the_depth_that_they_declare() -> None:
    wide = np.array([[0, 2**31], [2**32 - 1, 7]], "<u4")
    np.testing.assert_allclose(decode(tiff(wide.tobytes(), 32, 1)), wide / (2**32 - 1), rtol=1e-6)
    signed = np.array([[0, 2**15 - 1], [1, 2]], "<i2")
    np.testing.assert_allclose(
        decode(tiff(signed.tobytes(), 16, 2)), signed / (2**15 - 1), rtol=1e-6
    )
    twelve = bytes.fromhex("000fff 800001")  # two pixels per row of three bytes
    np.testing.assert_allclose(
        decode(tiff(twelve, 12, 1)), np.array([[0, 4095], [2048, 1]]) / 4095, rtol=1e-6
    )


def test_float_tiff_in_unit_range_is_taken_as_it_is() -> None:
    values = (GREY / 255).astype(np.float32)
    np.testing.assert_array_equal(decode(encode(Image.fromarray(values), "TIFF")), values)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (np.full((4, 4), 4095, np.float32), r"must lie in \[0, 1\]. Got 4095"),
        (np.full((4, 4), np.nan, np.float32), "finite. Got NaN"),
        (np.full((4, 4), np.inf, np.float32), "finite. Got NaN or Inf"),
        (np.full((4, 4), -3, np.int32), "pixels >= 0. Got -3"),
    ],
)
def test_values_that_cannot_be_scaled_name_the_file(
    bad: np.ndarray, message: str, tmp_path: Path
) -> None:
    path = tmp_path / "scan 7.tif"
    Image.fromarray(bad).save(path)
    with pytest.raises(DataError, match=message) as e:
        decode(Encoded(str(path), path))
    assert "scan 7.tif" in str(e.value) and "\n" not in str(e.value)


def test_signed_eight_bit_tiff_is_refused() -> None:
    file = encode(Image.fromarray(GREY), "TIFF", tiffinfo={339: 2})
    with pytest.raises(DataError, match="signed 8-bit"):
        decode(file)


@pytest.mark.parametrize("fmt", ["PNG", "JPEG", "TIFF", "BMP"])
def test_truncated_file_names_the_file(fmt: str, tmp_path: Path) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)
    whole = encode(Image.fromarray(noise), fmt).data
    assert isinstance(whole, bytes)
    path = tmp_path / f"cut.{fmt.lower()}"
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"cut\.\w+' must be a readable image"):
        decode(Encoded(str(path), path))


@pytest.mark.parametrize(
    "data", [b"", b"hello", b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"]
)
def test_other_content_is_refused(data: bytes) -> None:
    with pytest.raises(DataError, match=r"x\.png' must be a readable image. Got .*unknown format"):
        decode(Encoded("x.png", data))


def test_one_float_image_makes_the_set_float_without_changing_the_rest() -> None:
    deep = encode(Image.fromarray(GREY.astype(np.uint16) * 257), "PNG")
    flat = encode(Image.fromarray(GREY), "PNG")
    for files in ([flat, deep, flat], [deep, flat, flat]):
        out = stack(files, task())
        assert out.dtype == torch.float32
        for row in out:
            np.testing.assert_array_equal(row[0].numpy(), GREY / np.float32(255))


def test_no_file_gives_an_empty_set() -> None:
    assert stack([], task(8, 3)).shape == (0, 3, 8, 8)


def test_channels_follow_the_task() -> None:
    grey, colour = (encode(Image.fromarray(a), "PNG") for a in (GREY, COLOUR))
    three = stack([grey, colour], task(8, 3)).numpy()
    np.testing.assert_array_equal(three[0], GREY[None].repeat(3, 0))
    np.testing.assert_array_equal(three[1], COLOUR.transpose(2, 0, 1))
    luma = stack([colour], task(8, 1))[0, 0].numpy()
    assert np.abs(luma - COLOUR @ [0.299, 0.587, 0.114]).max() <= 1


def test_stretch_crop_and_pad() -> None:
    wide = np.zeros((4, 8), np.uint8)
    wide[:, 2:6] = 200
    file = encode(Image.fromarray(wide), "PNG")
    crop = stack([file], task(4, fit="crop"))[0, 0]
    assert bool((crop == 200).all())
    pad = stack([file], task(8, fit="pad"))[0, 0].numpy()
    np.testing.assert_array_equal(pad[2:6], wide)
    assert not pad[:2].any() and not pad[6:].any()
    stretch = stack([file], task(8))[0, 0].numpy()
    assert (stretch[:, 3:5] > 190).all() and (stretch[:, 0] < 10).all()
    tiny = encode(Image.fromarray(np.full((1, 100), 9, np.uint8)), "PNG")
    assert int(stack([tiny], task(8, fit="pad")).max()) == 9  # a side never shrinks to nothing


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16])
def test_shrinking_is_antialiased_and_stays_in_range(dtype: type) -> None:
    top = np.iinfo(dtype).max
    board = (np.indices((64, 64)).sum(0) % 2 * top).astype(dtype)
    out = stack([encode(Image.fromarray(board), "PNG")], task(8)).float()
    out /= 255 if dtype is np.uint8 else 1
    assert float((out - 0.5).abs().max()) < 0.02
    edge = np.repeat(np.array([0, top], dtype), 32)[None].repeat(64, 0)
    out = stack([encode(Image.fromarray(edge), "PNG")], task(100))
    assert float(out.min()) >= 0 and float(out.max()) <= (255 if dtype is np.uint8 else 1)


def test_an_image_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(1)
    files = [
        encode(Image.fromarray(rng.integers(0, 256, (h, 13), np.uint8)), "PNG") for h in (9, 20, 5)
    ]
    together = stack(files, task(8, 3))
    for i, f in enumerate(files):
        assert torch.equal(together[i], stack([f], task(8, 3))[0])


def test_arrays_and_files_are_treated_alike() -> None:
    for a in (GREY, COLOUR, GREY.astype(np.uint16) * 250):
        file = encode(Image.fromarray(a), "PNG")
        for t in (task(5, 1), task(5, 3, "crop"), task(16, 3, "pad")):
            assert torch.equal(convert(a[None], t, "x"), stack([file], t))


@pytest.mark.parametrize(
    ("shape", "channels"),
    [((2, 8, 8), 1), ((2, 8, 8, 1), 1), ((2, 1, 8, 8), 1), ((2, 8, 8, 3), 3), ((2, 3, 8, 8), 3)],
)
def test_array_layouts(shape: tuple[int, ...], channels: int) -> None:
    a = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
    out = convert(a, task(8, channels), "x").numpy()
    first = a.reshape(2, channels, 8, 8) if shape[-1] == 8 else np.moveaxis(a, 3, 1)
    np.testing.assert_array_equal(out, first)


def test_array_dtypes() -> None:
    one = convert(np.array([[[True, False] * 2] * 4]), task(4), "x")
    assert one.dtype == torch.uint8 and one.unique().tolist() == [0, 255]
    assert float(convert(np.full((1, 4, 4), 65_535, np.uint16), task(4), "x").max()) == 1
    half = convert(np.full((1, 4, 4), 0.5, np.float64), task(4), "x")
    assert half.dtype == torch.float32 and float(half.mean()) == 0.5


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.zeros((2, 4, 4), np.int64), "uint8, uint16 or floats .*Got int64"),
        (np.full((2, 4, 4), 255.0), r"must lie in \[0, 1\]"),
        (np.array([np.zeros((4, 4)), np.full((4, 4), np.nan)]), "image 1 of 'x' must be finite"),
        (np.zeros((2, 4), np.uint8), r"must have shape .*Got \[2, 4\]"),
        (np.zeros((2, 4, 4, 4), np.uint8), r"must have shape .*Got \[2, 4, 4, 4\]"),
        (np.zeros((2, 4, 4, 4, 3), np.uint8), "must have shape"),
    ],
)
def test_unusable_arrays(array: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        convert(array, task(4), "x")


def test_arrays_of_the_task_s_own_size_are_not_copied() -> None:
    a = np.zeros((3, 8, 8), np.uint8)
    out = convert(a, task(8), "x")
    a[0, 0, 0] = 7
    assert int(out[0, 0, 0, 0]) == 7
    a.flags.writeable = False  # torch must never write into memory that is not ours
    assert convert(a, task(8), "x").data_ptr() != out.data_ptr()


def test_native_channels_and_size() -> None:
    grey, colour = (encode(Image.fromarray(a), "PNG") for a in (GREY, COLOUR))
    deep = encode(Image.fromarray(GREY.astype(np.uint16)), "PNG")
    wide = encode(Image.fromarray(GREY[:4]), "PNG")
    assert native([grey, deep]) == (1, 8)
    assert native([grey, colour]) == (3, 8)
    assert native([grey, wide]) == (3, 64)
    assert native([wide]) == (1, 64)


def test_near_black_sets_warn() -> None:
    with pytest.warns(UserWarning, match=r"of 'x' should be at least 2% .*Got 1.57%"):
        warn_near_black(torch.full((2, 1, 4, 4), 4, dtype=torch.uint8), "x")
    with pytest.warns(UserWarning, match=r"near|at least"):
        warn_near_black(torch.full((2, 1, 4, 4), 0.01), "x")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_near_black(torch.full((2, 1, 4, 4), 0.03), "x")
        warn_near_black(torch.zeros(0, 1, 4, 4), "x")
