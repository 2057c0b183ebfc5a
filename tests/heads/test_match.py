"""`match`: images move to where the released means are, and only as far as the noise allows."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedgist.encoders.random_conv import RandomConv
from fedgist.errors import ConfigError, DataError
from fedgist.heads.match import Matched, Matching, NetMeans, match, net_means
from fedgist.queries import SumQuery
from fedgist.types import Images

pytestmark = pytest.mark.usefixtures("one_thread")

CLASSES = ("stripes", "bars", "blank")
NETS = RandomConv(1, nets=3, width=4)
HOW = Matching(steps=50, lr=0.05)


def real(n: int = 12) -> Tensor:
    """Waves of one direction per class, ``[2, n, 1, 28, 28]``."""
    rng = torch.Generator().manual_seed(0)
    at = torch.arange(28) / 28
    wave = (at * 18 + torch.rand(n, 1, generator=rng) * 6).sin() * 0.5 + 0.5
    across = wave[:, None, None, :].expand(-1, 1, 28, -1)
    return torch.stack([across, across.transpose(2, 3)])


def start(per_class: int = 3, classes: int = 2) -> Images:
    rng = torch.Generator().manual_seed(1)
    shape = (classes * per_class, 1, 28, 28)
    pixels = torch.randint(64, 192, shape, generator=rng).to(torch.uint8)
    labels = torch.arange(classes).repeat_interleave(per_class)
    return Images(pixels, labels, CLASSES)


def release(noise: float = 0.0, seed: int = 2) -> NetMeans:
    """True means with noise; the third class holds nobody and is all noise."""
    true = torch.stack([NETS.rows(x).mean(0) for x in real()])
    mean = torch.cat([true, torch.zeros_like(true[:1])])
    rng = torch.Generator().manual_seed(seed)
    std = torch.tensor([noise, noise, 1.0 if noise else 0.0])
    return NetMeans(mean + std[:, None, None] * torch.randn(mean.shape, generator=rng), std)


def run(of: NetMeans, images: Images, how: Matching = HOW, seed: int = 0) -> Matched:
    return match(of, NETS, images, how, torch.Generator().manual_seed(seed))


def distance(images: Images, nets: RandomConv = NETS) -> float:
    """Squared distance of class means to the real ones, summed over the two classes."""
    z = nets.rows(images.floats())
    means = torch.stack([z[images.labels == c].mean(0) for c in range(2)])
    true = torch.stack([nets.rows(x).mean(0) for x in real()])
    return float((means - true).square().sum())


def test_without_noise_the_means_are_met() -> None:
    images = start()
    out = run(release(), images)
    assert out.images.pixels.dtype == torch.uint8
    assert out.images.pixels.shape == images.pixels.shape
    assert torch.equal(out.images.labels, images.labels) and out.images.classes == CLASSES
    assert distance(out.images) < distance(images) / 10
    assert out.noise == 0
    steps, losses = zip(*out.history, strict=True)
    assert steps == tuple(range(0, 51, 5)) and losses[-1] < losses[0] / 10
    assert losses[0] == pytest.approx(distance(images) / 2, rel=1e-4)


def test_other_networks_see_the_class_too() -> None:
    """The images gain for networks that took no part, so it is not the three that are fooled."""
    images = start()
    out = run(release(), images).images
    others = RandomConv(99, nets=4, width=8)
    assert distance(out, others) < 0.8 * distance(images, others)


def test_the_same_seed_gives_the_same_bytes() -> None:
    how = replace(HOW, steps=7)
    before = torch.get_rng_state()
    a, b, c = (run(release(0.01), start(), how, seed).images.pixels for seed in (0, 0, 1))
    assert torch.equal(a, b) and not torch.equal(a, c)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_class_that_noise_drowns_keeps_its_images() -> None:
    images = start(classes=3)
    out = run(release(0.002), images, replace(HOW, steps=20)).images
    assert torch.equal(out.pixels[6:], images.pixels[6:])
    assert not torch.equal(out.pixels[:6], images.pixels[:6])


def test_noise_is_not_fitted() -> None:
    """The truth comes nearer and the loss stays at what the noise alone would leave."""
    images, noise = start(), 0.01
    out = run(release(noise), images)
    assert distance(out.images) < distance(images) / 3
    assert out.noise == pytest.approx(noise**2 * NETS.dim, rel=1e-4)
    assert out.history[-1][1] > out.noise / 2


def test_groups_are_matched_each_by_itself() -> None:
    images = start(per_class=4)
    out = run(release(), images, replace(HOW, group=2)).images
    for rows in ([0, 1, 4, 5], [2, 3, 6, 7]):
        part = out.take(torch.tensor(rows))
        assert distance(part) < distance(images.take(torch.tensor(rows))) / 10


def test_coarse_pixels_make_smooth_images() -> None:
    out = run(release(), start(), replace(HOW, factor=2)).images
    assert out.pixels.shape == (6, 1, 28, 28)
    x = out.floats()
    odd = x[..., 1:-2:2, :]  # a quarter of the way between two free rows of pixels
    between = 0.75 * x[..., 0:-3:2, :] + 0.25 * x[..., 3::2, :]
    smooth = (odd - between).abs().mean()
    rough = (start().floats()[..., 1:-2:2, :] - start().floats()[..., 0:-3:2, :]).abs().mean()
    assert float(smooth) < float(rough) / 2
    assert distance(out) < distance(start()) / 3


def test_no_steps_return_the_start() -> None:
    images = start()
    out = run(release(), images, replace(HOW, steps=0))
    assert torch.equal(out.images.pixels, images.pixels) and len(out.history) == 1


def test_progress_counts_every_step() -> None:
    seen: list[tuple[int, int]] = []
    how = Matching(steps=2, group=2)
    rng = torch.Generator().manual_seed(0)
    match(release(), NETS, start(), how, rng, progress=lambda *p: seen.append(p))
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_sums_become_means_with_their_noise() -> None:
    query = SumQuery(clip=1.0, levels=100, scale=2.0, per_class=True)
    sums = torch.full((2, 1, 16), 50)
    got = net_means(sums, torch.tensor([10.0, -3.0]), query, 4.0)
    assert torch.allclose(got.mean[:, 0, 0], torch.tensor([0.05, 0.5]))
    assert torch.allclose(got.std, torch.tensor([0.8, 8.0]), rtol=1e-3)
    assert net_means(sums, torch.ones(2), query, 0.0).std.tolist() == [0.0, 0.0]


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(ConfigError, match="group of match must be at least 1"):
        Matching(group=0)
    with pytest.raises(DataError, match="take the networks of the release"):
        match(release(), RandomConv(1, nets=2, width=4), start(), HOW, torch.Generator())
    with pytest.raises(DataError, match="needs images"):
        run(release(), start().take(torch.zeros(0, dtype=torch.int64)))
