"""FedProx and FedAdam: what they change about FedAvg, and nothing else."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from federation_tools import outcome_bytes, run_locally
from fedgist.errors import ConfigError, PrivacyError
from fedgist.methods._weights import LOCAL, fresh, local_update, size_of
from fedgist.methods.fedadam import FedAdam
from fedgist.methods.fedavg import FedAvg
from fedgist.methods.fedprox import FedProx
from fedgist.privacy.claim import Privacy
from fedgist.run import generator, plan_of
from fedgist.types import Merged, State

RECIPE = replace(LOCAL, width=4, batch=16)
OPEN = Privacy(epsilon=math.inf)
ADAM = FedAdam(rounds=2, recipe=RECIPE, server_lr=0.05)

pytestmark = pytest.mark.usefixtures("one_thread")


def parts(images):
    """Two clients of unequal size, and one without images."""
    return [images.take(torch.arange(a, b)) for a, b in ((0, 40), (40, 60), (60, 60))]


def run(method, task, images):
    return run_locally(method, task, parts(images), OPEN)[0]


def weights_of(outcome):
    (network,) = outcome.classifiers.values()
    return torch.cat([p.flatten() for p in network.model.parameters()])


# --- FedProx -------------------------------------------------------------------------------------


def test_fedprox_without_pull_is_fedavg_bit_for_bit(task, images):
    plain = run(FedAvg(rounds=2, recipe=RECIPE), task, images)
    assert outcome_bytes(run(FedProx(2, RECIPE, mu=0.0), task, images)) == outcome_bytes(plain)
    assert outcome_bytes(run(FedProx(2, RECIPE), task, images)) != outcome_bytes(plain)
    assert list(run(FedProx(1, RECIPE), task, images).classifiers) == ["fedprox"]


def test_fedprox_is_the_mean_of_pulled_updates(task, images):
    method = FedProx(1, replace(RECIPE, momentum=0.0), epochs=2.0, mu=0.5, server_lr=0.7)
    weights = fresh(task, RECIPE, generator(0, "start"))
    mean = torch.zeros_like(weights)
    for i, (part, share) in enumerate(zip(parts(images)[:2], (2 / 3, 1 / 3), strict=True)):
        rng = generator(0, "client", i, 0)
        mean += share * local_update(task, method.recipe, weights, part, rng, epochs=2.0, mu=0.5)
    assert torch.allclose(weights_of(run(method, task, images)), weights + 0.7 * mean, atol=1e-6)


def test_fedprox_pulls_by_default():
    assert FedProx().mu == 0.01
    assert replace(FedAvg(), mu=0.01).__dict__ == FedProx().__dict__


# --- FedAdam -------------------------------------------------------------------------------------


def steps(method, means):
    """Return the weights after each mean update, from zeros."""
    state, seen = State({"weights": torch.zeros(3)}), []
    for r, mean in enumerate(means):
        merged = Merged({"update": 4 * torch.tensor(mean), "images": torch.tensor([4.0])}, 0.0, 2)
        state = method.update(r, None, state, merged, generator(0))
        assert list(state.shared) == ["weights"]
        seen.append(state.shared["weights"].tolist())
    return seen


def adam(method, means, *, square=lambda m, d: d * d, first=None, corrected=False):
    """The same in floats: coordinate by coordinate, from the paper's lines."""
    out = [[0.0] * 3 for _ in range(len(means) + 1)]
    for j in range(3):
        m, v = 0.0, method.tau**2 if first is None else first
        for t, mean in enumerate(means):
            m = method.beta1 * m + (1 - method.beta1) * mean[j]
            v = method.beta2 * v + (1 - method.beta2) * square(m, mean[j])
            a = (1 - method.beta1 ** (t + 1)) if corrected else 1.0
            b = (1 - method.beta2 ** (t + 1)) if corrected else 1.0
            out[t + 1][j] = out[t][j] + method.server_lr * (m / a) / (math.sqrt(v / b) + method.tau)
    return out[1:]


MEANS = [[0.01, -0.002, 0.0], [0.02, 0.001, 1e-5], [-0.01, 0.003, 0.0]]


@pytest.mark.parametrize("betas", [(0.9, 0.99), (0.0, 0.5), (0.5, 0.0)])
def test_the_server_takes_steps_of_adam(betas):
    method = replace(ADAM, beta1=betas[0], beta2=betas[1])
    got = torch.tensor(steps(method, MEANS))
    assert torch.allclose(got, torch.tensor(adam(method, MEANS)), rtol=1e-5, atol=1e-8)


def test_wrong_versions_of_adam_are_told_apart():
    got = torch.tensor(steps(ADAM, MEANS))
    for wrong in ({"square": lambda m, d: m * m}, {"first": 0.0}, {"corrected": True}):
        other = torch.tensor(adam(ADAM, MEANS, **wrong))
        assert not torch.allclose(got, other, rtol=1e-3, atol=1e-6), wrong


def test_a_large_tau_is_fedavg(task, images):
    """With β1 = β2 = 0 and τ far above every update, Adam's step is the mean times lr / τ."""
    flat = FedAdam(2, RECIPE, server_lr=1e4, beta1=0.0, beta2=0.0, tau=1e4)
    plain = weights_of(run(FedAvg(2, RECIPE), task, images))
    assert torch.allclose(weights_of(run(flat, task, images)), plain, atol=1e-4)


def test_fedadam_broadcasts_weights_alone(task, images):
    outcome, exchange = run_locally(ADAM, task, parts(images), OPEN)
    assert list(outcome.classifiers) == ["fedadam"]
    assert {v.bytes_down for v in exchange.visits} == {4 * size_of(task, RECIPE)}


# --- both ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", [FedProx(2, RECIPE), ADAM], ids=["fedprox", "fedadam"])
def test_they_claim_nothing(task, method):
    plan = plan_of(method, task, OPEN)
    assert math.isinf(plan.claim.epsilon)
    assert plan.bytes_up == 2 * 4 * (size_of(task, RECIPE) + 1)
    with pytest.raises(PrivacyError, match="epsilon = inf"):
        plan_of(method, task, Privacy(epsilon=8))


@pytest.mark.parametrize(
    ("make", "field", "value"),
    [
        (FedProx, "mu", -0.1),
        (FedProx, "mu", math.nan),
        (FedProx, "rounds", 0),
        (FedProx, "epochs", -1.0),
        (FedAdam, "server_lr", 0.0),
        (FedAdam, "beta1", 1.0),
        (FedAdam, "beta2", -0.1),
        (FedAdam, "beta2", math.nan),
        (FedAdam, "tau", 0.0),
        (FedAdam, "tau", math.inf),
        (FedAdam, "recipe", replace(LOCAL, optimiser="adamw")),
    ],
)
def test_options_are_checked(make, field, value):
    with pytest.raises(ConfigError, match=rf"method\.{field}.*Got"):
        make(**{field: value})
