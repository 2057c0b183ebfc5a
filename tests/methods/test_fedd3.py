"""The tangent kernel and FedD3: closed form, regression, and what clients make with them."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from sklearn.kernel_ridge import KernelRidge

from fedgist.methods._distil import Canvas, pooled_images
from fedgist.methods._ntk import Kernel, regression
from fedgist.methods.fedd3 import FedD3
from fedgist.methods.fedd3 import loss_of as kernel_loss
from fedgist.privacy.client import Client
from fedgist.privacy.noise import SeededNoise

pytestmark = pytest.mark.usefixtures("one_thread")


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def made(method, task, images, seed):
    (rnd,) = method.plan(task)
    guard = Client("c", images, rnd, sigma=0.0, noise=SeededNoise(0), max_images=500)
    return method.summarize(0, task, {}, guard, rng(seed))


def by_hand(x, z, depth, w2=2.0, b2=0.01, *, tangent=True):
    """The arc-cosine recursion for one pair, in plain floats."""
    sigma = [w2 * float(a @ b) / len(a) + b2 for a, b in ((x, x), (z, z), (x, z))]
    theta = sigma[2]
    for _ in range(depth):
        norm = math.sqrt(sigma[0] * sigma[1])
        angle = math.acos(max(-1.0, min(1.0, sigma[2] / norm)))
        first = norm * (math.sin(angle) + (math.pi - angle) * math.cos(angle)) / (2 * math.pi)
        sigma = [w2 * sigma[0] / 2 + b2, w2 * sigma[1] / 2 + b2, w2 * first + b2]
        theta = sigma[2] + w2 * theta * (math.pi - angle) / (2 * math.pi)
    return theta if tangent else sigma[2]


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_the_kernel_is_the_arc_cosine_recursion(depth):
    x = torch.randn(5, 7, generator=rng(), dtype=torch.float64)
    x[4] = -x[3]
    got = Kernel(depth)(x, x)
    wanted = [[by_hand(a, b, depth) for b in x] for a in x]
    assert np.allclose(got, wanted, rtol=2e-6)
    assert float(torch.linalg.eigvalsh(got).min()) > 0
    for other in (  # the kernel of the last layer alone; one layer more
        [[by_hand(a, b, depth, tangent=False) for b in x] for a in x],
        [[by_hand(a, b, depth + 1) for b in x] for a in x],
    ):
        assert not np.allclose(got, other, rtol=0.05)


def test_the_kernel_is_that_of_gradients_of_a_wide_network():
    x, depth, width, draws = torch.randn(3, 6, generator=rng(1)), 2, 1200, 3
    x[1] = x[0] + 0.3 * x[1]
    found = torch.zeros(3, 3)
    for seed in range(draws):
        g, sizes = rng(seed), [6, *[width] * depth, 1]
        shapes = list(zip(sizes[1:], sizes[:-1], strict=True))
        ws = [torch.randn(s, generator=g, requires_grad=True) for s in shapes]
        bs = [torch.randn(s[0], generator=g, requires_grad=True) for s in shapes]
        rows = []
        for one in x:
            h = one
            for i, (w, b) in enumerate(zip(ws, bs, strict=True)):
                h = math.sqrt(2 / len(h)) * w @ (h if i == 0 else h.relu()) + 0.1 * b
            rows.append(torch.autograd.grad(h[0], [*ws, *bs]))
        for i in range(3):
            for j in range(3):
                found[i, j] += sum(
                    float((a * b).sum()) for a, b in zip(rows[i], rows[j], strict=True)
                )
    kernel = Kernel(depth)(x.double(), x.double()).float()
    assert torch.allclose(found / draws, kernel, rtol=0.08)


def test_regression_is_that_of_scikit_learn_with_a_relative_ridge():
    x, t = (torch.randn(n, 6, generator=rng(n), dtype=torch.float64) for n in (8, 5))
    y = torch.randn(8, 3, generator=rng(2), dtype=torch.float64)
    kernel, ridge = Kernel(2), 0.3
    own, cross = kernel(x, x), kernel(t, x)
    for factor, same in ((float(own.trace()) / 8, True), (1.0, False)):
        model = KernelRidge(alpha=ridge * factor, kernel="precomputed").fit(own.numpy(), y.numpy())
        said = model.predict(cross.numpy())
        assert np.allclose(regression(kernel, x, y, t, ridge), said) == same


def test_the_loss_and_its_gradient_at_images_on_a_tiny_case():
    g = rng(3)
    support = torch.rand(4, 1, 2, 2, generator=g, dtype=torch.float64)
    targets = torch.rand(5, 1, 2, 2, generator=g, dtype=torch.float64)
    labels, truth = torch.tensor([0, 0, 1, 2]), torch.tensor([0, 1, 2, 2, 1])

    def loss(pixels):
        return kernel_loss(Kernel(2), pixels, labels, targets, truth, 3, 1e-3)

    a, b = (2 * p.flatten(1).numpy() - 1 for p in (support, targets))
    k = np.array([[by_hand(i, j, 2) for j in a] for i in a])
    c = np.array([[by_hand(i, j, 2) for j in a] for i in b])
    y, z = (np.eye(3)[np.asarray(v)] - 1 / 3 for v in (labels, truth))
    said = c @ np.linalg.inv(k + 1e-3 * np.trace(k) / 4 * np.eye(4)) @ y
    assert float(loss(support)) == pytest.approx(0.5 * np.mean((said - z) ** 2), rel=1e-4)
    assert torch.autograd.gradcheck(loss, support.requires_grad_(), rtol=1e-4)


def test_gradients_stay_finite_where_an_image_is_there_twice():
    support = torch.rand(3, 1, 2, 2, generator=rng()).repeat(2, 1, 1, 1).requires_grad_()
    labels = torch.arange(3).repeat(2)
    x = support.detach()[:3].clone()
    loss = kernel_loss(Kernel(4), support, labels, x, labels[:3], 3, 1e-6)
    (g,) = torch.autograd.grad(loss, support)
    assert bool(g.isfinite().all())


@pytest.mark.parametrize("instance", ["kip", "coreset"])
def test_images_explain_what_a_client_holds_and_only_that(task, images, instance):
    method = FedD3(Canvas(2, 1), instance, steps=40, targets=40, lr=0.05)
    mine = images.take(images.labels != 1)
    sent = made(method, task, mine, 1)
    pixels = sent["pixels"].view(3, 2, 1, 8, 8).float() / 255
    held, x, y = torch.tensor([0, 2]), mine.floats(), mine.labels

    def loss(free):
        labels = held.repeat_interleave(2)
        return float(kernel_loss(method.kernel, free.flatten(0, 1), labels, x, y, 3, 1e-6))

    real = torch.stack([method._real(mine.take(y == c), task, rng(1)) for c in (0, 2)])
    assert loss(pixels[held]) < 0.7 * loss(real)
    assert sent["counts"].tolist() == [20, 0, 20]
    others = made(method, task, images.take(images.labels == 1), 2)
    both = {k: torch.cat([sent[k], others[k]]) for k in sent}
    pooled = pooled_images(both, method.canvas, task, 1.0)  # noise of classes not held stays out
    assert pooled.counts().tolist() == [2, 2, 2]
    assert torch.equal(pooled.pixels[pooled.labels == 1], both["pixels"][8:10])
    if instance == "coreset":  # means of all images of a class, weighted, are the class's mean
        centre = images.floats(images.labels == 0).mean(0)
        assert float((pixels[0].mean(0) - centre).abs().mean()) < 0.05


def test_a_class_with_fewer_images_than_its_share_repeats_them_disturbed(task, images):
    few = images.take((images.labels == 0).nonzero()[:3, 0])
    begun = FedD3(Canvas(8, 1))._real(few, task, rng()).flatten(1)
    near = torch.cdist(begun, few.floats().flatten(1)).min(1).values
    assert (near < 1e-6).sum() == 3 and float(near.max()) < 1
    assert len(torch.unique(begun, dim=0)) == 8
