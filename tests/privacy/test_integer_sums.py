"""Records on the integer grid, exact sums, and their packing."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedgist.errors import ConfigError, DataError
from fedgist.privacy.claim import Privacy, calibrate
from fedgist.privacy.noise import noise_scales
from fedgist.privacy.statistics import (
    MomentSums,
    bit_widths,
    clip_to_grid,
    complete,
    from_triangle,
    pack,
    packed_bytes,
    to_triangle,
    unpack,
)
from fedgist.queries import MomentsQuery
from fedgist.run import upload_bytes
from fedgist.types import Round, Task, Tensors

numbers = st.floats(allow_nan=False, allow_infinity=False, width=64)
rows = st.integers(1, 9).flatmap(
    lambda d: st.lists(st.lists(numbers, min_size=d, max_size=d), min_size=1, max_size=6)
)


def on_grid(u: Tensor, levels: int) -> bool:
    k = u.to(torch.int64)
    norms = (k * k).sum(1)
    return bool((k.to(torch.float64) == u).all()) and int(norms.max()) <= levels**2


@settings(deadline=None, max_examples=300)
@given(rows, st.floats(1e-6, 1e6), st.integers(1, 2**20))
def test_integer_norm_is_bounded_exactly(z: list[list[float]], clip: float, levels: int) -> None:
    assert on_grid(clip_to_grid(torch.tensor(z, dtype=torch.float64), clip, levels), levels)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.integers(1, 200), st.integers(1, 4096), st.floats(0.01, 100))
def test_bound_where_rounding_pushes_over_it(seed: int, d: int, levels: int, clip: float) -> None:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(20, d, generator=rng, dtype=torch.float64)
    z = z / z.norm(dim=1, keepdim=True) * clip
    z[:7] *= 1 + 1e-15  # on the bound, and a hair over and under it
    z[7:14] *= 1 - 1e-15
    u = clip_to_grid(z, clip, levels)
    assert on_grid(u, levels)
    error = u - z * (levels / clip)
    assert float(error.norm(dim=1).max()) <= math.sqrt(d) + 1  # rounded, not thrown away


def test_corner_rows() -> None:
    for levels in (1, 2, 5, 128, 1024):
        z = torch.tensor(
            [[3.0, 4.0], [5, 0], [-5, 0], [0, 0], [1e308, 1e308], [5e-324, 0], [1e150, -1e150]],
            dtype=torch.float64,
        )
        u = clip_to_grid(z, 5.0, levels)
        assert on_grid(u, levels)
        assert u[1].tolist() == [levels, 0] and u[2].tolist() == [-levels, 0]
        assert u[3].tolist() == u[5].tolist() == [0, 0]
    assert clip_to_grid(z, 5.0, 5)[0].tolist() == [3, 4]
    assert clip_to_grid(torch.empty(0, 4, dtype=torch.float64), 1.0, 8).shape == (0, 4)


@settings(deadline=None, max_examples=100)
@given(st.integers(0, 2**31), st.integers(1, 130), st.sampled_from([1, 3, 128, 1000]))
def test_what_is_on_the_grid_stays(seed: int, d: int, levels: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(9, d, generator=rng, dtype=torch.float64)
    u = clip_to_grid(z, 0.37, levels)
    assert torch.equal(clip_to_grid(u * (0.37 / levels), 0.37, levels), u)


@pytest.mark.parametrize("d", [1, 2, 3, 7, 64, 128, 131, 400])
def test_a_row_does_not_depend_on_its_batch(d: int) -> None:
    rng = torch.Generator().manual_seed(d)
    z = torch.randn(250, d, generator=rng, dtype=torch.float64)
    u = clip_to_grid(z, 0.9 * math.sqrt(d), 128)
    order = torch.randperm(250, generator=rng)
    assert torch.equal(clip_to_grid(z[order], 0.9 * math.sqrt(d), 128), u[order])
    strided = z.T.contiguous().T  # what a transposing encoder would hand over
    assert torch.equal(clip_to_grid(strided, 0.9 * math.sqrt(d), 128), u)
    for size in (1, 3, 8, 249):
        parts = [clip_to_grid(p, 0.9 * math.sqrt(d), 128) for p in torch.split(strided, size)]
        assert torch.equal(torch.cat(parts), u)


def test_what_cannot_be_bounded_is_refused() -> None:
    z = torch.tensor([[1.0, 2.0], [math.nan, 0.0]], dtype=torch.float64)
    with pytest.raises(DataError, match="integer norm must be at most 8"):
        clip_to_grid(z, 1.0, 8)
    with pytest.raises(DataError, match="integer norm"):
        clip_to_grid(z[:1], math.inf, 8)
    with pytest.raises(ConfigError, match=r"levels must be below 2\^26"):
        clip_to_grid(z[:1], 1.0, 2**26)


def brute_force(query: MomentsQuery, u: Tensor, labels: Tensor) -> Tensors:
    k = u.to(torch.int64).numpy()
    y = labels.numpy()
    mean = np.stack([k[y == c].sum(0) for c in range(query.classes)])
    second = np.stack([k[y == c].T @ k[y == c] for c in range(query.classes)])
    out = {
        "count": torch.from_numpy(np.bincount(y, minlength=query.classes) * query.count_weight),
        "mean": torch.from_numpy(mean),
    }
    triangle = to_triangle(torch.from_numpy(second))
    return out | ({"second": triangle} if query.second else {"pooled": triangle.sum(0)})


QUERIES = [
    MomentsQuery(1.0, 5, 3, count_weight=3),
    MomentsQuery(1.0, 5, 3, 0.5, 0.48, 0.0, 0.02),
    MomentsQuery(1.0, 5, 3, 0.7, 0.0, 0.28, 0.02),
]


@pytest.mark.parametrize("query", QUERIES, ids=["both", "class", "pooled"])
@settings(deadline=None, max_examples=40)
@given(
    seed=st.integers(0, 2**31),
    n=st.integers(0, 80),
    parts=st.integers(1, 7),
    size=st.integers(1, 90),
)
def test_sums_are_the_same_for_every_split_and_order(
    query: MomentsQuery, seed: int, n: int, parts: int, size: int
) -> None:
    rng = torch.Generator().manual_seed(seed)
    z = torch.randn(n, 5, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, 3, (n,), generator=rng)
    truth = brute_force(query, clip_to_grid(z, 1.0, 128), labels)
    owner = torch.randint(0, parts, (n,), generator=rng)
    total: Tensors = {}
    for p in range(parts):
        sums = MomentSums(query)
        mine = torch.randperm(n, generator=rng)
        mine = mine[owner[mine] == p]
        mine = mine[torch.argsort(labels[mine], stable=True)]
        for batch in torch.split(mine, size):
            sums.add(clip_to_grid(z[batch], 1.0, 128), labels[batch])
        for name, value in sums.tensors().items():
            total[name] = total[name] + value if name in total else value
    assert total.keys() == truth.keys()
    assert {k: tuple(v.shape) for k, v in total.items()} == query.shapes(noised=False)
    assert all(v.dtype == torch.int64 for v in total.values())
    assert all(torch.equal(total[k], truth[k]) for k in truth)
    completed = complete(query, total)
    assert {k: tuple(v.shape) for k, v in completed.items()} == query.shapes(noised=True)


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**31), st.integers(1, 12), st.integers(0, 3))
def test_triangle_round_trip_and_isometry(seed: int, d: int, lead: int) -> None:
    rng = torch.Generator().manual_seed(seed)
    a = torch.randint(-(2**40), 2**40, (lead, d, d), generator=rng)
    a = a + a.transpose(-1, -2)
    t = to_triangle(a)
    assert t.shape == (lead, d * (d + 1) // 2)
    assert torch.equal(from_triangle(t), a)
    assert torch.equal(t[..., :d], torch.diagonal(a, dim1=-2, dim2=-1))
    weight = torch.full((t.shape[-1],), math.sqrt(2), dtype=torch.float64)
    weight[:d] = 1
    norm = (t.to(torch.float64) * weight).norm(dim=-1)
    assert torch.allclose(norm, a.to(torch.float64).flatten(1).norm(dim=1), rtol=1e-12)


@pytest.mark.parametrize("bits", range(2, 65))
def test_pack_round_trip(bits: int) -> None:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    rng = np.random.default_rng(bits)
    draws = rng.integers(low, high, 29, endpoint=True).tolist()
    values = torch.tensor([low, high, 0, -1, 1, *draws, low], dtype=torch.int64)
    data = pack(values, bits)
    assert len(data) == packed_bytes(len(values), bits) == math.ceil(len(values) * bits / 8)
    assert torch.equal(unpack(data, bits, (len(values),)), values)
    square = values[:30].reshape(5, 6)
    assert torch.equal(unpack(pack(square.T, bits), bits, (6, 5)), square.T)
    assert pack(values[:0], bits) == b"" and unpack(b"", bits, (0, 3)).shape == (0, 3)
    if bits < 64:
        for outside in (high + 1, low - 1):
            with pytest.raises(DataError, match=f"to be packed in {bits} bits"):
                pack(torch.tensor([0, outside]), bits)


def test_unpack_refuses_other_lengths() -> None:
    data = pack(torch.arange(10), 7)
    for wrong in (data[:-1], data + b"\0", b""):
        with pytest.raises(DataError, match=r"payload must have 9 bytes\. Got"):
            unpack(wrong, 7, (10,))


@pytest.mark.parametrize("query", QUERIES, ids=["both", "class", "pooled"])
@pytest.mark.parametrize("most", [1, 3, 1000])
def test_widths_hold_the_worst_case_and_no_bit_more(query: MomentsQuery, most: int) -> None:
    for sign in (1, -1):
        u = torch.zeros(most, 5, dtype=torch.float64)
        u[:, 0] = sign * query.levels
        sums = MomentSums(query)
        sums.add(u, torch.zeros(most, dtype=torch.int64))
        widths = bit_widths(query, most)
        for name, value in sums.tensors().items():
            assert torch.equal(
                unpack(pack(value, widths[name]), widths[name], tuple(value.shape)), value
            )
            if sign > 0:
                with pytest.raises(DataError):
                    pack(value, widths[name] - 1)


def test_widths_leave_room_for_noise() -> None:
    query = QUERIES[0]
    scales = noise_scales(query, 4.0)
    widths = bit_widths(query, 100, scales)
    assert set(widths) == set(query.shapes(noised=True)) == set(scales)
    largest = {"count": 300, "mean": 100 * 128, "second": 100 * 128**2, "pooled": 100 * 128**2}
    for name, bound in largest.items():
        extreme = bound + math.ceil(14 * scales[name][0])
        pack(torch.tensor([extreme, -extreme]), widths[name])


def test_sums_that_would_not_be_exact_are_refused_in_the_plan() -> None:
    query = MomentsQuery(1.0, 5, 3, levels=2**15)
    bit_widths(query, 2**22)
    with pytest.raises(ConfigError, match=r"max_images x levels² must stay below 2\^53"):
        bit_widths(query, 2**23)


@pytest.mark.parametrize("shares", [(0.5, 0.3, 0.18, 0.02), (0.5, 0.48, 0, 0.02)])
def test_payload_of_ten_classes_is_no_larger_than_float32(shares: tuple[float, ...]) -> None:
    task = Task("t", tuple("abcdefghij"))
    rnd = Round("sum", (MomentsQuery(1.0, 128, 10, *shares),))
    privacy = Privacy(epsilon=10, trust="central")
    size = upload_bytes(rnd, task, privacy, calibrate([rnd], privacy))
    assert size is not None and size <= 327.5 * 1024
    (query,) = rnd.queries
    assert isinstance(query, MomentsQuery)
    widths, shapes = bit_widths(query, task.max_images), query.shapes(noised=False)
    assert size == sum(
        len(pack(torch.zeros(shapes[k], dtype=torch.int64), widths[k])) for k in shapes
    )
