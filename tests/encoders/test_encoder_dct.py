"""The dct codec: written down from a law, without data."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.datasets import load_sample_images
from torch import Tensor

from fedgist.config import load
from fedgist.encoders import DctCodec, Whitening, encoder_info, load_encoder, prepare
from fedgist.errors import EncoderError
from fedgist.setup import prepare_run


@pytest.fixture(scope="module")
def codec() -> DctCodec:
    encoder = load_encoder("dct")
    assert isinstance(encoder, DctCodec)
    return encoder


def noise(n: int, channels: int = 1, size: int = 28) -> Tensor:
    return torch.rand(n, channels, size, size, generator=torch.Generator().manual_seed(0))


def test_it_has_seen_no_data_and_says_so(codec: DctCodec) -> None:
    assert codec.track == "no public data" and codec.exact and codec.decodes and codec.dim == 128
    info = encoder_info("dct")
    assert info["shipped"] and info["track"] == "no public data" and "sources" not in info


def test_a_run_on_it_and_a_random_network_claims_no_public_data() -> None:
    sets = ["data.source=fashion-mini", "method.name=fedkt_csd", "method.encoder=dct"]
    made = prepare_run(load(None, [*sets, "method.features=random-conv:0"]))
    assert made.plan.claim.track == "no public data"


def test_components_are_orthonormal_cosines(codec: DctCodec) -> None:
    basis = codec._basis
    assert torch.allclose(basis @ basis.T, torch.eye(128), atol=1e-3)
    # one cosine across, none down, all three colours alike
    x = torch.cos(math.pi * (torch.arange(64) + 0.5) / 64).expand(3, 64, 64)
    along = basis @ (x / x.norm()).flatten()
    assert sorted(along.abs().tolist())[-1] == pytest.approx(1, abs=1e-3)
    assert sorted(along.abs().tolist())[-2] < 1e-3


def test_codes_come_back_and_do_not_depend_on_the_batch(codec: DctCodec) -> None:
    z = torch.randn(20, 128, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    x = codec.decode(z)
    assert torch.allclose(codec.encode(x), z, atol=0.02)  # pixels are rounded to k/65535
    images = noise(40)
    whole = codec.encode_task(images)
    assert torch.equal(torch.cat([codec.encode_task(p) for p in torch.split(images, 7)]), whole)


def test_grey_images_have_no_colour(codec: DctCodec) -> None:
    grey = codec.encode_task(noise(10))
    assert int((grey.abs() > 1e-2).any(0).sum()) == 112  # of 128: the others are colours
    assert torch.allclose(grey, codec.encode_task(noise(10).expand(-1, 3, -1, -1)), atol=1e-9)


def test_photographs_are_kept_as_by_fitted_components(codec: DctCodec) -> None:
    pca = load_encoder("pca")
    images = torch.cat(
        [
            torch.nn.functional.interpolate(
                torch.from_numpy(im.copy()).permute(2, 0, 1)[None, :, :420, :420].float() / 255,
                (64, 64),
                mode="bilinear",
                antialias=True,
            )
            for im in load_sample_images().images
        ]
    )

    def psnr(by: object) -> float:
        y = by.decode(by.encode_task(images))  # type: ignore[attr-defined]
        mse = (y - prepare(images, 64)).square().flatten(1).mean(1)
        return float(-10 * mse.log10().mean())

    assert psnr(codec) > psnr(pca) - 1.0


def test_public_statistics_are_those_of_the_law(codec: DctCodec) -> None:
    public = codec.public
    assert float(public.values.sum()) == pytest.approx(0.1 * 3 * 64 * 64)
    assert (public.values.diff() <= 1e-9).all()
    assert torch.equal(public.cov, torch.diag(public.values))
    g = torch.Generator().manual_seed(0)
    z = torch.randn(20_000, 128, dtype=torch.float64, generator=g) * public.values.sqrt()
    for t, row in zip((0.0, 0.25, 0.5), public.norms, strict=True):
        seen = Whitening(public, t).forward(z).norm(dim=1)
        for i, rel in ((9, 0.2 if t == 0 else 0.02), (49, 0.03), (79, 0.03), (98, 0.05)):
            assert float(row[i]) == pytest.approx(float(seen.quantile((i + 1) / 100)), rel=rel)
        assert (row.diff() > 0).all()


@pytest.mark.parametrize("dim", [1, 3, 64, 600])
def test_other_dimensions(dim: int) -> None:
    codec = load_encoder(f"dct:{dim}")
    assert codec.dim == dim and codec.encode_task(noise(3, 3, 40)).shape == (3, dim)
    assert codec.digest != load_encoder("dct").digest == load_encoder("dct").digest


@pytest.mark.parametrize("spec", ["dct:0", "dct:12289", "dct:many", "dct:-1"])
def test_wrong_dimensions_are_named(spec: str) -> None:
    with pytest.raises(EncoderError, match="dct must"):
        load_encoder(spec)
