"""Parameter averaging: by hand for few clients, and with what is clipped, summed and noised."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from federation_tools import run_locally
from fedgist.errors import ConfigError, PrivacyError
from fedgist.methods._weights import LOCAL, fresh, local_update, network_of, size_of
from fedgist.methods.dp_fedavg import CHUNK, LEVELS, DPFedAvg, record_gradients
from fedgist.methods.fedavg import FedAvg
from fedgist.privacy.accounting import plan_multiplier
from fedgist.privacy.claim import Privacy
from fedgist.privacy.client import Client, open_sensitive
from fedgist.privacy.noise import SeededNoise
from fedgist.queries import SumQuery
from fedgist.run import generator, plan_of
from fedgist.train import evaluate, train
from fedgist.types import Images, Merged

RECIPE = replace(LOCAL, width=4, batch=16)
PLAIN = replace(RECIPE, batch=500, momentum=0.0, weight_decay=0.0)
MLP = replace(LOCAL, model="mlp", width=16, batch=16)
AVERAGE = FedAvg(rounds=2, recipe=RECIPE)
NOISED = DPFedAvg(rounds=2, recipe=RECIPE)
GRADIENTS = replace(NOISED, release="gradients", server_lr=0.3)
OPEN = Privacy(epsilon=math.inf)

pytestmark = pytest.mark.usefixtures("one_thread")


def run(method, task, parts, privacy=OPEN, seed=0):
    return run_locally(method, task, parts, privacy, seed)[0]


def weights_of(outcome):
    (network,) = outcome.classifiers.values()
    return torch.cat([p.flatten() for p in network.model.parameters()])


def begin(task, recipe=RECIPE, seed=0):
    return fresh(task, recipe, generator(seed, "start"))


def split(images, *sizes):
    return [images.take(rows) for rows in torch.split(torch.arange(len(images)), sizes)]


def nobody(images):
    return images.take(torch.zeros(0, dtype=torch.int64))


def gradient(task, weights, images, smoothing=0.0):
    """Return the gradient of the mean loss over some images, float32 [P]."""
    network = network_of(task, RECIPE, weights)
    parameters = list(network.model.requires_grad_(True).parameters())
    logits = network.logits(images.floats())
    loss = F.cross_entropy(logits, images.labels, label_smoothing=smoothing)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def guard(method, task, images, r=0):
    return Client(
        "c", images, method.plan(task)[r], sigma=0.0, noise=SeededNoise(0), max_images=500
    )


def asked(method, task, images, weights, r=0):
    """Return one client's exact answers in round r, open."""
    sent = method.summarize(
        r, task, {"weights": weights}, guard(method, task, images, r), generator(5)
    )
    return [open_sensitive(s)["rows"] for s in (sent if isinstance(sent, tuple) else (sent,))]


# --- weights as a vector, local training ---------------------------------------------------------


def test_a_vector_becomes_the_network_that_it_was(task, images):
    weights = begin(task)
    network = network_of(task, RECIPE, weights)
    assert weights.shape == (size_of(task, RECIPE),)
    assert torch.equal(torch.cat([p.flatten() for p in network.model.parameters()]), weights)
    network.model[0][0].weight.zero_()  # a copy: the vector stays
    assert torch.equal(weights, begin(task))


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"momentum": 0.0},
        {"augment": "strong", "label_smoothing": 0.1},
        {"schedule": "cosine", "warmup": 0.3},
    ],
)
def test_local_training_is_the_one_loop_bit_for_bit(task, images, change):
    recipe = replace(RECIPE, steps=7, **change)
    weights = begin(task)
    start = network_of(task, recipe, weights)
    expected = train(images, recipe, generator(1), start=start)
    moved = local_update(task, recipe, weights, images, generator(1), epochs=0)
    ends = torch.cat([p.flatten() for p in expected.model.parameters()])
    assert torch.equal(moved, ends - weights)
    assert float(moved.norm()) > 0.01


def test_one_local_step_is_a_step_against_the_gradient(task, images):
    weights = begin(task)
    outcome = run(FedAvg(rounds=1, recipe=PLAIN), task, [images])
    expected = weights - PLAIN.lr * gradient(task, weights, images)
    assert torch.allclose(weights_of(outcome), expected, atol=1e-6)


@pytest.mark.parametrize(
    ("n", "epochs", "steps"), [(60, 1.0, 4), (60, 2.5, 9), (7, 3.0, 3), (60, 0.1, 1), (60, 0, 5)]
)
def test_epochs_become_steps(task, images, monkeypatch, n, epochs, steps):
    seen = []
    monkeypatch.setattr(
        "fedgist.train.loop.augment", lambda x, *a, **k: (seen.append(len(x)), x)[1]
    )
    recipe, weights = replace(RECIPE, steps=5), begin(task)
    few = images.take(torch.arange(n))
    local_update(task, recipe, weights, few, generator(0), epochs=epochs)
    assert seen == [min(16, n)] * steps


# --- FedAvg, FedProx -----------------------------------------------------------------------------


def test_the_mean_is_weighted_by_images(task, images):
    parts, weights = split(images, 45, 15), begin(task)
    outcome = run(FedAvg(rounds=1, recipe=PLAIN), task, parts)
    one, two = (gradient(task, weights, p) for p in parts)
    expected = weights - PLAIN.lr * (0.75 * one + 0.25 * two)
    assert torch.allclose(weights_of(outcome), expected, atol=1e-6)
    assert not torch.allclose(weights_of(outcome), weights - PLAIN.lr * (one + two) / 2, atol=1e-4)


def test_the_server_scales_the_mean(task, images):
    weights = begin(task)
    full, half = (
        weights_of(run(FedAvg(1, PLAIN, server_lr=lr), task, [images])) - weights
        for lr in (1.0, 0.5)
    )
    assert torch.allclose(half, full / 2, atol=1e-6)


def test_without_pull_fedprox_is_fedavg_and_with_much_it_stays(task, images):
    parts = split(images, 40, 20)
    plain = weights_of(run(AVERAGE, task, parts))
    assert torch.equal(weights_of(run(replace(AVERAGE, mu=0.0), task, parts)), plain)
    far = [
        float(
            (weights_of(run(replace(AVERAGE, epochs=5, mu=mu), task, parts)) - begin(task)).norm()
        )
        for mu in (0.0, 1.0, 10.0)
    ]
    assert far[0] > 1.2 * far[1] > 2 * far[2] > 0


def test_the_pull_is_the_proximal_gradient(task, images):
    weights, recipe = begin(task), replace(PLAIN, steps=2)
    moved = local_update(task, recipe, weights, images, generator(0), epochs=0, mu=0.7)
    w = weights - PLAIN.lr * gradient(task, weights, images)
    w = w - PLAIN.lr * (gradient(task, w, images) + 0.7 * (w - weights))
    assert torch.allclose(moved, w - weights, atol=1e-6)


def test_an_empty_client_changes_nothing(task, images):
    assert torch.equal(
        weights_of(run(AVERAGE, task, [images, nobody(images)])),
        weights_of(run(AVERAGE, task, [images])),
    )
    assert torch.equal(weights_of(run(AVERAGE, task, [nobody(images)])), begin(task))


def test_training_that_diverges_is_one_clear_line(task, images):
    wild = replace(RECIPE, lr=1e30)
    with pytest.raises(ConfigError, match=r"client 0.*method\.recipe\.lr"):
        run(replace(AVERAGE, recipe=wild), task, [images])


def test_fedavg_claims_nothing(task):
    plan = plan_of(AVERAGE, task, OPEN)
    assert math.isinf(plan.claim.epsilon)
    assert plan.bytes_up == 2 * 4 * (size_of(task, RECIPE) + 1)
    with pytest.raises(PrivacyError, match="epsilon = inf"):
        plan_of(AVERAGE, task, Privacy(epsilon=8))


# --- DP-FedAvg: whole updates --------------------------------------------------------------------


def test_an_update_is_clipped(task, images):
    weights = begin(task)
    moved = local_update(task, RECIPE, weights, images, generator(5), epochs=1)
    for clip in (0.01, 100.0):
        (row,) = asked(replace(NOISED, clip=clip), task, images, weights)
        norm = float(row.double().norm())
        assert norm <= LEVELS
        grid = row.double() * clip / LEVELS
        expected = moved * min(1.0, clip / float(moved.norm()))
        assert (grid - expected).abs().max() <= clip / LEVELS
    assert not asked(NOISED, task, nobody(images), weights)[0].any()


def test_without_noise_the_server_has_the_mean_of_clipped_updates(task, images):
    clip = 0.02
    method = replace(NOISED, rounds=1, clip=clip)
    parts = [*split(images, 40, 20), nobody(images)]
    weights = begin(task)
    mean = torch.zeros_like(weights)
    for i, part in enumerate(parts[:2]):
        rng = generator(0, "client", i, 0)
        moved = local_update(task, RECIPE, weights, part, rng, epochs=1)
        assert float(moved.norm()) > clip
        mean += moved * clip / moved.norm() / 3  # the empty client counts
    got = weights_of(run(method, task, parts)) - weights
    assert torch.allclose(got, mean, atol=clip / LEVELS)


def test_an_update_that_diverged_adds_nothing(task, images):
    wild = replace(NOISED, recipe=replace(RECIPE, lr=1e30))
    assert not asked(wild, task, images, begin(task))[0].any()
    outcome = run(wild, task, [images], Privacy(epsilon=1.0))
    assert bool(weights_of(outcome).isfinite().all())


# --- DP-FedSGD: gradients of records -------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_gradients_of_records_are_those_of_a_loop(task, images, smoothing):
    weights = begin(task)
    rows = record_gradients(network_of(task, RECIPE, weights), smoothing)
    got = rows(images.floats(), images.labels)
    assert got.shape == (60, size_of(task, RECIPE))
    for i in (0, 1, CHUNK, 59):
        one = images.take(torch.tensor([i]))
        assert torch.allclose(got[i], gradient(task, weights, one, smoothing), atol=1e-5)


def test_gradients_do_not_depend_on_the_company(task, images):
    rows = record_gradients(network_of(task, RECIPE, begin(task)))
    together = rows(images.floats(), images.labels)
    alone = [rows(x, y) for x, y in images.batches(1)]
    assert torch.equal(torch.cat(alone), together)


def test_the_sum_is_of_gradients_clipped_one_by_one(task, images):
    weights = begin(task)
    sums, count = asked(GRADIENTS, task, images, weights)
    each = record_gradients(network_of(task, RECIPE, weights))(images.floats(), images.labels)
    norms = each.norm(dim=1)
    assert float(norms.max()) > GRADIENTS.clip
    clipped = each * (GRADIENTS.clip / norms.clamp(min=GRADIENTS.clip))[:, None]
    unit = GRADIENTS.clip / LEVELS
    assert torch.allclose(sums * unit, clipped.sum(0), atol=60 * unit)
    assert int(count[0]) == 60 * LEVELS
    together = each.sum(0) * (GRADIENTS.clip / each.sum(0).norm()).clamp(max=1)
    assert not torch.allclose(sums * unit, together, atol=0.1)


def test_the_server_takes_steps_with_momentum(task, images):
    method = replace(GRADIENTS, recipe=replace(RECIPE, weight_decay=0.01))
    first, second = (r.queries[0] for r in method.plan(task))
    assert first == second
    size, unit = size_of(task, RECIPE), method.clip / LEVELS
    w = begin(task)
    velocity = torch.zeros(size)
    state = method.start(task, generator(0, "start"))
    for r, step in enumerate((3.0, 1.0)):
        sums = {"gradient.rows": torch.full((size,), round(50 * step / unit))}
        sums |= {"count.rows": torch.tensor([50 * LEVELS])} if r == 0 else {}
        state = method.update(r, task, state, Merged(sums, 0.0, 2), generator(0))
        velocity = step + 0.01 * w + 0.9 * velocity
        w = w - 0.3 * velocity
        assert torch.allclose(state.shared["weights"], w, atol=1e-4)


def test_the_server_has_a_rate_for_each_release():
    assert [replace(m, server_lr=None).rate for m in (NOISED, GRADIENTS)] == [1.0, 2.0]
    assert GRADIENTS.rate == 0.3


def test_a_stated_number_of_images_saves_the_count(task, images):
    stated = replace(GRADIENTS, images=60)
    assert [len(r.queries) for r in GRADIENTS.plan(task)] == [2, 1]
    assert [len(r.queries) for r in stated.plan(task)] == [1, 1]
    a, b = (weights_of(run(m, task, [images])) for m in (GRADIENTS, stated))
    assert torch.equal(a, b)


def test_the_split_changes_no_bit_of_a_sum_of_gradients(task, images):
    privacy = Privacy(epsilon=5.0)
    a, b = (
        weights_of(run(GRADIENTS, task, parts, privacy))
        for parts in ([images], [*split(images, 1, 26, 33), nobody(images)])
    )
    assert torch.equal(a, b)


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rounds", [1, 7])
def test_rounds_share_one_budget(task, rounds):
    whole = replace(NOISED, rounds=rounds).plan(task)
    assert plan_multiplier(whole, "add-remove", unit="client") == pytest.approx(1.0)
    assert plan_multiplier(whole, "add-remove", unit="image") == pytest.approx(2.0)
    for images in (None, 60):
        plan = replace(GRADIENTS, rounds=rounds, images=images).plan(task)
        assert plan_multiplier(plan, "add-remove", unit="image") == pytest.approx(1.0)


@pytest.mark.parametrize("method", [NOISED, GRADIENTS], ids=["update", "gradients"])
def test_the_claim_is_what_was_asked_for(task, method):
    for unit in ("image", "client"):
        records = 1 if unit == "image" else 500
        plan = plan_of(method, task, Privacy(epsilon=3.0, unit=unit, records=records))
        assert plan.claim.epsilon == pytest.approx(3.0, rel=1e-6)
        assert plan.bytes_up is not None


def test_noise_is_that_of_the_plan(task, images):
    method, privacy = replace(NOISED, rounds=1), Privacy(epsilon=1.0, unit="client", records=500)
    plan = plan_of(method, task, privacy)
    parts = split(images, 30, 30)
    noise = weights_of(run(method, task, parts, privacy)) - weights_of(run(method, task, parts))
    expected = plan.sigma * method.clip / 2  # a mean of two
    assert float(noise.std()) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(
    "method",
    [
        replace(AVERAGE, rounds=4, epochs=5, recipe=MLP),
        replace(NOISED, rounds=4, epochs=5, clip=5.0, recipe=MLP),
        replace(GRADIENTS, rounds=15, recipe=MLP),
    ],
    ids=["fedavg", "update", "gradients"],
)
def test_images_are_learned_without_noise(task, images, method):
    (network,) = run(method, task, split(images, 30, 20, 10)).classifiers.values()
    assert evaluate(network_of(task, MLP, begin(task, MLP)), images).accuracy < 0.7
    assert evaluate(network, images).accuracy > 0.95


def test_levels_leave_room_for_every_sum(task):
    (query,) = NOISED.plan(task)[0].queries
    assert isinstance(query, SumQuery)
    assert 65_535 * query.levels < 2**53
    assert LEVELS / math.sqrt(24_138) > 100  # what a number of a row is on average, as promised
    assert 0.002 * (0.5 * LEVELS) ** 2 > 1e6 / 12  # rounding of a million records beside noise


@pytest.mark.parametrize(
    ("method", "change"),
    [
        (AVERAGE, {"rounds": 0}),
        (AVERAGE, {"mu": -1.0}),
        (AVERAGE, {"server_lr": 0.0}),
        (AVERAGE, {"epochs": -1.0}),
        (AVERAGE, {"recipe": replace(RECIPE, optimiser="adamw")}),
        (AVERAGE, {"recipe": replace(RECIPE, choose="holdout")}),
        (AVERAGE, {"recipe": replace(RECIPE, steps=0), "epochs": 0}),
        (NOISED, {"release": "weights"}),
        (NOISED, {"rounds": 0}),
        (NOISED, {"images": 0}),
        (NOISED, {"clip": math.inf}),
        (NOISED, {"server_lr": 0.0}),
        (NOISED, {"count": 1.0}),
        (NOISED, {"epochs": math.nan}),
    ],
)
def test_bad_options_are_one_clear_line(method, change):
    with pytest.raises(ConfigError, match="method\\."):
        replace(method, **change)


def test_blank_images_give_finite_gradients(task):
    blank = Images(torch.zeros(3, 1, 8, 8), torch.zeros(3, dtype=torch.int64), task.classes)
    for weights in (begin(task), torch.zeros(size_of(task, RECIPE)), 1e30 * begin(task)):
        rows = record_gradients(network_of(task, RECIPE, weights))
        assert bool(rows(blank.floats(), blank.labels).isfinite().all())
