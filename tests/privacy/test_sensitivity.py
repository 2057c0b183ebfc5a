"""The sensitivity formula against a search over pairs of neighbours, through the real scales."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.privacy.accounting import epsilon_of, sensitivity, sigma_gaussian
from fedgist.privacy.noise import noise_scales
from fedgist.privacy.statistics import MomentSums, clip_to_grid, complete, to_triangle
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Adjacency

SHARES = [  # mean, class second moment, pooled second moment, count
    (0.5, 0.3, 0.18, 0.02),
    (0.3, 0.7, 0.0, 0.0),
    (0.5, 0.5, 0.0, 0.0),
    (0.7, 0.3, 0.0, 0.0),
    (0.7, 0.0, 0.28, 0.02),
    (0.9, 0.05, 0.04, 0.01),
    (0.1, 0.2, 0.6, 0.1),
    (0.98, 0.0, 0.0, 0.02),
]


def query_of(shares: tuple[float, float, float, float], d: int) -> MomentsQuery:
    mean, second, pooled, count = shares
    return MomentsQuery(1.0, d, 2, mean, second, pooled, count, exact_counts=count == 0)


def release(query: MomentsQuery, z: Tensor, labels: Tensor) -> Tensor:
    """What one record each of ``z`` ``[n, d]`` (norm <= 1) adds, in units of the noise: [n, D]."""
    scales = noise_scales(query, 1.0)
    u = z * query.levels
    outer = to_triangle(u[:, :, None] * u[:, None, :])
    one_hot = torch.nn.functional.one_hot(labels, query.classes).to(z.dtype)

    def scaled(block: str) -> Tensor:
        plain, off = scales[block]
        weight = torch.full((query.triangle,), off, dtype=z.dtype)
        weight[: query.dim] = plain
        return outer / weight

    parts = [one_hot[:, :, None] * u[:, None, :] / scales["mean"][0]]
    if query.second:
        parts.append(one_hot[:, :, None] * scaled("second")[:, None, :])
    if query.pooled:
        parts.append(scaled("pooled"))
    if not query.exact_counts:
        parts.append(one_hot * query.count_weight / scales["count"][0])
    return torch.cat([p.flatten(1) for p in parts], dim=1)


def into_ball(w: Tensor) -> Tensor:
    return w / w.norm(dim=-1, keepdim=True).clamp(min=1)


def largest(query: MomentsQuery, adjacency: Adjacency, seed: int) -> float:
    """The largest distance of neighbours that gradient ascent and a grid of angles find."""
    d, n = query.dim, 24
    rng = torch.Generator().manual_seed(seed)
    best = 0.0
    for first, second in {
        "add-remove": [(0, None)],
        "replace-same-class": [(0, 0)],
        "replace-one": [(0, 0), (0, 1)],
    }[adjacency]:

        def distance(pair: Tensor, first: int = first, second: int | None = second) -> Tensor:
            z = into_ball(pair)
            labels = torch.full((len(z),), first)
            out = release(query, z[:, 0], labels)
            if second is not None:
                out = out - release(query, z[:, 1], torch.full((len(z),), second))
            return out.norm(dim=1)

        angle = torch.linspace(0, math.pi, 721, dtype=torch.float64)
        grid = torch.zeros(len(angle), 2, d, dtype=torch.float64)
        grid[:, 0, 0], grid[:, 1, 0], grid[:, 1, 1] = 1, angle.cos(), angle.sin()
        best = max(best, float(distance(grid).max()))
        pair = torch.randn(n, 2, d, generator=rng, dtype=torch.float64).requires_grad_()
        for _ in range(25):
            values = distance(pair)
            best = max(best, float(values.detach().max()))
            (slope,) = torch.autograd.grad(values.sum(), pair)
            pair = (into_ball(pair) + 0.3 * slope).detach().requires_grad_()
    return best


@pytest.mark.parametrize("d", [2, 3, 8])
@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "replace-same-class"])
def test_formula_bounds_every_pair_and_is_attained(adjacency: Adjacency, d: int) -> None:
    for seed, shares in enumerate(SHARES):
        query = query_of(shares, d)
        formula = sensitivity(query, adjacency)
        if query.exact_counts and adjacency != "replace-same-class":
            assert formula == math.inf
            continue
        found = largest(query, adjacency, seed)
        assert found <= formula + 1e-9, shares
        assert found >= formula - 1e-3, shares


@settings(deadline=None, max_examples=25)
@given(st.lists(st.floats(0.01, 1), min_size=4, max_size=4), st.integers(0, 2**31))
def test_formula_bounds_random_shares(raw: list[float], seed: int) -> None:
    total = sum(raw)
    query = query_of(tuple(w / total for w in raw), 3)  # type: ignore[arg-type]
    rng = torch.Generator().manual_seed(seed)
    z = into_ball(torch.randn(400, 3, generator=rng, dtype=torch.float64))
    other = into_ball(torch.randn(400, 3, generator=rng, dtype=torch.float64))
    zeros = torch.zeros(400, dtype=torch.int64)
    here = release(query, z, zeros)
    assert float(here.norm(dim=1).max()) <= sensitivity(query, "add-remove") + 1e-9
    same = here - release(query, other, zeros)
    assert float(same.norm(dim=1).max()) <= sensitivity(query, "replace-same-class") + 1e-9
    cross = here - release(query, other, zeros + 1)
    assert float(cross.norm(dim=1).max()) <= sensitivity(query, "replace-one") + 1e-9


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 2**31), st.sampled_from([1, 2, 7, 128]), st.integers(1, 9))
def test_integer_records_stay_within_it(seed: int, levels: int, weight: int) -> None:
    """The same through clip_to_grid and MomentSums, for a data set with and without one record."""
    query = MomentsQuery(0.7, 5, 3, levels=levels, count_weight=weight)
    rng = torch.Generator().manual_seed(seed)
    scale = torch.rand(8, 1, generator=rng, dtype=torch.float64) * 3
    z = torch.randn(8, 5, generator=rng, dtype=torch.float64) * scale
    labels = torch.randint(0, 3, (8,), generator=rng).sort().values
    u = clip_to_grid(z, query.clip, query.levels)
    for adjacency, bound in (
        ("add-remove", 1.0),
        ("replace-one", sensitivity(query, "replace-one")),
    ):
        full, fewer = MomentSums(query), MomentSums(query)
        full.add(u[1:], labels[1:])
        if adjacency == "add-remove":
            fewer.add(u[2:], labels[2:])
        else:
            fewer.add(u[[0, *range(2, 8)]], labels[[0, *range(2, 8)]])
        a, b = complete(query, full.tensors()), complete(query, fewer.tensors())
        square = 0.0
        for name, (plain, off) in noise_scales(query, 1.0).items():
            gap = (a[name] - b[name]).to(torch.float64)
            weights = torch.full(gap.shape[-1:], off, dtype=torch.float64)
            weights[: query.dim] = plain
            square += float(((gap / weights) ** 2).sum())
        assert math.sqrt(square) <= bound + 1e-9


def test_a_group_counts_in_full() -> None:
    query = query_of(SHARES[0], 3)
    one = release(query, torch.tensor([[1.0, 0, 0]], dtype=torch.float64), torch.tensor([0]))
    for k in (1, 2, 7):
        assert float((k * one).norm()) == pytest.approx(sensitivity(query, "add-remove", k))
        for adjacency in ("replace-one", "replace-same-class"):
            assert sensitivity(query, adjacency, k) == k * sensitivity(query, adjacency)
    with pytest.raises(ConfigError, match=r"records per unit must be at least 1\. Got 0"):
        sensitivity(query, "add-remove", 0)


@pytest.mark.parametrize(("mean", "same"), [(0.3, 1.4368), (0.5, 1.5), (0.7, 1.6733)])
def test_published_values(mean: float, same: float) -> None:
    query = query_of((mean, 1 - mean, 0, 0), 8)
    assert sensitivity(query, "replace-same-class") == pytest.approx(same, abs=5e-5)
    noisy = query_of((mean * 0.98, (1 - mean) * 0.98, 0, 0.02), 8)
    assert sensitivity(noisy, "replace-one") >= math.sqrt(2)
    assert sensitivity(query_of((0.02, 0.02, 0.02, 0.94), 8), "replace-one") == math.sqrt(2)


def test_limits() -> None:
    mean_only = MomentsQuery(1.0, 4, 2, 1.0, 0, 0, 0, exact_counts=True)
    assert sensitivity(mean_only, "replace-same-class") == 2
    mostly_second = MomentsQuery(1.0, 4, 2, 1e-9, 1 - 1e-9, 0, 0, exact_counts=True)
    assert sensitivity(mostly_second, "replace-same-class") == pytest.approx(math.sqrt(2), abs=1e-6)
    for per_class in (False, True):
        q = SumQuery(3.0, per_class=per_class)
        assert sensitivity(q, "add-remove") == 1
        assert sensitivity(q, "replace-one") == sensitivity(q, "replace-same-class") == 2


@pytest.mark.parametrize(
    ("epsilon", "cross", "same"), [(10, 15.46, 16.68), (3, 4.46, 4.78), (1, 1.465, 1.564)]
)
def test_a_release_for_add_remove_read_under_replacement(
    epsilon: float, cross: float, same: float
) -> None:
    sigma = sigma_gaussian(epsilon, 1e-5)
    query = query_of((0.5, 0.5, 0, 0), 8)
    by_class = sensitivity(query, "replace-same-class")
    assert epsilon_of(sigma / by_class, 1e-5, "gaussian") == pytest.approx(same, abs=6e-3)
    assert epsilon_of(sigma / math.sqrt(2), 1e-5, "gaussian") == pytest.approx(cross, abs=6e-3)
