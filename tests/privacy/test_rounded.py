"""The rounded Gaussian: its table against mpmath, its draws bit by bit and by chi-square."""

import bisect
import math
import os
import random
import struct
from collections.abc import Callable
from decimal import Context, Decimal, localcontext

import mpmath
import numpy as np
import pytest
from scipy import special, stats

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy import rounded
from fedgist.privacy.rounded import (
    MAX_SCALE,
    MIN_SCALE,
    Table,
    chosen,
    rounded_gaussian,
    simulated,
    table,
)

ONE = 2**124
LOW = 2**62 - 1
N = 200_000


def seeded(seed: int = 0) -> Callable[[int], bytes]:
    return random.Random(seed).randbytes


def never(n: int) -> bytes:
    raise AssertionError("no randomness is needed")


def entries(law: Table) -> list[int]:
    return [(int(h) << 62) + int(low) for h, low in zip(law.high, law.low, strict=True)]


def law_of(values: list[int]) -> Table:
    return Table(
        np.array([v >> 62 for v in values], dtype=np.uint64),
        np.array([v & LOW for v in values], dtype=np.uint64),
    )


def words_of(pairs: list[tuple[int, int]]) -> Callable[[int], bytes]:
    """A source that gives, per (124-bit number, sign), its two words."""
    raw = b"".join(struct.pack("<QQ", (r >> 62) << 2 | sign, (r & LOW) << 2) for r, sign in pairs)
    assert all(0 <= r < ONE for r, _ in pairs)
    return lambda n: raw if n == len(raw) else b""


def exact(scale: float, k: int) -> mpmath.mpf:
    """P(|K| ≤ k); call it inside mpmath.workprec(300)."""
    return mpmath.erf((k + mpmath.mpf("0.5")) / (mpmath.mpf(scale) * mpmath.sqrt(2)))


def follows(draws: np.ndarray, scale: float) -> bool:
    """Chi-square against the exact pmf, one cell per integer; false alarms below 1e-6."""
    edge = math.ceil(9 * scale) + 1
    k = np.arange(-edge, edge + 1)
    near, far = (np.abs(k) - 0.5) / scale, (np.abs(k) + 0.5) / scale
    p = special.ndtr(-near) - special.ndtr(-far)
    p[edge] = special.erf(0.5 / scale / math.sqrt(2))
    inner = k[p * len(draws) >= 20]
    lo, hi = inner[0], inner[-1]
    clipped = np.clip(draws, lo - 1, hi + 1) - lo + 1
    observed = np.bincount(clipped, minlength=hi - lo + 3)
    outside = special.ndtr((lo - 0.5) / scale)
    expected = len(draws) * np.concatenate([[outside], p[lo + edge : hi + edge + 1], [outside]])
    chi2 = ((observed - expected) ** 2 / expected).sum()
    return bool(stats.chi2.sf(chi2, len(expected) - 1) > 1e-6)


@pytest.mark.parametrize("scale", [0.5, 3.0, 40.0])
def test_draws_follow_the_law(scale: float) -> None:
    draws = rounded_gaussian(scale, N, seeded())
    assert draws.dtype == np.int64 and draws.shape == (N,)
    assert follows(draws, scale)
    assert not follows(rounded_gaussian(0.97 * scale, N, seeded()), scale)
    assert not follows(rounded_gaussian(1.03 * scale, N, seeded()), scale)
    assert follows(simulated(scale, N, np.random.default_rng(0)), scale)


def wrong_table(scale: float, kind: str) -> Table:
    last = len(table(scale).high) - 1
    with mpmath.workprec(300):
        c = 1 / (mpmath.mpf(scale) * mpmath.sqrt(2))
        if kind == "no half":
            below = [mpmath.erf(k * c) for k in range(last + 1)]
        elif kind == "other half":
            below = [mpmath.erf((k + 1) * c) for k in range(last + 1)]
        else:  # zero has a sign too, or only half of its draws count
            zero = exact(scale, 0) * (2 if kind == "zero doubled" else mpmath.mpf("0.5"))
            below = [zero + exact(scale, k) - exact(scale, 0) for k in range(last + 1)]
            below = [b / below[-1] for b in below]
    return law_of([int(b * ONE) for b in below[:-1]] + [ONE])


@pytest.mark.parametrize("kind", ["no half", "other half", "zero doubled", "zero halved"])
@pytest.mark.parametrize("scale", [0.5, 3.0, 40.0])
def test_wrong_tables_are_caught(scale: float, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = wrong_table(scale, kind)
    monkeypatch.setattr(rounded, "table", lambda _: wrong)
    assert not follows(rounded_gaussian(scale, N, seeded()), scale)


def test_a_sign_taken_from_the_magnitudes_bits_is_caught() -> None:
    w = np.frombuffer(seeded()(16 * N), dtype="<u8").reshape(N, 2)
    magnitude = table(3.0).invert(w[:, 0] >> np.uint64(2), w[:, 1] >> np.uint64(2))
    for bit, good in ((0, True), (63, False), (62, False), (60, False)):
        sign = 1 - 2 * (w[:, 0] >> np.uint64(bit) & np.uint64(1)).astype(np.int64)
        assert follows(magnitude * sign, 3.0) is good


@pytest.mark.parametrize(("scale", "variance"), [(0.5, 0.3254), (4.0, 16 + 1 / 12)])
def test_variance(scale: float, variance: float) -> None:
    below = np.array([e / ONE for e in entries(table(scale))])
    p = np.diff(below, prepend=0.0)
    assert (p * np.arange(len(p)) ** 2).sum() == pytest.approx(variance, abs=5e-5)
    for draws in (
        rounded_gaussian(scale, N, seeded(1)),
        simulated(scale, N, np.random.default_rng(1)),
    ):
        assert draws.var() == pytest.approx(variance, rel=0.02)
        assert abs(draws.mean()) < 5 * math.sqrt(variance / N)


@pytest.mark.parametrize("scale", [MIN_SCALE, 0.25, 0.5, 1.0, 3.0, 40.0, 100.3, 1500.0, 20000.0])
def test_table_entries_are_those_of_erf(scale: float) -> None:
    got = entries(table(scale))
    last = len(got) - 1
    assert last == math.ceil(scale * math.sqrt(2 * 126 * math.log(2))) + 1
    assert got == sorted(got) and got[-1] == ONE
    random_places = random.Random(0).sample(range(last), min(last, 30))
    places = {*random_places, *range(min(last, 10)), *range(max(last - 5, 0), last)}
    with mpmath.workprec(300):
        for k in places:
            # Rounded down; the 2^-15 allows for the arithmetic, 2^-147 at most.
            assert -(2.0**-15) < exact(scale, k) * ONE - got[k] < 1 + 2.0**-15
        assert 1 - exact(scale, last) < mpmath.mpf(2) ** -129


@pytest.mark.parametrize("scale", [MIN_SCALE, 0.5, 3.0, 40.0, 20000.0])
def test_the_series_is_cut_as_late_as_the_docstring_says(scale: float) -> None:
    last = math.ceil(scale * math.sqrt(2 * 126 * math.log(2))) + 1
    with localcontext(Context(prec=64)):
        a = 1 / (8 * Decimal(scale) ** 2)
        powers = [(4 * a * last) ** (2 * m) for m in range(1000)]
        coefficients = rounded._coefficients(a, last)
        got = sum(c * y for c, y in zip(coefficients, powers, strict=False))
    with mpmath.workprec(300):
        s = mpmath.mpf(scale)
        with mpmath.workprec(3000):  # the difference cancels far out
            p = exact(scale, last) - exact(scale, last - 1)
        # P(|K| = k) = 2·e^(-k²/2s²)/(s√2π) · series
        true = p * s * mpmath.sqrt(2 * mpmath.pi) * mpmath.exp(last**2 / (2 * s**2)) / 2
        assert abs(mpmath.mpf(str(got)) / true - 1) < mpmath.mpf(10) ** -44


@pytest.mark.parametrize("scale", [0.5, 3.0, 40.0])
def test_total_variation_stays_within_the_bound(scale: float) -> None:
    law = table(scale)
    got = [0, *entries(law)]
    with mpmath.workprec(300):
        true = [mpmath.mpf(0)] + [exact(scale, k) for k in range(len(got) - 1)]
        pairs = zip(np.diff(true), np.diff(np.array(got, dtype=object)), strict=True)
        distance = (sum(abs(p - mpmath.mpf(q) / ONE) for p, q in pairs) + 1 - true[-1]) / 2
    assert distance < law.distance < 100 * distance
    assert law.distance == (len(law.high) + 1) * 2.0**-125


def test_every_draw_is_the_least_k_whose_entry_exceeds_it() -> None:
    for scale in (0.5, 3.0):
        got = entries(table(scale))
        expected, pairs = [], []
        for k, entry in enumerate(got):
            before = got[k - 1] if k else 0
            if before == entry:
                continue
            for r in {before, entry - 1}:
                for sign in (0, 1):
                    pairs.append((r, sign))
                    expected.append(-k if sign else k)
        assert rounded_gaussian(scale, len(pairs), words_of(pairs)).tolist() == expected


def test_a_big_table_is_searched_as_bisection_of_whole_numbers_does() -> None:
    rng = random.Random(6)
    pairs = [(rng.getrandbits(124), rng.getrandbits(1)) for _ in range(5_000)]
    pairs += [(ONE - 1 - rng.getrandbits(rng.randrange(1, 100)), 1) for _ in range(5_000)]  # tails
    got = entries(table(1500.0))
    expected = [bisect.bisect_right(got, r) * (-1 if sign else 1) for r, sign in pairs]
    assert rounded_gaussian(1500.0, len(pairs), words_of(pairs)).tolist() == expected


def test_equal_high_halves_are_settled_by_the_low_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = 5 << 62, 9 << 62
    law = law_of([a + 3, a + 3, a + 7, a + LOW, b, b + 1, ONE])
    monkeypatch.setattr(rounded, "table", lambda _: law)
    cases = [
        (0, 0), (a - 1, 0), (a, 0), (a + 2, 0), (a + 3, 2), (a + 6, 2), (a + 7, 3),
        (a + LOW - 1, 3), (a + LOW, 4), (b - 1, 4), (b, 5), (b + 1, 6), (b + LOW, 6), (ONE - 1, 6),
    ]  # fmt: skip
    got = rounded_gaussian(1.0, len(cases), words_of([(r, 1) for r, _ in cases]))
    assert got.tolist() == [-k for _, k in cases]


def test_all_zeros_and_all_ones() -> None:
    assert rounded_gaussian(40.0, 3, lambda n: bytes(n)).tolist() == [0, 0, 0]
    top = next(k for k, e in enumerate(entries(table(40.0))) if e == ONE)
    assert rounded_gaussian(40.0, 2, lambda n: b"\xff" * n).tolist() == [-top, -top]


def test_a_draw_reads_only_its_own_126_bits() -> None:
    raw = bytearray(seeded(3)(16 * 50))
    before = rounded_gaussian(40.0, 50, lambda n: bytes(raw))
    for i in range(50):
        raw[16 * i] ^= 2  # word 1, bit 1
        raw[16 * i + 8] ^= 3  # word 2, bits 0 and 1
    assert (rounded_gaussian(40.0, 50, lambda n: bytes(raw)) == before).all()
    for i in range(50):
        raw[16 * i] ^= 1
    assert (rounded_gaussian(40.0, 50, lambda n: bytes(raw)) == -before).all()


def test_chunks_change_nothing_and_bound_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = rounded_gaussian(40.0, 100, seeded(2))
    asked: list[int] = []
    source = seeded(2)

    def words(n: int) -> bytes:
        asked.append(n)
        return source(n)

    # randbytes gives the same stream in pieces of whole 4-byte words.
    monkeypatch.setattr(rounded, "_CHUNK", 7)
    assert (rounded_gaussian(40.0, 100, words) == whole).all()
    assert asked == [16 * 7] * 14 + [16 * 2]


def test_the_operating_systems_randomness() -> None:
    one, two = (rounded_gaussian(1500.0, 20_000, os.urandom) for _ in range(2))
    assert (one != two).mean() > 0.99
    assert one.std() == pytest.approx(1500.0, rel=0.03)
    state = random.getstate(), np.random.get_state(legacy=True)[1].copy()
    rounded_gaussian(40.0, 100, os.urandom)
    chosen(np.full(10, 0.5), os.urandom)
    assert random.getstate() == state[0]
    assert (np.random.get_state(legacy=True)[1] == state[1]).all()


def test_a_source_that_falls_short_is_refused() -> None:
    for give in (lambda n: bytes(n - 1), lambda n: bytes(n + 8), lambda n: b""):
        with pytest.raises(PrivacyError, match="random source must return 160 bytes"):
            rounded_gaussian(3.0, 10, give)
        with pytest.raises(PrivacyError, match="random source must return 80 bytes"):
            chosen(np.full(10, 0.5), give)


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf, MIN_SCALE / 2, 1.01 * MAX_SCALE])
def test_bad_scales_are_refused(scale: float) -> None:
    with pytest.raises(ConfigError, match="scale"):
        table(scale)
    with pytest.raises(ConfigError, match="scale"):
        rounded_gaussian(scale, 0, never)
    with pytest.raises(ConfigError, match="scale"):
        simulated(scale, 1, np.random.default_rng(0))


def test_sizes() -> None:
    assert rounded_gaussian(3.0, 0, never).shape == (0,)
    assert simulated(3.0, 0, np.random.default_rng(0)).dtype == np.int64
    for draw in (
        lambda: rounded_gaussian(3.0, -1, never),
        lambda: simulated(3.0, -1, np.random.default_rng(0)),
    ):
        with pytest.raises(ConfigError, match="draws"):
            draw()


def test_a_fault_in_the_arithmetic_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    for sign in (1, -1):
        monkeypatch.setattr(rounded, "_PI", rounded._PI * (1 + sign * Decimal(2) ** -120))
        with pytest.raises(PrivacyError, match="add up to 1"):
            table(3.0 + sign / 8)  # a scale that no other test has cached


def test_tables_are_kept_and_cannot_be_changed() -> None:
    assert table(3.0) is table(3.0)
    with pytest.raises(ValueError, match="read-only"):
        table(3.0).high[0] = 0
    assert table.cache_info().maxsize == 16


def test_simulated_noise_repeats_with_its_seed() -> None:
    one, two, other = (simulated(50.0, 99, np.random.default_rng(s)) for s in (1, 1, 2))
    assert (one == two).all() and (one != other).any()


def test_chosen_at_the_ends() -> None:
    assert not chosen(np.zeros(5), lambda n: bytes(n)).any()
    assert chosen(np.ones(5), lambda n: b"\xff" * n).all()
    assert not chosen(np.full(5, np.nextafter(1.0, 0.0)), lambda n: b"\xff" * n).any()
    assert chosen(np.zeros(0), lambda n: bytes(n)).shape == (0,)
    got = chosen(np.array([-0.0, 1.0]), seeded())
    assert got.dtype == np.bool_ and got.tolist() == [False, True]


def test_chosen_frequencies() -> None:
    for rate in (0.001, 0.3, 0.5, 0.97):
        hits = int(chosen(np.full(N, rate), seeded(4)).sum())
        assert stats.binomtest(hits, N, rate).pvalue > 1e-6
        wrong = rate + 6 * math.sqrt(rate * (1 - rate) / N) * (1.5 if rate < 0.5 else -1.5)
        assert stats.binomtest(hits, N, wrong).pvalue < 1e-6
    rates = np.tile([0.1, 0.9], N // 2)
    got = chosen(rates, seeded(5)).reshape(-1, 2)
    assert got.mean(axis=0) == pytest.approx([0.1, 0.9], abs=0.005)
    assert abs(np.corrcoef(got.T)[0, 1]) < 0.02


@pytest.mark.parametrize(
    "rate", [0.5, 0.1, 1 / 3, 2.0**-64, 2.0**-65, 5e-324, 1.7 * 2.0**-60, np.nextafter(1.0, 0.0)]
)
def test_chosen_compares_with_the_exact_threshold(rate: float) -> None:
    numerator, denominator = float(rate).as_integer_ratio()
    threshold = numerator * 2**64 // denominator
    assert threshold <= rate * 2**64
    around = [w for w in (threshold - 1, threshold, threshold + 1, 0) if 0 <= w < 2**64]
    got = chosen(np.full(len(around), rate), lambda n: struct.pack(f"<{len(around)}Q", *around))
    assert got.tolist() == [w < threshold for w in around]


@pytest.mark.parametrize("bad", [-1e-9, 1 + 1e-9, math.nan, math.inf])
def test_bad_rates_are_refused(bad: float) -> None:
    with pytest.raises(ConfigError, match="rates must be between 0 and 1"):
        chosen(np.array([0.5, bad]), never)


def test_rates_have_one_dimension() -> None:
    with pytest.raises(ConfigError, match="one-dimensional"):
        chosen(np.full((2, 2), 0.5), never)
