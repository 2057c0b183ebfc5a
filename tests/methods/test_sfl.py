"""SplitFed against central descent on the joined model, and what its two rounds carry."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from federation_tools import run_locally
from fedgist.errors import ConfigError, PrivacyError
from fedgist.methods._weights import fresh, network_of, size_of
from fedgist.methods.sfl import SFL, STEPS
from fedgist.privacy.claim import Privacy
from fedgist.privacy.client import Client
from fedgist.privacy.noise import SeededNoise
from fedgist.run import generator, plan_of
from fedgist.train.augment import augment
from fedgist.types import Images, Merged, Task

RECIPE = replace(STEPS, width=4, batch=16, steps=4, lr=0.05)
METHOD = SFL(RECIPE)
OPEN = Privacy(epsilon=math.inf)
FRONT = 4 * 9 + 4 + 8  # 3x3 kernels of one channel, biases, scale and shift of the norm

pytestmark = pytest.mark.usefixtures("one_thread")


def cut(images, *sizes):
    return [images.take(rows) for rows in torch.split(torch.arange(len(images)), sizes)]


def run(method, task, clients, **options):
    outcome, exchange = run_locally(method, task, clients, OPEN, **options)
    (network,) = outcome.classifiers.values()
    return torch.cat([p.flatten() for p in network.model.parameters()]), exchange


def batches(clients, step, recipe):
    """Return what all clients draw in one step, as one batch of floats and labels."""
    xs, ys = [], []
    for i, part in enumerate(clients):
        rng = generator(0, "client", i, 2 * step)
        rows = torch.randperm(len(part), generator=rng)[: recipe.batch]
        tag = int(torch.randint(2**63 - 1, (1,), generator=rng))
        seeded = torch.Generator().manual_seed(tag)
        xs.append(augment(part.floats(rows), recipe.augment, seeded, flip=recipe.flip))
        ys.append(part.labels[rows])
    return torch.cat(xs), torch.cat(ys)


def central(task, clients, recipe):
    """Train the joined model with torch's own SGD on the batches of all clients together."""
    network = network_of(task, recipe, fresh(task, recipe, generator(0, "start")))
    parameters = list(network.model.requires_grad_(True).parameters())
    optimiser = torch.optim.SGD(
        parameters,
        momentum=recipe.momentum,
        weight_decay=recipe.weight_decay,
        nesterov=recipe.momentum > 0,
    )
    for step in range(recipe.steps):
        optimiser.param_groups[0]["lr"] = recipe.rate(step)
        x, y = batches(clients, step, recipe)
        optimiser.zero_grad()
        F.cross_entropy(network.logits(x), y, label_smoothing=recipe.label_smoothing).backward()
        optimiser.step()
    return torch.cat([p.detach().flatten() for p in parameters])


# --- it equals central training ------------------------------------------------------------------


@pytest.mark.parametrize(
    "change",
    [
        {"momentum": 0.0, "weight_decay": 0.0},
        {},
        {"schedule": "cosine", "warmup": 0.5, "label_smoothing": 0.1},
        {"augment": "strong", "weight_decay": 0.1},
    ],
)
@pytest.mark.parametrize("sizes", [(60,), (30, 30), (40, 3, 17)], ids=str)
def test_steps_are_those_of_the_joined_model(task, images, change, sizes):
    recipe, clients = replace(RECIPE, **change), cut(images, *sizes)
    got, _ = run(SFL(recipe), task, clients)
    begin = fresh(task, recipe, generator(0, "start"))
    assert torch.allclose(got, central(task, clients, recipe), atol=2e-5)
    for part in (slice(FRONT), slice(FRONT, None)):  # both parts have moved
        assert float((got - begin)[part].norm()) > 0.01


def test_wrong_versions_are_told_apart(task, images):
    """Means of clients that weigh the same, or a momentum of another kind, are not it."""
    clients = cut(images, 52, 8)
    got, _ = run(METHOD, task, clients)
    assert not torch.allclose(got, central(task, clients[:1], RECIPE), atol=1e-3)
    for change in ({"momentum": 0.8}, {"weight_decay": 0.1}, {"lr": 0.06}):
        assert not torch.allclose(got, central(task, clients, replace(RECIPE, **change)), atol=1e-4)


def test_an_empty_client_changes_nothing(task, images):
    clients = [*cut(images, 40, 20), images.take(torch.arange(0))]
    assert torch.allclose(
        run(METHOD, task, clients)[0], run(METHOD, task, clients[:2])[0], atol=1e-6
    )
    still = SFL(replace(RECIPE, weight_decay=0.0))
    begin = fresh(task, RECIPE, generator(0, "start"))
    assert torch.equal(run(still, task, clients[2:])[0], begin)


# --- the two rounds ------------------------------------------------------------------------------


def guard(task, images, r, memory):
    return Client(
        "c",
        images,
        METHOD.plan(task)[r],
        sigma=0.0,
        noise=SeededNoise(0),
        max_images=500,
        memory=memory,
    )


def asked(task, images, r, shared, memory):
    return METHOD.summarize(r, task, shared, guard(task, images, r, memory), generator(3, r))


def test_activations_are_what_the_front_says_and_the_rest_is_padding(task, images):
    state = METHOD.start(task, generator(0, "start"))
    assert state.shared["front"].shape == (FRONT,)
    few, memory = images.take(torch.arange(5)), {}
    sent = asked(task, few, 0, state.shared, memory)
    rows = memory["rows"]
    assert sorted(rows.tolist()) == [0, 1, 2, 3, 4]
    assert sent["labels"].tolist() == [*few.labels[rows].tolist(), *[-1] * 11]
    model = network_of(task, RECIPE, state.server.weights).model
    expected = model[0][:4]((few.floats(rows) - 0.5) / 0.5)
    assert torch.equal(sent["activations"][:5], expected)
    assert not sent["activations"][5:].any()


def test_the_front_can_be_attacked(task, images):
    """Gradients reach the pixels, so that an image can be sought that has given activations."""
    wide = SFL(replace(RECIPE, width=32))
    shared = wide.start(task, generator(0, "start")).shared
    front, truth = wide.front(task, shared), images.floats(slice(0, 1))
    target = front(truth)
    guess = torch.full_like(truth, 0.5) + 0.01 * torch.rand(truth.shape, generator=generator(1))
    guess.requires_grad_(True)
    optimiser = torch.optim.Adam([guess], lr=0.05)
    off = []
    for _ in range(200):
        optimiser.zero_grad()
        loss = F.mse_loss(front(guess), target)
        loss.backward()
        optimiser.step()
        off.append(float(F.mse_loss(guess.detach(), truth)))
    assert off[-1] < 0.003 < 0.05 * off[0]  # 25 dB in 200 steps


def test_a_client_finds_its_own_gradients_by_tag(task, images):
    state = METHOD.start(task, generator(0, "start"))
    one, two = cut(images, 30, 30)
    memories = [{}, {}]
    sent = [asked(task, p, 0, state.shared, m) for p, m in zip((one, two), memories, strict=True)]
    sent[1]["tag"] += 1  # both drew from one generator here
    memories[1]["tag"] = sent[1]["tag"].clone()
    back = []
    for order in ([0, 1], [1, 0]):
        joined = {k: torch.cat([sent[i][k] for i in order]) for k in sent[0]}
        after = METHOD.update(0, task, state, Merged(joined, 0.0, 2), generator(0))
        assert after.shared["gradients"].shape == (32, 4, 4, 4)
        back.append(asked(task, one, 1, after.shared, memories[0])["gradient"])
    assert torch.allclose(back[0], back[1], atol=1e-5)
    assert float(back[0].norm()) > 0.01
    other = asked(task, two, 1, after.shared, memories[1])["gradient"]
    assert not torch.allclose(other, back[0], atol=1e-3)


def test_a_client_that_missed_the_batch_sends_zeros(task, images):
    state = METHOD.start(task, generator(0, "start"))
    memory = {}
    sent = asked(task, images, 0, state.shared, memory)
    shared = METHOD.update(0, task, state, Merged(sent, 0.0, 1), generator(0)).shared
    assert asked(task, images, 1, shared, memory)["images"].tolist() == [16.0]
    for stale in ({}, {**memory, "tag": memory["tag"] - 1}):
        late = asked(task, images, 1, shared, stale)
        assert late["images"].tolist() == [0.0]
        assert not late["gradient"].any()


def test_costs_are_known_in_advance(task, images):
    plan = plan_of(METHOD, task, OPEN)
    assert math.isinf(plan.claim.epsilon)
    assert len(plan.rounds) == 2 * RECIPE.steps
    up, down = 4 * 16 * 4 * 4 * 4 + 8 * 16 + 8, 4 * (FRONT + 1)
    assert plan.bytes_up == RECIPE.steps * (up + down)
    _, exchange = run(METHOD, task, cut(images, 20, 20, 20))
    stacked = 3 * (4 * 16 * 4 * 4 * 4 + 8) + 4 * FRONT
    assert {v.bytes_down for v in exchange.visits} == {4 * FRONT, stacked}
    with pytest.raises(PrivacyError, match="epsilon = inf"):
        plan_of(METHOD, task, Privacy(epsilon=8))


def test_colour_and_odd_sizes():
    task = Task("odd", ("a", "b"), channels=3, size=9, max_images=50)
    pixels = torch.randint(256, (7, 3, 9, 9), generator=generator(0)).to(torch.uint8)
    odd = Images(pixels, torch.arange(7) % 2, task.classes)
    assert run(METHOD, task, [odd])[0].shape == (size_of(task, RECIPE),)


@pytest.mark.parametrize("lr", [1e30, 1e38])
def test_training_that_diverges_is_one_clear_line(task, images, lr):
    with pytest.raises(ConfigError, match=r"method\.recipe\.lr"):
        run(SFL(replace(RECIPE, lr=lr)), task, [images])


@pytest.mark.parametrize(
    "change",
    [
        {"steps": 0},
        {"model": "mlp"},
        {"model": "resnet18"},
        {"optimiser": "adamw"},
        {"choose": "holdout"},
    ],
)
def test_options_are_checked(change):
    with pytest.raises(ConfigError, match=r"method\.recipe.*Got"):
        SFL(replace(RECIPE, **change))
