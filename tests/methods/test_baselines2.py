"""Uploads of codes, decoders, noised coefficients and feature sums, each against its equation."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
import scipy.fft
import torch
from scipy import integrate, stats
from torch import nn

from federation_tools import run_locally
from fedgist.config import load, make_method
from fedgist.data import open_source, partition
from fedgist.encoders import load_encoder, restore
from fedgist.errors import ConfigError, DataError, PrivacyError
from fedgist.heads.estimate import estimate
from fedgist.method import Exposing
from fedgist.methods._weights import LOCAL, in_steps
from fedgist.methods.dp_glow import OrthogonalNoise, analysed, cosines, synthesised
from fedgist.methods.fed3r import Fed3R
from fedgist.methods.fedcgs import FedCGS
from fedgist.methods.fedcvae import FedCVAE, decoder_of, elbo_terms, truncated
from fedgist.methods.fedsd2c import FedSD2C, core_set, cropped, mixed_amplitudes, refined
from fedgist.privacy.claim import Privacy
from fedgist.privacy.client import Client, open_sensitive
from fedgist.privacy.noise import SeededNoise
from fedgist.privacy.statistics import clip_to_grid, from_triangle
from fedgist.run import generator, plan_of
from fedgist.train import Network, Recipe, evaluate, train
from fedgist.types import Images, Merged, State, Task

OPEN = Privacy(epsilon=math.inf)
GREY = Task("toy", ("a", "b", "c"), channels=1, size=8, max_images=500)
COLOUR = replace(GREY, channels=3)
TASKS = pytest.mark.parametrize("task", [GREY, COLOUR], ids=["grey", "RGB"])
TINY = Recipe(steps=2, width=4, label_smoothing=0.0)

pytestmark = pytest.mark.usefixtures("one_thread")


def thirds(images):
    return [images.take(torch.arange(len(images)) % 3 == i) for i in range(3)]


def guard(method, images, task=GREY):
    rnd = method.plan(task)[0]
    return Client("c", images, rnd, sigma=0.0, noise=SeededNoise(0), max_images=task.max_images)


# Closed forms


@pytest.fixture
def uneven(images):
    """40 images of class 0, 15 of class 1, 5 of class 2: weights of classes matter."""
    order = torch.cat([torch.arange(60)[images.labels == c] for c in range(3)])
    rows = torch.cat([order[:20], order[:20], order[20:35], order[40:45]])
    noise = torch.randint(0, 40, (len(rows), 1, 8, 8), generator=generator(1), dtype=torch.uint8)
    return Images(images.pixels[rows] // 2 + noise, images.labels[rows], images.classes)


def features_of(method, images):
    """Return what is summed, float64 [n, d], and one-hot labels."""
    z = clip_to_grid(method.space.codes(images.floats()), 1.0, method.levels) / method.levels
    return z.numpy(), np.eye(3)[images.labels.numpy()]


def centralised_ridge(z, y, ridge, *, penalise=True, weights=None):
    """Return W, [d + 1, C], as the least squares solution of an extended system."""
    n, d = z.shape
    w = np.ones(n) if weights is None else weights
    x = np.c_[z, np.ones(n)] * np.sqrt(w)[:, None]
    penalty = np.sqrt(ridge) * np.eye(d + 1)
    penalty[-1, -1] *= penalise
    right = np.r_[y * np.sqrt(w)[:, None], np.zeros((d + 1, y.shape[1]))]
    return np.linalg.lstsq(np.r_[x, penalty], right, rcond=None)[0]


@pytest.mark.parametrize("columns", [True, False])
def test_fed3r_is_ridge_regression_on_all_images_in_one_place(uneven, columns):
    method = Fed3R(features="scattering:32", ridge=0.5, columns=columns)
    head = run_locally(method, GREY, thirds(uneven), OPEN)[0].classifiers["fed3r"]
    got = np.c_[head.weight.numpy(), head.bias.numpy()[:, None]].T
    z, y = features_of(method, uneven)

    def shaped(w):
        return w / np.linalg.norm(w, axis=0) if columns else w

    np.testing.assert_allclose(got, shaped(centralised_ridge(z, y, 0.5)), rtol=1e-9, atol=1e-12)
    alike = (y / y.sum(0)).sum(1) * len(y) / 3
    for wrong in (
        centralised_ridge(z, y, 0.05),
        centralised_ridge(z, y, 0.5, penalise=False),
        centralised_ridge(z, y, 0.5, weights=alike),  # fedkt_csd's: classes alike
    ):
        assert np.abs(got - shaped(wrong)).max() > 1e-3
    plain = method.space.codes(uneven.floats()).numpy()  # before they were put on the grid
    np.testing.assert_allclose(got, shaped(centralised_ridge(plain, y, 0.5)), atol=5e-3)


def test_fedcgs_has_the_gaussian_statistics_of_all_images_in_one_place(uneven):
    method = FedCGS(features="scattering:32")
    head = run_locally(method, GREY, thirds(uneven), OPEN)[0].classifiers["fedcgs"]
    z, y = features_of(method, uneven)
    means = (y.T @ z) / y.sum(0)[:, None]
    total = np.cov(z.T, bias=True)
    within = np.cov((z - y @ means).T, bias=True)

    def discriminant(cov, priors):
        w = np.linalg.solve(cov, means.T).T
        return w, -0.5 * (w * means).sum(1) + np.log(priors)

    weight, bias = discriminant(total, y.mean(0))
    np.testing.assert_allclose(head.weight.numpy(), weight, rtol=1e-7, atol=1e-7)
    np.testing.assert_allclose(head.bias.numpy(), bias, rtol=1e-7)
    assert np.abs(discriminant(within, y.mean(0))[0] - weight).max() > 0.1
    assert np.abs(discriminant(total, np.ones(3) / 3)[1] - bias).max() > 0.1


def test_fed3r_trusts_no_eigenvalue_below_the_noise(images):
    method = Fed3R(features="scattering:32", ridge=0.5, columns=False, floor=0.3)
    query, rows = method.records(GREY)[0]
    sums = open_sensitive(guard(method, images).moments(rows, query))
    m = replace(estimate(sums, query, 0.0), pooled_var=4e-4)  # of G / 60
    gram = from_triangle(sums["pooled"].double()) / query.levels**2
    head = method.head(m, gram)
    a, total = 0.5 * np.eye(33), (20 * m.mean.sum(0)).numpy()
    a[:-1, :-1] += gram.numpy()
    a[-1] += np.r_[total, 60]
    a[:-1, -1] += total
    values, vectors = np.linalg.eigh(a)
    floor = 0.5 + 0.3 * 2 * math.sqrt(32 * 4e-4) * 60
    assert (values < floor).any()
    raised = (vectors * np.maximum(values, floor)) @ vectors.T
    w = np.linalg.solve(raised, np.c_[20 * m.mean.numpy(), [20] * 3].T)
    np.testing.assert_allclose(head.weight.numpy(), w[:-1].T, atol=1e-10)
    np.testing.assert_allclose(head.bias.numpy(), w[-1], atol=1e-10)


@pytest.mark.parametrize("kind", [FedCGS, Fed3R])
def test_sums_of_features_keep_a_finite_epsilon_as_any_sum_does(kind, images):
    method = kind(features="scattering:32")
    claim = plan_of(method, GREY, Privacy(epsilon=3.0)).claim
    assert claim.epsilon == pytest.approx(3.0)
    outcome, _ = run_locally(method, GREY, thirds(images), Privacy(epsilon=0.1))
    (head,) = outcome.classifiers.values()
    assert bool(head.weight.isfinite().all())  # a matrix that is mostly noise can be inverted
    (query, rows) = method.records(GREY)[0]
    assert rows(images.floats()).norm(dim=1).numpy() == pytest.approx(np.ones(60))
    assert query == method.plan(GREY)[0].queries[0]


# Orthogonal noise


@pytest.mark.parametrize("n", [1, 3, 7, 28])
def test_cosines_are_the_orthonormal_transform(n):
    expected = scipy.fft.dct(np.eye(n), norm="ortho", axis=0)
    np.testing.assert_allclose(cosines(n), expected, atol=1e-13)


@pytest.mark.parametrize("c", [1, 3])
def test_the_transform_is_orthogonal_and_mixes_all_numbers(c):
    d = c * 25
    basis = torch.eye(d, dtype=torch.float64).view(d, c, 5, 5)
    q = analysed(basis, 0).flatten(1).T
    torch.testing.assert_close(q @ q.T, torch.eye(d, dtype=torch.float64))
    x = torch.rand(4, c, 5, 5, generator=generator(0), dtype=torch.float64)
    torch.testing.assert_close(synthesised(analysed(x, 0), 0), x)
    torch.testing.assert_close(analysed(x, 0).flatten(1), x.flatten(1) @ q.T)
    assert float((analysed(x, 0) - analysed(x, 1)).abs().max()) > 0.1
    # A flat image has one large coefficient in a cosine transform, and none in the mixed one.
    flat = torch.ones(1, c, 5, 5, dtype=torch.float64)
    share = float(analysed(flat, 0).square().max() / d)
    assert share < 0.5 < float(scipy.fft.dctn(flat.numpy(), norm="ortho").max() ** 2 / d)


def gaussian_delta(epsilon, deviation, change):
    """Return δ of N(0, deviation²) against its shift: Theorem 8 of Balle and Wang."""
    m = change / deviation
    return stats.norm.cdf(m / 2 - epsilon / m) - math.exp(epsilon) * stats.norm.cdf(
        -m / 2 - epsilon / m
    )


@TASKS
@pytest.mark.parametrize("epsilon", [0.5, 10.0])
def test_the_noise_is_as_large_as_two_images_may_differ(task, epsilon):
    method = OrthogonalNoise(epsilon=epsilon, side=4, delta=1e-4, radius=0.7)
    c = task.channels
    extremes = torch.stack([torch.zeros(c, 4, 4), torch.ones(c, 4, 4)]).double()
    q = analysed(extremes - 0.5, 0).flatten(1)
    clipped = clip_to_grid(q, method.clip(c), 2**16) * method.clip(c) / 2**16
    change = float((clipped[0] - clipped[1]).norm())
    assert change == pytest.approx(2 * method.clip(c), rel=1e-4)
    assert method.clip(c) == pytest.approx(0.7 * math.sqrt(c * 16) / 2)
    deviation = method.deviation(c)
    assert gaussian_delta(epsilon, deviation, change) == pytest.approx(1e-4, rel=1e-2)
    assert gaussian_delta(epsilon, deviation / 2, change) > 1e-3  # as for add/remove
    classical = change * math.sqrt(2 * math.log(1.25 / 1e-4)) / epsilon
    assert deviation < classical or gaussian_delta(epsilon, classical, change) > 1e-4


@TASKS
def test_pixels_carry_noise_of_that_deviation_in_no_direction_more(task):
    method = OrthogonalNoise(epsilon=1000.0, side=4, radius=0.1)
    grey = torch.full((4000, task.channels, 8, 8), 0.5)
    noise = (method.disturbed(task, grey, generator(3)).double() - 0.5).flatten(1)
    d, deviation = noise.shape[1], method.deviation(task.channels)
    assert float(noise.std()) == pytest.approx(deviation, rel=0.02)
    assert abs(float(noise.mean())) < 5 * deviation / math.sqrt(noise.numel())
    cov = np.cov(noise.numpy().T) / deviation**2
    assert np.abs(cov - np.eye(d)).max() < 7 / math.sqrt(4000)
    # Of an image beyond R what is sent is drawn in to R around grey.
    white = torch.ones(4000, task.channels, 8, 8)
    mean = method.disturbed(task, white, generator(4)).mean((0, 2, 3))
    assert mean.tolist() == pytest.approx([0.55] * task.channels, abs=2e-3)


def test_what_epsilon_holds_is_said_and_the_claim_is_infinite():
    method = OrthogonalNoise(epsilon=5.0, side=4)
    claim = plan_of(method, GREY, OPEN).claim
    assert math.isinf(claim.epsilon)
    for words in ("stands in for DP-GLOW: ε = 5, δ = 1e-05", "any other image", "labels, and how"):
        assert any(words in note for note in claim.notes)
    assert isinstance(method, Exposing) and method.random
    assert not torch.equal(*(method.disturbed(GREY, torch.ones(2, 1, 8, 8), generator(0))))


# FedCVAE


def test_the_terms_of_the_bound_by_hand():
    rng = np.random.default_rng(0)
    x, logits = rng.random((4, 6)), rng.normal(size=(4, 6)) * 2
    mean, log_var = rng.normal(size=(4, 3)), rng.normal(size=(4, 3))
    cross, kl = elbo_terms(*map(torch.tensor, (x, logits, mean, log_var)))
    p = 1 / (1 + np.exp(-logits))
    np.testing.assert_allclose(cross, -(x * np.log(p) + (1 - x) * np.log(1 - p)).sum(1))
    for row in range(4):
        by_integral = 0.0
        for m, s in zip(mean[row], np.exp(log_var[row] / 2), strict=True):
            q = stats.norm(m, s)
            by_integral += integrate.quad(
                lambda t, q=q: q.pdf(t) * (q.logpdf(t) - stats.norm.logpdf(t)), m - 9 * s, m + 9 * s
            )[0]
        assert float(kl[row]) == pytest.approx(by_integral, rel=1e-6)
        s = np.exp(log_var[row])  # read as a deviation where it is a variance
        wrong = 0.5 * (s**2 + mean[row] ** 2 - 1 - 2 * np.log(s)).sum()
        assert abs(wrong - by_integral) > 1e-2


@pytest.mark.parametrize("bound", [0.5, 1.0, 3.0])
def test_latents_are_truncated_not_clamped(bound):
    z = truncated((50_000, 2), bound, generator(0)).double().numpy()
    assert np.abs(z).max() <= bound
    law = stats.truncnorm(-bound, bound)
    assert z.var() == pytest.approx(law.var(), rel=0.02)
    assert stats.kstest(z[:5000, 0], law.cdf).pvalue > 1e-3
    clamped = np.clip(np.random.default_rng(0).normal(size=5000), -bound, bound)
    assert stats.kstest(clamped, law.cdf).pvalue < 1e-3 or bound == 3.0


def constant(task, method, logit):
    """Return the weights of a decoder that draws one grey whatever it is given."""
    model = decoder_of(task, method.latent, method.width).to_empty(device="cpu")
    for p in model.parameters():
        nn.init.zeros_(p)
    nn.init.constant_(model[-1].bias, logit)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_the_server_draws_from_every_decoder_what_its_client_has():
    recipe = replace(TINY, steps=0)
    method = FedCVAE(heads=("ens", "kd"), latent=2, width=4, images=400, recipe=recipe)
    decoders = torch.stack([constant(GREY, method, logit) for logit in (-20.0, 20.0, 0.0)])
    counts = torch.tensor([[30.0, 0, 0], [0, 5, 5], [0, 0, 0]])
    state = State(server=Merged({"decoder": decoders, "counts": counts}, 0.0, 3))
    outcome = method.finish(GREY, state, generator(0))
    made = outcome.synthetic
    assert set(outcome.classifiers) == {"fedcvae_ens", "fedcvae_kd"}
    assert made.pixels.flatten(1).min(1).values.eq(made.pixels.flatten(1).max(1).values).all()
    grey, y = made.pixels[:, 0, 0, 0], made.labels
    assert int((grey == 0).sum()) == 300 and int((grey == 255).sum()) == 100
    assert set(y[grey == 0].tolist()) == {0} and set(y[grey == 255].tolist()) == {1, 2}
    assert 30 < int((y == 1).sum()) < 70
    only = replace(method, heads=("kd",), distil_epochs=60, lr=0.02)
    made = only.finish(GREY, state, generator(0)).synthetic
    assert made.counts().tolist() == [134, 133, 133]  # whatever the clients' shares
    shown = [float(made.pixels[made.labels == c].double().mean()) for c in range(3)]
    assert shown[0] < 60 and min(shown[1:]) > 195  # one decoder has learned both
    for bad in ({"counts": -counts}, {"decoder": decoders * math.nan}):
        broken = State(server=Merged(state.server.tensors | bad, 0.0, 3))
        with pytest.raises(DataError, match="decoders must be finite"):
            method.finish(GREY, broken, generator(0))


def test_a_decoder_draws_images_of_the_label_that_it_is_given(images):
    method = FedCVAE(latent=2, width=32, epochs=150, lr=3e-3, batch=16, images=90, recipe=TINY)
    sent = method.summarize(0, GREY, {}, guard(method, images), generator(0))
    assert sent["counts"].tolist() == [[20.0, 20.0, 20.0]]
    state = State(server=Merged(sent, 0.0, 1))
    made = method.finish(GREY, state, generator(1)).synthetic
    means = torch.stack([images.floats()[images.labels == c].mean(0).flatten() for c in range(3)])
    nearest = torch.cdist(made.floats().flatten(1), means).argmin(1)
    assert float((nearest == made.labels).double().mean()) > 0.95
    nobody = images.take(torch.zeros(0, dtype=torch.int64))
    none = method.summarize(0, GREY, {}, guard(method, nobody), generator(0))
    assert not bool(none["decoder"].any()) and none["decoder"].shape == sent["decoder"].shape


# FedSD2C


def linear(weights, size=8):
    """Return a network of logits W x for images [b, 1, size, size]."""
    layer = nn.Linear(size * size, len(weights), bias=False)
    layer.weight = nn.Parameter(weights)
    model = nn.Sequential()
    model.add_module("features", nn.Flatten())
    model.add_module("head", layer)
    return Network(model, "mlp", 1, 1, size, tuple("abc"), torch.zeros(1), torch.ones(1))


def test_the_core_set_is_what_the_network_finds_most_informative(images):
    weights = torch.randn(3, 64, generator=generator(0))
    x = images.floats()
    kept, rest = core_set(linear(weights), x, 1, 7, 0, 1.0, generator(0))
    logits = x.flatten(1).double().numpy() @ weights.double().numpy().T
    loss = np.log(np.exp(logits).sum(1)) - logits[:, 1]
    order = loss.argsort(kind="stable")
    np.testing.assert_array_equal(kept, x[order[:7].copy()])
    np.testing.assert_array_equal(rest, x[order[7:].copy()])
    assert not np.array_equal(kept, x[order[::-1][:7].copy()])
    # Of several crops the most informative stands for an image, and more crops find no worse.
    network, previous = linear(weights), math.inf
    for crops in (1, 4, 16):
        kept, rest = core_set(network, x[:5], 1, 2, crops, 0.3, generator(1))
        losses = -network.predict(torch.cat([kept, rest]))[:, 1]
        assert torch.equal(losses, losses.sort().values)
        assert float(losses.sum()) < previous
        previous = float(losses.sum())


def test_crops_are_squares_of_the_area_that_was_asked_for():
    across = ((torch.arange(32) + 0.5) / 32).expand(200, 1, 32, 32)
    whole = torch.cat([across, across.transpose(2, 3)])
    torch.testing.assert_close(cropped(whole, 1.0, generator(0)), whole, atol=1e-4, rtol=0)
    seen = cropped(torch.cat([across, across.transpose(2, 3)], 1), 0.25, generator(0))
    wide = seen[:, 0, 0, -1] - seen[:, 0, 0, 0]
    high = seen[:, 1, -1, 0] - seen[:, 1, 0, 0]
    side = wide * 32 / 31  # between the centres of the outer pixels
    torch.testing.assert_close(wide, high, atol=2e-2, rtol=0)
    assert float((side**2).min()) > 0.22 and float((side**2).max()) <= 1.01
    assert float((side**2).mean()) == pytest.approx(0.625, abs=0.06)
    assert float(seen[:, 0].min()) < 0.1 and float(seen[:, 0].max()) > 0.9  # from edge to edge


@pytest.mark.parametrize(("h", "w"), [(8, 8), (7, 7)])
def test_amplitudes_are_mixed_and_phases_stay(h, w):
    rng = np.random.default_rng(0)
    x, other = (0.4 + 0.2 * rng.random((5, 2, h, w)) for _ in range(2))
    got = mixed_amplitudes(torch.tensor(x), torch.tensor(other), 0.8).numpy()
    a, b = np.fft.fft2(x), np.fft.fft2(other)
    both = 0.2 * np.abs(a) + 0.8 * np.abs(b)
    expected = np.fft.ifft2(both * np.exp(1j * np.angle(a))).real
    np.testing.assert_allclose(got, expected, atol=1e-6)
    assert np.abs(got - (0.2 * x + 0.8 * other)).max() > 0.02  # of whole spectra
    assert np.abs(got - np.fft.ifft2(both * np.exp(1j * np.angle(b))).real).max() > 0.02
    same = mixed_amplitudes(torch.tensor(x), torch.tensor(other), 0.0)
    np.testing.assert_allclose(same, x, atol=1e-6)


def test_refinement_brings_features_closer_each_image_alone(images):
    codec, x = load_encoder("pca"), images.floats()[:4]
    network = train(images, replace(TINY, steps=5), generator(0))
    z = codec.encode_task(mixed_amplitudes(x, x.flip(0), 0.8))
    assert torch.equal(refined(network, codec, z, x, GREY, 0, 0.5), z.float())

    def distance(code):
        y = restore(codec.decode(code), 1, 8)
        f = network.model.get_submodule("features")
        seen, want = ((t - network.mean) / network.std for t in (y, x))
        return (f(seen) - f(want)).square().mean(1)

    done = refined(network, codec, z, x, GREY, 20, 0.5)
    assert bool((distance(done) < 0.7 * distance(z)).all())
    each = zip(torch.split(z[:2], 1), torch.split(x[:2], 1), strict=True)
    alone = torch.cat([refined(network, codec, a, b, GREY, 20, 0.5) for a, b in each])
    torch.testing.assert_close(done[:2], alone, atol=1e-2, rtol=1e-2)


def test_codes_and_the_networks_word_on_what_they_show_are_sent(images):
    method = FedSD2C(
        encoder="pca",
        local=replace(LOCAL, width=4),
        epochs=2,
        keep=4,
        crops=0,
        steps=1,
        recipe=TINY,
    )
    few = images.take(images.labels != 2)
    sent = method.summarize(0, GREY, {}, guard(method, few), generator(5))
    assert sent["codes"].shape == (8, 128) and sent["probabilities"].shape == (8, 3)
    network = train(few, in_steps(method.local, 2, len(few)), generator(5))
    shown = restore(method.codec.decode(sent["codes"]), 1, 8)
    torch.testing.assert_close(network.predict(shown).exp(), sent["probabilities"])
    assert isinstance(method, Exposing) and len(method.used(few)) == len(few)
    made = method.uploaded(GREY, {}, few.floats(), generator(0))
    assert made.shape == few.floats().shape and 0 <= float(made.min()) <= float(made.max()) <= 1
    assert float((made - few.floats()).abs().mean()) > 0.02


def test_the_server_learns_what_the_clients_networks_say_and_leaves_out_nonsense(images):
    recipe = Recipe(model="mlp", width=16, steps=150, lr=3e-3, label_smoothing=0.0)
    method = FedSD2C(encoder="pca", recipe=recipe)
    codes = method.codec.encode_task(images.floats()).float()
    turned = 0.7 * torch.eye(3)[(images.labels + 1) % 3] + 0.1
    bad = torch.cat([codes[:1] * math.nan, codes[:2]])
    said = torch.cat([turned, torch.tensor([[1.0, 0, 0], [2, -1, 0], [0.1, 0.1, 0.1]])])
    merged = Merged({"codes": torch.cat([codes, bad]), "probabilities": said}, 0.0, 1)
    outcome = method.finish(GREY, State(server=merged), generator(0))
    assert outcome.details["images"] == 60
    (network,) = outcome.classifiers.values()
    wanted = (images.labels + 1) % 3
    best = network.predict(images.floats()).exp().max(1)
    assert float((best.indices == wanted).double().mean()) > 0.9
    assert float(best.values.mean()) == pytest.approx(0.8, abs=0.08)  # not 1, as of labels


# All of them


@pytest.mark.parametrize("method", [OrthogonalNoise(side=4), FedCVAE(), FedSD2C(encoder="pca")])
def test_what_is_read_without_noise_has_no_finite_epsilon(method):
    with pytest.raises(PrivacyError, match="private"):
        plan_of(method, GREY, Privacy(epsilon=10.0))
    assert math.isinf(plan_of(method, GREY, OPEN).claim.epsilon)


@pytest.mark.parametrize(
    ("name", "setting", "message"),
    [
        ("fed3r", "ridge=0", "method.ridge must be positive"),
        ("fedcgs", "floor=0", "method.floor must be positive"),
        ("dp_glow", "radius=0", r"method.radius must lie in \(0, 1\]"),
        ("dp_glow", "delta=0", "delta must lie strictly"),
        ("dp_glow", "side=9", "method.side must be at most 8"),
        ("dp_glow", "side=0", "method.side must be at least 1"),
        ("fedcvae", "latent=0", "method.latent must be positive"),
        ("fedcvae", "beta=-1", "method.beta must not be negative"),
        ("fedcvae", "heads=[]", "method.heads must be distinct and not empty"),
        ("fedsd2c", "keep=0", "method.keep must be at least 1"),
        ("fedsd2c", "share=2", r"method.share must lie in \[0, 1\]"),
        ("fedsd2c", "encoder=scattering", "method.encoder must be a codec"),
    ],
)
def test_wrong_settings_are_refused_before_any_image_is_read(name, setting, message):
    with pytest.raises(ConfigError, match=message):
        make_method(load(None, [f"method.name={name}", f"method.{setting}"])).plan(GREY)


@pytest.mark.parametrize(
    ("name", "least", "sets"),
    [
        ("fedcgs", 60, ["features=scattering:64"]),
        ("fed3r", 60, ["features=scattering:64"]),
        ("dp_glow", 40, ["epsilon=1000", "recipe.steps=80", "recipe.width=8"]),
        (
            "fedcvae",
            40,
            ["width=64", "epochs=30", "lr=3e-3", "batch=32", "images=600", "recipe.steps=100"],
        ),
        (
            "fedsd2c",
            35,
            [
                *("encoder=pca", "local.width=8", "epochs=5", "keep=12", "look=20", "crops=2"),
                *("steps=3", "recipe.steps=80", "recipe.width=8"),
            ],
        ),
    ],
)
def test_each_learns_something_of_real_images(name, least, sets):
    source = open_source("fashion-mini")
    task = source.task()
    rows = torch.randperm(6000, generator=generator(0))[:600]
    images = source.images("train", task).take(rows)
    test = source.images("test", task).take(torch.arange(300) * 3)
    clients = partition(images, 3, "dirichlet:1.0", 0).clients
    method = make_method(load(None, [f"method.name={name}", *(f"method.{s}" for s in sets)]))
    outcome, _ = run_locally(method, task, [images.take(r) for r in clients], OPEN)
    (head,) = outcome.classifiers.values()
    assert 100 * evaluate(head, test).accuracy > least  # chance: 10
