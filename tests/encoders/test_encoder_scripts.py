"""The scripts that make the shipped weights, on images made here."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import numpy.typing
import pytest
import torch
from PIL import Image, ImageDraw

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, SCRIPTS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def public_images() -> ModuleType:
    return script("public_images")


def drawing(ground: tuple[int, ...]) -> Image.Image:
    im = Image.new("RGBA", (200, 120), ground)
    ImageDraw.Draw(im).rectangle((50, 30, 149, 89), fill=(200, 40, 40, 255))
    return im


@pytest.mark.parametrize(
    ("ground", "kept"), [((0, 0, 0, 0), None), ((240, 240, 240, 255), (240, 240, 240))]
)
def test_objects_are_cut_out(
    public_images: ModuleType, ground: tuple[int, ...], kept: tuple[int, ...] | None
) -> None:
    cut, own = public_images.cut_out(drawing(ground))
    assert (cut.size, own) == ((100, 60), kept)


@pytest.mark.parametrize("kind", ["photo", "object"])
def test_views_are_the_same_for_the_same_seed(public_images: ModuleType, kind: str) -> None:
    noise = np.random.default_rng(0).integers(0, 256, (130, 180, 3), dtype=np.uint8)

    def views(seed: int) -> list[np.typing.NDArray[np.uint8]]:
        rng = np.random.default_rng(seed)
        if kind == "photo":
            return list(public_images.photo_views(Image.fromarray(noise), 1, rng))
        return list(public_images.object_views(drawing((0, 0, 0, 0)), 6, rng))

    a, b, c = views(1), views(1), views(2)
    assert len(a) >= 6 and all(x.shape == (3, 64, 64) and x.dtype == np.uint8 for x in a)
    assert np.array_equal(a, b) and not np.array_equal(a, c)


def test_near_duplicates_are_dropped(public_images: ModuleType) -> None:
    seen: set[bytes] = set()
    x = np.random.default_rng(0).integers(20, 200, (3, 64, 64), dtype=np.uint8)
    assert public_images.is_new(x, seen)
    assert not public_images.is_new(x.copy(), seen)
    assert public_images.is_new(255 - x, seen)


def test_the_private_sets_are_no_source(public_images: ModuleType) -> None:
    for source in public_images.SOURCES:
        assert not any(w in source.package for w in ("mnist", "emoji", "digits"))


def test_a_missing_package_names_the_command(
    public_images: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    with pytest.raises(SystemExit, match="apt-get install -y --no-install-recommends openclipart"):
        public_images.locate(public_images.SOURCES[0])


def test_the_fit_is_the_singular_value_decomposition() -> None:
    fit_pca = script("fit_pca")
    g = torch.Generator().manual_seed(0)
    x = (torch.randn(80, 12, generator=g) * torch.logspace(0, -2, 12)) @ torch.randn(
        12, 48, generator=g
    )
    images = (127 + 20 * x).clamp(0, 255).round().to(torch.uint8).view(80, 3, 4, 4).numpy()
    flat = torch.from_numpy(images).flatten(1).double() / 255
    mean = flat.mean(0)
    basis, explained = fit_pca.components(images, mean.float(), dim=4, sweeps=30, seed=0)
    _, s, v = torch.linalg.svd(flat - mean, full_matrices=False)
    assert torch.allclose((basis @ v[:4].T).abs(), torch.eye(4).double(), atol=1e-4)
    assert abs(explained - float(s[:4].square().sum() / s.square().sum())) < 1e-5
    w, bits = fit_pca.integers(basis)
    assert w.dtype == torch.int16 and 16_384 <= int(w.abs().max()) < 32_768
    assert torch.allclose(w.double() / 2**bits, basis, atol=0.5 / 2**bits)


def test_codecs_are_measured_on_the_patches_that_were_gathered(
    public_images: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = [f"{i}.png" for i in range(30)]
    rng = np.random.default_rng(0)
    for name in names:  # blocks of chance: every patch of every scale differs
        noise = rng.integers(0, 256, (12, 16, 3), dtype=np.uint8)
        Image.fromarray(noise).resize((133, 100), Image.Resampling.NEAREST).save(tmp_path / name)
    source = public_images.Source("photos", "", "", "photo")
    monkeypatch.setattr(public_images, "locate", lambda _: (tmp_path, "1", names))
    _, train, held = public_images.gather(source, 0, 1, set())
    scale = script("codec_by_scale")
    monkeypatch.setattr(scale, "SOURCES", (source,))
    monkeypatch.setattr(scale, "locate", public_images.locate)
    found = scale.patches()
    assert set(found) == {(s, n) for s in ("trained", "held out") for n in (64, 96)}
    for side, all_of in (("trained", train), ("held out", held)):
        mine = [x.tobytes() for n in (64, 96) for x in found[side, n]]
        assert sorted(mine) == sorted(x.tobytes() for x in all_of)
    rows = [
        {"split": s, "short_side": n, "patches": p, "psnr_db": {"gist-ae": db, "pca": db / 2}}
        for s, n, p, db in (("trained", 64, 1, 20.0), ("trained", 96, 3, 28.0))
    ]
    assert scale.means(rows) == {"trained": {"gist-ae": 26.0, "pca": 13.0}}
