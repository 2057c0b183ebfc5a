"""What releases of Poisson samples add up to: Rényi curves, groups, and the ledger's totals."""

from __future__ import annotations

import json
import math
import random
import sqlite3
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy.special import comb, logsumexp

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy.accounting import (
    ORDERS,
    epsilon_gaussian,
    epsilon_of,
    epsilon_zcdp,
    sampled_epsilon,
    sampled_rdp,
)
from fedgist.privacy.claim import Privacy, claim_of
from fedgist.privacy.ledger import Ledger, Release, release_of, rho_of
from fedgist.privacy.spending import Cell, Spent, _grouped, curve_of, resampled, totals
from fedgist.queries import SumQuery
from fedgist.types import Images, Round, Task

DELTA = 1e-5
TASK = Task("toy", ("a", "b"), channels=1, size=4, max_images=10_000)
SIGMA, RATE, TIMES = 1.2, 0.05, 60
COUNT = SumQuery(1.0, scale=8.0, name="count", rates=(1.0,))
POOL = Round("pool", (COUNT, SumQuery(1.0, times=TIMES, name="g", rates=(RATE,))))
PLAIN = (Round("sum", (SumQuery(1.0, name="s"),)),)


def photos(*numbers: int) -> Images:
    """Image i shows i, and always the same."""
    pixels = torch.zeros(len(numbers), 1, 4, 4, dtype=torch.uint8)
    pixels[:, 0, 0, 0] = torch.tensor(numbers)
    return Images(pixels, torch.arange(len(numbers)) % 2, TASK.classes)


def release(plan=(POOL,), sigma=SIGMA, task="t", r=0, **terms) -> Release:
    """One round of a plan; its claim is that of plain noise but for the law: quick."""
    law = "gaussian" if plan[0].queries[0].rates else "discrete-gaussian"
    privacy = Privacy(4.0, DELTA, noise="system", **terms)
    claim = replace(claim_of(PLAIN, privacy, sigma, track="none"), law=law)
    return release_of(task, TASK, "m", claim, plan, r)


def converted(curve, delta=DELTA) -> float:
    """The least ε of the tight conversion, written out once more."""
    return min(
        d + math.log(1 / delta) / (a - 1) + math.log(1 - 1 / a) - math.log(a) / (a - 1)
        for a, d in zip(ORDERS, curve, strict=True)
    )


@pytest.fixture
def book(tmp_path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def read(book: Ledger) -> float:
    return book.show()["epsilon"]


# --- the value


def some_spent(rng: random.Random) -> Spent:
    rho = rng.choice([0.0, 0.03, 0.5, 4.0])
    part = rng.random()
    return Spent(
        rho, tuple(rho * a * part ** (9 / a) for a in ORDERS) if rho and part < 0.6 else ()
    )


def test_sums_are_exact_at_every_order():
    low = tuple(0.1 * a for a in ORDERS)
    both = Spent(0.25) + Spent(0.5, low)
    assert both.rho == 0.75
    assert both.curve == pytest.approx([0.35 * a for a in ORDERS], rel=1e-15)
    assert Spent(0.25) + Spent(0.5) == Spent(0.75)
    assert Spent.total([]) == Spent() and Spent.total([both]) == both
    assert Spent.total([Spent(0.1)] * 10).rho == 1.0  # rounded once
    lost = both + Spent(math.inf)
    assert lost.rho == math.inf and set(lost.curve) == {math.inf}
    assert lost.epsilon(DELTA) == math.inf


def test_the_upper_bound_is_the_larger_at_every_order():
    flat = Spent(9.0, tuple(1.0 for _ in ORDERS))
    steep = Spent(0.25)
    assert flat.upper(steep) == steep.upper(flat)
    assert flat.upper(steep).curve == tuple(max(1.0, 0.25 * a) for a in ORDERS)
    assert flat.upper(steep).rho == 9.0
    assert steep.upper(Spent(0.5)) == Spent(0.5)


def test_laws_of_sums_and_bounds():
    rng = random.Random(1)
    for _ in range(200):
        a, b, c = some_spent(rng), some_spent(rng), some_spent(rng)
        assert (a + b).divergence == pytest.approx((b + a).divergence)
        assert ((a + b) + c).divergence == pytest.approx((a + (b + c)).divergence)
        top = a.upper(b)
        for low in (a, b):
            assert all(t >= v for t, v in zip(top.divergence, low.divergence, strict=True))
            for law in ("gaussian", "discrete-gaussian"):
                assert top.epsilon(DELTA, law) >= low.epsilon(DELTA, law) * (1 - 1e-12)
                assert (low + c).epsilon(DELTA, law) >= low.epsilon(DELTA, law) * (1 - 1e-12)
        assert all(s >= t for s, t in zip((a + b).divergence, top.divergence, strict=True))


@pytest.mark.parametrize("rho", [0.0, 1e-6, 0.1, 3.0, math.inf])
def test_without_a_curve_epsilon_is_that_of_rho(rho):
    sigma = math.sqrt(0.5 / rho) if rho else math.inf
    for law in ("gaussian", "discrete-gaussian"):
        assert Spent(rho).epsilon(DELTA, law) == (epsilon_of(sigma, DELTA, law) if rho else 0.0)


@pytest.mark.parametrize("rho", [0.01, 0.1, 3.0])
def test_with_a_curve_epsilon_is_the_best_of_all_orders_or_that_of_rho(rho):
    curve = tuple(rho * a for a in ORDERS)
    assert Spent(math.inf, curve).epsilon(DELTA) == pytest.approx(converted(curve), rel=1e-12)
    assert Spent(math.inf, curve).epsilon(DELTA) >= epsilon_zcdp(rho, DELTA)
    assert Spent(rho, curve).epsilon(DELTA) == pytest.approx(epsilon_zcdp(rho, DELTA), rel=1e-12)
    assert Spent(math.inf, (0.0,) * len(ORDERS)).epsilon(0.9) == 0.0  # never below


@pytest.mark.parametrize("bad", [(-1.0, ()), (math.nan, ()), (1.0, (1.0,)), (1.0, (-1.0,) * 9)])
def test_what_is_no_bound_is_refused(bad):
    with pytest.raises(ConfigError, match="Got"):
        Spent(*bad)


# --- the curve of one round


def mixture(x, sigma, rate, group, step=1.0):
    """The log density of a sum that each of ``group`` equal records enters with ``rate``."""
    k = np.arange(group + 1)
    weight = np.log(comb(group, k)) + k * np.log(rate) + (group - k) * np.log1p(-rate)
    square = -((x[:, None] - step * k) ** 2) / (2 * sigma**2)
    return logsumexp(weight + square, axis=1) - math.log(sigma * math.sqrt(2 * math.pi))


def renyi(order, sigma, p, q):
    """Rényi divergence by quadrature, the worse way round."""
    x = np.linspace(-130, 130, 60_001)
    a, b = p(x), q(x)
    both = (order * a + (1 - order) * b, order * b + (1 - order) * a)
    return max(logsumexp(v) + math.log(x[1] - x[0]) for v in both) / (order - 1)


@pytest.mark.parametrize("order", [1.5, 2.0, 3.25, 8.0, 31.0])
@pytest.mark.parametrize("adjacency,records", [
    ("add-remove", 1), ("add-remove", 2), ("add-remove", 3), ("replace-one", 1),
])  # fmt: skip
def test_curves_bound_what_neighbours_really_give_away(order, adjacency, records):
    sigma, rate = 1.5, 0.2
    plan = (Round("pool", (SumQuery(1.0, rates=(rate,)),)),)
    there = lambda x: mixture(x, sigma, rate, records)  # noqa: E731
    gone = lambda x: mixture(x, sigma, rate, records, -1.0 * (adjacency != "add-remove"))  # noqa: E731
    exact = renyi(order, sigma, there, gone)
    bound = curve_of(plan, sigma, adjacency, records)[ORDERS.index(order)]
    group = records * (1 if adjacency == "add-remove" else 2)
    assert exact * (1 - 1e-6) <= bound <= rho_of(plan, sigma, adjacency, records) * order
    if group == 1 and order >= 2:  # 1.5 may be left out by dp_accounting
        assert bound == pytest.approx(exact, rel=1e-2 if order % 1 else 1e-6)
    elif group == 1:
        assert bound <= curve_of(plan, sigma, adjacency)[ORDERS.index(2.0)]


def test_a_group_of_steps_is_exact_for_the_gaussian_and_below_mironovs_powers():
    gauss = tuple(0.3 * a for a in ORDERS)
    for order in (1.5, 2.0, 3.0, 6.0, 20.0):  # 2α and 2α-1 are among the orders
        assert _grouped(gauss, 2)[ORDERS.index(order)] == pytest.approx(4 * 0.3 * order)
    for group in (2, 3, 5, 6):
        many = _grouped(gauss, group)
        assert all(m >= group**2 * 0.3 * a * (1 - 1e-12) for m, a in zip(many, ORDERS, strict=True))
    one = sampled_rdp((POOL,), SIGMA)
    for c in (1, 2):  # Mironov 2017, Proposition 2: 3^c at the order 2^c α, from α = 2 on
        for a, m in zip(ORDERS, _grouped(one, 2**c), strict=True):
            if a >= 2 and a * 2**c in ORDERS:
                assert m <= 3**c * one[ORDERS.index(a * 2**c)] * (1 + 1e-12)
    assert _grouped(one, 1) == one
    assert all(a < b for a, b in zip(_grouped(one, 3)[:60], _grouped(one, 4)[:60], strict=True))


def test_infinite_orders_are_left_out():
    holes = tuple(math.inf if i % 3 == 1 else 0.3 * a for i, a in enumerate(ORDERS))
    assert all(m >= 1.2 * a * (1 - 1e-12) for m, a in zip(_grouped(holes, 2), ORDERS, strict=True))
    assert max(_grouped(holes, 2)[:40]) < math.inf
    assert set(_grouped((math.inf,) * len(ORDERS), 2)) == {math.inf}


def test_curves_kept_at_other_orders_still_bound():
    def true(a):  # of two coins; bent down in α, so that a chord of its own would lie below it
        odds = (a - 0.5) * math.log(9)
        return float(np.logaddexp(odds, -odds) + math.log(0.3)) / (a - 1)

    here = [true(a) for a in ORDERS]
    other = (1.25, 1.9, *range(3, 40, 2), 300.0)
    kept = resampled(other, [true(a) for a in other])
    assert all(k >= h * (1 - 1e-12) for k, h in zip(kept, here, strict=True))
    near = [k / h for a, k, h in zip(ORDERS, kept, here, strict=True) if 3 <= a <= 39]
    assert max(near) < 1.15 and kept[-1] == math.inf
    assert resampled(ORDERS, here) == tuple(here)


# --- releases


def test_a_sampled_release_carries_both_bounds():
    made = release()
    assert made.rho["add-remove"] == rho_of((POOL,), SIGMA, "add-remove")
    assert made.curve["add-remove"] == pytest.approx(sampled_rdp((POOL,), SIGMA))
    assert set(made.curve) == set(made.rho)
    assert made.epsilon == pytest.approx(sampled_epsilon((POOL,), SIGMA, DELTA, 1, "rdp"))
    assert release(adjacency="replace-one").epsilon > 2 * made.epsilon
    assert release(unit="person", records=3).epsilon > 3 * made.epsilon


def test_where_sampling_gains_nothing_there_is_no_curve(book):
    every = (Round("pool", (SumQuery(1.0, times=4, rates=(1.0,)),)),)
    one_class = (Round("pool", (SumQuery(1.0, per_class=True, rates=(0.1, 1.0)),)),)
    assert not release(every).curve and not release(one_class).curve and not release(PLAIN).curve
    assert not release(sigma=0.0).curve and release(sigma=0.0).epsilon == math.inf
    seeded = claim_of(PLAIN, Privacy(4.0, DELTA, noise="seeded"), SIGMA, track="none")
    assert release_of("t", TASK, "m", seeded, (POOL,), 0).epsilon == math.inf
    book.record(release(every), photos(1))
    assert read(book) == pytest.approx(epsilon_gaussian(SIGMA / 2, DELTA))
    assert curve_of((POOL,), SIGMA, "add-remove", records=5000) == ()  # ρα is less throughout


# --- the ledger


def test_one_sampled_release_reads_as_renyi_accounting_does(book):
    book.record(release(), photos(1, 2))
    shown = book.show()
    assert shown["epsilon"] == pytest.approx(converted(sampled_rdp((POOL,), SIGMA)), rel=1e-3)
    assert shown["epsilon"] >= sampled_epsilon((POOL,), SIGMA, DELTA)
    (total,) = shown["totals"]
    assert total["rho"] == pytest.approx(rho_of((POOL,), SIGMA, "add-remove"))
    assert shown["epsilon"] < epsilon_gaussian(math.sqrt(0.5 / total["rho"]), DELTA) / 5
    assert shown["entries"][0]["epsilon"] == shown["epsilon"]


def test_sampled_releases_compose_as_one_plan_of_them_would(book):
    second = Round("pool", (SumQuery(1.0, times=25, name="h", rates=(0.1,)),))
    plan = (POOL, second)
    book.record(release(plan), photos(1))
    book.record(release(plan, r=1), photos(1))
    assert read(book) == pytest.approx(sampled_epsilon(plan, SIGMA, DELTA, 1, "rdp"), rel=1e-9)
    book.record(release(plan, task="u", r=1), photos(2))  # image 2 has nothing else
    assert read(book) == pytest.approx(sampled_epsilon(plan, SIGMA, DELTA, 1, "rdp"), rel=1e-9)


def test_sampled_and_plain_releases_compose_below_the_sum_of_their_epsilons(book):
    book.record(release(), photos(1))
    first = read(book)
    book.record(release(PLAIN, 2.0, task="u"), photos(1))
    both, second = read(book), epsilon_of(2.0, DELTA, "discrete-gaussian")
    half = converted(sampled_rdp((POOL,), SIGMA), DELTA / 2) + epsilon_zcdp(0.125, DELTA / 2)
    assert max(first, second) < both < first + second < half
    curve = [v + 0.125 * a for v, a in zip(sampled_rdp((POOL,), SIGMA), ORDERS, strict=True)]
    assert both == pytest.approx(converted(curve), rel=1e-9)


def test_replacements_and_groups_are_not_read_as_one_record(book):
    """Two neighbours that are as far apart as may be: δ at the ε that is read."""
    sigma, rate = 1.5, 0.5
    plan = (Round("pool", (SumQuery(1.0, rates=(rate,)),)),)
    x = np.linspace(-60, 60, 60_001)
    for n, (terms, group, step) in enumerate([
        ({"adjacency": "replace-one"}, 1, -1.0),
        ({"unit": "person", "records": 3}, 3, 0.0),
    ]):  # fmt: skip
        part = Ledger(book.path.with_name(f"{n}.sqlite"))
        part.record(release(plan, sigma, **terms), photos(1))
        p = mixture(x, sigma, rate, group)
        q = mixture(x, sigma, rate, group, step)
        delta = np.clip(np.exp(p) - np.exp(read(part) + q), 0, None).sum() * (x[1] - x[0])
        assert 0 < delta <= DELTA
        alone = converted(sampled_rdp(plan, sigma))
        assert np.clip(np.exp(p) - np.exp(alone + q), 0, None).sum() * (x[1] - x[0]) > DELTA


def test_a_promise_for_a_person_counts_for_an_image_as_a_replacement(book):
    book.record(release(task="p", unit="person"), photos(1))
    book.record(release(PLAIN, 2.0, task="i"), photos(1))
    found = {t["unit"]: t["epsilon"] for t in book.show()["totals"]}
    replaced = Spent(
        rho_of((POOL,), SIGMA, "replace-one"), curve_of((POOL,), SIGMA, "replace-one")
    ) + Spent(0.125)
    assert found == {"image": pytest.approx(replaced.epsilon(DELTA)), "person": math.inf}


@pytest.mark.parametrize("seed", range(3))
def test_totals_never_fall_and_are_those_of_counting_image_by_image(book, seed):
    rng = random.Random(seed)
    kinds = [
        release(),
        release((Round("pool", (SumQuery(1.0, rates=(0.5,)),)),), 3.0),
        release(PLAIN, 3.0),
        release((Round("pool", (SumQuery(1.0, rates=(1.0,)),)),), 1.0),
    ]
    held: dict[int, list[Spent]] = {}
    before, laws = 0.0, set()
    for t in range(8):
        images = rng.sample(range(12), rng.randint(1, 6))
        kind = rng.choice(kinds)
        laws.add(kind.law)
        book.record(replace(kind, task=str(t)), photos(*images))
        for i in images:
            held.setdefault(i, []).append(kind.under(kind.reading))
        law = "gaussian" if laws == {"gaussian"} else "discrete-gaussian"
        now = read(book)
        worst = max(Spent.total(s).epsilon(DELTA, law) for s in held.values())
        assert now == pytest.approx(worst, rel=1e-12) and now >= before
        before = now


def test_the_worst_of_other_forms_is_added_at_every_order():
    """Of two cells of another form the one is worse at low orders, the other at high ones."""
    low = replace(
        release(PLAIN), rho={"add-remove": 9.0}, curve={"add-remove": (1.0,) * len(ORDERS)}
    )
    high = replace(low, rho={"add-remove": 0.2}, curve={})
    mine = replace(low, rho={"add-remove": 0.1}, curve={}, form="8x8x1 crop")
    cells = [Cell(low.form, (low,)), Cell(low.form, (high,)), Cell(mine.form, (mine,))]
    seen = []
    out = totals(cells, [low, high, mine], lambda s: seen.append(s) or s.epsilon(DELTA))
    worst = Spent(9.0, tuple(max(1.0, 0.2 * a) for a in ORDERS)) + Spent(0.1)
    assert worst in seen
    assert out["image", "add-remove"].epsilon(DELTA) == max(s.epsilon(DELTA) for s in seen)


def test_the_cap_reads_curves_and_leaves_no_trace_of_what_it_refused(book):
    book.cap(read_once := release().epsilon * 1.2, DELTA)
    book.check([release()], photos(1))
    assert not tables(book) & {"curves"}
    assert book.record(release(), photos(1)) is True
    assert book.record(release(), photos(1)) is False
    with pytest.raises(PrivacyError, match=rf"of which {release().epsilon:.4g} was spent before"):
        book.record(release(task="u"), photos(1))
    con = sqlite3.connect(book.path)
    assert con.execute("SELECT count(*) FROM curves").fetchone() == (1,)
    con.close()
    assert read(book) <= read_once


def tables(book: Ledger) -> set[str]:
    con = sqlite3.connect(book.path)
    found = {name for (name,) in con.execute("SELECT name FROM sqlite_master")}
    con.close()
    return found


def change(book: Ledger, sql: str, *values: object) -> None:
    con = sqlite3.connect(book.path)
    con.execute(sql, values)
    con.commit()
    con.close()


def test_whoever_does_not_know_of_curves_reads_the_same_file_to_more(book):
    book.record(release(), photos(1))
    known = read(book)
    assert "curves" in tables(book)
    change(book, "DROP TABLE curves")
    assert read(book) == pytest.approx(
        epsilon_of(math.sqrt(0.5 / rho_of((POOL,), SIGMA, "add-remove")), DELTA, "gaussian")
    )
    assert read(book) > 5 * known


def test_curves_of_a_file_with_other_orders_bound_from_above(book):
    book.record(release(), photos(1))
    known = read(book)
    kept = {"orders": ORDERS[::2], "curve": {a: c[::2] for a, c in release().curve.items()}}
    change(book, "UPDATE curves SET body = ?", json.dumps(kept))
    assert known <= read(book) < 1.05 * known


def test_the_claim_of_a_sampled_plan_reads_a_little_less(book):
    """It is read by privacy loss distributions, which do not add up across tasks in short form."""
    plan = (Round("pool", (SumQuery(1.0, rates=(0.1,)),)),)
    claim = claim_of(plan, Privacy(1.0, DELTA, noise="system"), 1.0, track="none")
    book.record(release_of("t", TASK, "m", claim, plan, 0), photos(1))
    assert claim.epsilon < read(book) < 1.3 * claim.epsilon
