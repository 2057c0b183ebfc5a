"""The secure sum is exact, bears losses, and hides each site's numbers."""

import math
import tracemalloc
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.errors import ConfigError, DataError, ProtocolError
from fedgist.privacy.packing import pack_ring, unpack_ring
from fedgist.privacy.secure_sum import STAGES, Block, Collector, Member, Terms
from fedgist.privacy.secure_sum.graph import choose_graph
from fedgist.privacy.secure_sum.masks import add_stream, private_key
from fedgist.privacy.secure_sum.wire import mask_key
from fedgist.privacy.statistics import pack
from secure_sum_tools import ask, flat, members, numbers, run, signer, terms, total


@pytest.mark.parametrize("n", [2, 3, 4, 5, 10, 64])
def test_sum_is_exact_and_signed(n: int) -> None:
    t = terms(n)
    values = numbers(t, n)
    server, sites, _ = run(t, values)
    assert flat(server.result()) == total(values, range(n))
    assert server.survivors == tuple(range(n)) and not server.faults
    assert {s.stage for s in sites} == {server.stage} == {"done"}


@pytest.mark.parametrize("bits", [1, 2, 8, 31, 32, 33, 62])
@pytest.mark.parametrize("edge", [0, 1])
def test_all_equal_values_at_the_edge_of_the_range(bits: int, edge: int) -> None:
    t = terms(4, blocks=(Block("x", (9,), bits),))
    value = (1 << (bits - 1)) - 1 if edge else -(1 << (bits - 1))
    values = [{"x": torch.full((9,), value)} for _ in range(4)]
    server, _, _ = run(t, values)
    assert flat(server.result()) == {"x": [4 * value] * 9}


@pytest.mark.parametrize("past", [-257, 256])
def test_one_past_the_edge_raises_and_leaves_the_member_able_to_answer(past: int) -> None:
    t = terms(3)
    values = numbers(t)
    _, sites, requests = run(t, values, upto="upload")
    wrong = {**values[0], "count": torch.tensor([0, past, 0])}
    with pytest.raises(DataError, match=r"'count' must lie in -256\.\.255\. Got .*-?25[67]"):
        sites[0].answer("upload", requests[0], wrong)
    assert len(sites[0].answer("upload", requests[0], values[0])) == t.upload_bytes


@pytest.mark.parametrize(
    "wrong",
    [
        {"count": torch.zeros(3, dtype=torch.int64)},
        {"count": torch.zeros(3), "mean": torch.zeros(2, 5, dtype=torch.int64)},
        {"count": torch.zeros(3, dtype=torch.int64), "mean": torch.zeros(10, dtype=torch.int64)},
    ],
)
def test_blocks_of_another_name_dtype_or_shape_are_refused(wrong: dict[str, torch.Tensor]) -> None:
    t = terms(3)
    _, sites, requests = run(t, numbers(t), upto="upload")
    with pytest.raises(DataError, match="block"):
        sites[1].answer("upload", requests[1], wrong)


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("degree", [None, 6])
def test_losses_up_to_the_threshold_at_each_stage(stage: str, degree: int | None) -> None:
    t = terms(11, degree=degree, threshold=None if degree is None else 4)
    lost = (1, 4, 7, 8, 10) if degree is None else (2, 3)
    values = numbers(t)
    server, _, _ = run(t, values, {stage: lost})
    # After its upload arrived, a site is in the sum whether it is still there or not.
    counted = range(11) if stage in ("confirm", "unmask") else set(range(11)) - set(lost)
    assert server.survivors == tuple(counted)
    assert flat(server.result()) == total(values, tuple(counted))
    assert server.faults == {i: f"{stage}: no answer" for i in lost}


def test_losses_at_every_stage_of_one_run() -> None:
    t = terms(11)
    values = numbers(t)
    server, _, _ = run(t, values, {s: (2 * k,) for k, s in enumerate(STAGES)})
    assert server.survivors == (1, 3, 5, 6, 7, 8, 9, 10)
    assert flat(server.result()) == total(values, server.survivors)


@pytest.mark.parametrize("stage", STAGES)
def test_one_loss_too_many_aborts_and_names_who_is_missing(stage: str) -> None:
    t = terms(5)
    before = {"keys": (1,)} if stage != "keys" else {}
    lost = (0, 4) if before else (0, 1, 4)
    with pytest.raises(ProtocolError) as e:
        run(t, numbers(t), {**before, stage: lost})
    text = str(e.value)
    assert f"stage '{stage}'" in text and "at least 3 of 5" in text and "Got 2" in text
    assert f"0 ({stage}: no answer)" in text and f"4 ({stage}: no answer)" in text
    assert "1 (keys: no answer)" in text


def test_a_late_reply_completes_a_stage_that_could_not_be_closed() -> None:
    t = terms(3, threshold=2)
    values = numbers(t)
    server, sites, requests = run(t, values, {"upload": (2,)}, upto="unmask")
    replies = ask(sites, "unmask", requests, values)
    with pytest.raises(ProtocolError, match=r"Got 1: missing 1 \(unmask: no answer\)"):
        server.advance({0: replies[0]})
    assert server.stage == "unmask"
    server.advance({1: replies[1]})
    assert flat(server.result()) == total(values, (0, 1))


def test_quorum_is_enforced_by_the_server_and_by_each_member() -> None:
    t = terms(5, threshold=3, quorum=5)
    values = numbers(t)
    with pytest.raises(ProtocolError, match=r"at least 5 of 5 sites. Got 4: missing 2"):
        run(t, values, {"upload": (2,)})
    _, sites, requests = run(t, values, upto="confirm")
    with pytest.raises(ProtocolError, match=r"must hold 5 sites\. Got 4"):
        sites[0].answer("confirm", bytes([requests[0][0] & ~4]))


def test_two_runs_over_equal_numbers_share_no_mask() -> None:
    t = terms(3, blocks=(Block("x", (20_000,), 30),))
    values = [{"x": torch.full((20_000,), 7)} for _ in range(3)]
    first, second = (_uploads(t, values)[0] for _ in range(2))
    assert np.count_nonzero(first == second) < 3


@pytest.mark.parametrize("bits", [20, 31, 62])
def test_uploads_look_uniform(bits: int) -> None:
    """Each bit of each site's masked number is a fair coin, and no two sites' numbers agree."""
    t = terms(3, blocks=(Block("x", (20_000,), bits),))
    values = [{"x": torch.full((20_000,), -2)} for _ in range(3)]
    width = t.width(t.blocks[0])
    for words in _uploads(t, values):
        for bit in (0, 1, width // 2, width - 1):
            mean = float((words >> np.uint64(bit) & np.uint64(1)).mean())
            assert abs(mean - 0.5) < 5 * 0.5 / math.sqrt(20_000)
        assert not (words >> np.uint64(width)).any()


def _uploads(t: Terms, values: list[dict[str, torch.Tensor]]) -> list[np.ndarray]:
    _, sites, requests = run(t, values, upto="upload")
    replies = ask(sites, "upload", requests, values)
    out = []
    for reply in replies.values():
        words = np.zeros(t.length, np.uint64)
        t.add_wire(words, reply)
        out.append(words[1:])
    return out


def test_a_late_upload_stays_hidden_by_its_self_mask() -> None:
    """A server that calls site 2 lost, rebuilds its mask key and then gets its upload reads noise.

    Without the second mask it would read the numbers: shown by taking that mask off as well.
    """
    t = terms(4, blocks=(Block("x", (50,), 20),))
    values = numbers(t)
    sites, server = members(t), Collector(t)
    requests = server.advance(ask(sites, "keys", server.open(), values))
    requests = server.advance(ask(sites, "shares", requests, values))
    mask, _, seed = sites[2]._three()  # what the others' shares would give: the first of them
    replies = ask(sites, "upload", requests, values)
    words = np.zeros(t.length, np.uint64)
    t.add_wire(words, replies.pop(2))
    for i in (0, 1, 3):
        add_stream(words, mask_key(t, 2, private_key(mask), i, server._bodies[i]), negative=i > 2)
    assert _hidden(t, words, values[2])
    add_stream(words, seed, negative=True)
    assert not _hidden(t, words, values[2])

    requests = server.advance(replies)  # and the honest rest goes on without it
    requests = server.advance(ask(sites, "confirm", requests, values))
    server.advance(ask(sites, "unmask", requests, values))
    assert flat(server.result()) == total(values, (0, 1, 3))


def _hidden(t: Terms, words: np.ndarray, values: dict[str, torch.Tensor]) -> bool:
    return bool((t.decode(words)[1]["x"] != values["x"]).float().mean() > 0.9)


@pytest.mark.parametrize("degree", [None, 4])
def test_kill_and_restore_between_any_two_stages(degree: int | None) -> None:
    t = terms(7, degree=degree)
    values = numbers(t)
    sites, server = members(t), Collector(t)
    requests, log = server.open(), []
    for stage in STAGES:
        replies = ask(sites, stage, requests, values)
        sites = [Member.restore(t, m.me, signer(m.me), m.dump()) for m in sites]
        log.append(replies)
        server = Collector(t)  # the server, killed too, replays what it stored
        assert server.open()
        for stored in log:
            requests = server.advance(stored)
    assert flat(server.result()) == total(values, range(7))


def test_state_is_refused_when_damaged_or_of_another_sum() -> None:
    t = terms(3)
    _, sites, _ = run(t, numbers(t), upto="confirm")
    state = sites[0].dump()
    for cut in (b"", state[:31], state[:-1], state[1:], state + b"\0"):
        with pytest.raises(ProtocolError, match="state must be"):
            Member.restore(t, 0, signer(0), cut)
    with pytest.raises(ProtocolError, match="state must be"):
        Member.restore(t, 1, signer(1), state)
    with pytest.raises(ProtocolError, match="state must be"):
        Member.restore(replace(t, context=b"\1" * 32), 0, signer(0), state)


def test_secrets_are_gone_once_they_are_not_needed() -> None:
    t = terms(3)
    values = numbers(t)
    _, sites, requests = run(t, values, upto="upload")
    private, channel, seed = sites[0]._three()
    sites[0].answer("upload", requests[0], values[0])
    state = sites[0].dump()
    assert private not in state and channel not in state and seed in state  # the seed: until unmask
    _, done, _ = run(t, values)
    assert not (done[0]._held or done[0]._secrets or done[0]._bodies)


def test_three_hundred_sites_on_a_graph_with_losses() -> None:
    t = terms(300, 7, (Block("x", (4,), 12),), degree=12)
    values = numbers(t)
    lost = {s: range(60 * k, 60 * k + 3) for k, s in enumerate(STAGES)}
    server, _, _ = run(t, values, lost)
    assert len(server.survivors) == 300 - 9
    assert flat(server.result()) == total(values, server.survivors)


@pytest.mark.parametrize("n", [3, 4, 5, 8, 21, 64, 301])
@pytest.mark.parametrize("degree", [2, 4, 20])
def test_graph_is_regular_symmetric_and_connected(n: int, degree: int) -> None:
    if degree >= n:
        with pytest.raises(ConfigError, match="degree must be even"):
            terms(n, degree=degree)
        return
    t = terms(n, degree=degree)
    near = [t.neighbours(i) for i in range(n)]
    assert all(len(set(x)) == degree and i not in x for i, x in enumerate(near))
    assert all(i in near[j] for i in range(n) for j in near[i])
    seen, edge = {0}, {0}
    while edge:
        edge = {j for i in edge for j in near[i]} - seen
        seen |= edge
    assert len(seen) == n


def test_graph_depends_on_the_context() -> None:
    a, b = (terms(50, degree=4, context=bytes([k]) * 32) for k in (0, 1))
    assert sum(a.neighbours(i) == b.neighbours(i) for i in range(50)) < 5


def test_choice_of_graph_keeps_its_promise() -> None:
    """A thousand random losses and colluders break a graph chosen for 1 in 100 in about so many."""
    n, away, bad = 201, 20, 10
    k, t = choose_graph(n, away, bad, failure=0.01)
    assert k is not None and choose_graph(n, away, bad, 1e-9)[0] > k  # type: ignore[operator]
    rng, failed = np.random.default_rng(0), 0
    for _ in range(1000):
        kind = rng.permutation(np.repeat([2, 1, 0], [away, bad, n - away - bad]))
        around = np.lib.stride_tricks.sliding_window_view(np.resize(kind, n + k), k + 1)
        others = np.delete(around, k // 2, axis=1)
        lost = (others == 2).sum(1).max() > k - t
        split = (others == 1).sum(1).max() > 2 * t - (k + 1) - 1
        failed += bool(lost or split)
    assert failed <= 20
    assert choose_graph(10, 2, 1) == (None, 8)
    with pytest.raises(ConfigError, match="dropouts must be fewer than 5 of 10"):
        choose_graph(10, 5, 1)


def test_server_memory_does_not_grow_with_the_number_of_uploads() -> None:
    few, many = (_peak(n) for n in (4, 20))
    assert many < 1.25 * few  # sixteen kept vectors would make it three times as much


def _peak(n: int) -> int:
    """Return the most bytes held while the uploads of ``n`` sites are made and received in turn."""
    t = terms(n, blocks=(Block("x", (50_000,), 27),))
    values = [{"x": torch.full((50_000,), i)} for i in range(n)]
    server, sites, requests = run(t, values, upto="upload")
    tracemalloc.start()
    for i, request in requests.items():
        server.receive(i, sites[i].answer("upload", request, values[i]))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(server.advance()) == n
    return peak


@settings(deadline=None, max_examples=60)
@given(st.integers(1, 64), st.integers(0, 70), st.integers(0, 2**32))
def test_ring_packing_is_that_of_the_statistics(bits: int, n: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    words = rng.integers(0, 2**64, n, np.uint64)
    data = pack_ring(words, bits)
    low = words & np.uint64((1 << bits) - 1)
    assert (unpack_ring(data, bits, n) == low).all()
    shift = np.int64(64 - bits)
    assert data == pack(torch.from_numpy((words << np.uint64(shift)).view(np.int64) >> shift), bits)


def test_ring_packing_over_several_chunks() -> None:
    words = np.random.default_rng(0).integers(0, 2**64, 100_001, np.uint64)
    for bits in (1, 13, 35, 61, 64):
        data = pack_ring(words, bits)
        assert (unpack_ring(data, bits, len(words)) == words & np.uint64((1 << bits) - 1)).all()
        assert len(data) == (100_001 * bits + 7) // 8


def test_stream_of_a_key_does_not_depend_on_chunks() -> None:
    """RFC 8439, test vector 1 of ChaCha20, and the seam at 32,768 words."""
    words = np.zeros(70_000, np.uint64)
    add_stream(words, bytes(32))
    assert words[:2].astype("<u8").tobytes() == bytes.fromhex("76b8e0ada0f13d90405d6ae55386bd28")
    assert len(np.unique(words)) == len(words)
    add_stream(words, bytes(32), negative=True)
    assert not words.any()


def test_terms_refuse_what_protects_nobody() -> None:
    for n, wrong in ((5, 2), (4, 2), (5, 6), (2, 1)):
        with pytest.raises(ConfigError, match="more than half"):
            terms(n, threshold=wrong)
    with pytest.raises(ConfigError, match="two or more distinct"):
        terms(1, threshold=1)
    t = terms(4)
    with pytest.raises(ConfigError, match="distinct keys"):
        replace(t, roster=(t.roster[0], *t.roster[:3]))
    with pytest.raises(ConfigError, match="quorum"):
        terms(5, threshold=4, quorum=3)
    with pytest.raises(ConfigError, match=r"at most 62 for 4 sites\. Got 63"):
        terms(4, blocks=(Block("x", (1,), 63),))
    with pytest.raises(ConfigError, match="degree must be even"):
        terms(9, degree=3)
    with pytest.raises(ConfigError, match="distinct names"):
        terms(4, blocks=(Block("x", (1,), 3), Block("x", (2,), 3)))
    with pytest.raises(ConfigError, match="sizes"):
        Block("x", (0,), 3)


def test_every_term_changes_the_digest() -> None:
    t = terms(5)
    others = [
        replace(t, context=b"\1" * 32),
        replace(t, roster=t.roster[::-1]),
        replace(t, threshold=4),
        replace(t, quorum=4),
        replace(t, degree=2, threshold=3),
        replace(t, blocks=t.blocks[::-1]),
        replace(t, blocks=(t.blocks[0], replace(t.blocks[1], bits=25))),
        replace(t, blocks=(t.blocks[0], replace(t.blocks[1], shape=(5, 2)))),
        replace(t, blocks=(t.blocks[0], replace(t.blocks[1], name="mear"))),
    ]
    assert len({o.digest for o in [t, *others]}) == 10
    assert replace(t, quorum=3).digest == t.digest  # the default, written out


def test_result_before_the_end_is_refused() -> None:
    t = terms(3)
    server, _, _ = run(t, numbers(t), upto="unmask")
    with pytest.raises(ProtocolError, match=r"complete\. Got stage 'unmask'"):
        server.result()
