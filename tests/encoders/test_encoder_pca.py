"""The pca codec: exact codes, and images that can be recognised."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_sample_images
from torch import Tensor

from fedgist import encoders
from fedgist.encoders import PcaCodec, files, load_encoder, prepare
from fedgist.encoders.base import GRID
from fedgist.encoders.public import blank
from fedgist.errors import EncoderError

PATH = Path(encoders.__file__).parent / "pca128.safetensors"


@pytest.fixture(scope="module")
def codec() -> PcaCodec:
    encoder = load_encoder("pca")
    assert isinstance(encoder, PcaCodec)
    return encoder


def noise(n: int, channels: int = 1, size: int = 28, seed: int = 0) -> Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, size, size), generator=g).float() / 255


def photos(short: int) -> Tensor:
    """64x64 patches of two photographs that no encoder was fitted on."""
    out = []
    for im in load_sample_images().images:
        x = torch.from_numpy(im.copy()).permute(2, 0, 1)[None].float() / 255
        x = x[..., : x.shape[-2]]
        x = torch.nn.functional.interpolate(x, (short, short), mode="bilinear", antialias=True)
        out += [x[..., i : i + 64, j : j + 64] for i in (0, 64) for j in (0, 64)]
    return torch.cat(out)


def psnr(a: Tensor, b: Tensor) -> float:
    return float((-10 * (a - b).square().flatten(1).mean(1).log10()).mean())


@settings(max_examples=10, deadline=None)
@given(st.lists(st.integers(1, 40), min_size=1, max_size=5), st.integers(0, 99))
def test_codes_do_not_depend_on_the_batch(sizes: list[int], seed: int) -> None:
    codec = load_encoder("pca")
    x = noise(sum(sizes), seed=seed)
    whole = codec.encode_task(x)
    assert torch.equal(torch.cat([codec.encode_task(b) for b in torch.split(x, sizes)]), whole)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
    assert torch.equal(codec.encode_task(x[order]), whole[order])


def test_codes_do_not_depend_on_the_threads(codec: PcaCodec) -> None:
    x, before = noise(60, 3, 50), torch.get_num_threads()
    codes = []
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            codes.append(codec.encode_task(x))
    finally:
        torch.set_num_threads(before)
    assert torch.equal(codes[0], codes[1]) and torch.equal(codes[0], codes[2])


def test_codes_are_the_integers_of_the_definition(codec: PcaCodec) -> None:
    file = files.read(PATH)
    w, mean, bits = file.tensors["weights"], file.tensors["mean"], file.meta["bits"]
    x = prepare(noise(2, 3), 64)
    k = (x.double() * GRID).round().long().flatten(1)
    exact = [[int(v) for v in row] for row in (k - mean.long()) @ w.long().T]  # int64 throughout
    got = codec.encode(x)
    assert got.dtype == torch.float64
    assert [[v / (2**bits * GRID) for v in row] for row in exact] == got.tolist()
    assert got.shape == (2, codec.dim)


def test_every_partial_sum_is_an_exact_float(codec: PcaCodec) -> None:
    w = files.read(PATH).tensors["weights"].long()
    assert 2 * GRID * int(w.abs().sum(1).max()) < 2**53


@pytest.mark.parametrize("size", [28, 64])
def test_grey_images_take_the_fast_path_to_the_same_codes(codec: PcaCodec, size: int) -> None:
    x = noise(9, size=size)
    view = prepare(x, 64)
    assert view.stride(1) == 0
    assert torch.equal(codec.encode(view), codec.encode(view.contiguous()))
    assert torch.equal(codec.encode_task(x), codec.encode_task(x.expand(-1, 3, -1, -1)))


def test_neither_memory_layout_nor_an_empty_batch_matters(codec: PcaCodec) -> None:
    x = noise(4, 3)
    channels_last = x.contiguous(memory_format=torch.channels_last)
    assert torch.equal(codec.encode_task(x), codec.encode_task(channels_last))
    assert codec.encode_task(x[:0]).shape == (0, codec.dim)


def test_photographs_survive(codec: PcaCodec) -> None:
    colour = photos(128)
    assert psnr(codec.decode(codec.encode_task(colour)), prepare(colour, 64)) > 17
    grey = colour.mean(1, keepdim=True)
    assert psnr(codec.decode(codec.encode_task(grey)), prepare(grey, 64)) > 17


@pytest.mark.parametrize("inverted", [False, True])
def test_a_grey_object_on_plain_ground_survives(codec: PcaCodec, inverted: bool) -> None:
    i = torch.arange(28.0) - 13.5
    disc = ((i[:, None] / 12) ** 2 + (i / 7) ** 2 < 1).float() * 0.8
    x = (1 - disc if inverted else disc)[None, None]
    y = codec.decode(codec.encode_task(x))
    assert y.dtype == torch.float32 and y.shape == (1, 3, 64, 64)
    assert 0 <= float(y.min()) <= float(y.max()) <= 1
    assert psnr(y, prepare(x, 64)) > 20


def test_decoding_is_the_transpose(codec: PcaCodec) -> None:
    z = torch.randn(5, codec.dim, generator=torch.Generator().manual_seed(0)).double() * 0.02
    mid = codec.decode(torch.zeros(1, codec.dim))
    inside = ((mid > 0.2) & (mid < 0.8)).all()
    assert inside  # so that nothing below is clamped
    back = codec.encode(codec.decode(z)) - codec.encode(mid)
    assert torch.allclose(back, z, atol=2e-3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(4, 12_288)}, "weights of 'x' must be int16"),
        ({"weights": torch.zeros(4, 100, dtype=torch.int16)}, "weights of 'x' must be int16"),
        ({"mean": torch.zeros(7, dtype=torch.int32)}, "mean and bits of 'x'"),
        ({"mean": torch.full((12_288,), -1, dtype=torch.int32)}, "its mean in 0..65535"),
    ],
)
def test_unusable_weights_are_refused(change: dict[str, Tensor], message: str) -> None:
    good = {
        "weights": torch.ones(4, 12_288, dtype=torch.int16),
        "mean": torch.zeros(12_288, dtype=torch.int32),
    }
    stats = {f"public.{k}": v for k, v in vars(blank(4)).items()}
    PcaCodec(files.CodecFile("pca", {"bits": 7}, good | stats, ""), "x")
    with pytest.raises(EncoderError, match=message):
        PcaCodec(files.CodecFile("pca", {"bits": 7}, good | change | stats, ""), "x")
