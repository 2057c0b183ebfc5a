"""Logistic regression by noised rounds: the gradient, the steps, and what noise does to them."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.heads.estimate import ClassMoments
from fedgist.heads.logistic import LEVER, Logistic, preconditioner

CLASSES, DIM, N = 4, 6, 1200


def records() -> tuple[Tensor, Tensor]:
    """Classes whose spread is skewed and differs: a discriminant from moments errs on them."""
    g = torch.Generator().manual_seed(0)
    y = torch.arange(CLASSES).repeat(N // CLASSES)
    means = torch.randn(CLASSES, DIM, generator=g, dtype=torch.float64)
    skew = torch.empty(N, DIM, dtype=torch.float64).exponential_(1, generator=g) - 1
    z = means[y] + skew * (0.3 + 0.5 * y[:, None].double()) + 0.5
    return z / 8, y


def moments(z: Tensor, y: Tensor, *, absent: bool = False, noise: float = 0.0) -> ClassMoments:
    count = torch.bincount(y, minlength=CLASSES).double()
    mean = torch.stack([z[y == c].mean(0) for c in range(CLASSES)])
    within = torch.cov((z - mean[y]).T)
    present = torch.ones(CLASSES, dtype=torch.bool)
    present[-1] = not absent
    zeros = torch.zeros(CLASSES, dtype=torch.float64)
    return ClassMoments(count, present, mean, zeros, None, zeros, within, noise, 1e-9)


def loss(model: Logistic, z: Tensor, y: Tensor) -> float:
    bias, weight = model.affine()
    return float(F.cross_entropy(z @ weight.T + bias, y))


def test_rows_are_the_gradients_of_the_loss() -> None:
    z, y = records()
    z, y = z[:20], y[:20]
    m = Logistic.start(moments(*records()), moments(*records()).pooled)
    weight, bias = m.weight.clone().requires_grad_(), m.bias.clone().requires_grad_()
    value = F.cross_entropy((z - m.centre) @ weight.T + bias, y, reduction="sum")
    by_weight, by_bias = torch.autograd.grad(value, [weight, bias])
    got = m.rows(z, y).sum(0)
    assert torch.allclose(got[:, :-1], by_weight, atol=1e-12)
    assert torch.allclose(got[:, -1], LEVER * by_bias, atol=1e-12)


def test_a_record_s_row_is_as_long_as_its_error() -> None:
    z, y = records()
    m = Logistic.start(moments(z, y), moments(z, y).pooled)
    norm = m.rows(z, y).flatten(1).norm(dim=1)
    assert bool((norm <= (2 * ((z - m.centre).square().sum(1) + LEVER**2)).sqrt() + 1e-12).all())


def test_the_start_is_the_tempered_discriminant() -> None:
    z, y = records()
    m = moments(z, y)
    bias, weight = Logistic.start(m, m.pooled, temper=1.0).affine()
    precision = torch.linalg.inv(m.pooled)
    gap = z[:50, None] - m.mean
    wanted = -0.5 * torch.einsum("bci,ij,bcj->bc", gap, precision, gap)
    got = z[:50] @ weight.T + bias
    assert torch.allclose(got - got[:, :1], wanted - wanted[:, :1], atol=1e-8)
    half = Logistic.start(m, m.pooled)
    assert torch.allclose(2 * half.weight, Logistic.start(m, m.pooled, temper=1.0).weight)


def test_steps_lower_the_loss_to_its_minimum() -> None:
    z, y = records()
    m = moments(z, y)
    model, inverse = Logistic.start(m, m.pooled), preconditioner(m, m.pooled)
    losses, slopes = [], []
    for _ in range(250):
        gradient = model.rows(z, y).sum(0)
        losses.append(loss(model, z, y))
        slopes.append(float(gradient.norm()))
        model = model.step(gradient, inverse, len(y), curvature=0.25)
    assert all(b < a + 1e-12 for a, b in pairwise(losses))
    assert slopes[-1] < 0.03 * slopes[0]  # the loss is convex: no slope, no better model


def test_a_gradient_of_nothing_changes_nothing() -> None:
    z, y = records()
    m = moments(z, y)
    start = Logistic.start(m, m.pooled)
    zero = torch.zeros(CLASSES, DIM + 1, dtype=torch.float64)
    again = start.step(zero, preconditioner(m, m.pooled), len(y))
    assert torch.equal(again.weight, start.weight) and torch.equal(again.bias, start.bias)


@pytest.mark.parametrize("count", [-3.0, 0.0, 10.0])
def test_absent_classes_stay_absent_and_noisy_counts_do_no_harm(count: float) -> None:
    z, y = records()
    m = moments(z, y, absent=True)
    model = Logistic.start(m, m.pooled)
    inverse = preconditioner(m, m.pooled)
    model = model.step(1e-3 * model.rows(z, y).sum(0), inverse, count)
    bias, weight = model.affine()
    assert float(bias[-1]) == -torch.inf and bool(torch.isfinite(bias[:-1]).all())
    assert bool(torch.isfinite(weight).all())
    assert int((z @ weight.T + bias).argmax(1).max()) < CLASSES - 1


def test_the_preconditioner_is_the_inverse_total_covariance() -> None:
    z, y = records()
    m = moments(z, y)
    total = torch.linalg.inv(preconditioner(m, m.pooled))
    assert torch.allclose(total, torch.cov(z.T, correction=0), rtol=2e-3, atol=1e-5)


def test_damping_quiets_directions_below_the_noise() -> None:
    z, y = records()
    sharp, damped = (
        preconditioner(moments(z, y, noise=v), moments(z, y).pooled) for v in (0, 1e-2)
    )
    loudest = [float(torch.linalg.eigvalsh(a)[-1]) for a in (sharp, damped)]
    assert loudest[1] < 0.2 * loudest[0]
