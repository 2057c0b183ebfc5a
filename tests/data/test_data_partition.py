"""Partitions: every image once, reproducible, and what each spec promises."""

import random
import socket
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.data import SPECS, Partition, partition
from fedgist.errors import ConfigError, DataError
from fedgist.types import Images

EVERY = [
    "iid",
    "dirichlet:0.5",
    "dirichlet:0.01",
    "dirichlet:1e-6",
    "dirichlet-balanced:0.5",
    "inner-dirichlet:0.5",
    "inner-dirichlet:0.001",
    "distribution:2",
    "pathological:2",
    "shards:2",
    "natural",
]


def make(labels: torch.Tensor, classes: int = 10, groups: torch.Tensor | None = None) -> Images:
    return Images(
        torch.zeros(len(labels), 1, 1, 1, dtype=torch.uint8),
        labels,
        tuple(str(c) for c in range(classes)),
        groups,
    )


def balanced(n: int = 2000, classes: int = 10) -> Images:
    return make(torch.arange(n) % classes, classes, torch.arange(n) * 7919 % n // (n // 40))


def check(p: Partition, images: Images, clients: int) -> None:
    assert len(p.clients) == clients
    assert all(r.dtype == torch.int64 and torch.equal(r, r.sort().values) for r in p.clients)
    together = torch.cat(p.clients).sort().values
    assert torch.equal(together, torch.arange(len(images)))


def test_every_spec_is_tested() -> None:
    assert {s.partition(":")[0] for s in EVERY} == {s.partition(":")[0] for s in SPECS}


@pytest.mark.parametrize("spec", EVERY)
def test_every_image_exactly_once_and_reproducible(spec: str) -> None:
    images = balanced()
    first, again, other = (partition(images, 20, spec, seed) for seed in (3, 3, 4))
    check(first, images, 20)
    assert (first.spec, first.seed) == (spec, 3)
    assert all(torch.equal(a, b) for a, b in zip(first.clients, again.clients, strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.clients, other.clients, strict=True))


@pytest.mark.parametrize("spec", [s for s in EVERY if not s.startswith("distribution")])
@pytest.mark.parametrize("clients", [1, 7])
def test_clients_need_not_match_the_classes(spec: str, clients: int) -> None:
    if clients == 1 and spec == "pathological:2":
        spec = "pathological:10"
    images = balanced(701)
    check(partition(images, clients, spec, 0), images, clients)


@pytest.mark.parametrize("spec", [s for s in EVERY if s != "natural"])
def test_a_thousand_clients(spec: str) -> None:
    images = make((torch.arange(60_000) * 7919) % 10)
    p = partition(images, 1000, spec, 0)
    check(p, images, 1000)
    table = p.table(images.labels, 10)
    assert table.dtype == torch.int64 and table.shape == (1000, 10)
    assert table.sum(0).tolist() == images.counts().tolist()
    if spec == "dirichlet:0.01":
        assert int((table.sum(1) == 0).sum()) > 100  # empty clients are part of it
    if spec.startswith(("iid", "inner")):
        assert table.sum(1).tolist() == [60] * 1000


@settings(max_examples=40, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=60),
    clients=st.integers(1, 12),
    spec=st.sampled_from(["iid", "dirichlet:0.1", "inner-dirichlet:0.01", "shards:1"]),
    seed=st.integers(0, 2**31),
)
def test_any_labels(labels: list[int], clients: int, spec: str, seed: int) -> None:
    images = make(torch.tensor(labels), 6)  # classes may be missing, one may be alone
    if clients > len(labels):
        with pytest.raises(ConfigError, match="clients must lie in"):
            partition(images, clients, spec, seed)
    else:
        check(partition(images, clients, spec, seed), images, clients)


@pytest.mark.parametrize(("clients", "k"), [(7, 2), (5, 2), (10, 1), (40, 3), (2, 10)])
def test_pathological_gives_exactly_k_classes_and_forgets_none(clients: int, k: int) -> None:
    images = balanced()
    for seed in range(5):
        table = partition(images, clients, f"pathological:{k}", seed).table(images.labels, 10)
        assert ((table > 0).sum(1) == k).all()
        assert table.sum(0).tolist() == [200] * 10


def test_dirichlet_follows_its_law() -> None:
    """A client's share of a class is Beta(a, (m - 1) a): mean 1/m, variance (m - 1)/m²(ma + 1)."""
    images = balanced(4000)
    m, a = 4, 0.5
    shares = torch.cat(
        [partition(images, m, f"dirichlet:{a}", s).table(images.labels, 10) for s in range(60)]
    )
    x = shares.double() / 400
    expected = (m - 1) / (m * m * (m * a + 1))
    assert abs(float(x.mean()) - 1 / m) < 1e-9
    assert abs(float(x.var()) / expected - 1) < 0.1


def test_heterogeneity_grows_as_alpha_falls() -> None:
    images = balanced()
    for name in ("dirichlet", "inner-dirichlet"):
        held = [
            float((partition(images, 10, f"{name}:{a}", 0).table(images.labels, 10) > 0).sum())
            for a in (100, 0.3, 0.01)
        ]
        assert held[0] > held[1] > held[2]


def test_balancing_caps_what_one_client_gets() -> None:
    images = balanced()
    plain, even = (
        max(max(map(len, partition(images, 10, f"{name}:0.1", s).clients)) for s in range(9))
        for name in ("dirichlet", "dirichlet-balanced")
    )
    assert even <= 200 + 200 < plain  # the fair share and at most one more class


def test_distribution_gives_neighbouring_classes() -> None:
    images = balanced()
    table = partition(images, 20, "distribution:2", 0).table(images.labels, 10)
    for i, row in enumerate(table):
        assert row.nonzero().ravel().tolist() == sorted({i % 10, (i + 1) % 10})
    assert float(table.sum(1).max()) > 2 * float(table.sum(1).median())


def test_shards_are_blocks_of_the_sorted_labels() -> None:
    images = balanced()
    table = partition(images, 10, "shards:2", 0).table(images.labels, 10)
    assert table.sum(1).tolist() == [200] * 10 and int((table > 0).sum(1).max()) <= 2


def test_natural_keeps_groups_whole() -> None:
    images = balanced()
    assert images.groups is not None
    forty = partition(images, 40, "natural", 0)
    for i, rows in enumerate(forty.clients):
        assert images.groups[rows].unique().tolist() == [i]
    seven = partition(images, 7, "natural", 0)
    owners = [set(images.groups[r].tolist()) for r in seven.clients]
    assert sum(map(len, owners)) == 40 and min(map(len, owners)) >= 5
    with pytest.raises(ConfigError, match=r"number of groups, 40, .*Got 41"):
        partition(images, 41, "natural", 0)
    with pytest.raises(ConfigError, match=r"must have images with groups. Got none"):
        partition(make(torch.zeros(9, dtype=torch.int64)), 3, "natural", 0)


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        ("dirichelt:0.5", "must be one of iid, dirichlet:ALPHA.*Did you mean 'dirichlet'"),
        ("", "must be one of"),
        ("dirichlet", "ALPHA of dirichlet:ALPHA must lie in"),
        ("dirichlet:0", "must lie in .*Got 'dirichlet:0'"),
        ("dirichlet:-1", "must lie in"),
        ("dirichlet:nan", "must lie in"),
        ("dirichlet:x", "must lie in"),
        ("inner-dirichlet:inf", "must lie in"),
        ("iid:3", "'iid' must have no parameter. Got 'iid:3'"),
        ("pathological:1.5", "positive integer"),
        ("pathological:0", "positive integer"),
        ("shards:nan", "positive integer"),
        ("pathological:11", "K <= 10 .*Got K = 11"),
        ("pathological:1", "K x clients >= 10.*Got K = 1 and 7 clients"),
        ("distribution:2", "a multiple of 10 clients.*Got K = 2 and 7"),
        ("shards:100", "K x clients <= 200.*Got K = 100"),
        ("dirichlet-balanced:1e-6", "use a larger one"),
    ],
)
def test_wrong_specs(spec: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        for seed in range(5):  # whether a balanced draw runs out of room is chance
            partition(balanced(200), 7, spec, seed)


def test_wrong_numbers() -> None:
    images = balanced(200)
    for clients in (0, -1, 201):
        with pytest.raises(ConfigError, match=rf"must lie in 1\.\.200.*Got {clients}"):
            partition(images, clients, "iid", 0)
    with pytest.raises(ConfigError, match="seed must be >= 0"):
        partition(images, 2, "iid", -1)
    with pytest.raises(ConfigError, match=r"40 images of every class. Got 20"):
        partition(images, 40, "pathological:10", 0)


def test_no_network_no_output_no_global_random_state(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    states = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state()  # type: ignore[union-attr]
    partition(balanced(), 20, "iid", 0)  # imports
    monkeypatch.setattr(socket, "socket", None)
    for spec in EVERY:
        partition(balanced(), 20, spec, 0)
    assert random.getstate() == states[0]
    assert np.random.get_state()[1].tolist() == states[1]  # type: ignore[union-attr]
    assert torch.equal(torch.get_rng_state(), states[2])
    assert capfd.readouterr() == ("", "")


def test_saved_and_loaded(tmp_path: Path) -> None:
    images = balanced()
    p = partition(images, 30, "dirichlet:0.01", 5)
    assert min(map(len, p.clients)) == 0
    path = tmp_path / "partition.npz"
    p.save(path)
    p.save(path)
    again = Partition.load(path)
    assert (again.spec, again.seed) == ("dirichlet:0.01", 5)
    assert all(torch.equal(a, b) for a, b in zip(p.clients, again.clients, strict=True))
    assert [f.name for f in tmp_path.iterdir()] == ["partition.npz"]


@pytest.mark.parametrize(
    ("sizes", "indices", "message"),
    [
        ([2, 2], [0, 1, 1, 3], "every position exactly once"),
        ([2, 1], [0, 1, 2, 3], "must sum to 4. Got 3"),
        ([5, -1], [0, 1, 2, 3], "every position exactly once"),
        ([2, 2], [0.0, 1.0, 2.0, 3.0], "every position exactly once"),
    ],
)
def test_altered_files(
    tmp_path: Path, sizes: list[int], indices: list[float], message: str
) -> None:
    path = tmp_path / "p.npz"
    np.savez(path, spec=np.array("iid"), seed=np.array(0), sizes=sizes, indices=indices)
    with pytest.raises(DataError, match=message):
        Partition.load(path)


def test_unreadable_files(tmp_path: Path) -> None:
    path = tmp_path / "p.npz"
    with pytest.raises(DataError, match=r"p\.npz' must be a saved partition"):
        Partition.load(path)
    path.write_bytes(b"junk")
    with pytest.raises(DataError, match="must be a saved partition"):
        Partition.load(path)
    np.savez(path, sizes=[1])
    with pytest.raises(DataError, match="must be a saved partition"):
        Partition.load(path)
