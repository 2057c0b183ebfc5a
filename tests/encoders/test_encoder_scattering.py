"""The scattering encoder: the transform against plain Fourier series, and its public projection."""

import math
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from fedgist.encoders import Whitening, files, prepare
from fedgist.encoders.projection import DIMS
from fedgist.encoders.scattering import (
    PATH,
    ScatteringEncoder,
    features,
    luminance,
    scatter,
    wavelets,
)
from fedgist.errors import EncoderError

Array = NDArray[np.float64]
BATCHES = st.lists(st.integers(1, 40), min_size=1, max_size=4)


@pytest.fixture(scope="module")
def encoder() -> ScatteringEncoder:
    return ScatteringEncoder.load()


def noise(n: int, channels: int = 1, size: int = 28, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, size, size), generator=g).float() / 255


def objects(n: int, size: int = 32) -> Tensor:
    """Grey ellipses on plain ground: the kind of picture that the encoder is for."""
    g = torch.Generator().manual_seed(5)
    a, b, angle, shade = torch.rand(4, n, 1, 1, generator=g)
    i = torch.arange(size) - (size - 1) / 2
    c, s = torch.cos(math.pi * angle), torch.sin(math.pi * angle)
    u, v = c * i + s * i[:, None], c * i[:, None] - s * i
    inside = (u / (4 + 8 * a)) ** 2 + (v / (4 + 8 * b)) ** 2 < 1
    shaded: Tensor = inside.float() * (0.3 + 0.7 * shade)
    return shaded[:, None]


def modulus(x: Array, octave: int, angle: int) -> Array:
    """|x * ψ| in float64 by one large Fourier transform of the reflected image."""
    sigma, xi, r = 0.8 * 2**octave, 3 * np.pi / 4 / 2**octave, (4, 7)[octave]
    psi = np.zeros((2 * r + 1, 2 * r + 1), complex)
    gauss = np.zeros(psi.shape)
    e = np.pi * angle / 8
    for i in range(-r, r + 1):
        for j in range(-r, r + 1):
            u, v = j * np.cos(e) + i * np.sin(e), i * np.cos(e) - j * np.sin(e)
            g = np.exp(-(u**2 / sigma**2 + v**2 / (2 * sigma) ** 2) / 2)
            gauss[i + r, j + r] = g / (2 * np.pi * sigma * 2 * sigma)
            psi[i + r, j + r] = gauss[i + r, j + r] * np.exp(1j * xi * u)
    psi -= gauss * psi.sum() / gauss.sum()
    wide = np.pad(x, r, mode="reflect")
    shape = (2 * wide.shape[0], 2 * wide.shape[0])
    # a network's convolution is a correlation: the filter is turned by 180 degrees
    y = np.fft.ifft2(np.fft.fft2(wide, shape) * np.fft.fft2(psi[::-1, ::-1], shape))
    n = len(x)
    return np.abs(y[2 * r : 2 * r + n, 2 * r : 2 * r + n])[:: 2**octave, :: 2**octave]


def smooth(u: Array) -> Array:
    """Gaussian of 1.6 pixels around each of 8x8 centres, ends reflected."""
    n, out = len(u), np.zeros((8, 8))
    step, wide = 32 // n, np.pad(u, n - 1, mode="reflect")
    at = np.arange(-(n - 1), 2 * n - 1) * step
    for i in range(8):
        for j in range(8):
            gi, gj = (np.exp(-((at - (4 * k + 1.5)) ** 2) / (2 * 1.6**2)) for k in (i, j))
            out[i, j] = gi @ wide @ gj / gi.sum() / gj.sum()
    return out


def reference(x: Array) -> Array:
    fine = [modulus(x, 0, k) for k in range(8)]
    coarse = [modulus(x, 1, k) for k in range(8)]
    second = [modulus(u, 1, k) for u in fine for k in range(8)]
    return np.stack([smooth(u) for u in [x, *fine, *coarse, *second]])


def test_the_transform_is_the_one_of_the_definition() -> None:
    x = torch.cat([noise(1, size=32), objects(1)])
    got = scatter(x).double().numpy()
    for image, mine in zip(x[:, 0].double().numpy(), got, strict=True):
        wanted = reference(image)
        assert mine.shape == (81, 8, 8)
        worst = np.abs(mine - wanted).max((1, 2)) / wanted.max((1, 2))
        assert float(worst.max()) < 1e-4


def test_features_are_pooled_logarithms(encoder: ScatteringEncoder) -> None:
    x, scale = objects(2), torch.linspace(0.001, 0.02, 80)
    s = scatter(x).double().numpy()
    s[:, 1:] = np.log1p(s[:, 1:] / scale.double().numpy()[:, None, None])
    pooled = s.reshape(2, 81, 4, 2, 4, 2).mean((3, 5)).reshape(2, -1)
    assert np.allclose(features(x, scale).numpy(), pooled, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("octave", [0, 1])
def test_wavelets_do_not_see_a_constant(octave: int) -> None:
    psi = wavelets(octave)
    assert float(psi.sum((1, 2)).abs().max()) < 1e-15
    energy = torch.fft.fft2(psi[:8] + 1j * psi[8:], (32, 32)).abs().square().sum(0)
    assert float((energy + energy.roll((1, 1), (0, 1)).flip(0, 1)).max()) / 2 < 1.3


def test_a_plain_image_has_order_zero_only() -> None:
    s = scatter(torch.full((1, 1, 32, 32), 0.7))
    assert torch.allclose(s[:, 0], torch.tensor(0.7)) and float(s[:, 1:].max()) < 1e-6


def test_order_one_follows_contrast_and_forgets_brightness() -> None:
    x = objects(3) / 2
    s = scatter(x)
    assert torch.allclose(scatter(2 * x), 2 * s, rtol=1e-4, atol=1e-6)
    assert torch.allclose(scatter(x + 0.3)[:, 1:], s[:, 1:], rtol=1e-3, atol=1e-5)


def test_a_small_shift_moves_features_less_than_pixels(encoder: ScatteringEncoder) -> None:
    x = objects(20)
    moved = x.roll(1, 3)

    def change(f: Tensor, g: Tensor) -> float:
        return float((f - g).norm() / (f - f.mean(0)).norm())

    pixels = change(x.flatten(1), moved.flatten(1))
    codes = change(encoder.encode_task(x), encoder.encode_task(moved))
    assert codes < 0.6 * pixels


def test_a_quarter_turn_turns_the_angles() -> None:
    x = objects(2)
    first = scatter(x)[:, 1:9].mean((2, 3))
    turned = scatter(x.rot90(1, (2, 3)))[:, 1:9].mean((2, 3))
    assert torch.allclose(turned, first.roll(4, 1), rtol=0.02)


@settings(max_examples=5, deadline=None)
@given(BATCHES, st.integers(0, 99))
def test_codes_do_not_depend_on_the_batch(sizes: list[int], seed: int) -> None:
    encoder = ScatteringEncoder.load("scattering:64")
    x = noise(sum(sizes), seed=seed)
    whole = encoder.encode_task(x)
    assert torch.equal(torch.cat([encoder.encode_task(b) for b in torch.split(x, sizes)]), whole)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(encoder.encode_task(x[order]), whole[order])


@pytest.mark.parametrize("size", [28, 32, 64])
def test_grey_images_take_the_fast_path_to_the_same_codes(
    encoder: ScatteringEncoder, size: int
) -> None:
    x = noise(9, size=size)
    view = prepare(x, 32)
    assert view.stride(1) == 0
    assert torch.equal(luminance(view.contiguous()), view[:, :1])
    assert torch.equal(encoder.encode(view), encoder.encode(view.contiguous()))


def test_colour_is_not_seen(encoder: ScatteringEncoder) -> None:
    red, green = torch.zeros(2, 3, 32, 32)
    red[0], green[1] = 150 / 255, 77 / 255  # the same luminance
    assert torch.allclose(encoder.encode_task(red[None]), encoder.encode_task(green[None]))


@pytest.mark.parametrize("dim", [d for d in DIMS if d <= 512])
def test_dimensions_are_nested(encoder: ScatteringEncoder, dim: int) -> None:
    some = ScatteringEncoder.load(f"scattering:{dim}")
    x = objects(3)
    assert (some.name, some.dim, some.digest) == (f"scattering:{dim}", dim, encoder.digest)
    assert torch.allclose(some.encode_task(x), encoder.encode_task(x)[:, :dim], rtol=1e-12)
    assert torch.equal(some.public.values, encoder.public.values[:dim])
    radii = [Whitening(some.public, 0.5).radius(q) for q in (0.05, 0.5, 0.95)]
    assert radii[0] < radii[1] < radii[2]
    assert 0.5 * dim**0.5 < radii[1] < 1.1 * dim**0.5


def test_the_default_is_512_nested_directions_in_order(encoder: ScatteringEncoder) -> None:
    public = encoder.public
    assert (encoder.name, encoder.dim, encoder.decodes) == ("scattering", 512, False)
    assert encoder.exact is False and encoder.track == "public images"
    assert bool((public.values[:-1] >= 0.999 * public.values[1:]).all())
    assert float(public.mean.norm()) < 0.01 * float(public.raw_norms[49])


def test_whitened_codes_of_new_pictures_have_the_public_norm(encoder: ScatteringEncoder) -> None:
    z = Whitening(encoder.public, 0.5).forward(encoder.encode_task(objects(60)))
    assert 0.2 < float(z.square().mean()) < 3


def test_decoding_is_refused(encoder: ScatteringEncoder) -> None:
    with pytest.raises(EncoderError, match="must not be asked to decode"):
        encoder.decode(torch.zeros(1, encoder.dim))


@pytest.mark.parametrize(
    "spec", ["scattering:100", "scattering:0", "scattering:-1", "scattering:x"]
)
def test_an_unknown_dimension_is_refused(spec: str) -> None:
    with pytest.raises(EncoderError, match="Got"):
        ScatteringEncoder.load(spec)


def test_a_damaged_file_is_refused(tmp_path: Path) -> None:
    copy = tmp_path / "x.safetensors"
    copy.write_bytes(PATH.read_bytes()[:-100])
    with pytest.raises(EncoderError, match="must be a FedGist codec file"):
        ScatteringEncoder(files.read(copy))


@pytest.mark.parametrize("scale", [None, [1.0] * 79, [1.0] * 79 + [0.0], [1.0] * 79 + [math.nan]])
def test_scales_that_do_not_fit_are_refused(scale: list[float] | None) -> None:
    file = files.read(PATH)
    meta = {**file.meta, "scale": scale}
    with pytest.raises(EncoderError, match="80 positive scales"):
        ScatteringEncoder(files.CodecFile(file.kind, meta, file.tensors, file.digest))
