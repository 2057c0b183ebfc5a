"""What distilled images begin with: sums of bounded rows, and draws that follow them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedgist.methods._distil import Canvas
from fedgist.methods._start import KEPT, Beginning
from fedgist.methods.collab_dm import CollabDM
from fedgist.privacy.client import Client
from fedgist.privacy.noise import SeededNoise
from fedgist.privacy.statistics import from_triangle
from fedgist.types import Images, Round, Task

TASK = Task("t", ("a", "b"), channels=1, size=28, max_images=10_000)
COLOUR = Task("t", ("a", "b"), channels=3, size=12, max_images=10_000)


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def sums(begin: Beginning, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    """Exact sums on a grid so fine that rounding does not show."""
    out = {}
    for q in begin.queries:
        rows = begin.rows(q)(x).double() * (q.levels / q.clip)
        total = torch.zeros(q.shape, dtype=torch.float64)
        out[q.name] = total.index_add_(0, y, rows) if q.per_class else rows.sum(0)
    return out


def noised(
    begin: Beginning, exact: dict[str, Tensor], sigma: float, g: torch.Generator
) -> dict[str, Tensor]:
    return {
        q.name: exact[q.name]
        + torch.randn(exact[q.name].shape, generator=g) * sigma * q.scale * q.levels
        for q in begin.queries
    }


def codes(begin: Beginning, x: Tensor) -> Tensor:
    return begin.rows(begin.queries[1])(x).double()


def smooth(n: int, task: Task) -> tuple[Tensor, Tensor]:
    """Images well inside the range whose classes differ in mean, with a few directions."""
    begin = Beginning(task, Canvas())
    d = begin.queries[1].shape[1]
    y = torch.arange(n) % 2
    scale = torch.zeros(d)
    scale[:4] = torch.tensor([0.4, 0.3, 0.2, 0.1])
    z = torch.randn(n, d, generator=rng(1)) * scale
    z[:, 1] += 0.5 * (2 * y - 1)
    side = begin.canvas.tile(task)
    tiles = (z.unflatten(1, (task.channels, -1)) @ begin._cosines).unflatten(2, (side, side))
    return 0.5 + torch.nn.functional.interpolate(tiles, scale_factor=2, mode="nearest"), y


@pytest.mark.parametrize("task", [TASK, COLOUR, replace(COLOUR, size=6)], ids=str)
@pytest.mark.parametrize("factor", [1, 2])
def test_no_record_is_longer_than_the_bound(task: Task, factor: int) -> None:
    begin = Beginning(task, Canvas(2, factor))
    shape = (40, task.channels, task.size, task.size)
    x = torch.cat(
        [torch.zeros(1, *shape[1:]), torch.ones(1, *shape[1:]), torch.rand(shape, generator=rng())]
    )
    x = torch.cat([x, (torch.rand(shape, generator=rng(2)) > 0.5).float()])
    z = codes(begin, x)
    kept = min(KEPT, begin.canvas.tile(task) ** 2)
    assert z.shape[1] == kept * task.channels
    for q in begin.queries:
        rows = begin.rows(q)(x)
        assert rows.shape == (len(x), q.row)
        assert float(rows.norm(dim=1).max()) <= q.clip * (1 + 1e-5)
    # black and white images reach it: a tighter bound would be wrong
    assert float(z[:2].norm(dim=1).min()) == pytest.approx(begin.queries[1].clip, rel=1e-5)
    products = begin.rows(begin.queries[2])(x).double()
    assert torch.allclose(products.norm(dim=1), z.norm(dim=1) ** 2, rtol=1e-5)


def test_the_cosines_are_those_of_the_lowest_frequencies() -> None:
    begin = Beginning(TASK, Canvas())
    basis = begin._cosines
    assert torch.allclose(basis @ basis.T, torch.eye(KEPT), atol=1e-5)
    assert torch.allclose(basis[0], torch.full((196,), 1 / 14.0))
    i = (torch.arange(14) + 0.5) * math.pi / 14
    first = torch.outer(torch.ones(14), torch.cos(i)) * math.sqrt(2) / 14
    assert torch.allclose(basis[1].view(14, 14), first, atol=1e-6)
    f = begin._lowest[0]
    assert f[0] == 0 and (f.diff() >= 0).all() and f[-1] <= 7**2


def test_without_noise_draws_have_the_means_and_the_covariance_of_the_records() -> None:
    begin = Beginning(TASK, Canvas(per_class=1500))
    x, y = smooth(4000, TASK)
    counts, free = begin.draw(sums(begin, x, y), 0.0, rng())
    assert counts.tolist() == [2000, 2000] and free.shape == (2, 6000, 1, 14, 14)
    z = codes(begin, x)
    drawn = codes(begin, torch.nn.functional.interpolate(free.flatten(0, 1), scale_factor=2))
    drawn = drawn.view(2, 6000, -1)
    mean = torch.stack([z[y == c].mean(0) for c in (0, 1)])
    assert torch.allclose(drawn.mean(1), mean, atol=0.03)
    within = torch.cat([z[y == c] - mean[c] for c in (0, 1)])
    made = (drawn - drawn.mean(1, keepdim=True)).flatten(0, 1)
    assert torch.allclose(made.T @ made / 12000, within.T @ within / 4000, atol=0.01)


def test_noise_of_the_moments_is_taken_out() -> None:
    """On average over noise, what is estimated is the covariance, not that plus the noise."""
    begin = Beginning(TASK, Canvas())
    x, y = smooth(4000, TASK)
    exact = sums(begin, x, y)
    _, mean_query, spread = begin.queries
    n, d = torch.tensor([2000.0, 2000.0], dtype=torch.float64), mean_query.shape[1]
    z = codes(begin, x)
    true = sum((z[y == c] - z[y == c].mean(0)).T @ (z[y == c] - z[y == c].mean(0)) for c in (0, 1))
    true = true / 4000
    sigma, traces, errors = 2.0, [], []
    unit = spread.clip / spread.levels
    for seed in range(20):
        noisy = noised(begin, exact, sigma, rng(seed))
        mean = noisy["mean"] * (mean_query.clip / mean_query.levels) / n[:, None]
        std = sigma * mean_query.scale * mean_query.clip / n
        made = begin._covariance(
            noisy["spread"] * unit, sigma * spread.scale * spread.clip, n, mean, std
        )
        assert float(torch.linalg.eigvalsh(made).min()) > 0
        traces.append(float(made.trace()))
        raw = from_triangle(noisy["spread"] * unit / 4000) - mean.T @ mean / 2
        errors.append((float((made - true).norm()), float((raw - true).norm())))
    # nothing is trusted below a least variance; above it the size is that of the records
    assert sum(traces) / 20 == pytest.approx(max(float(true.trace()), 0.005 * 196), rel=0.35)
    assert all(a < b for a, b in errors)
    assert d == KEPT


def test_drowned_in_noise_images_are_images_still() -> None:
    begin = Beginning(TASK, Canvas(per_class=50))
    x, y = smooth(20, TASK)
    exact = sums(begin, x, y)
    _, free = begin.draw(noised(begin, exact, 1e4, rng(3)), 1e4, rng())
    assert bool(free.isfinite().all()) and 0 <= float(free.min()) <= float(free.max()) <= 1


def test_with_one_more_query_the_budget_is_that_of_one() -> None:
    for kind, many in (("gaussian", 3), ("noise", 1)):
        begin = Beginning.beside(TASK, Canvas(), kind)  # type: ignore[arg-type]
        scales = [q.scale for q in begin.queries]
        assert len(scales) == many
        assert begin.whole**-2 + sum(s**-2 for s in scales) == pytest.approx(1)
    (rnd,) = CollabDM(nets=1, width=4).plan(TASK)
    assert sum(q.scale**-2 for q in rnd.queries) == pytest.approx(1)


def test_a_client_releases_once_and_begins() -> None:
    begin = Beginning(TASK, Canvas(), rates=(1.0,))
    x, y = smooth(400, TASK)
    images = Images((x.clamp(0, 1) * 255).round().to(torch.uint8), y, TASK.classes)
    rnd = Round("pool", begin.queries)
    guard = Client("c", images, rnd, sigma=1.0, noise=SeededNoise(0), max_images=500)
    counts, free = begin.begin(guard, rng())
    assert free.shape == (2, 12, 1, 14, 14)
    assert counts.tolist() == pytest.approx([200, 200], abs=40) and counts.tolist() != [200, 200]


def test_the_grid_is_coarse_enough_for_strong_noise() -> None:
    """Rounded Gaussians have at most 65,536 grid units: at ε = 1 multipliers come to fifteen."""
    for q in Beginning(TASK, Canvas(), rates=(1.0,)).queries:
        assert 30 * q.scale * q.levels <= 65_536
