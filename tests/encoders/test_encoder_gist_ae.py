"""The trained codec: what it starts from, how it is trained and resumed, what it refuses."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedgist import encoders
from fedgist.data import open_source
from fedgist.encoders import GistCodec, encoder_info, files, load_encoder, training
from fedgist.encoders.gist_ae import Shape
from fedgist.encoders.make import make_codec, psnr, read_public, train_own, write_codec
from fedgist.encoders.training import Muon, Schedule, augment, train_codec
from fedgist.errors import ConfigError, DataError, EncoderError

HOME = Path(encoders.__file__).parent
SMALL = Shape(dim=8, widths=(6, 6, 6, 6), encoder=(1, 0, 0, 1), decoder=(1, 0, 0, 1))


def blobs(n: int, seed: int = 0) -> np.ndarray:
    """Smooth random colour images."""
    g = torch.Generator().manual_seed(seed)
    x = torch.nn.functional.interpolate(
        torch.rand(n, 3, 4, 4, generator=g), (64, 64), mode="bicubic"
    )
    return (x.clamp(0, 1) * 255).byte().numpy()


def quiet(shown: int, db: float) -> None:
    pass


@pytest.fixture(scope="module")
def images() -> np.ndarray:
    return blobs(40)


@pytest.fixture(scope="module")
def codec(images: np.ndarray, tmp_path_factory: pytest.TempPathFactory) -> GistCodec:
    folder = tmp_path_factory.mktemp("codec")
    net = train_codec(images, Schedule(24, batch=8), folder / "c", quiet, SMALL)
    return write_codec(net, SMALL, images, folder / "codec.safetensors")


def test_training_lowers_the_error(tmp_path: Path) -> None:
    colours = np.random.default_rng(0).integers(0, 256, (60, 3, 1, 1), np.uint8)
    images = np.ascontiguousarray(np.broadcast_to(colours, (60, 3, 64, 64)))
    dbs: list[float] = []
    for shown in (8, 800):
        schedule = Schedule(shown, batch=8, lr=1e-2, noise=0.0, average=0.9)
        net = train_codec(images, schedule, tmp_path / f"{shown}", quiet, SMALL)
        codec = write_codec(net, SMALL, images, tmp_path / f"{shown}.safetensors")
        dbs.append(psnr(codec, images))
    assert dbs[1] > dbs[0] + 0.3


def test_a_stopped_training_goes_on_as_if_nothing_had_happened(
    images: np.ndarray, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schedule, path = Schedule(48, batch=8, seed=3), tmp_path / "checkpoint"
    whole = train_codec(images, schedule, tmp_path / "other", quiet, SMALL)
    advance = training._Run.advance

    def stop(run: training._Run, step: int) -> float:
        if step == 5:
            raise KeyboardInterrupt
        return advance(run, step)

    with monkeypatch.context() as m:
        m.setattr(training._Run, "advance", stop)
        with pytest.raises(KeyboardInterrupt):
            train_codec(images, schedule, path, quiet, SMALL, keep_every=2)
    resumed = train_codec(images, schedule, path, quiet, SMALL, keep_every=2)
    for k, v in whole.state_dict().items():
        assert torch.equal(v, resumed.state_dict()[k]), k
    with pytest.raises(ConfigError, match="must belong to this training"):
        train_codec(images, Schedule(48, batch=8, seed=4), path, quiet, SMALL)


def test_the_global_generator_is_untouched(images: np.ndarray, tmp_path: Path) -> None:
    before = torch.get_rng_state()
    train_codec(images, Schedule(16, batch=8), tmp_path / "c", quiet, SMALL)
    assert torch.equal(before, torch.get_rng_state())


def test_muon_makes_steps_orthogonal() -> None:
    p = torch.nn.Parameter(torch.zeros(6, 10))
    p.grad = torch.randn(6, 10, generator=torch.Generator().manual_seed(0))
    optimiser = Muon([p])
    optimiser.param_groups[0]["lr"] = 1.0
    optimiser.step()
    singular = torch.linalg.svdvals(p.detach()) / (0.2 * 10**0.5)
    assert singular.min() > 0.6 and singular.max() < 1.3
    assert torch.sign((p.detach() * p.grad).sum()) == -1


def test_augmented_images_stay_images() -> None:
    x = torch.from_numpy(blobs(64))
    y = augment(x, torch.Generator().manual_seed(0))
    assert y.shape == x.shape and y.dtype == torch.float32 and y.min() >= 0 and y.max() <= 1
    assert torch.equal(x, torch.from_numpy(blobs(64)))


def test_rows_do_not_depend_on_the_batch(codec: GistCodec) -> None:
    x = torch.from_numpy(blobs(70, seed=5)).float() / 255
    z = codec.encode_task(x)
    order = torch.randperm(70, generator=torch.Generator().manual_seed(0))
    assert torch.equal(codec.encode_task(x[order]), z[order])
    assert torch.equal(codec.encode_task(x[11:12]), z[11:12])
    assert z.dtype == torch.float64 and z.shape == (70, 8)
    y = codec.decode(z)
    assert y.shape == x.shape and y.min() >= 0 and y.max() <= 1


def test_gradients_flow_to_codes(codec: GistCodec) -> None:
    z = torch.zeros(2, 8, requires_grad=True)
    (gradient,) = torch.autograd.grad(codec.decode(z).sum(), z)
    assert gradient.abs().sum() > 0


def test_a_damaged_file_is_refused(codec: GistCodec, images: np.ndarray, tmp_path: Path) -> None:
    net, path = codec._net, tmp_path / "codec.safetensors"
    weights = {k: v.half() for k, v in net.state_dict().items()}
    for change, message in (
        ({"down.1.bias": torch.zeros(3)}, r"'down.1.bias' .* must be finite with shape \[6\]"),
        ({"down.1.bias": torch.full((6,), torch.nan)}, "must be finite"),
    ):
        file = files.write(path, "gist-ae", weights | change, codec.public, shape=SMALL.meta())
        with pytest.raises(EncoderError, match=message):
            GistCodec(file)
    for shape in ({}, SMALL.meta() | {"dim": 10**9}, SMALL.meta() | {"widths": [1, 2]}):
        file = files.write(path, "gist-ae", weights, codec.public, shape=shape)
        with pytest.raises(EncoderError, match="the shape of"):
            GistCodec(file)


def test_images_of_another_shape_are_refused(tmp_path: Path) -> None:
    for bad in (np.zeros((40, 3, 32, 32), np.uint8), np.zeros((40, 3, 64, 64), np.float32)):
        with pytest.raises(DataError, match=r"must be uint8 \[n, 3, 64, 64\]"):
            train_codec(bad, Schedule(8, batch=8), tmp_path / "c", quiet, SMALL)
    with pytest.raises(DataError, match="must be at least 2"):
        train_codec(blobs(1), Schedule(8, batch=8), tmp_path / "c", quiet, SMALL)
    with pytest.raises(ConfigError, match="at least one batch"):
        Schedule(images=5, batch=8)


def test_a_user_trains_on_a_folder_of_pictures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    for i, x in enumerate(blobs(40)):
        picture = Image.fromarray(x.transpose(1, 2, 0)).resize((80, 70 + i))
        picture.save(tmp_path / "in" / ("deep" if i % 2 else "") / f"{i}.png")
    assert read_public(tmp_path / "in").shape == (40, 3, 64, 64)
    monkeypatch.setattr("fedgist.encoders.make.Shape", lambda: SMALL)
    out = tmp_path / "own.safetensors"
    codec = train_own(tmp_path / "in", out, shown=96, held_out=0.1, seed=0, log=quiet)
    made = json.loads(out.with_suffix(".json").read_text())
    assert made["sha256"] == codec.digest == load_encoder(str(out)).digest
    assert made["fitted_on"] == 36 and made["psnr"]["held_out"] > 5
    assert not out.with_suffix(".checkpoint").exists()
    with pytest.raises(DataError, match="npy file or a folder"):
        read_public(tmp_path / "nothing")
    with pytest.raises(ConfigError, match=r"must end in \.safetensors"):
        train_own(tmp_path / "in", tmp_path / "own.pt", shown=96, held_out=0.1, seed=0, log=quiet)


def test_the_manifest_names_what_was_held_out(images: np.ndarray, tmp_path: Path) -> None:
    out = tmp_path / "c.safetensors"
    with pytest.MonkeyPatch.context() as m:
        m.setattr("fedgist.encoders.make.Shape", lambda: SMALL)
        make_codec(images, {"a": blobs(9, 1)}, out, Schedule(96), quiet, {"command": "x"})
    made = json.loads(out.with_suffix(".json").read_text())
    assert set(made["psnr"]) == {"a"} and made["command"] == "x" and made["shown"] == 96


def test_the_shipped_codec_beats_principal_components():
    """On images that neither has seen: clothes, at the size that the codecs read."""
    source = open_source("fashion-mini")
    pixels = source.images("test", source.task()).pixels[:200].numpy()
    ours, linear = (psnr(load_encoder(name), pixels) for name in ("gist-ae", "pca"))
    assert ours > 25
    assert ours > linear + 3


def test_the_shipped_codec_says_where_it_comes_from():
    info = encoder_info("gist-ae")
    assert info["dim"] == 128 and info["decodes"] and info["track"] == "public images"
    assert info["psnr"]["held_photos"] > 29
    packages = {s["package"] for s in info["sources"]}
    assert "openclipart-png" in packages
    assert not any("fashion" in p or "emoji" in p for p in packages)
