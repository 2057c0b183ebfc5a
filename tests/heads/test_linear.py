"""Discriminants from noised means: textbook forms, and lengths that noise does not change."""

import math

import pytest
import torch
from torch import Tensor

from fedgist.encoders import load_encoder
from fedgist.heads.estimate import ClassMoments, excess_length
from fedgist.heads.linear import CodeSpace, lda, qda

C, D = 5, 60


@pytest.fixture(scope="module")
def space() -> CodeSpace:
    return CodeSpace(load_encoder("pca"), 0.5, 1.0)


def moments(mean: Tensor, mean_var: Tensor, present: list[bool] | None = None) -> ClassMoments:
    c, d = mean.shape
    eye, zero = torch.eye(d, dtype=torch.float64), torch.zeros(c, dtype=torch.float64)
    there = torch.tensor(present or [True] * c)
    return ClassMoments(zero + 100, there, mean, mean_var, None, zero, eye, 0.0, 0.0)


def normal(*shape: int, seed: int = 0) -> Tensor:
    rng = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=rng, dtype=torch.float64)


def spread_out(seed: int = 1) -> Tensor:
    """A covariance whose eigenvalues differ tenfold."""
    q, _ = torch.linalg.qr(normal(D, D, seed=seed))
    return (q * torch.linspace(0.2, 2, D, dtype=torch.float64)) @ q.T


SIGMA = spread_out()
TRUE = 0.4 * normal(C, D, seed=2) * torch.linspace(0.5, 1.5, C, dtype=torch.float64)[:, None]


def lengths(mean: Tensor) -> Tensor:
    gap = mean - mean.mean(-2, keepdim=True)
    return ((gap @ torch.linalg.inv(SIGMA)) * gap).sum(-1)


def test_without_noise_lengths_and_heads_are_the_textbook_ones(space: CodeSpace) -> None:
    m = moments(TRUE, torch.zeros(C, dtype=torch.float64), [True] * 4 + [False])
    assert torch.equal(excess_length(m, SIGMA), torch.zeros(C, dtype=torch.float64))
    z = normal(50, D, seed=3)
    gap = z[:, None] - TRUE
    far = torch.einsum("ncd,de,nce->nc", gap, torch.linalg.inv(SIGMA), gap)[:, :4]
    expected = torch.log_softmax(-0.5 * far, 1)
    assert torch.allclose(lda(m, space, SIGMA).scores(z)[:, :4], expected, atol=1e-9)
    covs = SIGMA.expand(C, D, D) * torch.linspace(1, 2, C, dtype=torch.float64)[:, None, None]
    far = torch.einsum("ncd,cde,nce->nc", gap, torch.linalg.inv(covs), gap) + torch.logdet(covs)
    expected = torch.log_softmax(-0.5 * far[:, :4], 1)
    assert torch.allclose(qda(m, space, covs).scores(z)[:, :4], expected, atol=1e-9)
    for head in (lda(m, space, SIGMA), qda(m, space, covs)):
        assert head.bias[4] == -math.inf and not bool((head.scores(z).argmax(1) == 4).any())


def test_excess_length_is_its_formula() -> None:
    tau2 = torch.tensor([0.01, 0.02, 0.04, 0.08, 9.0], dtype=torch.float64)
    present = [True] * 4 + [False]
    mean = TRUE + tau2.sqrt()[:, None] * normal(C, D, seed=4)
    weights = [1 / float(t) for t in tau2[:4]]
    weights = [w / sum(weights) for w in weights]
    common = sum(w * y for w, y in zip(weights, mean, strict=False))
    inverse = torch.linalg.inv(SIGMA)
    square = inverse @ inverse
    unbiased, variance, raw = [], [], []
    for w, t, y in zip(weights, tau2.tolist(), mean, strict=False):
        v, gap = t * (1 - w), y - common
        raw.append(float(gap @ inverse @ gap))
        unbiased.append(raw[-1] - v * float(inverse.trace()))
        signal = max(0.0, float(gap @ square @ gap) - v * float(square.trace()))
        variance.append(2 * v**2 * float(square.trace()) + 4 * v * signal)
    middle = sum(unbiased) / 4
    energy = sum((q - middle) ** 2 for q in unbiased)
    keep = max(0.0, 1 - sum(variance) / 4 / energy)
    assert 0 < keep < 1
    expected = [r - middle - keep * (q - middle) for r, q in zip(raw, unbiased, strict=True)]
    found = excess_length(moments(mean, tau2, present), SIGMA)
    assert found.tolist() == pytest.approx([*expected, 0.0])


def test_lengths_less_their_excess_are_unbiased_with_the_variance_that_is_stated() -> None:
    tau2 = torch.full((C,), 0.15, dtype=torch.float64)
    noise = normal(200, C, D, seed=5) * 0.15**0.5
    raw = lengths(TRUE + noise)
    excess = torch.stack([excess_length(moments(TRUE + e, tau2), SIGMA) for e in noise])
    inverse = torch.linalg.inv(SIGMA)
    error = float((raw - excess - lengths(TRUE)).mean(1).std()) / 200**0.5
    trace, square = float(inverse.trace()), float((inverse**2).sum())

    def off(values: Tensor) -> float:
        """How far the mean over classes, which shrinkage keeps, is from the truth."""
        return abs(float((values - lengths(TRUE)).mean())) / error

    assert off(raw - excess) < 4
    assert off(raw) > 25  # not taken out
    assert off(raw - 0.15 * trace) > 5  # the noise of the common mean forgotten
    assert off(raw - 2 * (1 - 1 / C) * 0.15 * trace) > 25  # counted twice
    v = 0.15 * (1 - 1 / C)
    gap = TRUE - TRUE.mean(0)
    stated = 2 * v**2 * square + 4 * v * ((gap @ inverse) ** 2).sum(1)
    assert torch.allclose(raw.var(0), stated, rtol=0.35)
    ours = ((raw - excess - lengths(TRUE)) ** 2).mean()
    plain = ((raw - (1 - 1 / C) * 0.15 * trace - lengths(TRUE)) ** 2).mean()
    assert float(ours) < float(plain)


def test_a_small_class_is_not_lost(space: CodeSpace) -> None:
    """Its mean is noisier: with lengths as they are, others take its records."""
    tau2 = torch.tensor([0.05, 0.05, 0.05, 0.05, 0.6], dtype=torch.float64)
    z = TRUE.repeat_interleave(40, 0) + normal(40 * C, D, seed=6) @ torch.linalg.cholesky(SIGMA).T
    own = torch.arange(C).repeat_interleave(40) == 4
    covs = SIGMA.expand(C, D, D)
    found = {"lda": 0.0, "qda": 0.0, "raw": 0.0}
    for seed in range(5):
        mean = TRUE + tau2.sqrt()[:, None] * normal(C, D, seed=100 + seed)
        m = moments(mean, tau2)
        bare = moments(mean, torch.zeros_like(tau2))
        heads = {"lda": lda(m, space, SIGMA), "qda": qda(m, space, covs)}
        for name, head in {**heads, "raw": lda(bare, space, SIGMA)}.items():
            right = head.scores(z[own]).argmax(1) == 4
            found[name] += float(right.double().mean()) / 5
        trace = float(torch.linalg.inv(SIGMA).trace())
        moved = heads["qda"].bias - qda(bare, space, covs).bias
        assert torch.allclose(moved, 0.5 * tau2 * trace)
    assert min(found["lda"], found["qda"]) > found["raw"] + 0.3, found
