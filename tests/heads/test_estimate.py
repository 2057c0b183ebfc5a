"""From noised sums to moments: unbiased, with the variances it states, usable on any data."""

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from fedgist.heads.estimate import (
    ODDS,
    ClassMoments,
    _counts,
    covariances,
    estimate,
    pooled_covariance,
    spectra,
)
from fedgist.heads.shrinkage import noise_edge, reconcile
from fedgist.privacy.noise import SeededNoise, noise_scales, noise_tensors
from fedgist.privacy.statistics import MomentSums, clip_to_grid, complete, from_triangle
from fedgist.queries import MomentsQuery
from fedgist.types import Tensors

D, C = 4, 3
NOISY = MomentsQuery(3.0, D, C)
PUBLIC = MomentsQuery(3.0, D, C, 0.5, 0.3, 0.2, 0.0, exact_counts=True)
CLASS = MomentsQuery(3.0, D, C, 0.5, 0.48, 0.0, 0.02)
POOLED = MomentsQuery(3.0, D, C, 0.7, 0.0, 0.28, 0.02)


def records(sizes: list[int], seed: int = 0, spread: float = 0.6) -> tuple[Tensor, Tensor]:
    """Codes within the radius (so that clipping changes nothing), sorted by class."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    mix = torch.randn(len(sizes), D, D, generator=rng, dtype=torch.float64) * spread / D**0.5
    centre = torch.randn(len(sizes), D, generator=rng, dtype=torch.float64) * 0.3
    z = torch.randn(len(labels), 1, D, generator=rng, dtype=torch.float64) @ mix[labels]
    z = z[:, 0] + centre[labels]
    return z * (2.9 / z.norm(dim=1, keepdim=True)).clamp(max=1), labels


def sums_of(z: Tensor, labels: Tensor, query: MomentsQuery) -> Tensors:
    total = MomentSums(query)
    total.add(clip_to_grid(z, query.clip, query.levels), labels)
    return total.tensors()


def noised(sums: Tensors, query: MomentsQuery, sigma: float, seed: int) -> Tensors:
    sums = complete(query, sums)
    drawn = noise_tensors(query, sigma, SeededNoise(seed), sums)
    return {k: v + drawn[k] for k, v in sums.items()}


def sample_moments(z: Tensor, labels: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    mean = torch.stack([z[labels == c].mean(0) for c in range(C)])
    cov = torch.stack([torch.cov(z[labels == c].T, correction=0) for c in range(C)])
    share = torch.bincount(labels, minlength=C) / len(labels)
    return mean, cov, (cov * share[:, None, None]).sum(0)


@pytest.mark.parametrize("query", [NOISY, PUBLIC, CLASS, POOLED])
def test_without_noise_it_is_the_sample_moments(query: MomentsQuery) -> None:
    z, labels = records([400, 300, 500])
    m = estimate(sums_of(z, labels, query), query, 0.0)
    mean, cov, pooled = sample_moments(z, labels)
    unit = query.clip / query.levels
    assert m.dim == D and m.present.tolist() == [True] * C and m.count.tolist() == [400, 300, 500]
    assert float((m.mean - mean).abs().max()) < unit / 5  # rounding averages out
    assert m.mean_var.tolist() == [0] * C and m.pooled_var == 0
    assert float((m.pooled - pooled).abs().max()) < unit / 5
    if query is POOLED:
        assert m.cov is None
    else:
        assert m.cov is not None and float((m.cov - cov).abs().max()) < unit / 5
    # and exactly the moments of the integer records, less the variance of rounding
    u = clip_to_grid(z, query.clip, query.levels) * unit
    mean, cov, pooled = sample_moments(u, labels)
    eye = torch.eye(D, dtype=torch.float64) * unit**2 / 12
    assert torch.allclose(m.mean, mean, atol=1e-12)
    assert torch.allclose(m.pooled, pooled - eye, atol=1e-12)
    if m.cov is not None:
        assert torch.allclose(m.cov, cov - eye, atol=1e-12)


def test_rounding_is_taken_out() -> None:
    """On a coarse grid the correction halves the error of the variances, at the least."""
    query = MomentsQuery(3.0, D, C, levels=6)
    z, labels = records([4000, 4000, 4000], spread=0.5)
    m = estimate(sums_of(z, labels, query), query, 0.0)
    _, cov, _ = sample_moments(z, labels)
    assert m.cov is not None
    grid = (query.clip / query.levels) ** 2 / 12
    corrected = m.cov.diagonal(dim1=1, dim2=2) - cov.diagonal(dim1=1, dim2=2)
    assert abs(float(corrected.mean())) < 0.5 * abs(float((corrected + grid).mean()))


class Draws:
    """Estimates from many noise draws on one data set with public counts."""

    def __init__(self, query: MomentsQuery, sigma: float, n: int) -> None:
        z, labels = records([30, 40, 50])
        z = z - torch.stack([z[labels == c].mean(0) for c in range(C)])[labels]
        sums = sums_of(z, labels, query)
        self.truth = estimate(sums, query, 0.0)
        self.all = [estimate(noised(sums, query, sigma, i), query, sigma) for i in range(n)]

    def stack(self, of: Callable[[ClassMoments], Tensor | None]) -> Tensor:
        values = [of(m) for m in self.all]
        return torch.stack([v for v in values if v is not None])


@pytest.fixture(scope="module")
def draws() -> Draws:
    return Draws(PUBLIC, 3.0, 900)


def off_by(values: Tensor, truth: Tensor) -> float:
    """The largest error of the mean over draws, in standard errors."""
    gap = (values.mean(0) - truth).abs()
    return float((gap / (values.std(0) / len(values) ** 0.5)).max())


def test_estimates_are_unbiased_and_the_bias_term_is_needed(draws: Draws) -> None:
    t = draws.truth
    assert t.cov is not None
    assert off_by(draws.stack(lambda m: m.mean), t.mean) < 4.5
    assert off_by(draws.stack(lambda m: m.cov), t.cov) < 4.5
    assert off_by(draws.stack(lambda m: m.pooled), t.pooled) < 4.5
    eye = torch.eye(D, dtype=torch.float64)
    traces = draws.stack(lambda m: m.cov).diagonal(dim1=-2, dim2=-1).sum(-1)
    without = draws.stack(
        lambda m: (m.cov - m.mean_var[:, None, None] * eye).diagonal(dim1=-2, dim2=-1).sum(-1)  # type: ignore[operator]
    )
    truth = t.cov.diagonal(dim1=-2, dim2=-1).sum(-1)
    assert off_by(traces, truth) < 4.5
    assert off_by(without, truth) > 6  # a forgotten τ² would be seen
    spread = draws.stack(lambda m: m.pooled.diagonal().sum() - float(m.mean_var.sum()) * D)
    assert off_by(spread, t.pooled.diagonal().sum()) > 6


def test_stated_variances_are_the_real_ones(draws: Draws) -> None:
    m = draws.all[0]
    means = draws.stack(lambda e: e.mean)
    assert torch.allclose(means.var(0).mean(1), m.mean_var, rtol=0.1)
    i, j = torch.triu_indices(D, D, 1)
    off = draws.stack(lambda e: e.cov)[..., i, j].var(0).mean(1)
    assert torch.allclose(off, m.cov_var, rtol=0.1)
    unit = PUBLIC.clip / PUBLIC.levels
    as_released = (noise_scales(PUBLIC, 3.0)["second"][1] * unit**2) ** 2 / m.count**2
    assert not torch.allclose(off, as_released, rtol=0.1)  # agreeing with the total lowers it
    pooled = draws.stack(lambda e: e.pooled)[..., i, j].var(0).mean()
    assert float(pooled) == pytest.approx(m.pooled_var, rel=0.1)
    diagonal = draws.stack(lambda e: e.cov).diagonal(dim1=-2, dim2=-1).var(0).mean(1)
    assert torch.allclose(diagonal, 2 * m.cov_var, rtol=0.15)  # GOE


@pytest.mark.parametrize("query", [CLASS, POOLED])
def test_variances_without_a_reconciled_total(query: MomentsQuery) -> None:
    sigma = 2.0
    m = estimate(noised(sums_of(*records([300] * 3), query), query, sigma, 0), query, sigma)
    unit = query.clip / query.levels
    scales = noise_scales(query, sigma)
    assert torch.allclose(m.mean_var, (scales["mean"][0] * unit / m.count) ** 2)
    if query is CLASS:
        one = (scales["second"][1] * unit**2) ** 2
        assert torch.allclose(m.cov_var, one / m.count**2)
        assert m.pooled_var == pytest.approx(C * one / float(m.count.sum()) ** 2)
    else:
        assert m.cov is None and m.cov_var.tolist() == [0] * C
        n = float(m.count.sum())
        assert m.pooled_var == pytest.approx((scales["pooled"][1] * unit**2) ** 2 / n**2)


def test_class_and_pooled_blocks_are_made_to_agree() -> None:
    sums = noised(sums_of(*records([300] * 3), PUBLIC), PUBLIC, 2.0, 4)
    m = estimate(sums, PUBLIC, 2.0)
    unit = PUBLIC.clip / PUBLIC.levels
    scales = noise_scales(PUBLIC, 2.0)
    variances = [(scales[b][1] * unit**2) ** 2 for b in ("second", "pooled")]
    parts, total = (
        from_triangle(sums[b].to(torch.float64)) * unit**2 for b in ("second", "pooled")
    )
    agreed = reconcile(parts, total, *variances)
    assert m.cov is not None
    outer = m.mean[:, :, None] * m.mean[:, None, :]
    eye = torch.eye(D, dtype=torch.float64)
    back = m.cov + outer - (m.mean_var - unit**2 / 12)[:, None, None] * eye
    assert torch.allclose(back * m.count[:, None, None], agreed, atol=1e-9)


def test_the_multiplier_in_the_sum_scales_the_stated_noise() -> None:
    sums = noised(sums_of(*records([300] * 3), PUBLIC), PUBLIC, 2.0, 4)
    one, three = estimate(sums, PUBLIC, 2.0), estimate(sums, PUBLIC, 6.0)
    assert torch.allclose(three.mean_var, 9 * one.mean_var)
    assert torch.allclose(three.cov_var, 9 * one.cov_var)


def test_count_weight_changes_nothing_but_the_unit() -> None:
    z, labels = records([30, 20, 10])
    heavy = MomentsQuery(3.0, D, C, count_weight=9)
    a, b = (
        estimate(sums_of(z, labels, NOISY), NOISY, 0.0),
        estimate(sums_of(z, labels, heavy), heavy, 0.0),
    )
    assert torch.equal(a.count, b.count) and torch.equal(a.mean, b.mean)
    noisy = estimate(noised(sums_of(z, labels, heavy), heavy, 1.0, 0), heavy, 1.0)
    assert float((noisy.count - a.count).abs().max()) < 5 / math.sqrt(0.02)


def test_absent_classes_are_told_by_the_noise_level() -> None:
    z, labels = records([500, 500])
    sums = sums_of(z, labels, NOISY)
    assert estimate(sums, NOISY, 0.0).present.tolist() == [True, True, False]
    for seed in range(20):
        m = estimate(noised(sums, NOISY, 1.0, seed), NOISY, 1.0)
        assert m.present.tolist()[:2] == [True, True]
        assert float(m.count.min()) >= 1


STD = 26.0  # of noisy counts at about ε = 1


def numbers(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def test_counts_without_noise_are_as_they_are() -> None:
    count, present = _counts(numbers(120, 1, 0, 7), 0.0)
    assert count.tolist() == [120, 1, 1, 7] and present.tolist() == [True, True, False, True]
    count, present = _counts(numbers(0, 0), 0.0)
    assert count.tolist() == [1, 1] and present.tolist() == [True, True]


def test_a_class_is_absent_only_where_that_is_clearly_likelier() -> None:
    told = set()
    for y in range(-60, 100, 4):
        noisy = numbers(*[100.0] * 40, y)
        m = float(noisy.mean())
        none, some = (torch.distributions.Normal(mu, STD).log_prob(noisy[-1]) for mu in (0.0, m))
        absent = bool(none - some > math.log(ODDS))
        assert _counts(noisy, STD)[1].tolist() == [True] * 40 + [not absent]
        told.add(absent)
    assert told == {True, False}
    # far above the noise three deviations tell, whatever the mean is
    far = numbers(*[5000.0] * 5, 3.1 * STD, 2.9 * STD)
    assert _counts(far, STD)[1].tolist() == [True] * 6 + [False]


def test_absent_classes_do_not_hide_each_other() -> None:
    noisy = numbers(117, 2, 103, -30, 132, 11, 109, -4, 119, -18)
    assert _counts(noisy, 18.0)[1].tolist() == [True, False] * 5
    assert _counts(numbers(-5, 4, -20), STD)[1].tolist() == [True] * 3  # nothing can be told


def test_uncertain_classes_stay_and_their_counts_are_shrunk() -> None:
    rng = torch.Generator().manual_seed(0)
    error, kept, by_three = 0.0, 0, 0
    for _ in range(300):
        noisy = 100 + STD * torch.randn(10, generator=rng, dtype=torch.float64)
        count, present = _counts(noisy, STD)
        kept += int(present.sum())
        by_three += int((noisy > 3 * STD).sum())
        assert float(count[present].sum()) == pytest.approx(float(noisy[present].sum()))
        error += float(((count - 100) ** 2).mean()) / 300
    assert kept > 0.98 * 3000 and by_three < 0.85 * 3000
    assert error < STD**2 / 2
    sizes = numbers(6000, 3000, 800, 200)  # far apart: as they are
    assert torch.allclose(_counts(sizes, STD)[0], sizes, rtol=1e-3, atol=1)


def crowd(name: str) -> tuple[Tensor, Tensor]:
    zero, one = torch.zeros(0, D, dtype=torch.float64), torch.ones(1, D, dtype=torch.float64)
    none = torch.zeros(0, dtype=torch.int64)
    z, labels = records([50, 50, 50])
    return {
        "no records": (zero, none),
        "one record": (one, torch.tensor([1])),
        "one record of each": (torch.cat([one, -one, 2 * one]), torch.arange(3)),
        "fewer than dimensions": (z[49:52], labels[49:52]),
        "one class": (z[:50], labels[:50]),
        "constant": (torch.ones_like(z), labels),
        "zero vectors": (torch.zeros_like(z), labels),
        "far beyond the radius": (z * 1e12, labels),
        "many": (z, labels),
    }[name]


CROWDS = (
    "no records",
    "one record",
    "one record of each",
    "fewer than dimensions",
    "one class",
    "constant",
    "zero vectors",
    "far beyond the radius",
    "many",
)


@pytest.mark.parametrize("sigma", [0.0, 0.5, 40.0])
@pytest.mark.parametrize(
    "query", [NOISY, CLASS, POOLED, PUBLIC], ids=["both", "class", "pool", "exact"]
)
@pytest.mark.parametrize("name", CROWDS)
def test_any_data_give_finite_positive_definite_results(
    name: str, query: MomentsQuery, sigma: float
) -> None:
    sums = sums_of(*crowd(name), query)
    for seed in range(3 if sigma else 1):
        m = estimate(noised(sums, query, sigma, seed) if sigma else sums, query, sigma)
        values = [m.count, m.mean, m.mean_var, m.cov_var, m.pooled]
        assert all(bool(torch.isfinite(v).all()) for v in values if v is not None)
        pooled = pooled_covariance(m)
        assert torch.allclose(pooled, pooled.T)
        torch.linalg.cholesky(pooled)
        for method in ("rie", "linear", "clamp"):
            for mix in (0.0, 0.5, 1.0):
                covs = covariances(m, pooled, mix=mix, method=method)
                assert covs.shape == (C, D, D)
                torch.linalg.cholesky(covs)  # raises unless positive definite
        seen = spectra(m, covs)
        assert len(seen["released"]) == len(seen["shrunk"]) == D
        assert all(
            math.isfinite(x) for x in (*seen["released"], *seen["shrunk"], seen["noise_edge"])
        )


def test_floors_hold() -> None:
    sigma = 5.0
    m = estimate(noised(sums_of(*records([60] * 3), NOISY), NOISY, sigma, 1), NOISY, sigma)
    pooled = pooled_covariance(m, floor=0.7)
    assert float(torch.linalg.eigvalsh(pooled)[0]) >= 0.7 * noise_edge(m.pooled_var, D) * (1 - 1e-9)
    signal = float(m.pooled.diagonal().mean())
    for edges in (0.001, 0.05, 0.3):
        covs = covariances(m, pooled, mix=0.0, method="clamp", least=0.05, edges=edges)
        for cov, v in zip(covs, m.cov_var.tolist(), strict=True):
            noise = edges * noise_edge(v, D)
            own = max(0.0, 1 - noise / signal) * noise
            least = max(own, 0.05 * float(pooled.diagonal().mean()))
            assert float(torch.linalg.eigvalsh(cov)[0]) >= least * (1 - 1e-9)


def test_a_class_that_drowns_in_noise_falls_back_on_the_pooled_covariance() -> None:
    sums = sums_of(*records([8000, 8000, 6]), NOISY)
    m = estimate(noised(sums, NOISY, 2.0, 1), NOISY, 2.0)
    pooled = pooled_covariance(m)
    covs = covariances(m, pooled, mix=0.0, least=1e-6)
    assert torch.allclose(covs[2], pooled, atol=1e-9)
    assert not torch.allclose(covs[0], pooled, atol=1e-3)


def test_without_noise_no_method_changes_good_covariances() -> None:
    m = estimate(sums_of(*records([4000, 3000, 5000]), NOISY), NOISY, 0.0)
    assert m.cov is not None
    pooled = pooled_covariance(m)
    assert torch.allclose(pooled, m.pooled, atol=1e-9)
    for method in ("rie", "linear", "clamp"):
        covs = covariances(m, pooled, mix=0.0, method=method, least=0.0)
        assert torch.allclose(covs, m.cov, atol=1e-9)
        half = covariances(m, pooled, mix=0.5, method=method, least=0.0)
        assert torch.allclose(half, 0.5 * (pooled + m.cov), atol=1e-9)
        same = covariances(m, pooled, mix=1.0, method=method, least=0.0)
        assert torch.allclose(same, pooled.expand(C, D, D), atol=1e-9)


def test_classes_without_a_covariance_of_their_own_get_the_pooled_one() -> None:
    pooled_only = estimate(sums_of(*records([40, 30, 50]), POOLED), POOLED, 0.0)
    pooled = pooled_covariance(pooled_only)
    covs = covariances(pooled_only, pooled, mix=0.2, least=0.0)
    assert torch.allclose(covs, pooled.expand(C, D, D), atol=1e-9)
    covs[0] += 1  # copies, not views
    assert not torch.equal(covs[1], covs[0])
    absent = estimate(sums_of(*records([40, 30]), NOISY), NOISY, 0.0)
    pooled = pooled_covariance(absent)
    assert torch.allclose(covariances(absent, pooled, mix=0.0, least=0.0)[2], pooled, atol=1e-9)
