"""The noise law, and that the tests of it reject 10 % too little and 10 % too much."""

import math
import random
import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

import fedgist
from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy import noise as noise_module
from fedgist.privacy.noise import (
    MIN_SHARE_SCALE,
    SeededNoise,
    SystemNoise,
    noise_scales,
    noise_tensors,
    share_scale,
)
from fedgist.queries import MomentsQuery, SumQuery

QUERY = MomentsQuery(2.0, 6, 4)


def pmf(scale: float) -> tuple[np.ndarray, np.ndarray]:
    reach = math.ceil(14 * scale) + 2
    k = np.arange(-reach, reach + 1)
    w = np.exp(-0.5 * (k / scale) ** 2)
    return k, w / w.sum()


def follows(draws: Tensor, scale: float) -> bool:
    """Chi-square against the exact pmf, mean and variance; false alarms below 1e-6 each."""
    n = len(draws)
    k, p = pmf(scale)
    variance = float((k**2 * p).sum())
    fourth = float((k**4 * p).sum())
    x = draws.numpy().astype(float)
    if abs(x.mean()) > 5 * math.sqrt(variance / n):
        return False
    if abs((x**2).mean() - variance) > 5 * math.sqrt((fourth - variance**2) / n):
        return False
    edges = np.searchsorted(np.cumsum(p), np.linspace(0.02, 0.98, 25))
    bins = np.unique(np.concatenate([[-1], edges, [len(k) - 1]]))
    expected = np.add.reduceat(p, bins[:-1] + 1) * n
    observed, _ = np.histogram(draws.numpy(), bins=np.append(k[bins[:-1] + 1] - 0.5, k[-1] + 0.5))
    chi2 = ((observed - expected) ** 2 / expected).sum()
    return observed.sum() == n and bool(stats.chi2.sf(chi2, len(expected) - 1) > 1e-6)


def follows_normal(draws: Tensor, scale: float) -> bool:
    """For scales where a grid unit is nothing: Kolmogorov-Smirnov and variance."""
    x = draws.numpy() / scale
    n = len(x)
    return bool(stats.kstest(x, "norm").pvalue > 1e-6) and abs((x**2).mean() - 1) < 5 * math.sqrt(
        2 / n
    )


@pytest.mark.parametrize("scale", [0.3, 0.5, 1.0, 2.5, 10.0, 100.0])
def test_seeded_noise_is_the_discrete_gaussian(scale: float) -> None:
    draw: Callable[[float], Tensor] = lambda s: SeededNoise(7).sample(s, 100_000)  # noqa: E731
    assert draw(scale).dtype == torch.int64
    assert follows(draw(scale), scale)
    assert not follows(draw(0.9 * scale), scale)
    assert not follows(draw(1.1 * scale), scale)
    assert not follows(draw(scale) + max(1, round(scale / 10)), scale)


@pytest.mark.parametrize("scale", [0.5, 3.0, 40.0])
def test_system_noise_is_the_discrete_gaussian(scale: float) -> None:
    draw: Callable[[float], Tensor] = lambda s: SystemNoise().sample(s, 6_000)  # noqa: E731
    assert draw(scale).dtype == torch.int64
    assert follows(draw(scale), scale)
    assert not follows(draw(0.9 * scale), scale)
    assert not follows(draw(1.1 * scale), scale)


def test_the_rounded_gaussian_is_told_apart_where_it_differs() -> None:
    rng = np.random.default_rng(0)
    rounded = torch.from_numpy(np.rint(rng.normal(0, 0.5, 100_000)).astype(np.int64))
    assert float((rounded**2).double().mean()) == pytest.approx(0.3254, abs=0.01)
    assert not follows(rounded, 0.5)


@pytest.mark.parametrize("scale", [1e3, 3e4, 4e4, 1.5e5, 2e6, 1e9])
def test_big_scales(scale: float) -> None:
    sources: list[tuple[Callable[[float, int], Tensor], int]] = [
        (SeededNoise(3).sample, 100_000),
        (SystemNoise().sample, 6_000),
    ]
    for sample, n in sources:
        if n == 6_000 and scale not in (1e3, 1e9):
            continue
        assert follows_normal(sample(scale, n), scale)
        assert not follows_normal(sample(0.9 * scale, n), scale)
        assert not follows_normal(sample(1.1 * scale, n), scale)
        if scale == 1e9:
            assert int(sample(scale, n).abs().max()) > 2**31  # OpenDP's i32 would saturate


def test_no_simulation_needs_a_huge_table() -> None:
    noise_module._table.cache_clear()
    SeededNoise(0).sample(1e8, 10)
    assert noise_module._table.cache_info().currsize == 0
    values, _ = noise_module._table(noise_module._TABLE)
    assert values.nbytes < 8 * 2**20


def test_no_noise_and_no_numbers() -> None:
    for source in (SeededNoise(0), SystemNoise()):
        assert source.sample(0.0, 5).tolist() == [0] * 5
        assert source.sample(3.0, 0).shape == (0,)


def test_seeded_noise_repeats_and_system_noise_does_not() -> None:
    assert SeededNoise.seeded and not SystemNoise.seeded
    assert torch.equal(SeededNoise(5).sample(50.0, 40), SeededNoise(5).sample(50.0, 40))
    assert not torch.equal(SeededNoise(5).sample(50.0, 40), SeededNoise(6).sample(50.0, 40))
    one = SeededNoise(5)
    assert not torch.equal(one.sample(50.0, 40), one.sample(50.0, 40))
    draws = []
    for _ in range(2):
        torch.manual_seed(0)
        np.random.seed(0)
        random.seed(0)
        draws.append(SystemNoise().sample(1000.0, 40))
    assert not torch.equal(*draws)


def test_global_generators_are_left_alone() -> None:
    before = torch.get_rng_state(), np.random.get_state(legacy=True)[1].copy(), random.getstate()
    for source in (SeededNoise(1), SystemNoise()):
        source.sample(20.0, 100)
        source.sample(1e6, 100)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (np.random.get_state(legacy=True)[1] == before[1]).all()
    assert random.getstate() == before[2]


class Ruler:
    """A stand-in for noise whose every draw is its scale in thousandths."""

    seeded = True

    def sample(self, scale: float, size: int) -> Tensor:
        return torch.full((size,), round(1000 * scale))


def like(query: MomentsQuery, lead: tuple[int, ...] = ()) -> dict[str, Tensor]:
    return {
        k: torch.zeros(*lead, *shape, dtype=torch.int64)
        for k, shape in query.shapes(noised=True).items()
    }


def test_scales_are_those_of_the_joint_release() -> None:
    query = MomentsQuery(2.0, 6, 4, 0.4, 0.3, 0.2, 0.1, levels=100, count_weight=7)
    drawn = noise_tensors(query, 2.5, Ruler(), like(query))
    assert {k: tuple(v.shape) for k, v in drawn.items()} == query.shapes(noised=True)
    assert bool((drawn["count"] == round(1000 * 2.5 * 7 / math.sqrt(0.1))).all())
    assert bool((drawn["mean"] == round(1000 * 2.5 * 100 / math.sqrt(0.4))).all())
    for block, share in (("second", 0.3), ("pooled", 0.2)):
        full = 2.5 * 100**2 / math.sqrt(share)
        assert bool((drawn[block][..., :6] == round(1000 * full)).all())
        assert bool((drawn[block][..., 6:] == round(1000 * full / math.sqrt(2))).all())
    assert noise_scales(query, 2.5)["mean"] == (2.5 * 100 / math.sqrt(0.4),) * 2


def test_off_diagonal_noise_is_smaller_by_root_two() -> None:
    drawn = noise_tensors(QUERY, 1.0, SeededNoise(2), like(QUERY, (3000,)))
    plain, off = noise_scales(QUERY, 1.0)["second"]
    diagonal, upper = drawn["second"][..., :6].flatten(), drawn["second"][..., 6:].flatten()
    assert off == plain / math.sqrt(2)
    assert follows_normal(diagonal, plain) and follows_normal(upper, off)
    assert not follows_normal(upper, plain)
    assert follows(drawn["count"].flatten(), noise_scales(QUERY, 1.0)["count"][0])


def test_every_number_gets_noise_of_its_own() -> None:
    drawn = noise_tensors(QUERY, 5.0, SystemNoise(), like(QUERY))
    second = drawn["second"].flatten().tolist()
    # 84 draws out of some 500,000 values: one pair is equal once in 150 runs, three never
    assert len(set(second)) >= len(second) - 2
    again = noise_tensors(QUERY, 5.0, SystemNoise(), like(QUERY))
    assert not any(torch.equal(drawn[k], again[k]) for k in drawn)


def test_only_declared_exact_counts_go_without_noise() -> None:
    exact = MomentsQuery(1.0, 3, 2, 0.5, 0.3, 0.2, 0.0, exact_counts=True)
    assert not bool(noise_tensors(exact, 9.0, Ruler(), like(exact))["count"].any())
    rows = {"count": torch.zeros(4, dtype=torch.int64), "g": torch.zeros(2, 3, dtype=torch.int64)}
    drawn = noise_tensors(SumQuery(1.0, levels=10, scale=3.0), 2.0, Ruler(), rows)
    assert drawn["count"].tolist() == [60_000] * 4 and bool((drawn["g"] == 60_000).all())
    pooled = MomentsQuery(1.0, 3, 2, 0.7, 0.0, 0.28, 0.02)
    for block in ("second", "rows", "extra"):
        with pytest.raises(PrivacyError, match=f"Got '{block}', without noise"):
            noise_tensors(pooled, 1.0, Ruler(), {block: torch.zeros(2, 6, dtype=torch.int64)})


@pytest.mark.parametrize(("parties", "missing"), [(2, 0), (5, 2), (10, 9)])
def test_shares_sum_to_the_whole_noise(parties: int, missing: int) -> None:
    query = MomentsQuery(2.0, 6, 4, count_weight=20)
    sources = [SeededNoise(i) for i in range(parties)]
    drawn = [
        noise_tensors(query, 2.0, s, like(query, (600,)), parties=parties, missing=missing)
        for s in sources
    ]
    for arrived in {parties, parties - missing}:
        for block, (plain, off) in noise_scales(query, 2.0).items():
            total = torch.stack([d[block] for d in drawn[:arrived]]).sum(0)
            excess = math.sqrt(arrived / (parties - missing))
            head = total[..., : query.dim] if plain != off else total
            assert follows_normal(head.flatten(), plain * excess) or plain * excess < 300
            assert float((head.double() ** 2).mean()) == pytest.approx(
                (plain * excess) ** 2, rel=0.08
            )
            if plain != off:
                rest = total[..., query.dim :]
                assert follows_normal(rest.flatten(), off * excess)


def test_thin_shares_are_refused() -> None:
    assert share_scale(30.0, 100, 0) == MIN_SHARE_SCALE
    with pytest.raises(PrivacyError, match=r"at least 3.0 grid units. Got 2.99 for 100 parties"):
        share_scale(29.9, 100, 0)
    assert share_scale(29.9, 100, 30) == pytest.approx(29.9 / math.sqrt(70))
    with pytest.raises(PrivacyError, match="larger count_weight"):  # the count, before all others
        noise_tensors(QUERY, 0.53, SeededNoise(0), like(QUERY), parties=100)
    heavy = MomentsQuery(2.0, 6, 4, count_weight=9)
    noise_tensors(heavy, 0.53, SeededNoise(0), like(heavy), parties=100)
    for parties, missing in ((3, 3), (3, -1), (3, 7)):
        with pytest.raises(ConfigError, match="missing parties must be between 0 and 2"):
            share_scale(100.0, parties, missing)


def impossible(y: np.ndarray, gap: float) -> float:
    """The share of outputs that no float of the same type, added to ``gap``, can give."""
    near = y - y.dtype.type(gap)
    reach = np.zeros(len(y), bool)
    for step in (near, np.nextafter(near, np.inf), np.nextafter(near, -np.inf)):
        reach |= y.dtype.type(gap) + step.astype(y.dtype) == y
    return float(1 - reach.mean())


def test_float_noise_gives_neighbours_away_and_ours_does_not() -> None:
    gap = 1024
    rng = np.random.default_rng(0)
    for kind, least in ((np.float32, 0.3), (np.float64, 0.3)):
        naive = (1024 * rng.standard_normal(20_000)).astype(kind)
        assert impossible(naive, gap) > least  # outputs under f = 0 that f = 1024 cannot give
        assert impossible(naive + kind(gap), gap) == 0
    query = SumQuery(1.0, levels=1024)
    for source, size in ((SeededNoise(0), 20_000), (SystemNoise(), 4_000)):
        rows = {"rows": torch.zeros(size, dtype=torch.int64)}
        out = rows["rows"] + noise_tensors(query, 1.0, source, rows)["rows"]
        assert out.dtype == torch.int64
        values, _ = noise_module._table(1024.0)
        shifted = out - gap  # what the noise would have been under the neighbour
        assert bool(
            (torch.abs(shifted) <= int(values[-1])).all()
        )  # every integer is in its support
        assert impossible(out.numpy().astype(float), gap) == 0


def test_private_code_uses_no_global_generator_and_one_file_imports_opendp() -> None:
    root = Path(fedgist.__file__).parent
    for path in root.rglob("*.py"):
        text = path.read_text()
        where = path.relative_to(root).as_posix()
        assert not re.search(r"np\.random\.(?!default_rng\(|Generator)", text), where
        for package, home in (
            ("opendp", "privacy/noise.py"),
            ("dp_accounting", "privacy/accounting.py"),
        ):
            if re.search(rf"^\s*(import|from) {package}\b", text, re.M):
                assert where == home, f"{where} imports {package}"
