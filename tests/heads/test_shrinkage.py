"""Shrinkage against independent computations, and that it helps where it says it does."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.heads.shrinkage import (
    clamp_eigenvalues,
    james_stein,
    linear_shrinkage,
    noise_edge,
    reconcile,
    rie,
)


def goe(d: int, v: float, rng: torch.Generator) -> Tensor:
    a = torch.randn(d, d, generator=rng, dtype=torch.float64) * math.sqrt(v)
    upper = torch.triu(a, 1)
    return upper + upper.T + torch.diag(a.diagonal() * math.sqrt(2))


def spectrum_cov(d: int, rng: torch.Generator, power: float = 1.0) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(d, d, generator=rng, dtype=torch.float64))
    values = torch.arange(1, d + 1, dtype=torch.float64) ** -power
    return (q * (values * d / values.sum())) @ q.T


def test_noise_edge_is_the_largest_eigenvalue_of_pure_noise() -> None:
    rng = torch.Generator().manual_seed(0)
    top = float(torch.linalg.eigvalsh(goe(300, 2.5, rng))[-1])
    assert noise_edge(2.5, 300) == pytest.approx(2 * math.sqrt(750))
    assert top == pytest.approx(noise_edge(2.5, 300), rel=0.05)
    assert noise_edge(0.0, 10) == 0


def test_rie_is_its_formula() -> None:
    rng = torch.Generator().manual_seed(1)
    d, v = 9, 0.3
    target = spectrum_cov(d, rng)
    y = target + goe(d, v, rng)
    lam, vectors = np.linalg.eigh((y - target).numpy())
    eta = 2 * math.sqrt(v)
    xi = []
    for i in range(d):
        others = [1 / (lam[i] - 1j * eta - lam[j]) for j in range(d) if j != i]
        xi.append(lam[i] - 2 * v * d * np.real(np.mean(others)))
    expected = target.numpy() + (vectors * np.array(xi)) @ vectors.T
    assert np.allclose(rie(y, v, target).numpy(), expected, atol=1e-12)
    assert torch.equal(rie(y, 0.0, target), y)
    zero = torch.zeros(d, d, dtype=torch.float64)
    assert torch.equal(rie(y, v), rie(y, v, zero))


def test_rie_pulls_pure_noise_to_the_target() -> None:
    rng = torch.Generator().manual_seed(2)
    target = torch.eye(60, dtype=torch.float64)
    noisy = target + goe(60, 1.0, rng)
    before = float((noisy - target).norm())
    assert float((rie(noisy, 1.0, target) - target).norm()) < 0.25 * before


@pytest.mark.parametrize("relative", [0.3, 1.0, 3.0])  # noise edge over the mean eigenvalue
def test_shrinking_first_beats_the_projection_alone_on_average(relative: float) -> None:
    d = 32
    errors = {"psd": 0.0, "rie": 0.0, "rie to a target": 0.0, "linear": 0.0}
    for seed in range(12):
        rng = torch.Generator().manual_seed(seed)
        truth = spectrum_cov(d, rng)
        target = 0.8 * truth + 0.2 * spectrum_cov(d, rng)  # a pooled covariance: near, not equal
        v = relative**2 / (4 * d)
        y = truth + goe(d, v, rng)
        for name, estimate in {
            "psd": y,
            "rie": rie(y, v),
            "rie to a target": rie(y, v, target),
            "linear": linear_shrinkage(y, v, target),
        }.items():
            errors[name] += float((clamp_eigenvalues(estimate, 1e-3) - truth).norm()) / 12
    assert errors["rie"] < errors["psd"]
    assert errors["rie to a target"] < errors["psd"]
    assert errors["linear"] < errors["psd"]


def test_linear_shrinkage_is_its_formula() -> None:
    rng = torch.Generator().manual_seed(4)
    d, v = 6, 0.01
    target = spectrum_cov(d, rng)
    y = target + goe(d, 0.5, rng)
    alpha = v * d * (d + 1) / float(((y - target) ** 2).sum())
    assert 0 < alpha < 1
    assert torch.allclose(linear_shrinkage(y, v, target), target + (1 - alpha) * (y - target))
    assert torch.equal(linear_shrinkage(y, 100.0, target), target)
    assert torch.equal(linear_shrinkage(target, 0.0, target), target)
    assert torch.allclose(linear_shrinkage(y, 0.0, target), y)


def test_expected_noise_energy_is_what_linear_shrinkage_removes() -> None:
    rng = torch.Generator().manual_seed(5)
    d, v = 16, 0.7
    energy = sum(float((goe(d, v, rng) ** 2).sum()) for _ in range(200)) / 200
    assert energy == pytest.approx(v * d * (d + 1), rel=0.03)


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(1, 12), st.floats(1e-6, 10))
def test_clamped_eigenvalues_keep_the_floor(seed: int, d: int, floor: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    a = torch.randn(d, d, generator=rng, dtype=torch.float64)
    clamped = clamp_eigenvalues(a, floor)
    values = torch.linalg.eigvalsh(clamped)
    assert float(values[0]) >= floor * (1 - 1e-6) - 1e-12
    symmetric = (a + a.T) / 2
    assert torch.allclose(
        values, torch.linalg.eigvalsh(symmetric).clamp(min=floor), rtol=1e-9, atol=1e-9
    )
    assert torch.allclose(clamp_eigenvalues(clamped, floor), clamped, atol=1e-9)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(0, 2**31),
    st.integers(1, 8),
    st.floats(1e-3, 1e3),
    st.floats(1e-3, 1e3),
)
def test_reconcile_is_generalised_least_squares(
    seed: int, parts: int, var_part: float, var_total: float
) -> None:
    rng = np.random.default_rng(seed)
    x, y = rng.normal(size=(parts, 3, 2)), rng.normal(size=(3, 2))
    design = np.vstack([np.eye(parts) / math.sqrt(var_part), np.ones(parts) / math.sqrt(var_total)])
    seen = np.vstack([x.reshape(parts, -1) / math.sqrt(var_part), y.ravel() / math.sqrt(var_total)])
    best = np.linalg.lstsq(design, seen, rcond=None)[0].reshape(x.shape)
    ours = reconcile(torch.from_numpy(x), torch.from_numpy(y), var_part, var_total)
    assert np.allclose(ours.numpy(), best, rtol=1e-6, atol=1e-6)


def test_reconcile_trusts_what_is_exact() -> None:
    parts = torch.randn(4, 2, 2, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    total = torch.ones(2, 2, dtype=torch.float64)
    assert torch.allclose(reconcile(parts, total, 1.0, 0.0).sum(0), total)
    assert torch.equal(reconcile(parts, total, 0.0, 1.0), parts)
    assert torch.equal(reconcile(parts, total, 0.0, 0.0), parts)


def test_james_stein_is_its_formula() -> None:
    y = torch.tensor([70.0, 95.0, 100.0, 140.0, 150.0, 165.0], dtype=torch.float64)  # mean 120
    energy = 50**2 + 25**2 + 20**2 + 20**2 + 30**2 + 45**2
    v = 400.0
    expected = 120 + (1 - 3 * v / energy) * (y - 120)
    assert torch.allclose(james_stein(y, v), expected, atol=1e-12)
    for wrong in (math.sqrt(v), 2 * v, v / 2):  # the deviation, noise counted twice, half of it
        assert not torch.allclose(james_stein(y, wrong), expected, atol=0.5)
    each = torch.tensor([100.0, 700.0] * 3, dtype=torch.float64)
    assert torch.allclose(james_stein(y, each), expected, atol=1e-12)
    assert torch.equal(james_stein(y, 0.0), y)
    assert torch.allclose(james_stein(y, 1e9), torch.full_like(y, 120))  # never past the mean
    three = 120 + (1 - 900 / 1800) * torch.tensor([-30.0, 0.0, 30.0], dtype=torch.float64)
    assert torch.allclose(james_stein(three * 2 - 120, 900.0), three)
    for few in (y[:1], torch.full((4,), 7.0, dtype=torch.float64)):
        assert torch.equal(james_stein(few, v), few)


@pytest.mark.parametrize("spread", [0.0, 1.0, 10.0])
def test_james_stein_beats_the_numbers_as_they_are(spread: float) -> None:
    """For equal numbers the plain estimator's risk is 3v of C·v: E 1/χ²_k = 1/(k - 2)."""
    rng = torch.Generator().manual_seed(3)
    c, s = 10, 26.0
    truth = 100 + spread * s * torch.linspace(-1, 1, c, dtype=torch.float64)
    draws = truth + s * torch.randn(2000, c, generator=rng, dtype=torch.float64)

    def risk(to: Tensor) -> float:
        return float(((to - truth) ** 2).sum(1).mean()) / s**2

    ours = risk(torch.stack([james_stein(y, s**2) for y in draws]))
    assert ours < risk(draws) - (0.02 if spread == 10 else 2)
    if spread == 0:
        assert ours < 3
        assert risk(torch.stack([james_stein(y, s) for y in draws])) > 8  # the deviation
    keep = (1 - (c - 2) * s**2 / (draws**2).sum(1, keepdim=True)).clamp(min=0)
    if spread < 10:
        assert ours < risk(draws * keep) - 2  # towards zero
