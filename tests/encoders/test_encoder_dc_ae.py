"""DC-AE: a tiny saved model with the layout of the real one goes the whole way."""

import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fedgist.encoders import DcAeCodec, encoder_info, load_encoder
from fedgist.errors import EncoderError, MissingExtra

pytest.importorskip("diffusers")

STATISTICS = "fedgist_public.safetensors"


def images(n: int, seed: int = 0) -> torch.Tensor:
    g = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, 3, 32, 32), generator=g).to(torch.uint8)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny AutoencoderDC with the block layout of mit-han-lab/dc-ae-f32c32-in-1.0."""
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from diffusers import AutoencoderDC

        blocks = ["ResBlock"] * 3 + ["EfficientViTBlock"] * 3
        widths = [8, 16, 32, 32, 64, 64]
        layers = [0, 1, 1, 1, 1, 1]
        with torch.random.fork_rng():
            torch.manual_seed(0)
            net = AutoencoderDC(
                in_channels=3,
                latent_channels=32,
                attention_head_dim=32,
                encoder_block_types=blocks,
                decoder_block_types=blocks,
                encoder_block_out_channels=widths,
                decoder_block_out_channels=widths,
                encoder_layers_per_block=layers,
                decoder_layers_per_block=layers,
                encoder_qkv_multiscales=[[]] * 6,
                decoder_qkv_multiscales=[[]] * 6,
                upsample_block_type="pixel_shuffle",
                downsample_block_type="pixel_unshuffle",
                decoder_norm_types=["batch_norm"] * 3 + ["rms_norm"] * 3,
                decoder_act_fns=["relu"] * 3 + ["silu"] * 3,
                encoder_out_shortcut=True,
                decoder_in_shortcut=True,
                decoder_conv_act_fn="relu",
                scaling_factor=0.3189,
            )
        path = tmp_path_factory.mktemp("dc") / "tiny"
        net.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def codec(folder: Path) -> DcAeCodec:
    assert DcAeCodec.measure(str(folder), images(140)) == folder / STATISTICS
    return DcAeCodec.load(str(folder), f"dc-ae:{folder}")


def test_a_saved_model_loads_encodes_and_decodes(folder: Path, codec: DcAeCodec) -> None:
    encoder = load_encoder(f"dc-ae:{folder}", codec.digest)
    assert (encoder.dim, encoder.size, encoder.track) == (128, 64, "public ImageNet")
    assert not encoder.exact
    z = encoder.encode_task(images(3).float() / 255)
    assert z.shape == (3, 128) and z.dtype == torch.float64
    y = encoder.decode(z)
    assert y.shape == (3, 3, 64, 64) and y.dtype == torch.float32
    assert 0 <= float(y.min()) < float(y.max()) <= 1
    assert encoder_info(f"dc-ae:{folder}")["digest"] == codec.digest


def test_latents_are_raw_and_inputs_run_from_minus_one_to_one(codec: DcAeCodec) -> None:
    x = torch.rand(25, 3, 64, 64, generator=torch.Generator().manual_seed(1))
    latent = codec._net.encode(2 * x - 1).latent
    assert torch.allclose(codec.encode(x), latent.flatten(1).double(), atol=1e-5)
    shown = (codec._net.decode(latent).sample + 1) / 2
    assert torch.allclose(codec.decode(codec.encode(x)), shown.clamp(0, 1), atol=1e-5)


def test_codes_do_not_depend_on_the_batch(codec: DcAeCodec) -> None:
    x = images(60, seed=2).float() / 255
    whole = codec.encode_task(x)
    assert torch.equal(
        torch.cat([codec.encode_task(b) for b in torch.split(x, [1, 30, 29])]), whole
    )
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    assert torch.equal(codec.encode_task(x[order]), whole[order])


def test_codes_depend_on_neither_layout_nor_padding(codec: DcAeCodec) -> None:
    x = torch.rand(codec.step, 3, 64, 64, generator=torch.Generator().manual_seed(5))
    whole = codec.encode_task(x)
    assert torch.equal(codec.encode_task(x.contiguous(memory_format=torch.channels_last)), whole)
    assert torch.equal(codec.encode_task(x[:7]), whole[:7])
    grey = x[:, :1]
    assert torch.equal(codec.encode_task(grey), codec.encode_task(grey.expand(-1, 3, -1, -1)))


def test_the_network_is_frozen_and_gradients_reach_codes(codec: DcAeCodec) -> None:
    assert not codec._net.training  # the decoder has batch normalisation
    assert not any(p.requires_grad for p in codec._net.parameters())
    z = torch.zeros(2, 128, requires_grad=True)
    (grad,) = torch.autograd.grad(codec.decode(z).sum(), z)
    assert bool((grad.abs().sum(1) > 0).all())


def test_the_hash_follows_weights_and_statistics(
    folder: Path, codec: DcAeCodec, tmp_path: Path
) -> None:
    other = tmp_path / "other.safetensors"
    DcAeCodec.measure(str(folder), images(150, seed=9), other)
    assert DcAeCodec.load(str(folder), statistics=other).digest != codec.digest
    copy = tmp_path / "copy"
    copy.mkdir()
    for name in ("config.json", "diffusion_pytorch_model.safetensors", STATISTICS):
        (copy / name).write_bytes((folder / name).read_bytes())
    assert load_encoder(f"dc-ae:{copy}").digest == codec.digest
    weights = copy / "diffusion_pytorch_model.safetensors"
    tensors = load_file(weights)
    first = sorted(tensors)[0]
    save_file(tensors | {first: tensors[first] + 1}, weights, {"format": "pt"})
    with pytest.raises(EncoderError, match="must be measured with the weights of"):
        load_encoder(f"dc-ae:{copy}")


def test_without_statistics_it_says_how_to_make_them(folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "none.safetensors"
    with pytest.raises(EncoderError, match=r"must exist\..*scripts/measure_public.py"):
        DcAeCodec.load(str(folder), statistics=nowhere)


def test_missing_weights_name_three_ways(tmp_path: Path) -> None:
    for source in (tmp_path / "missing", tmp_path):
        with pytest.raises(EncoderError, match="Three ways: dc-ae:FOLDER; `hf download") as e:
            load_encoder(f"dc-ae:{source}")
        assert "\n" not in str(e.value)


def test_a_missing_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtra, match=r"pip install 'fedgist\[codecs\]'"):
        load_encoder("dc-ae:anything")
