"""A broken line: whatever bytes arrive, only ProtocolError comes out, and nothing is lost."""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedgist.errors import ProtocolError
from fedgist.privacy.secure_sum import STAGES, Collector, Member
from fedgist.privacy.secure_sum.wire import KEYS, PARCEL, SIGNATURE
from secure_sum_tools import Messages, ask, flip, members, numbers, rows, signer, terms


@cache
def _recorded(stage: str) -> tuple[bytes, tuple[bytes, ...], bytes]:
    """Return site 0's state before ``stage``, all good replies up to it, and its request."""
    t = terms(3)
    values = numbers(t)
    sites, server = members(t), Collector(t)
    requests, log = server.open(), []
    for s in STAGES[: STAGES.index(stage) + 1]:
        state = sites[0].dump()
        request = requests[0]
        replies = ask(sites, s, requests, values)
        log.append(rows({i: len(r).to_bytes(4, "big") + r for i, r in replies.items()}))
        if s != stage:
            requests = server.advance(replies)
    return state, tuple(log), request


def _replies(log: bytes) -> Messages:
    out, at = {}, 0
    while at < len(log):
        site, size = (int.from_bytes(log[at + k : at + k + 4], "big") for k in (0, 4))
        out[site] = log[at + 8 : at + 8 + size]
        at += 8 + size
    return out


def _bent(data: st.DataObject, good: bytes) -> bytes:
    kind = data.draw(st.sampled_from(["cut", "long", "flip", "splice", "random"]))
    if kind == "random" or not good:
        size = data.draw(st.sampled_from([1, 3, len(good), len(good) + 1]))
        return data.draw(st.binary(min_size=size, max_size=size))
    at = data.draw(st.integers(0, len(good) - 1))
    more = data.draw(st.binary(min_size=1, max_size=200))
    return {
        "cut": good[:at],
        "long": good + more,
        "flip": flip(good, at),
        "splice": good[:at] + more + good[at + len(more) :],
    }[kind]


@pytest.mark.parametrize("stage", STAGES)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_bent_request_is_a_protocol_error(stage: str, data: st.DataObject) -> None:
    t = terms(3)
    state, _, request = _recorded(stage)
    site = Member.restore(t, 0, signer(0), state)
    bent = _bent(data, request)
    values = numbers(t)[0] if stage == "upload" else None
    if bent != request and not _still_valid(stage, bent, request):
        with pytest.raises(ProtocolError):
            site.answer(stage, bent, values)
        assert site.dump() == state
    assert site.answer(stage, request, values)


def _still_valid(stage: str, bent: bytes, request: bytes) -> bool:
    """Whole rows left out can leave enough of them; a shorter survivor list can be a good one."""
    width = {"shares": KEYS, "upload": PARCEL, "unmask": SIGNATURE}.get(stage, 0) + 4
    whole = {request[i : i + width] for i in range(0, len(request), width)}
    part = {bent[i : i + width] for i in range(0, len(bent), width)}
    return part <= whole if width > 4 else stage == "confirm" and len(bent) == len(request)


@pytest.mark.parametrize("stage", STAGES)
@settings(deadline=None, max_examples=80)
@given(data=st.data())
def test_any_bent_reply_costs_its_site_and_nothing_else(stage: str, data: st.DataObject) -> None:
    t = terms(3)
    _, log, _ = _recorded(stage)
    server = Collector(t)
    server.open()
    for stored in log[:-1]:
        server.advance(_replies(stored))
    replies = _replies(log[-1])
    good = replies[0]
    replies[0] = _bent(data, good)
    try:
        server.advance(replies)
    except ProtocolError:
        # A vector or a ciphertext of the right length cannot be told from another by itself.
        assert stage == "unmask" or 0 in server.faults
    assert not server.faults.keys() - {0}
    assert 0 in server.faults or replies[0] == good or len(replies[0]) == len(good)


@settings(deadline=None, max_examples=100)
@given(st.binary(max_size=300))
def test_any_bytes_as_state_are_a_protocol_error(state: bytes) -> None:
    with pytest.raises(ProtocolError):
        Member.restore(terms(3), 0, signer(0), state)
