"""FedSumUp: what leaves, the closed loop, when it ends, and the form with a guarantee."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from federation_tools import run_locally
from fedgist.compress import build_compressor, enlarge
from fedgist.compress.learned import ssim
from fedgist.config import load, make_method
from fedgist.errors import ConfigError
from fedgist.methods._uploads import chosen, pooled, upload
from fedgist.methods._weights import fresh, network_of
from fedgist.methods.fedsumup import FedSumUp, Improve
from fedgist.privacy.claim import Privacy
from fedgist.run import generator, plan_of
from fedgist.train import Recipe
from fedgist.types import Images, Task

FAST = FedSumUp(
    side=4,
    rounds=4,
    share=1.0,
    recipe=Recipe(width=8, steps=60, batch=16),
    improve=Improve(steps=3),
)
RAW = Privacy(epsilon=math.inf)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def striped(n=90, size=8, channels=1):
    """Three classes that differ in the direction of their stripes."""
    at = torch.arange(size)
    stripes = torch.stack(
        [at[:, None].expand(size, size), at[None].expand(size, size), at[:, None] + at[None]]
    )
    labels = torch.arange(n) % 3
    waves = ((stripes[labels] + torch.randint(4, (n, 1, 1), generator=rng(1))) // 2 % 2).float()
    noise = 0.2 * torch.rand(n, channels, size, size, generator=rng(2))
    pixels = ((0.8 * waves[:, None] + noise) * 255).to(torch.uint8)
    return Images(pixels, labels, ("a", "b", "c"))


def split_by_place(n=90):
    """The same, darkened by class in another half: their means differ too."""
    images = striped(n)
    images.pixels[images.labels == 1, :, :4] //= 4
    images.pixels[images.labels == 2, :, :, :4] //= 4
    return images


@pytest.fixture
def task():
    return Task("stripes", ("a", "b", "c"), 1, 8, max_images=500)


def parts(images, n=3):
    return [images.take(torch.arange(len(images)) % n == i) for i in range(n)]


def test_an_upload_is_one_small_image_and_its_label(task):
    images = striped()
    v = build_compressor("light", 1, 8, 4, rng())
    gist = upload(images, task, v, 4)
    assert {k: (v.dtype, tuple(v.shape)) for k, v in gist.items()} == {
        "pixels": (torch.uint8, (90, 1, 4, 4)),
        "labels": (torch.uint8, (90,)),
    }
    assert torch.equal(gist["pixels"].float(), (v(images.floats()) * 255).round())
    assert torch.equal(pooled(gist, task).labels, images.labels)


def test_many_classes_get_labels_that_fit():
    task = Task("many", tuple(map(str, range(300))), 1, 8)
    images = Images(striped(3).pixels, torch.tensor([0, 255, 299]), task.classes)
    gist = upload(images, task, build_compressor("light", 1, 8, 4, rng()), 4)
    assert gist["labels"].tolist() == [0, 255, 299]


def test_the_share_is_the_same_for_every_split_round_and_neighbour():
    images = striped(3000)
    images = replace(images, pixels=torch.randint(256, images.pixels.shape, generator=rng()).byte())
    picked = chosen(images, 0.3)
    assert len(picked) == pytest.approx(900, abs=100)
    apart = torch.cat([chosen(p, 0.3).pixels for p in parts(images)])
    assert sorted(map(bytes, apart.numpy())) == sorted(map(bytes, picked.pixels.numpy()))
    fewer = chosen(images.take(torch.arange(3000) != 17), 0.3)
    assert {bytes(x) for x in fewer.pixels.numpy()} <= {bytes(x) for x in picked.pixels.numpy()}
    assert len(chosen(images, 1.0)) == 3000
    assert len(chosen(images.take(torch.arange(0)), 0.3)) == 0


def test_labels_that_are_no_class_are_left_out(task):
    gist = {"pixels": torch.zeros(3, 1, 4, 4).byte(), "labels": torch.tensor([0, 9, 2]).byte()}
    assert pooled(gist, task).labels.tolist() == [0, 2]


def test_it_learns_and_says_how_it_went(task):
    images = split_by_place()
    outcome, _ = run_locally(FAST, task, parts(images), RAW)
    model = outcome.classifiers["fedsumup"]
    right = (model.predict(images.floats()).argmax(1) == images.labels).float().mean()
    assert right > 0.8
    assert outcome.details["rounds"] == len(outcome.details["held_out_uploads"])
    assert outcome.details["uploads"] == 90
    assert outcome.synthetic is None


@pytest.mark.parametrize(("gain", "rounds"), [(1.0, 2), (0.0, 4)])
def test_it_ends_when_a_round_gains_too_little(task, gain, rounds):
    method = replace(FAST, least_gain=gain)
    # nothing improves when no step is taken; a gain of 0 is then enough to go on
    method = replace(method, recipe=replace(method.recipe, steps=0))
    outcome, exchange = run_locally(method, task, parts(striped()), RAW)
    assert outcome.details["rounds"] == rounds
    assert len(exchange.visits) == 3 * rounds


def test_the_better_of_two_rounds_is_kept_with_its_own_compressor(task):
    method = replace(
        FAST, more=0.0, improve=replace(FAST.improve, lr=0.5, steps=20), least_gain=0.0, rounds=2
    )
    outcome, exchange = run_locally(method, task, parts(striped()), RAW)
    first, second = outcome.details["held_out_uploads"]
    assert second < first, "a spoilt compressor must be noticed here"
    kept = outcome.classifiers["fedsumup"].compress.state_dict()
    assert all(torch.equal(kept[k], v) for k, v in exchange.broadcasts[0].items())
    assert any(not torch.equal(kept[k], v) for k, v in exchange.broadcasts[1].items())


def test_the_loss_is_the_paper_s(task):
    images, v = striped(12), build_compressor("light", 1, 8, 4, rng())
    network = network_of(task, FAST.recipe, fresh(task, FAST.recipe, rng()))
    once = enlarge(v(images.floats()).detach(), 8)
    right = torch.arange(12) % 2 == 0
    got = FAST._loss(v, network, once, images.labels, right)
    again = enlarge(v(once), 8)
    error = (again - once).square().mean((1, 2, 3)) + 1e-4
    want = (
        0.03 * F.cross_entropy(network.logits(again)[right], images.labels[right])
        + ssim(again, once).mean()
        + 0.01 * (-10 * error.log10()).clamp(min=5).mean()
    )
    assert got.item() == pytest.approx(want.item(), abs=1e-5)
    only = replace(FAST, improve=replace(FAST.improve, loss="utility"))
    got = only._loss(v, network, once, images.labels, right)
    want = 0.03 * F.cross_entropy(network.logits(again[right]), images.labels[right])
    assert got.item() == pytest.approx(want.item(), abs=1e-6)


def test_nothing_right_is_nothing_to_keep_and_no_crash(task):
    v = build_compressor("light", 1, 8, 4, rng())
    network = network_of(task, FAST.recipe, fresh(task, FAST.recipe, rng()))
    once = enlarge(v(striped(6).floats()).detach(), 8)
    nobody = torch.zeros(6, dtype=torch.bool)
    for loss in ("complete", "utility"):
        method = replace(FAST, improve=replace(FAST.improve, loss=loss))
        value = method._loss(v, network, once, torch.zeros(6, dtype=torch.int64), nobody)
        torch.autograd.backward(value)
        assert math.isfinite(value.item())
        assert all(p.grad is None or bool(p.grad.isfinite().all()) for p in v.parameters())


def test_training_the_compressor_lowers_its_loss_and_leaves_the_classifier(task):
    images = striped()
    v = build_compressor("light", 1, 8, 4, rng())
    network = network_of(task, FAST.recipe, fresh(task, FAST.recipe, rng()))
    before = {k: t.clone() for k, t in network.model.state_dict().items()}
    method = replace(FAST, improve=Improve(steps=40))
    small = pooled(upload(images, task, v, 4), task)
    tensors = {k: t.detach().clone() for k, t in v.state_dict().items()}
    better = method._improved(task, tensors, network, small, rng())
    once = enlarge(small.floats(), 8)
    everybody = torch.ones(90, dtype=torch.bool)
    losses = [
        float(method._loss(method._compressor(task, t), network, once, images.labels, everybody))
        for t in (tensors, better)
    ]
    assert losses[1] < losses[0]
    assert all(torch.equal(v.state_dict()[k], t) for k, t in tensors.items()), "changed in place"
    assert all(torch.equal(before[k], t) for k, t in network.model.state_dict().items())


def test_raw_images_are_infinite_and_statistics_are_not(task):
    plan = plan_of(FAST, task, RAW)
    assert math.isinf(plan.claim.epsilon)
    assert any("clear" in note for note in plan.claim.notes)
    assert plan.bytes_up is None
    private = replace(FAST, release="statistics", rounds=2)
    plan = plan_of(private, task, Privacy(epsilon=3.0))
    assert plan.claim.epsilon <= 3.0 and plan.bytes_up
    alone = plan_of(replace(private, rounds=1), task, Privacy(epsilon=3.0))
    assert plan.sigma == pytest.approx(alone.sigma * math.sqrt(2), rel=0.01), "rounds add up"


def test_statistics_do_not_depend_on_the_split_and_learn(task):
    images = split_by_place(300)
    method = replace(FAST, release="statistics", rounds=1, drawn=60)
    outcomes = [
        run_locally(method, task, p, Privacy(epsilon=20.0))[0] for p in (parts(images), [images])
    ]
    scores = [o.classifiers["fedsumup"].predict(images.floats()) for o in outcomes]
    assert torch.equal(*scores)
    assert (scores[0].argmax(1) == images.labels).float().mean() > 0.5


@pytest.mark.parametrize(
    "setting",
    [
        "rounds=0",
        "share=0",
        "share=1.5",
        "least_gain=-1",
        "side=9",
        "improve.lr=0",
        "recipe.choose='holdout'",
    ],
)
def test_wrong_options_are_named(task, setting):
    key = setting.split("=")[0].split(".")[0]
    with pytest.raises(ConfigError, match=key):
        method = make_method(load(None, ["method.name=fedsumup", f"method.{setting}"]))
        method.start(task, generator(0, "start"))
