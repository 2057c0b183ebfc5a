"""What a lying server, a lying site and a broken line can do to a secure sum: be refused."""

import hashlib
from dataclasses import replace

import pytest

from fedgist.errors import ConfigError, ProtocolError
from fedgist.privacy.secure_sum import STAGES, Collector, Member
from fedgist.privacy.secure_sum.shamir import SHARE
from fedgist.privacy.secure_sum.wire import BODY, KEYS, PARCEL, SIGNATURE, TAG, bitmap, keys_text
from secure_sum_tools import (
    Messages,
    ask,
    flat,
    flip,
    members,
    numbers,
    rows,
    run,
    signer,
    terms,
    total,
)

LOW_ORDER = [
    bytes(32),
    b"\1" + bytes(31),
    bytes.fromhex("e0eb7a7c3b41b8ae1656e3faf19fc46ada098deb9c32b1fd866205165f49b800"),
    bytes.fromhex("5f9c95bca3508c24b1d0b1559c83ef5b04445cc4581c8e86d8224eddd09f1157"),
    (2**255 - 20).to_bytes(32, "little"),
]


# ---- a lying server ----


def test_a_key_that_its_site_did_not_sign_is_refused() -> None:
    t = terms(4)
    _, sites, requests = run(t, numbers(t), upto="shares")
    for at in (4, 4 + 32, 4 + 64, 4 + BODY):  # mask key, channel key, commitment, signature
        with pytest.raises(ProtocolError, match="keys of site 1 must be signed"):
            sites[0].answer("shares", flip(requests[0], at))
    with pytest.raises(ProtocolError, match="keys of site 1 must be signed"):  # 1's row is 2's
        swapped = requests[0][:4] + requests[0][4 + KEYS + 4 :][:KEYS] + requests[0][4 + KEYS :]
        sites[0].answer("shares", swapped)


def test_an_invented_site_has_no_place() -> None:
    t = terms(4)
    _, sites, requests = run(t, numbers(t), upto="shares")
    for site in (0, 4, 2**32 - 1):  # itself, past the roster, far past
        with pytest.raises(ProtocolError, match=f"neighbours. Got {site}"):
            sites[0].answer("shares", site.to_bytes(4, "big") + requests[0][4:])


def test_a_server_with_another_roster_gets_nothing() -> None:
    t = terms(4)
    other = replace(t, roster=(*t.roster[:3], signer(9).public_key().public_bytes_raw()))
    with pytest.raises(ProtocolError, match="terms must be this site's own"):
        members(t)[0].answer("keys", Collector(other).open()[0])


def test_a_member_needs_its_own_rostered_key() -> None:
    t = terms(3)
    for me, key in ((0, 1), (3, 3), (-1, 2)):
        with pytest.raises(ConfigError, match="must belong to roster position"):
            Member(t, me, signer(key))


def test_contexts_do_not_mix() -> None:
    """Keys, parcels and votes of one sum are worth nothing in another of the same sites."""
    a, b = terms(3), terms(3, context=b"\1" * 32)
    values = numbers(a)
    _, _, asked = run(a, values, upto="shares")
    _, sites, _ = run(b, values, upto="shares")
    with pytest.raises(ProtocolError, match="signed by its rostered key"):
        sites[0].answer("shares", asked[0])
    _, _, asked = run(a, values, upto="upload")
    _, sites, _ = run(b, values, upto="upload")
    with pytest.raises(ProtocolError, match="parcel from site 1 must open"):
        sites[0].answer("upload", asked[0], values[0])
    _, _, asked = run(a, values, upto="unmask")
    _, sites, _ = run(b, values, upto="unmask")
    with pytest.raises(ProtocolError, match="survivors of site 1 must be signed"):
        sites[0].answer("unmask", asked[0])


def test_votes_of_an_earlier_attempt_do_not_count() -> None:
    """The same context, the same survivors: a site that lost its state has new keys."""
    t = terms(3)
    values = numbers(t)
    _, _, old = run(t, values, upto="unmask")
    _, sites, _ = run(t, values, upto="unmask")
    with pytest.raises(ProtocolError, match="survivors of site 1 must be signed"):
        sites[0].answer("unmask", old[0])


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_is_answered_once_and_in_order(stage: str) -> None:
    t = terms(3)
    values = numbers(t)
    _, sites, requests = run(t, values, upto=stage)
    for wrong in {*STAGES, "done", "start"} - {stage}:
        with pytest.raises(ProtocolError, match=f"now '{stage}'"):
            sites[0].answer(wrong, requests[0], values[0] if wrong == "upload" else None)
    sites[0].answer(stage, requests[0], values[0] if stage == "upload" else None)
    restored = Member.restore(t, 0, signer(0), sites[0].dump())
    for site in (sites[0], restored):
        with pytest.raises(ProtocolError, match="answers each stage once"):
            site.answer(stage, requests[0], values[0] if stage == "upload" else None)


def test_two_survivor_lists_to_two_halves_unmask_nothing() -> None:
    t = terms(6)  # threshold 4
    values = numbers(t)
    _, sites, _ = run(t, values, upto="confirm")
    lists = [bitmap(t, {0, 1, 2, 3, 4}), bitmap(t, {0, 1, 2, 3, 5})]
    halves = [(0, 1, 4), (2, 3, 5)]
    votes = {i: sites[i].answer("confirm", lists[h]) for h in (0, 1) for i in halves[h]}
    for h, half in enumerate(halves):
        for i in half:
            own = rows({j: votes[j] for j in half if j != i})
            with pytest.raises(ProtocolError, match="must get confirmations from at least 4"):
                sites[i].answer("unmask", own)
            both = rows({j: v for j, v in votes.items() if j != i and (j in half or j < 4)})
            with pytest.raises(ProtocolError, match="must be signed"):
                sites[i].answer("unmask", both)
            with pytest.raises(ProtocolError, match="each stage once"):  # nor a second vote
                sites[i].answer("confirm", lists[1 - h])


def test_survivor_lists_that_isolate_or_leave_out_are_refused() -> None:
    t = terms(6)
    _, sites, _ = run(t, numbers(t), {"shares": (5,)}, upto="confirm")
    cases = {
        "must include site 0": {1, 2, 3, 4},
        r"without shares: \[5\]": {0, 1, 2, 3, 5},
        "at least 4 of the 6 sites": {0, 1, 2},
    }
    for text, alive in cases.items():
        with pytest.raises(ProtocolError, match=text):
            sites[0].answer("confirm", bitmap(t, alive))
    for wrong in (b"", b"\x1f\0", b"\xff", b"\x5f"):  # bits beyond the roster
        with pytest.raises(ProtocolError, match="survivors must be 6 bits"):
            sites[0].answer("confirm", wrong)


def test_no_member_ever_gives_both_shares_of_an_owner() -> None:
    """Every share that leaves is of the right kind; nothing else of the pair is in the reply."""
    t = terms(5)
    values = numbers(t)
    _, sites, requests = run(t, values, {"upload": (3,)}, upto="unmask")
    held = dict(sites[0]._held)
    reply = sites[0].answer("unmask", requests[0])
    assert len(reply) == 5 * SHARE
    for k, owner in enumerate(sorted(held)):
        mask, seed = held[owner][:SHARE], held[owner][SHARE:]
        given, kept = (mask, seed) if owner == 3 else (seed, mask)
        assert reply[k * SHARE : (k + 1) * SHARE] == given
        assert kept not in reply or owner == 0  # its own second half was never there
    assert not sites[0]._held


def test_too_few_keys_parcels_or_votes_are_refused() -> None:
    t = terms(5)
    values = numbers(t)
    for stage, width, what in (
        ("shares", KEYS, "keys"),
        ("upload", PARCEL, "parcels"),
        ("unmask", SIGNATURE, "confirmations"),
    ):
        _, sites, requests = run(t, values, upto=stage)
        with pytest.raises(ProtocolError, match=f"must get {what} from at least 3 of the 5"):
            ask(sites, stage, {0: requests[0][: 4 + width]}, values)


def test_rows_that_are_repeated_or_out_of_order_are_refused() -> None:
    t = terms(4)
    _, sites, requests = run(t, numbers(t), upto="shares")
    r, step = requests[0], 4 + KEYS
    for bent in (r + r[-step:], r[step : 2 * step] + r[:step] + r[2 * step :]):
        with pytest.raises(ProtocolError, match="ids of rows must ascend"):
            sites[0].answer("shares", bent)


def test_a_parcel_of_another_site_or_an_altered_one_is_refused() -> None:
    t = terms(4)
    values = numbers(t)
    _, sites, requests = run(t, values, upto="upload")
    step = 4 + PARCEL
    for at in (4, 4 + TAG, 4 + 2 * TAG, step - 1):  # either hash, nonce, ciphertext
        with pytest.raises(ProtocolError, match="parcel from site 1 must open"):
            sites[0].answer("upload", flip(requests[0], at), values[0])
    reflected = requests[1][4:step]  # what 0 sent to 1, as if 1 had sent it
    with pytest.raises(ProtocolError, match="parcel from site 1 must open"):
        sites[0].answer("upload", requests[0][:4] + reflected + requests[0][step:], values[0])


# ---- lying sites ----


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("how", ["cut", "long", "empty", "random"])
def test_a_malformed_reply_is_the_loss_of_that_site(stage: str, how: str) -> None:
    t = terms(5)
    values = numbers(t)

    def bend(s: str, replies: Messages) -> None:
        if s == stage:
            r = replies[2]
            noise = hashlib.shake_128(stage.encode()).digest(len(r) + 1)
            replies[2] = {"cut": r[:-1], "long": r + b"\0", "empty": b"", "random": noise}[how]

    server, _, _ = run(t, values, bend=bend)
    assert set(server.faults) == {2} and server.faults[2].startswith(f"{stage}: ")
    alive = range(5) if stage in ("confirm", "unmask") else (0, 1, 3, 4)
    assert flat(server.result()) == total(values, tuple(alive))


@pytest.mark.parametrize("point", LOW_ORDER)
def test_keys_of_low_order_are_the_loss_of_their_site(point: bytes) -> None:
    t = terms(4)
    values = numbers(t)

    def weak(body: bytes) -> bytes:
        return body + signer(2).sign(keys_text(t, 2, body))

    for body in (point + bytes([9]) + bytes(63), bytes([9]) + bytes(31) + point + bytes(32)):

        def bend(stage: str, replies: Messages, body: bytes = body) -> None:
            if stage == "keys":
                replies[2] = weak(body)

        server, _, _ = run(t, values, bend=bend)
        assert "must be of full order" in server.faults[2]
        assert flat(server.result()) == total(values, (0, 1, 3))
    _, sites, requests = run(t, values, upto="shares")  # a server that lets it through
    step = 4 + KEYS
    bad = weak(bytes([9]) + bytes(31) + point + bytes(32))
    with pytest.raises(ProtocolError, match="of full order"):
        sites[0].answer("shares", requests[0][: step + 4] + bad + requests[0][2 * step :])


def test_a_corrupted_share_is_found_named_and_left_aside() -> None:
    t = terms(6)  # threshold 4; site 5 lost, so 4 of 5 shares of its key are needed

    def bend(stage: str, replies: Messages) -> None:
        if stage == "unmask":
            replies[1] = flip(replies[1], 5 * SHARE + 65)

    values = numbers(t)
    server, _, _ = run(t, values, {"upload": (5,)}, bend)
    assert server.faults[1] == "unmask: the share of site 5 must be as dealt. Got another"
    assert flat(server.result()) == total(values, range(5))

    with pytest.raises(ProtocolError, match=r"Got 3: missing 1 \(unmask: the share of site 5"):
        run(t, values, {"upload": (5,), "unmask": (2,)}, bend)


def test_a_wrong_seed_is_found_named_and_rebuilt_from_shares() -> None:
    t = terms(4)

    def bend(stage: str, replies: Messages) -> None:
        if stage == "unmask":
            replies[0] = flip(replies[0], SHARE - 1)

    values = numbers(t)
    server, _, _ = run(t, values, bend=bend)
    assert server.faults == {0: "unmask: the seed must be the one committed to. Got another"}
    assert flat(server.result()) == total(values, range(4))


def test_wrong_masks_spoil_the_sum_and_are_noticed() -> None:
    t = terms(4)

    def bend(stage: str, replies: Messages) -> None:
        if stage == "upload":
            replies[3] = bytes(len(replies[3]))

    with pytest.raises(ProtocolError, match="must count 4 sites"):
        run(t, numbers(t), bend=bend)


def test_second_and_uninvited_replies_change_nothing() -> None:
    t = terms(5)
    values = numbers(t)
    server, sites, requests = run(t, values, {"keys": (4,)}, upto="upload")
    replies = ask(sites, "upload", requests, values)
    for i in (0, 1, 0, 4, 99):
        server.receive(i, replies.get(i, replies[0]))
    assert "second reply" in server.faults[0]
    assert "not asked" in server.faults[4] and "not asked" in server.faults[99]
    requests = server.advance({i: replies[i] for i in (2, 3)})
    requests = server.advance(ask(sites, "confirm", requests, values))
    server.advance(ask(sites, "unmask", requests, values))
    assert flat(server.result()) == total(values, range(4))


def test_closing_a_finished_sum_is_refused() -> None:
    t = terms(3)
    server, _, _ = run(t, numbers(t))
    with pytest.raises(ProtocolError, match="closed twice"):
        server.advance()
    server.receive(0, b"more")
    assert "not asked" in server.faults[0]
