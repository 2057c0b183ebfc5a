"""SCAFFOLD against its lines written out, and what its controls are for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from federation_tools import run_locally
from fedgist.errors import ConfigError, PrivacyError
from fedgist.methods._weights import LOCAL, fresh, network_of, size_of
from fedgist.methods.fedavg import FedAvg
from fedgist.methods.scaffold import Scaffold
from fedgist.privacy.claim import Privacy
from fedgist.privacy.client import Client
from fedgist.privacy.noise import SeededNoise
from fedgist.run import generator, plan_of
from fedgist.types import Merged, State

RECIPE = replace(LOCAL, width=4, batch=16, momentum=0.0, lr=0.05)
WHOLE = replace(RECIPE, batch=500, weight_decay=0.0, steps=3)  # every batch is all images
METHOD = Scaffold(rounds=2, recipe=RECIPE)
OPEN = Privacy(epsilon=math.inf)

pytestmark = pytest.mark.usefixtures("one_thread")


def parts(images):
    """Two clients of unequal size and unlike classes, and one without images."""
    order = images.labels.argsort(stable=True)
    return [images.take(order[a:b]) for a, b in ((0, 40), (40, 60), (60, 60))]


def run(method, task, clients, **options):
    outcome, exchange = run_locally(method, task, clients, OPEN, **options)
    (network,) = outcome.classifiers.values()
    return torch.cat([p.flatten() for p in network.model.parameters()]), exchange


def gradient(task, weights, images):
    network = network_of(task, RECIPE, weights)
    parameters = list(network.model.requires_grad_(True).parameters())
    loss = F.cross_entropy(network.logits(images.floats()), images.labels)
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters)])


def by_hand(task, clients, rounds, steps, lr, server_lr=1.0, uniform=False):
    """Return (x, c, [c_i]) after the paper's rounds; full batches, option II."""
    x = fresh(task, RECIPE, generator(0, "start"))
    clients = [p for p in clients if len(p)]
    c, own = torch.zeros_like(x), [torch.zeros_like(x) for _ in clients]
    shares = [len(p) / sum(map(len, clients)) for p in clients]
    weigh = [1 / len(clients)] * len(clients) if uniform else shares
    for _ in range(rounds):
        moved, change = torch.zeros_like(x), torch.zeros_like(x)
        for i, part in enumerate(clients):
            y = x
            for _ in range(steps):
                y = y - lr * (gradient(task, y, part) - own[i] + c)
            new = own[i] - c + (x - y) / (steps * lr)
            moved += shares[i] * (y - x)
            change += weigh[i] * (new - own[i])
            own[i] = new
        x, c = x + server_lr * moved, c + change
    return x, c, own


@pytest.mark.parametrize("server_lr", [1.0, 0.5])
def test_rounds_are_the_papers_lines(task, images, server_lr):
    method = Scaffold(rounds=3, recipe=WHOLE, epochs=0, server_lr=server_lr)
    got, exchange = run(method, task, parts(images))
    x, _, own = by_hand(task, parts(images), 3, 3, WHOLE.lr, server_lr)
    assert torch.allclose(got, x, atol=2e-6)
    for i, control in enumerate(own):
        assert torch.allclose(exchange.memory[i]["control"], control, atol=2e-5)
    wrong = by_hand(task, parts(images), 3, 3, WHOLE.lr, server_lr, uniform=True)[0]
    assert not torch.allclose(got, wrong, atol=2e-5)


def test_without_controls_a_round_is_fedavg(task, images):
    """Two rounds with the controls thrown away in between are two rounds of FedAvg."""
    plain = FedAvg(rounds=2, recipe=RECIPE)
    first, _ = run(replace(METHOD, rounds=1), task, parts(images))
    assert torch.equal(first, run(replace(plain, rounds=1), task, parts(images))[0])
    second, _ = run(METHOD, task, parts(images))
    assert not torch.allclose(second, run(plain, task, parts(images))[0], atol=1e-4)


def test_the_servers_control_is_the_weighted_mean_of_the_clients(task, images):
    clients = parts(images)[:2]
    state = METHOD.start(task, generator(0, "start"))
    exchange = run_locally(replace(METHOD, rounds=1), task, clients, OPEN)[1]
    exchange.memory.clear()
    for r, rnd in enumerate(METHOD.plan(task)):
        merged = exchange.round(r, rnd, state.shared)
        state = METHOD.update(r, task, state, merged, generator(0))
    one, two = (exchange.memory[i]["control"] for i in (0, 1))
    assert torch.allclose(state.shared["control"], (2 * one + two) / 3, atol=1e-5)
    assert float((one - two).norm()) > 0.1


def test_a_control_is_the_mean_gradient_of_the_local_steps(task, images):
    method = Scaffold(rounds=1, recipe=WHOLE, epochs=0)
    _, exchange = run(method, task, [images])
    weights, total = fresh(task, RECIPE, generator(0, "start")), 0
    for _ in range(3):
        g = gradient(task, weights, images)
        weights, total = weights - WHOLE.lr * g, total + g / 3
    assert torch.allclose(exchange.memory[0]["control"], total, atol=2e-5)


def asked(method, task, images, shared, memory):
    rnd = method.plan(task)[0]
    noise = SeededNoise(0)
    guard = Client("c", images, rnd, sigma=0.0, noise=noise, max_images=500, memory=memory)
    return method.summarize(0, task, shared, guard, generator(0))


def test_controls_undo_the_drift_of_unlike_clients(task, images):
    """From the same weights, clients that know the controls go the same way."""
    method = Scaffold(recipe=replace(WHOLE, steps=5, lr=0.01), epochs=0)
    state = method.start(task, generator(0, "start"))
    clients, memories, apart = parts(images)[:2], [{}, {}], []
    for _ in range(2):
        sent = [
            asked(method, task, p, state.shared, m) for p, m in zip(clients, memories, strict=True)
        ]
        one, two = (s["update"] / s["images"] for s in sent)
        apart.append(float((one - two).norm() / (one + two).norm()))
        total = {k: sent[0][k] + sent[1][k] for k in sent[0]}
        after = method.update(0, task, state, Merged(total, 0.0, 2), generator(0))
        state = State(state.shared | {"control": after.shared["control"]})
    assert apart[1] < 0.2 * apart[0]


def test_a_client_without_images_sends_zeros_and_keeps_its_control(task, images):
    state = METHOD.start(task, generator(0, "start"))
    memory = {"control": torch.ones(size_of(task, RECIPE))}
    none = images.take(torch.arange(0))
    sent = asked(METHOD, task, none, state.shared, memory)
    assert not any(bool(v.any()) for v in sent.values())
    assert bool((memory["control"] == 1).all())
    with_it, without = (run(METHOD, task, p)[0] for p in (parts(images), parts(images)[:2]))
    assert torch.equal(with_it, without)
    assert torch.equal(run(METHOD, task, [none])[0], state.shared["weights"])


def test_training_that_diverges_is_one_clear_line(task, images):
    wild = replace(METHOD, recipe=replace(RECIPE, lr=1e30))
    with pytest.raises(ConfigError, match=r"client 0.*method\.recipe\.lr"):
        run(wild, task, [images])


def test_it_claims_nothing_and_sends_twice_what_fedavg_does(task):
    plan = plan_of(METHOD, task, OPEN)
    assert math.isinf(plan.claim.epsilon)
    assert plan.bytes_up == 2 * 4 * (2 * size_of(task, RECIPE) + 1)
    with pytest.raises(PrivacyError, match="epsilon = inf"):
        plan_of(METHOD, task, Privacy(epsilon=8))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rounds", 0),
        ("server_lr", 0.0),
        ("server_lr", math.nan),
        ("epochs", math.inf),
        ("recipe", LOCAL),  # it has momentum
        ("recipe", replace(RECIPE, schedule="cosine")),
        ("recipe", replace(RECIPE, warmup=0.1)),
        ("recipe", replace(RECIPE, lr=0.0)),
        ("recipe", replace(RECIPE, optimiser="adamw")),
    ],
)
def test_options_are_checked(field, value):
    with pytest.raises(ConfigError, match=rf"method\.{field}.*Got"):
        Scaffold(**{field: value})
