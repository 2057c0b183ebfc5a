from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from safetensors.torch import save

import fedgist.train.loop as loop
from fedgist.errors import ConfigError, DataError
from fedgist.train import MODELS, POLICIES, Recipe, evaluate, finetune, split, train
from fedgist.types import Images


def written(network):
    return save(network.tensors()), network.meta()


def same(a, b):
    return written(a) == written(b)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("choose", ["last", "holdout"])
def test_same_seed_same_bytes(policy, choose, images, recipe, rng):
    recipe = replace(recipe, augment=policy, flip=True, choose=choose)
    pixels, labels, state = images.pixels.clone(), images.labels.clone(), torch.get_rng_state()
    first, second, other = (train(images, recipe, rng(seed)) for seed in (0, 0, 1))
    assert same(first, second)
    assert not same(first, other)
    assert torch.equal(images.pixels, pixels) and torch.equal(images.labels, labels)
    assert torch.equal(torch.get_rng_state(), state)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_learns(name, optimiser, images, rng):
    lr = {"adamw": 3e-3, "sgd": 0.03}[optimiser]
    recipe = Recipe(
        model=name, width=8, steps=40, batch=20, lr=lr, optimiser=optimiser, augment="none"
    )
    network = train(images, recipe, rng(0))
    assert evaluate(network, images).accuracy > 0.95


def test_float_and_byte_pixels_train_alike(images, recipe, rng):
    floats = replace(images, pixels=images.floats())
    assert same(train(images, recipe, rng(0)), train(floats, recipe, rng(0)))


def test_inputs_are_normalised_by_the_training_set(images, recipe, rng):
    rgb = replace(images, pixels=torch.cat([images.pixels, images.pixels // 2, images.pixels], 1))
    network = train(rgb, recipe, rng(0))
    x = rgb.floats().double()
    assert torch.allclose(network.mean.double(), x.mean((0, 2, 3)), atol=1e-6)
    assert torch.allclose(network.std.double(), x.std((0, 2, 3), correction=0), atol=1e-6)


def test_progress_counts_every_step(images, recipe, rng):
    seen = []
    train(images, recipe, rng(0), progress=lambda done, total: seen.append((done, total)))
    assert seen == [(i + 1, recipe.steps) for i in range(recipe.steps)]


# What it begins from.


def test_warm_start_continues_and_leaves_the_start_alone(images, recipe, network, rng):
    before = written(network)
    rest = train(images, replace(recipe, steps=0), rng(0), start=network)
    assert same(rest, network)
    on = train(images, replace(recipe, steps=1, lr=1e-5, warmup=0), rng(0), start=network)
    step = max(float((on.tensors()[k] - v).abs().max()) for k, v in network.tensors().items())
    assert 0 < step < 1e-4
    assert written(network) == before


def test_warm_start_keeps_the_input_statistics(images, recipe, network, rng):
    dark = replace(images, pixels=images.pixels // 4)
    assert torch.equal(train(dark, recipe, rng(0), start=network).mean, network.mean)


def test_finetune_takes_the_networks_own_model(images, recipe, network, rng):
    own = finetune(network, images, replace(recipe, model="mlp", width=99), rng(0))
    assert (own.name, own.width) == (network.name, network.width)
    assert same(own, train(images, recipe, rng(0), start=network))


def test_pretraining_helps(images, rng):
    recipe = Recipe(width=8, steps=40, batch=20, lr=3e-3, augment="none")
    shared = train(images, recipe, rng(0))
    little = images.take(torch.arange(6))
    short = replace(recipe, steps=3, lr=1e-4)
    assert evaluate(finetune(shared, little, short, rng(0)), images).accuracy > 0.95
    assert evaluate(train(little, short, rng(0)), images).accuracy < 0.95


# What it learns from.


def test_a_correction_is_added_to_every_gradient(images, network, rng):
    """SGD is linear in it: steps of the loss alone, then of the loss and the correction."""
    plain_sgd = {"optimiser": "sgd", "momentum": 0.0, "schedule": "constant", "warmup": 0.0}
    recipe = Recipe(width=8, steps=1, batch=60, lr=0.1, **plain_sgd)
    sizes = [p.numel() for p in network.model.parameters()]
    shift = torch.randn(sum(sizes), generator=rng(3))
    start, ends = network, []
    for correction in (None, torch.zeros_like(shift), shift):
        ends.append(train(images, recipe, rng(0), start=start, correction=correction))
    assert same(ends[0], ends[1])
    parts = torch.split(shift, sizes)
    pairs = zip(ends[0].model.parameters(), ends[2].model.parameters(), parts, strict=True)
    for alone, corrected, part in pairs:
        assert torch.allclose(corrected, alone - 0.1 * part.view_as(alone), atol=1e-6)
    two = replace(recipe, steps=2)  # the second step too, from where the first led
    straight = train(images, two, rng(0), start=start, correction=shift)
    again = train(images, recipe, rng(1), start=ends[2], correction=shift)
    for a, b in zip(straight.model.parameters(), again.model.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-5)


def test_soft_labels_that_are_certain_equal_labels(images, recipe, rng):
    hard = torch.eye(3)[images.labels]
    a, b = train(images, recipe, rng(0)), train(images, recipe, rng(0), soft_labels=hard.double())
    x = images.floats()
    assert torch.allclose(a.predict(x), b.predict(x), atol=1e-4)


def test_soft_labels_replace_the_labels(images, rng):
    recipe = Recipe(width=8, steps=40, batch=20, lr=3e-3, augment="none")
    moved = torch.eye(3)[(images.labels + 1) % 3]
    guess = train(images, recipe, rng(0), soft_labels=moved).predict(images.floats()).argmax(1)
    assert (guess == (images.labels + 1) % 3).float().mean() > 0.95
    flat = torch.full((60, 3), 1 / 3)
    p = train(images, recipe, rng(0), soft_labels=flat).predict(images.floats()).exp()
    assert (p - 1 / 3).abs().max() < 0.1


@pytest.mark.parametrize(
    ("soft", "message"),
    [
        (
            torch.ones(60, 2) / 2,
            r"soft_labels must be float \[60, 3\]. Got torch.float32 \[60, 2\]",
        ),
        (torch.ones(60, 3, dtype=torch.int64), "Got torch.int64"),
        (torch.ones(60, 3), "sum to 1. Got sums 3 .. 3"),
        (torch.tensor([2.0, -1.0, 0.0]).expand(60, 3), "smallest value -1: use softmax"),
        (torch.full((60, 3), torch.nan), "sum to 1. Got sums nan"),
    ],
)
def test_bad_soft_labels(soft, message, images, recipe, rng):
    with pytest.raises(DataError, match=message):
        train(images, recipe, rng(0), soft_labels=soft)


@pytest.mark.parametrize("soft", [False, True])
def test_extra_images_teach_what_the_set_lacks(soft, images, rng):
    own = images.take(images.labels != 2)
    extra = images.take(images.labels == 2)
    extra = replace(extra, pixels=extra.floats())  # of the other dtype, too
    recipe = Recipe(width=8, steps=40, batch=20, lr=3e-3, augment="none")
    labels = torch.eye(3)[own.labels] if soft else None
    network = train(own, recipe, rng(0), extra=extra, soft_labels=labels)
    assert evaluate(network, images).accuracy > 0.95
    assert torch.allclose(network.mean, images.floats().mean(), atol=1e-6)


def test_extra_must_fit(images, recipe, rng):
    other = replace(images, classes=("a", "b", "z"))
    with pytest.raises(DataError, match=r"extra must have the classes of the images.* 'z'\]"):
        train(images, recipe, rng(0), extra=other)
    wide = replace(images, pixels=images.pixels.repeat(1, 3, 1, 1))
    with pytest.raises(DataError, match=r"extra must have the shape of the images: \[1, 8, 8\]"):
        train(images, recipe, rng(0), extra=wide)


# What it keeps.


def test_holdout_keeps_the_best_checkpoint_and_last_the_last(images, recipe, rng, monkeypatch):
    seen, scores = [], iter([3, 1, 9, 2, 9, 8, 0, 0, 0, 0])

    def judge(network, pool, rows):
        seen.append((len(rows), save(network.tensors())))
        return next(scores)

    monkeypatch.setattr(loop, "_right", judge)
    recipe = replace(recipe, steps=20, holdout=0.25)
    chosen = train(images, replace(recipe, choose="holdout"), rng(0))
    assert [n for n, _ in seen] == [15] * 10
    assert save(chosen.tensors()) == seen[4][1], "the later of two equals"
    seen.clear()
    train(images, recipe, rng(0))
    assert not seen


def test_holdout_never_trains_on_what_it_holds(images, recipe, rng):
    """Held-out images may be anything: the weights do not change, only the choice could."""
    recipe = replace(recipe, choose="holdout", steps=1, holdout=0.3)
    state = rng(0)
    train(images, replace(recipe, steps=0), state)  # draws the parameters and the split
    _, held = split(images.labels, 0.3, _after_initialisation(images, recipe, rng(0)))
    noise = images.pixels.clone()
    noise[held] = noise[held].roll(3, 2)  # same statistics
    a, b = train(images, recipe, rng(0)), train(replace(images, pixels=noise), recipe, rng(0))
    assert all(
        torch.allclose(x, y, atol=1e-6)
        for x, y in zip(*(t.tensors().values() for t in (a, b)), strict=True)
    )


def _after_initialisation(images, recipe, rng):
    train(images, replace(recipe, steps=0, choose="last"), rng)
    return rng


@pytest.mark.parametrize("n", [1, 2, 5])
def test_holdout_of_tiny_sets_trains(n, images, recipe, rng):
    network = train(images.take(torch.arange(n)), replace(recipe, choose="holdout"), rng(0))
    assert network.predict(images.floats()).isfinite().all()


@pytest.mark.parametrize("share", [0.1, 0.25, 0.5])
def test_split_is_stratified_and_complete(share, rng):
    labels = torch.randint(0, 4, (203,), generator=rng(0)).clamp(max=2)
    kept, held = split(labels, share, rng(1))
    assert torch.equal(torch.cat([kept, held]).sort().values, torch.arange(203))
    assert len(held) == int(203 * share + 0.5)
    for c in range(3):
        assert abs(int((labels[held] == c).sum()) - share * int((labels == c).sum())) <= 1
    assert torch.equal(held, split(labels, share, rng(1))[1])
    assert not torch.equal(held, split(labels, share, rng(2))[1])


@pytest.mark.parametrize("n", [0, 1, 2, 3])
def test_split_never_holds_everything(n, rng):
    kept, held = split(torch.zeros(n, dtype=torch.int64), 0.9, rng(0))
    assert len(kept) + len(held) == n
    assert len(kept) >= min(n, 1)


# Unusual sets and bad input.


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("rows", [[0], [0, 3, 6], list(range(7))], ids=["one", "one class", "few"])
def test_small_sets(name, rows, images, recipe, rng):
    small = images.take(torch.tensor(rows))
    network = train(small, replace(recipe, model=name, augment="strong", flip=True), rng(0))
    assert network.predict(images.floats()).shape == (60, 3)
    assert network.predict(images.floats()).isfinite().all()


def test_constant_images(images, recipe, rng):
    flat = replace(images, pixels=torch.full_like(images.pixels, 9))
    assert train(flat, recipe, rng(0)).predict(images.floats()).isfinite().all()


def test_one_class_task(recipe, rng):
    only = Images(torch.zeros(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64), ("a",))
    assert torch.equal(train(only, recipe, rng(0)).predict(only.floats()), torch.zeros(3, 1))


def test_bad_images(images, recipe, rng):
    with pytest.raises(DataError, match=r"training needs at least one image. Got 0"):
        train(images.take(torch.arange(0)), recipe, rng(0))
    tall = replace(images, pixels=images.pixels[:, :, :, :7])
    with pytest.raises(DataError, match=r"training images must be square. Got \[8, 7\]"):
        train(tall, recipe, rng(0))
    broken = images.floats().clone()
    broken[3, 0, 2, 2] = torch.nan
    with pytest.raises(DataError, match="pixels of training images must be finite"):
        train(replace(images, pixels=broken), recipe, rng(0))


def test_a_start_for_something_else(images, recipe, network, rng):
    with pytest.raises(ConfigError, match=r"must name its model, convnet3 of width 8. Got mlp"):
        train(images, replace(recipe, model="mlp"), rng(0), start=network)
    other = replace(images, classes=("a", "b", "z"))
    with pytest.raises(DataError, match=r"images of a warm start .* Got 1 x 8 x 8 of .*'z'\]"):
        train(other, recipe, rng(0), start=network)


@pytest.mark.parametrize("optimiser", ["adamw", "sgd"])
def test_divergence_names_step_and_rate(optimiser, images, recipe, rng):
    wild = replace(recipe, optimiser=optimiser, lr=1e30, schedule="constant", warmup=0)
    with pytest.raises(
        ConfigError, match=r"loss must be finite. Got (nan|inf) at step \d of 6 with"
    ):
        train(images, wild, rng(0))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "resnet"}, "model must be one of .* Did you mean 'resnet18'"),
        ({"optimiser": "adam"}, "optimiser must be one of adamw, sgd. Got 'adam'. Did you mean"),
        ({"schedule": "cosin"}, "Did you mean 'cosine'"),
        ({"augment": "heavy"}, "augment must be one of none, flip, light, strong. Got 'heavy'"),
        ({"choose": "best"}, "choose must be one of last, holdout. Got 'best'"),
        ({"steps": -1}, r"steps must lie in \[0, inf\). Got -1"),
        ({"batch": 0}, r"batch must lie in \[1, inf\). Got 0"),
        ({"lr": float("nan")}, r"lr must lie in \[0, inf\). Got nan"),
        ({"holdout": 1.0}, r"holdout must lie in \[0, 1\). Got 1.0"),
    ],
)
def test_bad_recipes(change, message):
    with pytest.raises(ConfigError, match=message):
        Recipe(**change)


def test_rates():
    recipe = Recipe(steps=100, lr=1.0, warmup=0.1)
    assert [recipe.rate(i) for i in (0, 4, 9, 10)] == pytest.approx([0.1, 0.5, 1.0, 1.0])
    assert recipe.rate(55) == pytest.approx(0.5)
    assert 0 < recipe.rate(99) < 1e-3
    steps = replace(recipe, schedule="step", warmup=0)
    assert [steps.rate(i) for i in (0, 29, 30, 60, 90)] == pytest.approx([1, 1, 0.2, 0.04, 0.008])
    assert {replace(steps, schedule="constant").rate(i) for i in range(100)} == {1.0}
    assert copy.copy(recipe) == recipe
