"""The local exchange: what it refuses, and that noise reaches every sum."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from federation_tools import run_locally
from fedgist.errors import ConfigError, DataError, PrivacyError
from fedgist.exchange.local import LocalExchange
from fedgist.method import Method
from fedgist.privacy.claim import Privacy
from fedgist.queries import SumQuery
from fedgist.run import drive, plan_of
from fedgist.types import Images, Outcome, Round, State, Task

QUERY = SumQuery(clip=1.0, levels=64)
PAIR = (SumQuery(1.0, 64, name="a"), SumQuery(2.0, 64, scale=3.0, name="b", shape=(1,)))


@dataclass(frozen=True)
class Toy(Method):
    """Sums the mean pixel; misbehaves as told."""

    reduce: str = "sum"
    plain_from: int = 99
    two_queries: bool = False
    skip: int = 99
    wide: SumQuery | None = None

    def plan(self, task):
        queries = PAIR if self.two_queries else (self.wide or QUERY,)
        return [Round(self.reduce, queries)]

    def start(self, task, rng):
        return State()

    def summarize(self, r, task, shared, client, rng):
        i = int(client.name.split()[-1])
        if i >= self.plain_from:
            return {"x": torch.zeros(1, dtype=torch.int64)}
        queries = self.plan(task)[0].queries
        answers = [client.sum(lambda x, y: {"x": brightness(x)}, q) for q in queries[:1]]
        answers += [client.sum(lambda x, y: {"rows": 2 * brightness(x)}, q) for q in queries[1:]]
        return answers[0] if len(queries) == 1 else tuple(answers[: 1 if i >= self.skip else 2])

    def update(self, r, task, state, merged, rng):
        return State(server=merged)

    def finish(self, task, state, rng):
        return Outcome(details={"merged": state.server})


def brightness(x):
    return x.flatten(1).mean(1, keepdim=True)


def run(method, task, parts, privacy, **options):
    outcome, exchange = run_locally(method, task, parts, privacy, **options)
    return outcome.details["merged"], exchange


@pytest.fixture
def parts(images: Images) -> list[Images]:
    return [images.take(torch.arange(60) % 4 == i) for i in range(4)]


def test_a_plain_gist_cannot_carry_the_whole_sum_past_the_noise(task, parts):
    for first_plain in (0, 1, 3):
        with pytest.raises(PrivacyError, match=f"client {first_plain}.*must be Sensitive"):
            run(Toy(plain_from=first_plain), task, parts, Privacy(epsilon=1))


def test_every_query_of_a_sum_round_is_answered(task, parts):
    with pytest.raises(PrivacyError, match=r"client 2: .* must answer the 2 queries"):
        run(Toy(two_queries=True, skip=2), task, parts, Privacy(epsilon=1))


def test_several_queries_share_one_round_and_one_budget(task, parts):
    for trust in ("central", "local", "distributed"):
        privacy = Privacy(epsilon=1, trust=trust)
        exact, _ = run(Toy(two_queries=True), task, parts, Privacy(epsilon=float("inf")))
        noise: dict[str, list[float]] = {"a.x": [], "b.rows": []}
        for seed in range(60):
            merged, _ = run(Toy(two_queries=True), task, parts, privacy, seed=seed)
            for k, values in noise.items():
                values.append(float(merged.tensors[k] - exact.tensors[k]))
        assert set(merged.tensors) == set(noise)
        single = plan_of(Toy(), task, privacy).sigma
        joint = plan_of(Toy(two_queries=True), task, privacy).sigma
        assert joint == pytest.approx(single * (1 + 1 / 9) ** 0.5)
        scale = merged.sigma * 64
        for k, expected in (("a.x", scale), ("b.rows", 3 * scale)):
            spread = torch.tensor(noise[k]).std()
            assert expected * 0.7 < spread < expected * 1.4, (trust, k)


def test_the_shape_of_a_sum_is_the_plans(task, parts):
    wide = SumQuery(1.0, 64, shape=(2,))
    with pytest.raises(DataError, match="must be the plan's"):
        run(Toy(wide=wide), task, parts, Privacy(epsilon=1))


def test_queries_of_a_sum_round_need_names_of_their_own():
    with pytest.raises(ConfigError, match="names of their own"):
        Round("sum", (QUERY, QUERY))


def test_exact_sums_in_a_pool_round_are_refused(task, parts):
    with pytest.raises(PrivacyError, match="must be released before a pool round"):
        run(Toy(reduce="pool"), task, parts, Privacy(epsilon=1))


def test_exact_sums_are_kept_in_simulations_only(task, parts):
    _, exchange = run(Toy(), task, parts, Privacy(epsilon=1), observe=True)
    assert "x" in exchange.exact
    with pytest.raises(PrivacyError, match="must not be kept in a real release"):
        run(Toy(), task, parts, Privacy(epsilon=1, noise="system"), observe=True)


@pytest.mark.parametrize("trust", ["central", "local", "distributed"])
@pytest.mark.parametrize("noise", ["seeded", "system"])
def test_the_noise_in_the_sum_has_the_stated_size(task, parts, trust, noise):
    privacy = Privacy(epsilon=1, trust=trust, noise=noise)
    exact, _ = run(Toy(), task, parts, Privacy(epsilon=float("inf")))
    drawn = []
    for seed in range(60):
        merged, _ = run(Toy(), task, parts, privacy, seed=seed)
        drawn.append(float(merged.tensors["x"] - exact.tensors["x"]))
    expected = merged.sigma * QUERY.levels
    measured = torch.tensor(drawn).std()
    assert 0.65 * expected < measured < 1.45 * expected  # χ²(59) at about 1e-5
    assert merged.sigma == pytest.approx(
        plan_of(Toy(), task, privacy).sigma * (2 if trust == "local" else 1)
    )


def test_classes_that_are_not_the_tasks_are_refused_by_name(task, images):
    wrong = Images(images.pixels, images.labels, ("a", "c", "b"))
    with pytest.raises(DataError, match=r"client 1: classes must be the task's"):
        run(Toy(), task, [images, wrong], Privacy(epsilon=1))


def test_one_client_is_in_memory_at_a_time(task, images):
    alive: list[int] = []
    peak = 0

    def load():
        nonlocal peak
        part = images.take(torch.arange(5))
        import weakref

        alive.append(1)
        weakref.finalize(part, alive.pop)
        peak = max(peak, len(alive))
        return part

    plan = plan_of(Toy(), task, Privacy(epsilon=1))
    names = [f"client {i}" for i in range(20)]
    exchange = LocalExchange(Toy(), task, Privacy(epsilon=1), plan.sigma, [load] * 20, names)
    drive(Toy(), task, exchange, plan.rounds, 0)
    assert peak <= 2


def test_a_tasks_bound_is_enforced_by_name(images):
    task = Task("toy", images.classes, channels=1, size=8, max_images=10)
    with pytest.raises(DataError, match=r"client 0 must hold at most 10 images\. Got 60"):
        run(Toy(), task, [images], Privacy(epsilon=1))
