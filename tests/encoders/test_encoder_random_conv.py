"""Random networks: public by construction, of norm one, and blind to a record's neighbours."""

import pytest
import torch
from torch import Tensor

from fedgist.encoders.base import Whitening
from fedgist.encoders.random_conv import RandomConv, _maps
from fedgist.errors import ConfigError, EncoderError
from fedgist.privacy.statistics import clip_to_grid


def images(n: int, channels: int = 1, size: int = 28, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (n, channels, size, size), generator=rng) / 255


@pytest.fixture(scope="module")
def nets() -> RandomConv:
    return RandomConv(3, nets=2, width=4)


@pytest.mark.parametrize(
    ("channels", "size"), [(1, 28), (3, 32), (1, 64), (3, 8)], ids=lambda v: str(v)
)
def test_every_image_has_norm_one(nets: RandomConv, channels: int, size: int) -> None:
    z = nets.rows(images(3, channels, size))
    assert z.shape == (3, 2, 64) and z.dtype == torch.float32
    assert torch.allclose(z.norm(dim=2), torch.full((3, 2), 0.5**0.5), atol=1e-6)
    assert torch.allclose(nets.rows(torch.zeros(1, channels, size, size)).norm(), torch.ones(()))


def test_the_seed_is_the_networks(nets: RandomConv) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(123)
        before = torch.get_rng_state()
        same, other = RandomConv(3, nets=2, width=4), RandomConv(4, nets=2, width=4)
        x = images(2)
        assert torch.equal(same.rows(x), nets.rows(x))
        assert torch.equal(torch.get_rng_state(), before)
    assert same.digest == nets.digest != other.digest
    assert not torch.allclose(other.rows(x), nets.rows(x), atol=0.05)


def test_a_row_does_not_depend_on_its_neighbours(nets: RandomConv) -> None:
    x = images(120)
    z = nets.rows(x)
    order = torch.randperm(120, generator=torch.Generator().manual_seed(1))
    assert torch.equal(nets.rows(x[order]), z[order])
    assert torch.equal(torch.cat([nets.rows(p) for p in torch.split(x, [1, 7, 50, 62])]), z)


def test_codes_do_not_depend_on_the_batch() -> None:
    encoder = RandomConv(0, width=4)
    x = images(60, 3, 40)
    z = encoder.encode_task(x)
    assert z.shape == (60, 64) and z.dtype == torch.float64
    assert torch.equal(torch.cat([encoder.encode_task(p) for p in torch.split(x, [3, 57])]), z)
    grey = encoder.encode_task(x[:5, :1])
    assert torch.allclose(grey, encoder.encode_task(x[:5, :1].repeat(1, 3, 1, 1)), atol=1e-5)


def test_grey_is_three_equal_channels(nets: RandomConv) -> None:
    x = images(3)
    assert torch.allclose(nets.embed(x), nets.embed(x.repeat(1, 3, 1, 1)), atol=1e-5)


def test_gradients_reach_the_pixels(nets: RandomConv) -> None:
    for size in (28, 40):
        x = images(2, size=size).requires_grad_()
        z = nets.embed(x, range(1, 2))
        assert z.shape == (2, 1, 64) and torch.allclose(z[:, 0], nets.rows(x)[:, 1], atol=1e-6)
        (g,) = torch.autograd.grad((z * torch.linspace(-1, 1, 64)).sum(), x)
        assert bool((g.flatten(1).norm(dim=1) > 0).all()) and bool(g.isfinite().all())


def test_the_centre_leaves_more_for_what_differs() -> None:
    """The mean that images have in common takes less of the norm than it would without a centre."""
    encoder = RandomConv(0, width=16)
    yy = torch.linspace(0, 1, 28).view(1, 1, 28, 1)
    x = (yy * torch.linspace(1, 6, 40).view(40, 1, 1, 1) * torch.pi).sin().abs().repeat(1, 1, 1, 28)
    x = (x + 0.2 * images(40)).clamp(0, 1)
    plain = torch.nn.functional.normalize(_maps(x, encoder._weights[0], strided=False), dim=1)
    assert float(encoder.rows(x).mean(0).norm()) < 0.8 * float(plain.mean(0).norm())


def test_public_facts_are_those_of_the_unit_sphere() -> None:
    encoder = RandomConv(0, width=2)
    public = encoder.public
    assert public.mean.abs().max() == 0 and torch.equal(public.cov, torch.eye(32).double())
    z = encoder.encode_task(images(4))
    for t in (0.0, 0.25, 0.5):
        white = Whitening(public, t)
        assert white.radius(0.8) == 1 and torch.allclose(white.forward(z), z, atol=1e-5)
    assert (encoder.track, encoder.decodes, encoder.exact) == ("no public data", False, False)


def test_the_grid_holds_a_record(nets: RandomConv) -> None:
    z = nets.rows(images(50)).flatten(1).double()
    u = clip_to_grid(z, 1.0, 4096)
    assert torch.allclose(u / 4096, z, atol=2 / 4096)


def test_what_cannot_be_is_refused() -> None:
    assert RandomConv.of("7", "random-conv:7").name == "random-conv:7"
    with pytest.raises(EncoderError, match="followed by a seed"):
        RandomConv.of("x", "random-conv:x")
    with pytest.raises(EncoderError, match="codec to decode"):
        RandomConv(0, width=1).decode(torch.zeros(1, 16))
    for seed, nets, width in ((-1, 1, 1), (0, 0, 1), (0, 1, 0)):
        with pytest.raises(ConfigError, match="at least"):
            RandomConv(seed, nets, width)
