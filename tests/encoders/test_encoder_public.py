"""Public statistics: what they must be, and that whitening undoes itself."""

from pathlib import Path

import pytest
import torch

from fedgist.encoders import Whitening, files, load_encoder, measure_public
from fedgist.encoders.base import TILTS, PublicCodes
from fedgist.encoders.public import load_public, save_public
from fedgist.errors import ConfigError, DataError, EncoderError


@pytest.fixture(scope="module")
def codes() -> torch.Tensor:
    g = torch.Generator().manual_seed(3)
    mix = torch.randn(6, 6, generator=g, dtype=torch.float64)
    return torch.randn(900, 6, generator=g, dtype=torch.float64) @ mix + 2


@pytest.mark.parametrize("t", [None, *TILTS])
def test_whitening_undoes_itself(codes: torch.Tensor, t: float | None) -> None:
    w = Whitening(PublicCodes.of(codes), t)
    # integer codes: a step is 2^-21 of the public spread
    assert torch.allclose(w.backward(w.forward(codes)), codes, atol=1e-4)


def test_public_codes_are_white_at_one_half(codes: torch.Tensor) -> None:
    w = Whitening(PublicCodes.of(codes), 0.5)
    assert torch.allclose(torch.cov(w.forward(codes).T), torch.eye(6).double(), atol=1e-4)


@pytest.mark.parametrize("t", [None, *TILTS])
def test_whitened_rows_do_not_depend_on_their_batch(codes: torch.Tensor, t: float | None) -> None:
    w = Whitening(PublicCodes.of(codes), t)
    codes = torch.cat([codes, 1e6 * codes[:3], torch.zeros(1, 6, dtype=torch.float64)])
    whole = w.forward(codes)
    order = torch.randperm(len(codes), generator=torch.Generator().manual_seed(0))
    assert torch.equal(w.forward(codes[order]), whole[order])
    alone = torch.cat([w.forward(codes[i : i + 1]) for i in range(len(codes))])
    assert torch.equal(alone, whole)


def test_whitening_is_exact_at_the_shipped_size() -> None:
    w = Whitening(load_encoder("pca").public, 0.25)
    k = w._integers.to(torch.int64)
    assert int((k**2).sum(0).max()) <= 2**52  # columns of norm at most 2^26
    z = 30 * torch.randn(250, 128, generator=torch.Generator().manual_seed(1)).double()
    whole = w.forward(z)
    assert all(torch.equal(w.forward(z[i : i + n]), whole[i : i + n]) for i, n in ((0, 1), (7, 99)))


def test_a_code_far_out_keeps_its_direction(codes: torch.Tensor) -> None:
    w = Whitening(PublicCodes.of(codes), 0.25)
    far, farther = w.forward(1e5 * codes[:4]), w.forward(1e9 * codes[:4])
    assert torch.allclose(
        far / far.norm(dim=1, keepdim=True), farther / farther.norm(dim=1, keepdim=True), atol=1e-4
    )


@pytest.mark.parametrize("t", [None, *TILTS])
@pytest.mark.parametrize("q", [0.01, 0.5, 0.8, 0.95, 0.99])
def test_radius_is_the_quantile_of_norms(codes: torch.Tensor, t: float | None, q: float) -> None:
    w = Whitening(PublicCodes.of(codes), t)
    inside = (w.forward(codes).norm(dim=1) <= w.radius(q)).double().mean()
    assert abs(float(inside) - q) < 2e-3


def test_the_shipped_codes_are_white_and_ordered() -> None:
    public = load_encoder("pca").public
    forward = public.vectors * public.values**-0.5
    white = forward.T @ public.cov @ forward
    assert torch.allclose(white, torch.eye(128).double(), atol=1e-6)
    assert bool((public.norms.diff(dim=1) >= 0).all() & (public.raw_norms.diff() >= 0).all())
    spread = public.cov.diagonal()
    assert bool((spread[:-1] >= 0.99 * spread[1:]).all())  # components in order of variance
    assert float(public.mean.norm()) < 0.01 * float(public.raw_norms[49])  # centred


@pytest.mark.parametrize("q", [0.0, 1.0, 0.805])
def test_a_radius_that_was_not_measured_is_refused(q: float) -> None:
    with pytest.raises(ConfigError, match="clip_quantile must be one of"):
        Whitening(load_encoder("pca").public, 0.25).radius(q)


def test_statistics_survive_a_file(codes: torch.Tensor, tmp_path: Path) -> None:
    public = PublicCodes.of(codes)
    save_public(public, tmp_path / "s.safetensors", "abc")
    again, weights = load_public(tmp_path / "s.safetensors", 6)
    assert weights == "abc"
    assert all(torch.equal(v, getattr(again, k)) for k, v in vars(public).items())
    assert [p.name for p in tmp_path.iterdir()] == ["s.safetensors"]  # nothing left aside
    with pytest.raises(EncoderError, match=r"public\.cov.*must be finite with shape \[5, 5\]"):
        load_public(tmp_path / "s.safetensors", 5)


def test_the_same_content_has_the_same_hash(codes: torch.Tensor, tmp_path: Path) -> None:
    public = PublicCodes.of(codes)
    a, b = (files.write(tmp_path / n, "k", {"w": codes}, public, z=1, a=2) for n in ("a", "b"))
    assert a.digest == b.digest
    assert (a.kind, dict(a.meta)) == ("k", {"z": 1, "a": 2})


def test_measuring_is_encoding() -> None:
    encoder = load_encoder("pca")
    pixels = torch.randint(0, 256, (260, 1, 12, 12), generator=torch.Generator().manual_seed(0))
    pixels = pixels.to(torch.uint8)
    public = measure_public(encoder, pixels)
    z = torch.cat([encoder.encode_task(p.float() / 255) for p in torch.split(pixels, 130)])
    assert torch.allclose(public.mean, z.mean(0)) and torch.allclose(public.cov, torch.cov(z.T))
    with pytest.raises(DataError, match="at least 2"):
        measure_public(encoder, pixels[:1])
