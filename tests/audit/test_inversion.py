from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.audit.decoder import train_decoder
from fedgist.audit.inversion import Attack, headline, invert, moia, rows
from fedgist.audit.similarity import Similarity, psnr, ssim
from fedgist.compress import enlarge, quantised
from fedgist.errors import DataError
from fedgist.types import Images

SIZE = 12
QUICK = {"steps": 120, "width": 16, "batch": 32, "lr": 5e-3}

pytestmark = pytest.mark.usefixtures("one_thread")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, seed: int, channels: int = 1, size: int = SIZE) -> Images:
    """Discs of all sizes, places and shades before a slope; their label is the half they lie in."""
    g = rng(seed)
    at, radius = torch.rand(n, 2, 1, 1, generator=g), 0.15 + 0.2 * torch.rand(n, 1, 1, generator=g)
    shade = torch.rand(n, channels, 1, 1, generator=g)
    line = (torch.arange(size) + 0.5) / size
    far = ((line[:, None] - at[:, 0]) ** 2 + (line - at[:, 1]) ** 2).sqrt()
    inside = ((radius - far) * size).clamp(0, 1)[:, None]
    pixels = inside * (0.5 + 0.5 * shade) + (1 - inside) * 0.4 * line * (1 - shade)
    labels = (at[:, 1, 0, 0] > 0.5).long()
    return Images((pixels * 255).round().to(torch.uint8), labels, ("left", "right"))


AUXILIARY, TARGETS = images(600, 0), images(40, 1)
X = TARGETS.floats()


def pooled(x: Tensor) -> Tensor:
    return F.avg_pool2d(x, 2)


def inverted(x: Tensor) -> Tensor:
    return 1 - pooled(x)


def constant(x: Tensor) -> Tensor:
    return x[..., :6, :6] * 0 + 0.5


class Absolute:
    """A distance that costs nothing."""

    name = "mean absolute difference"

    def __call__(self, a: Tensor, b: Tensor) -> Tensor:
        return (a - b).abs().mean((1, 2, 3))


def mean_psnr(shown: Tensor) -> float:
    return float(psnr(X, enlarge(shown, SIZE)).mean())


# MoIA


def test_moia_beats_upsampling():
    u = quantised(pooled(X))
    got = moia(pooled, u, SIZE, steps=150)
    assert got.shape == X.shape and float(got.min()) >= 0 and float(got.max()) <= 1
    assert mean_psnr(got) > mean_psnr(u) + 1
    assert float((pooled(got) - u).abs().mean()) < 0.02
    # what it starts with is the upload itself
    assert torch.equal(moia(pooled, u, SIZE, steps=0), enlarge(u, SIZE))


def test_moia_undoes_an_inverted_contrast():
    u = quantised(inverted(X))
    got = moia(inverted, u, SIZE, steps=150)
    assert mean_psnr(u) < 8 and mean_psnr(got) > 18


def test_moia_treats_each_image_alone():
    u = pooled(X[:3])
    alone = moia(pooled, u[1:2], SIZE, steps=20)
    assert torch.allclose(moia(pooled, u, SIZE, steps=20)[1:2], alone, atol=1e-3)


def test_moia_leaves_the_compressor_as_it_is():
    layer = torch.nn.Conv2d(1, 1, 2, 2)
    moia(lambda x: layer(x), pooled(X[:2]), SIZE, steps=2)
    assert layer.weight.grad is None


def test_more_variation_weight_gives_smoother_images():
    def steps(x: Tensor) -> float:
        return float((x[..., 1:] - x[..., :-1]).abs().mean())

    u = pooled(X[:8])
    smooth = moia(pooled, u, SIZE, steps=60, tv=0.1)
    assert steps(smooth) < 0.9 * steps(moia(pooled, u, SIZE, steps=60, tv=0.0))


# The decoder


@pytest.fixture(scope="module")
def through_pooling():
    return train_decoder(pooled, AUXILIARY, rng(), **QUICK)


@pytest.fixture(scope="module")
def through_inversion():
    return train_decoder(inverted, AUXILIARY, rng(), **QUICK)


def test_decoder_beats_upsampling(through_pooling):
    u = quantised(pooled(X))
    got = through_pooling(u)
    assert got.shape == X.shape and float(got.min()) >= 0 and float(got.max()) <= 1
    assert mean_psnr(got) > mean_psnr(u) + 2


def test_decoder_recovers_through_the_identity():
    got = train_decoder(lambda x: x, AUXILIARY, rng(), **QUICK)(X)
    assert mean_psnr(got) > 30


def test_a_low_similarity_of_the_upload_is_no_protection(through_inversion):
    u = quantised(inverted(X))
    assert float(ssim(X, enlarge(u, SIZE)).mean()) < 0.2
    got = through_inversion(u)
    assert float(ssim(X, got).mean()) > 0.85
    assert mean_psnr(got) > mean_psnr(pooled(X)) + 2


def test_a_decoder_of_another_compressor_fails(through_pooling):
    assert mean_psnr(through_pooling(quantised(inverted(X)))) < 10


def test_a_constant_upload_gives_the_mean_image():
    mean = AUXILIARY.floats().mean(0, keepdim=True).expand_as(X)
    got = train_decoder(constant, AUXILIARY, rng(), **QUICK)(quantised(constant(X)))
    assert mean_psnr(got) < mean_psnr(mean) + 0.3
    assert float((got - got[:1]).abs().max()) < 1e-5


def test_labels_tell_what_a_constant_upload_does_not():
    u = quantised(constant(X))
    blind = train_decoder(constant, AUXILIARY, rng(), **QUICK)
    decoder = train_decoder(constant, AUXILIARY, rng(), labelled=True, **QUICK)
    got = decoder(u, TARGETS.labels)
    assert mean_psnr(got) > mean_psnr(blind(u)) + 0.1
    left = got[TARGETS.labels == 0]
    assert float(left[..., :6].mean()) > float(left[..., 6:].mean())
    with pytest.raises(DataError, match="labels must be given"):
        decoder(u)
    with pytest.raises(DataError, match="labels must be left out"):
        blind(u, TARGETS.labels)


def test_two_views_tell_more_than_one():
    def upper(x: Tensor) -> Tensor:
        return x[..., :6, :6]

    def lower(x: Tensor) -> Tensor:
        return x[..., 6:, 6:]

    both = train_decoder([upper, lower], AUXILIARY, rng(), **QUICK)
    one = train_decoder([upper], AUXILIARY, rng(), **QUICK)
    got = both([quantised(upper(X)), quantised(lower(X))])
    assert mean_psnr(got) > mean_psnr(one(quantised(upper(X)))) + 0.5
    with pytest.raises(DataError, match=r"2 channels\. Got 1"):
        both(upper(X))


def test_decoder_needs_no_gradient_and_draws_anew():
    drawn = rng(9)

    def noisy(x: Tensor) -> Tensor:
        return quantised(pooled(x) + 0.3 * torch.randn(len(x), 1, 6, 6, generator=drawn))

    u = noisy(X)
    few = AUXILIARY.take(torch.arange(60))
    once = train_decoder(noisy, few, rng(), **QUICK)
    anew = train_decoder(noisy, few, rng(), fresh=True, **QUICK)
    assert mean_psnr(anew(u)) > max(mean_psnr(once(u)) + 0.7, mean_psnr(u) + 2)


def test_decoder_takes_colour_and_sides_that_no_cell_divides():
    aux, target = images(64, 2, channels=3, size=10), images(5, 3, channels=3, size=10)
    decoder = train_decoder(pooled, aux, rng(), steps=5, width=8)
    got = decoder(pooled(target.floats()))
    assert got.shape == (5, 3, 10, 10)
    again = train_decoder(pooled, aux, rng(), steps=5, width=8)
    assert torch.equal(got, again(pooled(target.floats())))  # the generator decides alone
    with pytest.raises(DataError, match="one or more"):
        train_decoder(pooled, aux.take(torch.arange(0)), rng())


# The report


def figures(p: float, s: float) -> Similarity:
    return Similarity(p, s, 0.5, 3, 10)


def test_headline_names_who_recovers_most():
    upload = Attack("upload", "", figures(10, 0.3))
    weak, strong = Attack("weak", "", figures(9, 0.2)), Attack("strong", "", figures(20, 0.8))
    sharp = Attack("sharp", "", figures(15, 0.9))
    assert headline(upload, [weak]).startswith("No attack shows more than the upload")
    assert headline(upload, [weak, strong]) == (
        "Most is recovered by the attack 'strong' (PSNR 20.0 dB, SSIM 0.80); the upload as it is "
        "shows PSNR 10.0 dB, SSIM 0.30."
    )
    assert "by PSNR, by 'sharp' (PSNR 15.0 dB, SSIM 0.90) by SSIM" in headline(
        upload, [strong, sharp]
    )


def test_rows_are_plain():
    got = rows([Attack("a", "all", figures(10, 0.3))])
    want = {"name": "a", "sees": "all", "psnr": 10, "ssim": 0.3, "distance": 0.5}
    assert got == [want | {"worst": 3, "n": 10}]
    json.dumps(got)


@pytest.mark.slow
def test_invert_runs_every_attack():
    distance = Absolute()
    views = [quantised(pooled(X)), quantised(inverted(X))]
    quick = {"moia_steps": 80, "decoder_steps": 80}
    got = invert(X, TARGETS.labels, [pooled, inverted], views, AUXILIARY, distance, rng(), **quick)
    by = {row["name"]: row for row in got["rows"]}
    assert list(by) == [
        *("class mean", "bicubic", "upload", "MoIA"),
        *("decoder", "decoder, one round old", "decoder, all rounds"),
    ]
    assert by["bicubic"]["ssim"] > 0.7 > 0.3 > by["upload"]["ssim"]
    best = max(by["decoder"]["psnr"], by["decoder, all rounds"]["psnr"])
    assert best > by["MoIA"]["psnr"] > by["upload"]["psnr"] + 5
    assert by["decoder, one round old"]["psnr"] < by["class mean"]["psnr"]
    assert "decoder" in got["headline"] and got["distance"] == distance.name
    found = got["identified"]
    assert found["white box"] > 0.9 > 0.3 > found["pixels"]
    assert found["gallery"] == 640 and found["chance"] == 1 / 640
    assert set(got["pictures"]) == set(by)
    assert all(p.shape == X.shape for p in got["pictures"].values())
    with pytest.raises(DataError, match="2 compressors for 1 rounds"):
        invert(X, TARGETS.labels, [pooled, inverted], views[:1], AUXILIARY, distance, rng())


def test_invert_leaves_out_what_it_cannot_do():
    got = invert(
        X[:5],
        TARGETS.labels[:5],
        [lambda x: quantised(pooled(x))],
        [quantised(pooled(X[:5]))],
        AUXILIARY.take(torch.arange(40)),
        Absolute(),
        rng(),
        differentiable=False,
        decoder_steps=3,
    )
    assert [row["name"] for row in got["rows"]] == ["class mean", "bicubic", "upload", "decoder"]
