"""Distillation baselines: unrolled steps, what clients and servers do; FedD3: test_fedd3."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from federation_tools import run_locally
from fedgist.config import load, make_method
from fedgist.data import open_source, partition
from fedgist.errors import ConfigError, PrivacyError
from fedgist.methods._unroll import Steps, learned, loss_of, pull_back, replay, steady, uploads
from fedgist.methods._weights import LOCAL, fresh, local_update, network_of
from fedgist.methods.dosfl import DOSFL
from fedgist.methods.fedd3 import FedD3
from fedgist.methods.fedsynth import FedSynth, towards
from fedgist.privacy.claim import Privacy
from fedgist.privacy.client import Client
from fedgist.privacy.noise import SeededNoise
from fedgist.run import plan_of
from fedgist.train import Recipe, evaluate
from fedgist.types import Merged, State

OPEN = Privacy(epsilon=math.inf)
SMALL = Recipe(model="mlp", width=6)

pytestmark = pytest.mark.usefixtures("one_thread")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def guard(method, task, images, memory=None):
    rnd = method.plan(task)[0]
    noise = SeededNoise(0)
    return Client("c", images, rnd, sigma=0.0, noise=noise, max_images=500, memory=memory)


def nobody(images):
    return images.take(torch.zeros(0, dtype=torch.int64))


def joined(gists):
    return {k: torch.cat([g[k] for g in gists]) for k in gists[0]}


# --- steps on synthetic data ---------------------------------------------------------------------


def linear_loss(weights, inputs, targets):
    """Soft cross-entropy of logits W x; weights flat, 3 classes."""
    logits = inputs.flatten(1) @ weights.view(3, -1).T
    return -(targets * logits.log_softmax(1)).sum(1).mean()


def curved_loss(weights, inputs, targets):
    """The same behind a hidden layer of 4."""
    split = inputs[0].numel() * 4
    hidden = torch.tanh(inputs.flatten(1) @ weights[:split].view(-1, 4))
    return -(targets * (hidden @ weights[split:].view(4, 3)).log_softmax(1)).sum(1).mean()


def double_steps(count=2, batch=2, side=2, seed=3):
    g = rng(seed)
    return Steps(
        torch.randn(count, batch, 1, side, side, generator=g, dtype=torch.float64),
        torch.rand(count, batch, 3, generator=g, dtype=torch.float64),
        torch.tensor([0.7, 0.4, 0.3], dtype=torch.float64)[:count],
    )


def parts(steps):
    return [steps.inputs, steps.targets, steps.rates]


def test_gradients_through_steps_are_those_of_the_whole_graph_and_of_differences():
    """Each step's own graph gives what one graph of all steps does; a step may come twice."""
    steps, order = double_steps(3), [0, 2, 1, 0]
    start, goal = (torch.randn(28, generator=rng(i), dtype=torch.float64) for i in (1, 2))

    def ends(free):
        weights = start.clone().requires_grad_()
        for s in order:
            loss = curved_loss(weights, free.inputs[s], free.targets[s])
            (g,) = torch.autograd.grad(loss, weights, create_graph=True)
            weights = weights - free.rates[s] * g
        return (weights - goal).square().sum()

    path = replay(curved_loss, start, steps, order)
    assert len(path) == 5 and not any(p.requires_grad for p in path)
    got = pull_back(curved_loss, path, steps, order, 2 * (path[-1] - goal))
    free = [t.clone().requires_grad_() for t in parts(steps)]
    for mine, theirs in zip(parts(got), torch.autograd.grad(ends(Steps(*free)), free), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-9, atol=1e-12)
    for which, place in ((0, (0, 1, 0, 1, 0)), (1, (2, 0, 1)), (2, (0,))):
        values = []
        for h in (1e-5, -1e-5):
            moved = [t.clone() for t in parts(steps)]
            moved[which][place] += h
            values.append(
                float((replay(curved_loss, start, Steps(*moved), order)[-1] - goal).square().sum())
            )
        difference = (values[0] - values[1]) / 2e-5
        assert float(parts(got)[which][place]) == pytest.approx(difference, rel=1e-5)
    # what leaves out that later steps begin elsewhere is another gradient
    short = pull_back(curved_loss, path[:1], steps, order[:1], 2 * (path[-1] - goal))
    assert not torch.allclose(short.inputs[0], got.inputs[0], rtol=0.01)


@pytest.mark.parametrize("model", ["mlp", "convnet3"])
def test_a_replay_is_plain_sgd_on_soft_cross_entropy(task, model):
    recipe = Recipe(model=model, width=4)
    weights, held = fresh(task, recipe, rng()), torch.tensor([0, 2])
    steps = Steps.noise(task, 3, 4, 0.1, held, rng(1))
    assert steps.targets.argmax(2).unique().tolist() == [0, 2]
    soft = Steps(steps.inputs, steps.targets * 0.7 + 0.2, torch.tensor([0.1, 0.3, 0.2]))
    network = network_of(task, recipe, weights)
    parameters = list(network.model.requires_grad_(True).parameters())
    for s in range(3):
        optimiser = torch.optim.SGD(parameters, float(soft.rates[s]))
        optimiser.zero_grad()
        F.cross_entropy(network.logits(soft.inputs[s]), soft.targets[s]).backward()
        optimiser.step()
    wanted = torch.cat([p.detach().flatten() for p in parameters])
    got = replay(loss_of(task, recipe), weights, soft, range(3))[-1]
    assert torch.allclose(got, wanted, atol=1e-5)
    assert float((got - weights).norm()) > 0.05


def test_steps_survive_the_trip_and_blank_ones_change_nothing(task):
    sent = [Steps.noise(task, 2, 3, 0.1, torch.arange(3), rng(i)) for i in range(2)]
    sent.append(Steps.nothing(task, 2, 3))
    back = uploads(joined([s.gist() for s in sent]), 2, 3)
    for a, b in zip(sent, back, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(parts(a), parts(b), strict=True))
    weights = fresh(task, SMALL, rng())
    assert torch.equal(replay(loss_of(task, SMALL), weights, back[2], range(2))[-1], weights)
    with pytest.raises(ConfigError, match=r"method\.rate"):
        steady(torch.tensor([math.nan]))


# --- FedSynth ------------------------------------------------------------------------------------


def linear_update():
    """Return (start, Δ) of a linear softmax model; Δ is one that gradients can make."""
    start = 0.1 * torch.randn(12, generator=rng(5), dtype=torch.float64)
    wanted = 0.3 * torch.randn(3, 4, generator=rng(6), dtype=torch.float64)
    return start, (wanted - wanted.mean(0)).flatten()  # logits' gradients sum to 0 over classes


def test_a_linear_models_update_is_reproduced_exactly_by_as_many_inputs_as_its_rank():
    """ΔW = -η/b Σ (p - y) xᵀ: with Δ = UᵀV, rows x = V and labels y = p + b U / η do it."""
    start, update = linear_update()
    u, s, v = torch.linalg.svd(update.view(3, 4), full_matrices=False)
    inputs = v[:2].view(1, 2, 1, 2, 2)  # rank two
    p = (inputs[0].flatten(1) @ start.view(3, 4).T).softmax(1)
    rate, scale = 0.5, (u * s)[:, :2].T
    steps = Steps(inputs, (p + 2 * scale / rate)[None], torch.tensor([rate]).double())
    assert torch.allclose(steps.targets.sum(2), torch.ones(1, 2).double())
    ended = replay(linear_loss, start, steps, [0])[-1]
    assert torch.allclose(ended - start, update, atol=1e-12)


def test_learning_finds_such_data_and_one_input_too_few_cannot():
    start, update = linear_update()
    left = {}
    for batch in (1, 2):
        begun = double_steps(1, batch)
        aim = towards(start + update, float(update.norm()))
        made = learned(linear_loss, begun, aim, lambda: (start, [0]), lr=0.05, iterations=400)
        ended = replay(linear_loss, start, made, [0])[-1]
        left[batch] = float((ended - start - update).norm() / update.norm())
    s = torch.linalg.svdvals(update.view(3, 4))
    assert left[2] < 1e-3
    assert left[1] == pytest.approx(float(s[1] / s.norm()), rel=0.02)  # Eckart and Young


def test_the_server_adds_the_mean_of_replays_weighted_by_images(task):
    method = FedSynth(recipe=replace(LOCAL, model="mlp", width=6), steps=2, batch=3)
    start = fresh(task, method.recipe, rng())
    sent = [Steps.noise(task, 2, 3, 0.2 + i, torch.arange(3), rng(i)) for i in range(2)]
    counts = [torch.tensor([30.0]), torch.tensor([10.0]), torch.tensor([0.0])]
    gists = [s.gist() for s in (*sent, Steps.nothing(task, 2, 3))]
    gists = [g | {"images": n} for g, n in zip(gists, counts, strict=True)]
    merged = Merged(joined(gists), 0.0, 3)
    state = method.update(0, task, State({"weights": start}), merged, rng())
    moved = [replay(loss_of(task, method.recipe), start, s, range(2))[-1] - start for s in sent]
    assert torch.allclose(state.shared["weights"], start + (3 * moved[0] + moved[1]) / 4, atol=1e-6)
    alike = start + (moved[0] + moved[1]) / 2
    assert not torch.allclose(state.shared["weights"], alike, atol=1e-3)


def test_a_client_sends_data_that_lead_towards_its_own_update(task, images):
    method = FedSynth(
        recipe=replace(LOCAL, model="mlp", width=6, lr=0.1), epochs=5.0, batch=8, iterations=150
    )
    start, memory = fresh(task, method.recipe, rng()), {}
    sent = method.summarize(
        0, task, {"weights": start}, guard(method, task, images, memory), rng(4)
    )
    # the same draws: steps begin from noise, then local training
    draws = rng(4)
    Steps.noise(task, method.steps, method.batch, method.rate, torch.arange(3), draws)
    update = local_update(task, method.recipe, start, images, draws, epochs=5.0)
    (steps,) = uploads(sent, method.steps, method.batch)
    ended = replay(loss_of(task, method.recipe), start, steps, range(method.steps))[-1] - start
    assert float((ended - update).norm() / update.norm()) < 0.5
    assert float(sent["images"]) == 60 and torch.equal(memory["rates"], steps.rates)
    blank = method.summarize(
        0, task, {"weights": start}, guard(method, task, nobody(images)), rng()
    )
    assert float(blank["rates"].abs().sum() + blank["images"]) == 0


# --- DOSFL ---------------------------------------------------------------------------------------


TEACH = {"model": "mlp", "width": 6, "steps": 3, "batch": 3, "iterations": 80, "real": 40}
TEACH |= {"rate": 0.05, "reset": 0.02}


def test_learned_steps_teach_the_known_network_what_noise_does_not(task, images):
    method = DOSFL(**TEACH)
    start = method.start(task, rng()).shared
    sent = method.summarize(0, task, start, guard(method, task, images), rng(1))
    assert {p.name: p.shape for p in method.plan(task)[0].sends} == {
        k: tuple(v.shape) for k, v in sent.items()
    }
    loss, x, y = loss_of(task, method.recipe), images.floats(), F.one_hot(images.labels, 3).float()

    def after(steps, weights):
        return float(loss(replay(loss, weights, steps, range(3))[-1], x, y))

    (steps,) = uploads(sent, 3, 3)
    noise = Steps.noise(task, 3, 3, method.rate, torch.arange(3), rng(1))
    known, other = start["weights"], fresh(task, method.recipe, rng(9))
    assert after(steps, known) < 0.5 * after(noise, known)
    assert after(steps, known) < 0.7 * after(steps, other)  # they are meant for one network
    assert not torch.allclose(steps.rates, steps.rates[:1].expand(3), rtol=0.01)
    assert float(steps.targets.min(2).values.abs().max()) > 0.01  # labels became soft


def test_the_server_takes_all_steps_in_the_order_that_is_asked_for(task):
    sent = [Steps.noise(task, 3, 3, 0.3, torch.arange(3), rng(i)) for i in range(2)]
    ends = {}
    for order, sequence in (
        ("clients", [(0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (1, 2)]),
        ("steps", [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]),
    ):
        method = DOSFL(**TEACH, order=order)
        start = method.start(task, rng())
        merged = Merged(joined([s.gist() for s in sent]), 0.0, 2)
        outcome = method.finish(task, method.update(0, task, start, merged, rng()), rng())
        loss, weights = loss_of(task, method.recipe), start.shared["weights"]
        for i, s in sequence:
            weights = replay(loss, weights, sent[i], [s])[-1]
        parameters = outcome.classifiers["distilled"].model.parameters()
        ends[order] = torch.cat([p.flatten() for p in parameters])
        assert torch.equal(ends[order], weights)
    assert not torch.allclose(ends["clients"], ends["steps"], atol=1e-4)
    twice = DOSFL(**TEACH, passes=2)._sequence(1)
    assert twice == [(0, 0), (0, 1), (0, 2)] * 2


def test_masks_leave_out_their_share_of_steps_and_never_all():
    method, draws = DOSFL(steps=10, masked=0.3), rng()
    sizes = [len(method._unmasked(draws)) for _ in range(300)]
    assert np.mean(sizes) == pytest.approx(7.0, abs=0.3)
    lone = DOSFL(steps=1, masked=0.9)
    assert all(lone._unmasked(draws) == [0] for _ in range(20))
    for wrong in ({"masked": 1.0}, {"reset": -0.1}, {"rate": 0.0}):
        with pytest.raises(ConfigError):
            DOSFL(**wrong)


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [DOSFL, FedD3, FedSynth])
def test_nothing_is_promised_and_a_finite_epsilon_is_refused(task, cls):
    method = cls()
    plan = plan_of(method, task, OPEN)
    assert math.isinf(plan.claim.epsilon) and plan.claim.sigma == 0
    assert all(r.raw and r.reduce == "pool" and not r.queries for r in plan.rounds)
    assert cls.__name__.lower() in method.unfit and method.unfit in plan.claim.notes
    with pytest.raises(PrivacyError, match="epsilon = inf"):
        plan_of(method, task, Privacy(epsilon=8))
    with pytest.raises(PrivacyError, match="fit"):
        plan_of(method, task, replace(OPEN, noise="system"))
    pixels = task.size**2
    each = 4 * (pixels + len(task.classes))
    assert plan.bytes_up == {
        DOSFL: lambda m: m.steps * m.batch * each + 4 * m.steps,
        FedD3: lambda m: 3 * m.canvas.per_class * pixels + 12,
        FedSynth: lambda m: m.rounds * (m.steps * m.batch * each + 4 * m.steps + 4),
    }[cls](method)


SERVED = ["model=mlp", "width=64", "steps=100", "augment=none"]
DISTILLED = ["canvas.per_class=5", *(f"server.recipe.{s}" for s in SERVED)]
TAUGHT = ["width=8", "real=48", "iterations=30", "steps=5", "batch=6", "rate=0.05", "lr=0.1"]
UPDATED = ["recipe.model=mlp", "recipe.width=32", "epochs=5", "rounds=2", "iterations=30"]


@pytest.mark.parametrize(
    ("name", "least", "sets"),
    [
        ("dosfl", 30, TAUGHT),
        ("fedd3", 45, ["steps=30", "targets=60", *DISTILLED]),
        ("fedd3", 45, ["instance=coreset", *DISTILLED]),
        ("fedsynth", 30, ["rate=0.002", *UPDATED]),
    ],
)
def test_each_learns_something_of_real_images(name, least, sets):
    source = open_source("fashion-mini")
    task = source.task()
    rows = torch.randperm(6000, generator=rng())[:600]
    images = source.images("train", task).take(rows)
    test = source.images("test", task).take(torch.arange(500) * 2)
    options = [f"method.name={name}", "privacy.epsilon=inf", *(f"method.{s}" for s in sets)]
    method = make_method(load(None, options))
    clients = partition(images, 3, "dirichlet:1.0", 0).clients
    outcome, _ = run_locally(method, task, [images.take(r) for r in clients], OPEN)
    first = next(iter(outcome.classifiers.values()))
    assert 100 * evaluate(first, test).accuracy > least  # chance: 10
