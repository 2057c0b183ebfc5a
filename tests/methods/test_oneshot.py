"""One upload of weights: averages, ensembles and what is distilled, each against its equation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from federation_tools import run_locally
from fedgist.config import load, make_method
from fedgist.data import open_source, partition
from fedgist.errors import ConfigError, DataError, PrivacyError
from fedgist.methods._datafree import Generate, Pool, generated, new_generator
from fedgist.methods._oneshot import Distil, Student, divergence
from fedgist.methods._weights import LOCAL, fresh, local_update, network_of, size_of
from fedgist.methods.co_boosting import CoBoosting, moved, weight_step
from fedgist.methods.dense import Dense
from fedgist.methods.ensemble import EnsembleMethod
from fedgist.methods.fedavg import FedAvg
from fedgist.methods.feddf import FedDF
from fedgist.methods.oneshot_fedavg import OneShotFedAvg
from fedgist.privacy.claim import Privacy
from fedgist.report.export import load_classifier, save_classifier
from fedgist.run import generator, plan_of
from fedgist.train import Network, evaluate
from fedgist.train.ensemble import Ensemble, mixed

RECIPE = replace(LOCAL, width=4, batch=16)
ONCE = {"recipe": RECIPE, "epochs": 2.0}
OPEN = Privacy(epsilon=math.inf)
LITTLE = Generate(epochs=3, steps=2, batch=8, width=4, latent=5)

pytestmark = pytest.mark.usefixtures("one_thread")


def run(method, task, parts, seed=0):
    return run_locally(method, task, parts, OPEN, seed)[0]


def split(images, *sizes):
    return [images.take(rows) for rows in torch.split(torch.arange(len(images)), sizes)]


def nobody(images):
    return images.take(torch.zeros(0, dtype=torch.int64))


def weights_of(network):
    return torch.cat([p.flatten() for p in network.model.parameters()])


def local(task, parts, seed=0):
    """Return (start, weights of every client's own network), trained apart."""
    start = fresh(task, RECIPE, generator(seed, "start"))
    return start, [
        start
        + local_update(
            task, RECIPE, start, p, generator(seed, "client", i, 0), epochs=ONCE["epochs"]
        )
        for i, p in enumerate(parts)
    ]


def softmax(z):
    e = np.exp(z - z.max(-1, keepdims=True))
    return e / e.sum(-1, keepdims=True)


def kl(t, s):
    p, q = softmax(t), softmax(s)
    return (p * np.log(p / q)).sum(-1)


def linear(weights, size=2):
    """Return a network of logits W (x - 0) for images [b, 1, size, size], W float32 [C, size²]."""
    layer = nn.Linear(size * size, len(weights), bias=False)
    layer.weight.data = weights.clone()
    model = nn.Sequential(nn.Flatten(), layer).requires_grad_(False)
    names = tuple(str(c) for c in range(len(weights)))
    return Network(model, "linear", 1, 1, size, names, torch.zeros(1), torch.ones(1))


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# --- the ensemble as a classifier ----------------------------------------------------------------


def test_a_mixture_is_the_mean_of_probabilities_or_of_logits():
    each, shares = 3 * draws(3, 5, 4), torch.tensor([0.5, 0.3, 0.2])
    z, w = each.double().numpy(), shares.double().numpy()
    probabilities = np.einsum("k,kbc->bc", w, softmax(z))
    got = mixed(each, shares, "probabilities").exp()
    assert np.allclose(got, probabilities, atol=1e-6)
    assert np.allclose(mixed(each, shares, "logits"), np.einsum("k,kbc->bc", w, z), atol=1e-5)
    geometric = mixed(each.log_softmax(2), shares, "logits").softmax(1)
    assert not np.allclose(got, geometric, atol=0.01)  # mean of log-probabilities: another thing
    alone = torch.tensor([0.0, 1.0, 0.0])
    assert torch.allclose(mixed(each, alone, "probabilities"), each[1].log_softmax(1), atol=1e-6)
    far = torch.tensor([[[500.0, 0.0]], [[0.0, 500.0]]])  # e^-500 is no float
    got = mixed(far, torch.tensor([1.0, 0.0]), "probabilities")
    assert torch.allclose(got, far[0].log_softmax(1))


def test_the_slope_of_a_share_is_finite_where_the_share_is_zero():
    each, shares = 2 * draws(3, 4, 3), torch.tensor([0.0, 0.75, 0.25])
    p = softmax(each.double().numpy())
    for mix, right in (
        ("probabilities", p / np.einsum("k,kbc->bc", shares.double().numpy(), p)),
        ("logits", each.double().numpy()),
    ):
        free = shares.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(mixed(each, free, mix).sum(), free)
        assert np.allclose(slope, right.sum((1, 2)), rtol=1e-4)


@pytest.mark.parametrize("mix", ["probabilities", "logits"])
def test_an_ensemble_predicts_the_mixture_and_survives_a_file(task, images, tmp_path, mix):
    members = tuple(network_of(task, RECIPE, fresh(task, RECIPE, generator(i))) for i in range(3))
    ensemble = Ensemble(members, torch.tensor([0.6, 0.3, 0.1]), mix)
    x = images.floats()
    each = torch.stack([m.logits(x) for m in members])
    expected = mixed(each, ensemble.shares, mix).log_softmax(1)
    assert torch.allclose(ensemble.predict(x), expected, atol=1e-5)
    save_classifier(ensemble, tmp_path / "e.safetensors", {})
    again = load_classifier(tmp_path / "e.safetensors")
    assert (again.kind, again.meta()) == ("ensemble", ensemble.meta())
    assert torch.equal(again.predict(x), ensemble.predict(x))


def test_a_damaged_ensemble_is_refused(task):
    members = tuple(network_of(task, RECIPE, fresh(task, RECIPE, generator(i))) for i in range(2))
    ensemble = Ensemble(members, torch.tensor([0.5, 0.5]))
    tensors, meta = ensemble.tensors(), ensemble.meta()
    missing = {k: v for k, v in tensors.items() if k != "1.mean"}
    for bad, facts in (
        (missing, meta),
        (tensors | {"2.mean": torch.zeros(1)}, meta),
        (tensors | {"shares": torch.tensor([0.5, 0.6])}, meta),
        (tensors, meta | {"mix": "votes"}),
    ):
        with pytest.raises(DataError):
            Ensemble.load(bad, facts)
    with pytest.raises(DataError, match="one model"):
        Ensemble((), torch.zeros(0))


# --- what leaves ---------------------------------------------------------------------------------


@pytest.mark.parametrize("cls", [OneShotFedAvg, EnsembleMethod, FedDF, Dense, CoBoosting])
def test_weights_leave_once_and_nothing_is_claimed(task, cls):
    method = cls(**ONCE)
    plan = plan_of(method, task, OPEN)
    assert len(plan.rounds) == 1
    assert math.isinf(plan.claim.epsilon)
    assert plan.bytes_up == 4 * (size_of(task, RECIPE) + 1)
    with pytest.raises(PrivacyError, match="epsilon = inf"):
        plan_of(method, task, Privacy(epsilon=8))


# --- one-shot FedAvg -----------------------------------------------------------------------------


@pytest.mark.parametrize(("weighting", "shares"), [("images", (0.75, 0.25)), ("equal", (0.5, 0.5))])
def test_the_average_is_of_the_clients_own_weights(task, images, weighting, shares):
    parts = [*split(images, 45, 15), nobody(images)]
    _, (one, two) = local(task, parts[:2])
    (network,) = run(OneShotFedAvg(**ONCE, weighting=weighting), task, parts).classifiers.values()
    right, wrong = shares[0] * one + shares[1] * two, shares[1] * one + shares[0] * two
    assert torch.allclose(weights_of(network), right, atol=1e-5)
    if weighting == "images":
        assert not torch.allclose(weights_of(network), wrong, atol=1e-3)
        assert not torch.allclose(weights_of(network), (one + two) / 2, atol=1e-3)


def test_it_is_fedavg_of_one_round(task, images):
    parts = split(images, 40, 20)
    one, other = (
        run(m, task, parts).classifiers for m in (FedAvg(1, **ONCE), OneShotFedAvg(**ONCE))
    )
    assert torch.equal(weights_of(one["fedavg"]), weights_of(other["oneshot_fedavg"]))
    with pytest.raises(ConfigError, match=r"rounds must be 1"):
        OneShotFedAvg(rounds=2)


# --- the ensemble --------------------------------------------------------------------------------


def test_the_ensemble_asks_every_client_that_has_images(task, images):
    parts = [*split(images, 45, 15), nobody(images)]
    x = images.floats()
    _, own = local(task, parts[:2])
    p = torch.stack([network_of(task, RECIPE, w).predict(x).exp() for w in own])
    for weighting, shares in (("equal", [0.5, 0.5]), ("images", [0.75, 0.25])):
        outcome = run(EnsembleMethod(**ONCE, weighting=weighting), task, parts)
        expected = torch.einsum("k,kbc->bc", torch.tensor(shares), p)
        got = outcome.classifiers["ensemble"].predict(x).exp()
        assert torch.allclose(got, expected, atol=1e-5)
    alone = run(EnsembleMethod(**ONCE), task, [nobody(images)]).classifiers["ensemble"]
    (member,) = alone.members
    assert torch.equal(weights_of(member), fresh(task, RECIPE, generator(0, "start")))


# --- distillation --------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 4.0])
def test_the_divergence_and_a_students_step_are_those_of_the_books(temperature):
    x, teacher, start = draws(6, 1, 2, 2, seed=1), 2 * draws(6, 3, seed=2), draws(3, 4, seed=3)
    z, t, w = (v.double().numpy() for v in (x.flatten(1), teacher, start))
    student = Student(linear(start), Distil(lr=0.1, temperature=temperature), 2)
    loss = student.step(x, teacher)
    rows = temperature**2 * kl(t / temperature, z @ w.T / temperature)
    assert np.allclose(divergence(teacher, x.flatten(1) @ start.T, temperature), rows, atol=1e-5)
    assert loss == pytest.approx(rows.mean(), rel=1e-5)
    # gradient of T² KL in the logits: T (softmax(s/T) - softmax(t/T)), with momentum 0.9
    velocity = np.zeros_like(w)
    for rate in (0.1, 0.05):
        q, p = softmax(z @ w.T / temperature), softmax(t / temperature)
        velocity = 0.9 * velocity + temperature * (q - p).T @ z / 6
        w = w - rate * velocity
        assert np.allclose(student.network.model[1].weight.detach(), w, atol=1e-5)
        if rate == 0.1:
            student.step(x, teacher)
    swapped = kl(z @ w.T, t)
    assert not np.allclose(divergence(teacher, x.flatten(1) @ start.T), swapped, atol=0.05)


def test_feddf_begins_at_the_average_and_learns_from_the_mean_of_logits(task, images):
    parts = split(images, 45, 15)
    _, (one, two) = local(task, parts)
    still = FedDF(**ONCE, images=40, distil=Distil(steps=1, lr=1e-12))
    outcome = run(still, task, parts)
    assert torch.allclose(
        weights_of(outcome.classifiers["feddf"]), 0.75 * one + 0.25 * two, atol=1e-5
    )
    ensemble = outcome.classifiers["ensemble"]
    assert ensemble.mix == "logits"
    x = images.floats()

    def away(steps):
        method = replace(still, distil=Distil(steps=steps, batch=20, lr=1e-3, optimiser="adam"))
        network = run(method, task, parts).classifiers["feddf"]
        return float(divergence(ensemble.logits(x), network.logits(x)).mean())

    assert away(60) < 0.5 * away(1)


def test_public_images_are_named_converted_and_never_the_private_ones(task, images):
    method = FedDF(**ONCE, public="digits", images=30, distil=Distil(steps=1))
    assert (method.track, FedDF().track) == ("public images", "no public data")
    assert any("digits" in note for note in plan_of(method, task, OPEN).claim.notes)
    assert run(method, replace(task, size=10), [nobody(images)]).details["images"] == 30
    with pytest.raises(ConfigError, match="other images"):
        method.plan(replace(task, name="digits"))


# --- DENSE ---------------------------------------------------------------------------------------


def test_the_loss_of_dense_counts_disagreement_only_where_labels_differ():
    teacher = torch.tensor([[2.0, 0.0, -1.0], [0.5, 1.5, 0.0], [1.0, 0.0, 3.0]])
    student = torch.tensor([[1.0, 0.5, 0.0], [2.0, 0.0, 1.0], [2.5, 0.0, 1.0]])
    labels = torch.tensor([0, 1, 0])
    t, s = teacher.double().numpy(), student.double().numpy()
    cross = -np.log(softmax(t)[np.arange(3), labels]).mean()
    apart = kl(t, s)
    right = cross - 0.7 * (apart[1] + apart[2]) / 3  # the first is 0 for both
    got = float(Dense(adversarial=0.7).loss(teacher, student, labels))
    assert got == pytest.approx(right, rel=1e-5)
    assert abs(got - (cross - 0.7 * apart.mean())) > 0.005  # without the mask
    assert abs(got - (cross - 0.7 * (apart[1] + apart[2]) / 2)) > 0.05  # mean over those alone
    assert float(Dense(adversarial=0).loss(teacher, student, labels)) == pytest.approx(cross)


def test_a_generator_lowers_its_loss_and_leaves_everything_else_alone(task):
    wanted = draws(8, 1, 8, 8).sigmoid()
    settings = replace(LITTLE, steps=60, lr=0.01)
    maker, z = new_generator(task, settings, generator(1)), draws(8, 5)
    before, kept = torch.get_rng_state(), z.clone()

    def loss(x):
        return (x - wanted).square().mean()

    first = float(loss(maker(z)).detach())
    x = generated(maker, z, loss, settings)
    assert x.shape == wanted.shape
    assert bool(((x >= 0) & (x <= 1)).all())
    assert not x.requires_grad
    assert float(loss(x)) < 0.7 * first
    assert torch.equal(z, kept)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("size", [8, 13, 28])
def test_generated_images_have_the_tasks_size(task, size):
    coloured = replace(task, size=size, channels=3)
    assert new_generator(coloured, LITTLE, generator(0))(draws(2, 5)).shape == (2, 3, size, size)


def test_a_pool_remembers_what_every_member_says_of_the_bytes():
    ensemble = Ensemble(
        (linear(draws(3, 4)), linear(draws(3, 4, seed=1))), torch.tensor([0.5, 0.5])
    )
    x = draws(5, 1, 2, 2, seed=2).sigmoid()
    empty = Pool(
        torch.zeros(0, 1, 2, 2, dtype=torch.uint8), torch.zeros(0).long(), torch.zeros(2, 0, 3)
    )
    pool = empty.more(x[:2], torch.tensor([0, 1]), ensemble)
    pool = pool.more(x[2:], torch.tensor([2, 0, 1]), ensemble)
    rounded = (x * 255).round() / 255
    assert torch.equal(pool.floats(torch.arange(5)), rounded)
    assert torch.allclose(pool.each, ensemble.each(rounded), atol=1e-6)
    assert pool.labels.tolist() == [0, 1, 2, 0, 1]


@pytest.mark.parametrize("cls", [Dense, CoBoosting])
def test_the_student_takes_exactly_the_steps_that_its_rate_was_planned_for(
    task, images, monkeypatch, cls
):
    students, step = [], Student.step
    monkeypatch.setattr(Student, "step", lambda s, *a: (students.append(s), step(s, *a))[1])
    method = cls(**ONCE, generate=LITTLE, distil=Distil(passes=2, batch=6))
    run(method, task, split(images, 30, 30))
    assert len(students) == students[0]._steps == 2 * (2 + 3 + 4)


# --- Co-Boosting ---------------------------------------------------------------------------------


def test_the_loss_of_co_boosting_weighs_hard_images():
    teacher, student, labels = 2 * draws(4, 3), draws(4, 3, seed=1), torch.tensor([0, 1, 2, 0])
    t, s = teacher.double().numpy(), student.double().numpy()
    p = softmax(t)[np.arange(4), labels]
    right = (-(1 - p) * np.log(p) - 0.5 * 9 * kl(t / 3, s / 3)).mean()
    got = float(CoBoosting(adversarial=0.5).loss(teacher, student, labels))
    assert got == pytest.approx(right, rel=1e-4)
    assert abs(got - (-np.log(p) - 0.5 * 9 * kl(t / 3, s / 3)).mean()) > 0.05


@pytest.mark.parametrize("mix", ["logits", "probabilities"])
def test_weights_move_by_the_sign_of_the_losss_slope(mix):
    each, labels = 2 * draws(4, 20, 3), torch.arange(20) % 3
    weights = torch.tensor([0.4, 0.005, 0.3, 0.999])
    z = each.double().numpy()

    def loss(w):
        means = {
            "logits": softmax(np.einsum("k,kbc->bc", w / w.sum(), z)),
            "probabilities": np.einsum("k,kbc->bc", w / w.sum(), softmax(z)),
        }
        return -np.log(means[mix][np.arange(20), labels]).mean()

    w = weights.double().numpy()
    slope = [(loss(w + h) - loss(w - h)) / 2e-5 for h in np.eye(4) * 1e-5]
    right = np.clip(w - 0.01 * np.sign(slope), 0, 1)
    got = weight_step(weights, each, labels, 0.01, mix)
    assert np.allclose(got, right, atol=1e-6)
    assert float(np.dot(slope, w)) == pytest.approx(0, abs=1e-6)  # all alike: no progress
    up = np.clip(w + 0.01 * np.sign(slope), 0, 1)
    assert not np.allclose(got, up, atol=1e-3)
    good = 3.0 * nn.functional.one_hot(labels, 3).float()
    pair, near = torch.stack([good, -good]), torch.tensor([0.995, 0.005])
    assert weight_step(near, pair, labels, 0.01, mix).tolist() == [1.0, 0.0]  # clipped at both ends
    alone = torch.tensor([0.001])  # its slope is 0 but for rounding
    assert float(weight_step(alone, pair[:1], labels, 0.5, mix)) > 0


def test_the_better_member_gains_weight_from_the_second_epoch_on():
    labels = torch.arange(40) % 3
    good = 3.0 * nn.functional.one_hot(labels, 3).float()
    pool = Pool(torch.zeros(40, 1, 2, 2, dtype=torch.uint8), labels, torch.stack([good, -good]))
    method, half = (
        CoBoosting(distil=Distil(batch=20), step=0.01, decay=0.5),
        torch.tensor([0.5, 0.5]),
    )
    assert torch.equal(method.reweighted(half, pool, 0, generator(0)), half)
    got = method.reweighted(half, pool, 2, generator(0))  # two batches of steps 0.01 / 4
    assert torch.allclose(got, torch.tensor([0.505, 0.495]), atol=1e-6)


def test_images_move_along_the_sign_of_the_outputs_slope():
    ensemble = Ensemble(
        (linear(draws(3, 4)), linear(draws(3, 4, seed=1))), torch.tensor([0.7, 0.3]), "logits"
    )
    x, reach = torch.full((3, 1, 2, 2), 0.5), 0.03
    got = moved(x, ensemble, reach, generator(3))
    u = (torch.rand(3, 3, generator=generator(3)) * 2 - 1).double().numpy()
    w = sum(
        float(a) * m.model[1].weight.double().numpy()
        for a, m in zip(ensemble.shares, ensemble.members, strict=True)
    )
    for i in range(3):
        p = softmax(w @ np.full(4, 0.5) / 4)
        slope = w.T @ (p * (u[i] - p @ u[i])) / 4
        assert np.allclose(got[i].flatten(), 0.5 + reach * np.sign(slope), atol=1e-6)
    edge = moved(torch.ones(3, 1, 2, 2), ensemble, reach, generator(3))
    assert float(edge.max()) <= 1


# --- all of them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "least"),
    [("oneshot_fedavg", 30), ("ensemble", 45), ("feddf", 35), ("dense", 35), ("co_boosting", 35)],
)
def test_each_learns_something_of_real_images(name, least):
    source = open_source("fashion-mini")
    task = source.task()
    rows = torch.randperm(6000, generator=generator(0))[:900]
    images = source.images("train", task).take(rows)
    test = source.images("test", task).take(torch.arange(500) * 2)
    sets = [
        f"method.name={name}",
        "method.epochs=4",
        "method.recipe.width=8",
        "privacy.epsilon=inf",
    ]
    if name in ("dense", "co_boosting"):
        sets += ["method.generate.epochs=4", "method.generate.steps=5", "method.generate.batch=64"]
    sets += ["method.images=300", "method.distil.steps=60"] if name == "feddf" else []
    clients = partition(images, 3, "dirichlet:1.0", 0).clients
    method = make_method(load(None, sets))
    outcome = run(method, task, [images.take(r) for r in clients])
    first = next(iter(outcome.classifiers.values()))
    assert 100 * evaluate(first, test).accuracy > least  # chance: 10
