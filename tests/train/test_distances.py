"""Distances against closed forms; each with the mistake that is easily made and must show."""

from __future__ import annotations

import math

import pytest
import torch

from fedgist.encoders import load_encoder
from fedgist.errors import DataError
from fedgist.train.distances import compare, density_coverage, frechet, kid, public_features, room
from fedgist.types import Images

pytestmark = pytest.mark.usefixtures("one_thread")


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def normal(n, d, seed=0, dtype=torch.float64):
    return torch.randn(n, d, generator=rng(seed), dtype=dtype)


def exact(mean, cov, n=40):
    """Return points whose sample mean and covariance are the ones given."""
    mean, cov = (torch.tensor(v, dtype=torch.float64) for v in (mean, cov))
    x = normal(n, len(mean))
    x = x - x.mean(0)
    root = torch.linalg.cholesky(torch.cov(x.T).view(len(mean), -1))
    white = torch.linalg.solve_triangular(root, x.T, upper=False).T
    return white @ torch.linalg.cholesky(cov).T + mean


def test_frechet_of_gaussians_that_share_their_axes():
    a = exact([0.0, 0, 0], [[1.0, 0, 0], [0, 4, 0], [0, 0, 9]])
    b = exact([1.0, 2, 0], [[4.0, 0, 0], [0, 1, 0], [0, 0, 9]], n=60)
    # ‖Δ‖² + Σ (√a - √b)²; without the cross term it would be 5 + 28
    assert frechet(a, b) == pytest.approx(5 + 1 + 1)
    assert frechet(b, a) == pytest.approx(frechet(a, b))
    assert frechet(a, a) == pytest.approx(0, abs=1e-9)


def test_frechet_of_gaussians_that_do_not():
    """In two dimensions tr (AB)^½ = √(tr AB + 2 √det AB); elementwise roots would be off."""
    a, b = [[2.0, 1], [1, 3]], [[5.0, -2], [-2, 1.5]]
    first, second = (torch.tensor(m, dtype=torch.float64) for m in (a, b))
    product = first @ second
    cross = math.sqrt(float(product.trace()) + 2 * math.sqrt(float(torch.linalg.det(product))))
    want = float(first.trace() + second.trace()) - 2 * cross
    assert frechet(exact([0.0, 0], a), exact([0.0, 0], b)) == pytest.approx(want)
    elementwise = float((first.sqrt() - second.abs().sqrt()).square().sum())
    assert abs(want - elementwise) > 0.1


def test_frechet_survives_a_covariance_without_full_rank():
    flat = torch.cat([normal(30, 2), torch.zeros(30, 3, dtype=torch.float64)], 1)
    assert frechet(flat, flat + 1) == pytest.approx(5)
    assert frechet(normal(30, 1), normal(30, 1) + 2) == pytest.approx(4)


def cubed(mean, var, third):
    """Return E (xy + 1)³ for independent x, y in one dimension, from pairs of raw moments."""
    return 1 + 3 * mean + 3 * var + third


def test_kid_is_unbiased_and_its_error_honest():
    """x ~ N(0, 1), y ~ N(1, 4) in one dimension, against the moments: MMD² = 3·1 + 3·16 + 169."""
    x2, y1, y2, y3 = 1.0, 1.0, 5.0, 13.0
    want = cubed(0, x2 * x2, 0) + cubed(y1 * y1, y2 * y2, y3 * y3) - 2 * cubed(0, x2 * y2, 0)
    off = []
    for seed in range(30):
        x = normal(2000, 1, 2 * seed)
        y = 2 * normal(2000, 1, 2 * seed + 1) + 1
        value, error = kid(x, y, rng(seed))
        off.append((value - want) / error)
    off = torch.tensor(off)
    assert abs(float(off.mean())) < 0.6 and 0.7 < float(off.std()) < 1.7


def test_kid_of_equal_distributions_is_zero_on_average_and_a_biased_one_is_not():
    values = torch.tensor([kid(normal(400, 8, 2 * s), normal(400, 8, 2 * s + 1), rng(s))
                           for s in range(30)], dtype=torch.float64)  # fmt: skip
    mean, error = float(values[:, 0].mean()), float(values[:, 0].std()) / 30**0.5
    assert abs(mean) < 4 * error
    assert float(values[:, 0].min()) < 0  # clamped at zero it would be biased
    # with the diagonal, blocks of 40 add 2 (E k(x, x) - E k(x, y)) / 40 = 2 (E (1 + q)³ - E) / 40
    q = normal(100_000, 8, 9).square().sum(1) / 8
    biased = 2 * (float(((1 + q) ** 3).mean()) - (1 + 3 / 8)) / 40
    assert biased > 8 * error


def test_kid_of_one_point_each():
    a = torch.tensor([[1.0, 0]], dtype=torch.float64).repeat(40, 1)
    b = torch.tensor([[0.0, 2]], dtype=torch.float64).repeat(50, 1)
    value, error = kid(a, b, rng())
    assert value == pytest.approx(1.5**3 + 3**3 - 2) and error == pytest.approx(0, abs=1e-9)
    assert kid(a[:19], b, rng()) == (None, None)


def test_density_and_coverage_of_equal_distributions():
    """E coverage = 1 - Π (N - i)/(M + N - i), i = 1..k (Naeem et al.), and E density = 1.

    A neighbourhood that counts the image itself would reach to its (k-1)-th neighbour only.
    """
    n, k = 40, 5
    found = torch.tensor(
        [density_coverage(normal(n, 3, 2 * s), normal(n, 3, 2 * s + 1), k) for s in range(200)],
        dtype=torch.float64,
    )
    mean, error = found.mean(0), found.std(0) / 200**0.5

    def expected(k):
        return 1 - math.prod((n - i) / (2 * n - i) for i in range(1, k + 1))

    assert abs(float(mean[0]) - 1) < 4 * float(error[0])
    assert abs(float(mean[1]) - expected(k)) < 4 * float(error[1])
    assert abs(float(mean[1]) - expected(k - 1)) > 6 * float(error[1])


def test_density_and_coverage_by_hand():
    real = torch.arange(6.0, dtype=torch.float64)[:, None]  # radii to the nearest: all 1
    other = torch.tensor([[0.5], [2.0], [99.0], [99.0]], dtype=torch.float64)
    density, coverage = density_coverage(real, other, k=1)
    assert density == pytest.approx((2 + 3) / 4) and coverage == pytest.approx(4 / 6)


def test_few_images_are_not_given_a_frechet_distance():
    assert room(98, 1000, 512) == 0 and room(100, 1000, 512) == 5 and room(1000, 10000, 512) == 50
    few = compare(normal(98, 64), normal(1000, 64, 1), rng())
    assert few.frechet is None and few.frechet_floor is None and few.dimensions == 0
    assert few.kid is not None and few.coverage is not None
    handful = compare(normal(8, 4), normal(9, 4, 1), rng())
    assert (handful.kid, handful.coverage, handful.frechet) == (None, None, None)
    assert compare(normal(1, 4), normal(9, 4, 1), rng()).n == 0


def test_floors_are_what_equal_distributions_show():
    found = compare(normal(600, 64), normal(900, 64, 1), rng())
    assert (found.n, found.dimensions) == (300, 30)
    assert found.frechet_floor > 1  # sampled from one distribution, yet far from 0
    assert found.frechet == pytest.approx(found.frechet_floor, rel=0.2)
    assert abs(found.kid) < 4 * found.kid_error
    assert found.coverage == pytest.approx(found.coverage_floor, abs=0.05)
    assert found.density == pytest.approx(found.density_floor, abs=0.15)
    far = compare(normal(600, 64), 1.5 * normal(900, 64, 1) + 0.5, rng())
    assert far.frechet > 5 * far.frechet_floor and far.kid > 8 * far.kid_error
    assert far.coverage < 0.5 * far.coverage_floor


def test_dropped_modes_cost_coverage_not_density():
    centres = 20 * torch.eye(4, dtype=torch.float64)
    real = normal(800, 4) + centres.repeat(200, 1)
    kept = normal(800, 4, 1) + centres[:1]
    found = compare(real, kept, rng())
    assert found.coverage < 0.3 and found.density > 0.7


def test_features_come_by_public_variance_and_in_its_units():
    g = rng(3)
    images = Images(
        torch.randint(0, 256, (30, 1, 28, 28), generator=g, dtype=torch.uint8),
        torch.arange(30) % 2,
        ("a", "b"),
    )
    for name in ("pca", "scattering:64"):
        encoder = load_encoder(name)
        public = encoder.public
        found = public_features(encoder, images)
        codes = encoder.encode_task(images.floats())
        unit = float(public.values.mean())
        # a turn and one factor: lengths stay, and the first direction is the widest in public
        assert found.square().sum() * unit == pytest.approx(
            float((codes - public.mean).square().sum()), rel=1e-6
        )
        widest = public.vectors[:, public.values.argmax()]
        assert torch.allclose(found[:, 0] * unit**0.5, (codes - public.mean) @ widest)


def test_what_is_no_pair_of_features_is_refused():
    for a, b in (
        (normal(5, 3), normal(5, 4)),
        (normal(5, 3), normal(0, 3)),
        (normal(5, 3), torch.full((5, 3), math.nan, dtype=torch.float64)),
    ):
        for measure in (frechet, density_coverage, lambda a, b: compare(a, b, rng())):
            with pytest.raises(DataError, match="must"):
                measure(a, b)
    with pytest.raises(DataError, match="more than 5"):
        density_coverage(normal(5, 3), normal(5, 3))
    with pytest.raises(DataError, match="at least 2"):
        frechet(normal(1, 3), normal(5, 3))
