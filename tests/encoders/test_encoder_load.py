"""Finding encoders by name, and refusing those that are not what the task says."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fedgist import encoders
from fedgist.encoders import Encoder, encoder_info, encoder_names, files, load_encoder
from fedgist.encoders.base import restore
from fedgist.encoders.public import blank
from fedgist.errors import EncoderError

HOME = Path(encoders.__file__).parent


class Mean(Encoder):
    """The mean of each channel, which breaks for images that are white."""

    def __init__(self, worst: float = 1.0) -> None:
        self.name, self.dim, self.digest, self.public = "mean", 3, "d", blank(3)
        self.worst = worst
        self.seen: list[int] = []

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.append(len(x))
        z = x.double().mean((2, 3))
        return torch.where(z == 1, self.worst, z)

    def decode(self, z: torch.Tensor) -> torch.Tensor:
        return z.float()[:, :, None, None].expand(-1, -1, self.size, self.size)


@pytest.mark.parametrize("worst", [float("nan"), float("inf"), float("-inf")])
def test_codes_that_are_not_finite_are_refused(worst: float) -> None:
    x = torch.zeros(4, 3, 8, 8)
    assert Mean(worst).encode_task(x).shape == (4, 3)
    x[2] = 1
    with pytest.raises(EncoderError, match=r"must be finite\. Got 1 of 4 with NaN or Inf"):
        Mean(worst).encode_task(x)


def test_images_with_nan_are_refused() -> None:
    x = torch.zeros(3, 1, 8, 8)
    x[1, 0, 2, 2] = float("nan")
    with pytest.raises(EncoderError, match="Got 1 of 3"):
        load_encoder("pca").encode_task(x)


def test_a_network_meets_one_batch_shape_only() -> None:
    net = Mean()
    for n in (1, 7, 250):
        assert net.encode_task(torch.zeros(n, 1, 8, 8)).shape == (n, 3)
    assert net.seen == [250, 250, 250]
    with pytest.raises(ValueError, match="at most 250"):
        net.encode_task(torch.zeros(251, 1, 8, 8))


def test_the_manifest_is_of_the_shipped_file() -> None:
    data = (HOME / "pca128.safetensors").read_bytes()
    made = json.loads((HOME / "pca128.json").read_text())
    assert made["sha256"] == hashlib.sha256(data).hexdigest() == load_encoder("pca").digest
    assert len(data) < 4_000_000
    assert made["dim"] == load_encoder("pca").dim == 128
    assert all(s["licence"] and s["version"] and s["train"] for s in made["images"]["sources"])
    assert made["fitted_on"] == sum(s["train"] for s in made["images"]["sources"])
    assert made["psnr"]["held_grey_objects"] > 20


def test_info_says_where_an_encoder_comes_from() -> None:
    info = encoder_info("pca")
    assert json.loads(json.dumps(info)) == info
    assert (info["name"], info["kind"], info["dim"], info["size"]) == ("pca", "PcaCodec", 128, 64)
    assert (info["track"], info["exact"], info["decodes"]) == ("public images", True, True)
    assert {"openclipart-png", "tuxpaint-stamps-default"} <= {s["package"] for s in info["sources"]}
    assert info["radius"]["0.50"] < info["radius"]["0.80"] < info["radius"]["0.95"]
    assert {"pca", "dc-ae", "scattering", "efficientnet-lite0"} <= set(encoder_names())


def test_a_path_loads_the_same_codec() -> None:
    path = str(HOME / "pca128.safetensors")
    by_path, by_name = load_encoder(path), load_encoder("pca")
    assert by_path.digest == by_name.digest
    assert (by_path.name, by_name.name) == (path, "pca")


def test_the_hash_must_be_the_tasks() -> None:
    right = load_encoder("pca").digest
    assert load_encoder("pca", right).digest == right
    with pytest.raises(EncoderError, match=f"must be the task's, 00ff. Got {right}"):
        load_encoder("pca", "00ff")


def test_a_dotted_name_loads_a_third_partys(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as m:
        m.syspath_prepend(str(tmp_path))
        (tmp_path / "their").mkdir()
        (tmp_path / "their" / "__init__.py").touch()
        (tmp_path / "their" / "own.py").write_text(
            "from fedgist.encoders import load_encoder\ndef make(): return load_encoder('pca')\n"
        )
        assert load_encoder("their.own:make").dim == 128


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("pcaa", "Did you mean 'pca'"),
        ("", "encoder must be one of pca, gist-ae, dct, dc-ae"),
        ("no.such.module:make", "must be importable"),
        ("fedgist.encoders:nothing", "must be importable"),
        ("missing.safetensors", "must exist. Got 'missing.safetensors'"),
        ("json.encoder:JSONEncoder", "must return an Encoder. Got JSONEncoder"),
    ],
)
def test_an_unknown_encoder_is_one_clear_line(spec: str, message: str) -> None:
    with pytest.raises(EncoderError, match=message) as e:
        load_encoder(spec)
    assert "\n" not in str(e.value)


def test_files_that_are_no_codecs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    good = (HOME / "pca128.safetensors").read_bytes()
    for damaged in (b"", b"hello", good[:1000], good[:-1]):
        path.write_bytes(damaged)
        with pytest.raises(EncoderError, match="must be a FedGist codec file"):
            load_encoder(str(path))
    for meta in (None, {"fedgist": "{"}, {"fedgist": "[]"}, {"fedgist": "{}"}):
        save_file({"w": torch.zeros(1)}, path, meta)
        with pytest.raises(EncoderError, match="must be a FedGist codec file"):
            load_encoder(str(path))
    files.write(path, "other", {}, blank(2))
    with pytest.raises(
        EncoderError, match=r"must be one of pca, gist-ae, scattering\. Got 'other'"
    ):
        load_encoder(str(path))


@pytest.mark.parametrize("size", [28, 64, 96])
def test_restore_goes_back_to_the_task(size: int) -> None:
    y = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    assert restore(y, 1, size).shape == (2, 1, size, size)
    assert restore(y, 3, size).shape == (2, 3, size, size)
