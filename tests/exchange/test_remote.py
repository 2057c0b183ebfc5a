"""Runs over letters: equal to the local exchange, whoever is lost, and nothing bad gets in."""

from __future__ import annotations

import json
import re
import struct

import pytest
import torch

from federation_tools import OPEN, federation, outcome_bytes
from fedgist.errors import PrivacyError, ProtocolError
from fedgist.exchange.letter import FIXED, write_letter
from fedgist.exchange.site import Site
from fedgist.exchange.wire import duty_of, wire_blocks, wire_specs
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity

TRUSTS = ("local", "central", "distributed")


@pytest.fixture
def parts(images):
    return [images.take(torch.arange(60) % 4 == i) for i in range(4)]


@pytest.mark.parametrize("trust", TRUSTS)
def test_equal_to_the_local_exchange_bit_for_bit(tmp_path, task, parts, trust):
    fed = federation(tmp_path, task, parts, [f"privacy.trust={trust}"])
    outcome, exchange = fed.run()
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    assert not exchange.faults
    assert fed.agreement.secure == (trust != "local")


def test_central_without_secure_sum(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=central"], {"secure": False})
    outcome, _ = fed.run()
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    assert fed.transport.log == ["0.gist"]


@pytest.mark.parametrize("stage", ["keys", "shares", "upload", "confirm", "unmask"])
def test_a_site_lost_at_any_stage_of_the_secure_sum(tmp_path, task, parts, stage):
    sets = ["privacy.trust=distributed", "privacy.missing=1"]
    fed = federation(tmp_path, task, parts, sets, {"threshold": 3})
    after = ["keys", "shares", "upload", "confirm", "unmask"]
    fed.transport.lost = {(f"0.{s}", "site-2") for s in after[after.index(stage) :]}
    outcome, _ = fed.run()
    gone = (2,) if stage in ("keys", "shares", "upload") else ()
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts, lost=gone))


def test_too_few_sites_stop_the_run_and_it_goes_on_later(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], {"quorum": 4})
    fed.transport.lost = {("0.gist", "site-1")}
    with pytest.raises(ProtocolError, match=r"at least 4 sites. Got 3; missing: site-1 \(lost\)"):
        fed.run()
    fed.transport.lost = set()
    outcome, exchange = fed.run()
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    assert sorted(v.client for v in exchange.visits) == ["site-0", "site-1", "site-2", "site-3"]
    assert fed.transport.log == ["0.gist", "0.gist"]


def test_too_few_noise_shares_are_never_opened(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=distributed"], {"threshold": 3})
    fed.transport.lost = {("0.upload", "site-3")}
    with pytest.raises(ProtocolError, match=r"at least 4 sites. Got 3; missing: site-3"):
        fed.run()
    assert "0.unmask" not in fed.transport.log


def test_shares_cannot_be_asked_to_cover_fewer_sites_than_the_quorum(tmp_path, task, parts):
    with pytest.raises(PrivacyError, match="quorum must be at least 4"):
        federation(tmp_path, task, parts, ["privacy.trust=distributed"], {"quorum": 3})
    with pytest.raises(PrivacyError, match="must travel in a secure sum"):
        federation(tmp_path, task, parts, ["privacy.trust=distributed"], {"secure": False})


LOGISTIC = [
    "method.name=logistic",
    "method.features=scattering:32",
    "method.steps=2",
    "privacy.noise=seeded",
]


@pytest.mark.parametrize("trust", TRUSTS)
def test_several_rounds(tmp_path, task, parts, trust):
    fed = federation(tmp_path, task, parts, [f"privacy.trust={trust}"], base=LOGISTIC)
    outcome, _ = fed.run()
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    ledger = fed.sites["site-1"].ledger.show()
    assert len(ledger["entries"]) == 3


def test_a_restarted_coordinator_asks_the_same_and_nobody_spends_twice(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=distributed"], base=LOGISTIC)
    fed.transport.lost = {("2.upload", "site-0")}
    with pytest.raises(ProtocolError, match=r"step '2.upload' must be answered"):
        fed.run()
    fed.transport.lost = set()
    fed.transport.log.clear()
    outcome, _ = fed.run()
    assert fed.transport.log == ["2.upload", "2.confirm", "2.unmask"]
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    assert len(fed.sites["site-2"].ledger.show()["entries"]) == 3


def test_a_restarted_site_sends_the_same_bytes(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    old = fed.sites["site-0"]
    request = ask(fed, "0.gist", "site-0")
    reply = old.answer(request)
    assert old.answer(request) == reply
    again = reopened(old, lambda: pytest.fail("the images must not be read again"))
    assert again.answer(request) == reply


def test_one_process_at_a_time(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    with pytest.raises(ProtocolError, match="one process at a time"):
        Site(
            fed.agreement,
            fed.members[0],
            lambda: parts[0],
            tmp_path / "site-0",
            fed.sites["site-0"].ledger,
            OPEN,
        )


def test_a_step_is_answered_once(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    site = fed.sites["site-0"]
    site.answer(ask(fed, "0.gist", "site-0"))
    other = {"shared.x": torch.ones(2)}
    with pytest.raises(ProtocolError, match="must be asked once"):
        site.answer(ask(fed, "0.gist", "site-0", other))


@pytest.mark.parametrize("step", ["1.gist", "0.unmask", "0.", "gist", "-1.gist", "0.gist.x", "x.y"])
def test_steps_outside_the_plan_are_refused(tmp_path, task, parts, step):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    with pytest.raises(ProtocolError, match="must be one of the task's plan"):
        fed.sites["site-0"].answer(ask(fed, step, "site-0"))
    assert fed.sites["site-0"].ledger.show()["entries"] == []


def test_a_stage_out_of_order_is_refused(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=distributed"])
    body = {"message": torch.zeros(8, dtype=torch.uint8)}
    with pytest.raises(ProtocolError, match="stage 'upload' must come after 'shares'"):
        fed.sites["site-0"].answer(ask(fed, "0.upload", "site-0", body))
    assert fed.sites["site-0"].ledger.show()["entries"] == []


def test_a_stage_without_its_message_is_refused(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=distributed"])
    for body in ({}, {"message": torch.ones(3)}):
        with pytest.raises(ProtocolError, match="must carry a message"):
            fed.sites["site-0"].answer(ask(fed, "0.keys", "site-0", body))


def test_a_lost_memory_is_not_a_second_release(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    site, request = fed.sites["site-0"], ask(fed, "0.gist", "site-0")
    site.answer(request)
    site.close()
    other = tmp_path / "elsewhere"
    again = Site(fed.agreement, site.identity, site.load, other, site.ledger, OPEN)
    for _ in range(2):
        with pytest.raises(PrivacyError, match="must be answered once with these images"):
            again.answer(request)
    assert len(site.ledger.show()["entries"]) == 1


def test_only_the_coordinator_of_the_task_is_answered(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    site = fed.sites["site-0"]
    digest = fed.agreement.digest
    for wrong, match in (
        (write_letter(Identity.new("leader"), digest, "0.gist", "site-0", "ask", {}), "roster"),
        (write_letter(fed.members[1], digest, "0.gist", "site-0", "ask", {}), "roster"),
        (write_letter(fed.leader, "0" * 64, "0.gist", "site-0", "ask", {}), "task = "),
        (write_letter(fed.leader, digest, "0.gist", "site-1", "ask", {}), "to = site-0"),
        (write_letter(fed.leader, digest, "0.gist", "site-0", "reply", {}), "kind 'ask'"),
    ):
        with pytest.raises(ProtocolError, match=match):
            site.answer(wrong)
    assert site.ledger.show()["entries"] == []


def intruder(fed, name, reply):
    return write_letter(Identity.new(name), fed.agreement.digest, "0.gist", "leader", "reply", {})


def remade(fed, name, reply, tensors=None, **changes):
    """Return a letter of the site's own that differs from the honest one as told."""
    header = json.loads(reply[FIXED : FIXED + struct.unpack("<I", reply[FIXED - 4 : FIXED])[0]])
    fixed = {k: header.pop(k) for k in ("task", "step", "to", "kind")} | changes
    for k in ("from", "bytes", "sha256"):
        header.pop(k)
    member = next(m for m in fed.members if m.name == name)
    more = header | {k: v for k, v in fixed.items() if k not in ("task", "step", "to", "kind")}
    body = packed(fed) if tensors is None else tensors
    return write_letter(
        member, fixed["task"], fixed["step"], fixed["to"], fixed["kind"], body, **more
    )


def packed(fed, change=lambda k, n: n):
    specs = wire_specs(wire_blocks(duty_of(fed.agreement), fed.agreement.plan.rounds[0]))
    return {k: torch.zeros(change(k, s[0]), dtype=torch.uint8) for k, (_, s) in specs.items()}


BAD = {
    "a key outside the roster": (intruder, "roster"),
    "another task": (lambda f, n, r: remade(f, n, r, task="1" * 64), "task ="),
    "another step": (lambda f, n, r: remade(f, n, r, step="1.gist"), "step = 0.gist"),
    "an answer to something else": (lambda f, n, r: remade(f, n, r, asked="2" * 64), "asked"),
    "a weaker claim": (lambda f, n, r: remade(f, n, r, epsilon="99.0"), "epsilon ="),
    "less noise": (lambda f, n, r: remade(f, n, r, sigma="0.001"), "sigma ="),
    "a wrong shape": (lambda f, n, r: remade(f, n, r, packed(f, lambda k, n: n + 1)), "plan says"),
    "a block too many": (
        lambda f, n, r: remade(f, n, r, packed(f) | {"more": torch.zeros(1).byte()}),
        "'more' besides",
    ),
    "a block too few": (lambda f, n, r: remade(f, n, r, {}), "no '"),
    "numbers of another type": (
        lambda f, n, r: remade(f, n, r, {k: v.double() for k, v in packed(f).items()}),
        "at most|float64",
    ),
    "too much": (
        lambda f, n, r: remade(f, n, r, packed(f) | {"more": torch.zeros(100_000).byte()}),
        "at most",
    ),
    "one bit changed": (lambda f, n, r: r[:-1] + bytes([r[-1] ^ 1]), "body that was signed"),
    "a changed header": (lambda f, n, r: r.replace(b'"epsilon"', b'"epsilom"'), "signature"),
    "cut short": (lambda f, n, r: r[: len(r) // 2], "body that was signed"),
    "nothing": (lambda f, n, r: b"", "begin with FEDGIST"),
    "a pickle": (lambda f, n, r: b"\x80\x04K\x01." * 99, "begin with FEDGIST"),
    "a later format": (lambda f, n, r: r[:7] + b"\x02" + r[8:], "version 1"),
}


@pytest.mark.parametrize("kind", BAD)
def test_a_bad_gist_is_refused_named_and_nothing_is_lost(tmp_path, task, parts, kind):
    change, match = BAD[kind]
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], {"quorum": 3})
    fed.transport.alter[("0.gist", "site-1")] = lambda reply: change(fed, "site-1", reply)
    outcome, exchange = fed.run()
    (fault,) = exchange.faults.items()
    assert fault[0] == ("0.gist", "site-1")
    assert re.search(match, fault[1]), fault[1]
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts, lost=(1,)))


def test_a_site_says_what_kind_of_error_and_keeps_the_rest(tmp_path, task, parts):
    strict = Policy(**(OPEN.model_dump() | {"min_class": 6}))
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], {"quorum": 1}, policy=strict)
    with pytest.raises(ProtocolError) as caught:
        fed.run()
    assert "the site refused (DataError)" in str(caught.value)
    assert "min_class" not in str(caught.value)
    assert "class 'a' must have at least 6 images" in fed.transport.said["site-0"]
    assert fed.sites["site-0"].ledger.show()["entries"] == []


@pytest.mark.parametrize(
    ("key", "value", "sets"),
    [
        ("max_epsilon", 1.0, []),
        ("max_delta", 1e-6, []),
        ("methods", ("logistic",), []),
        ("trust", ("local",), ["privacy.trust=central"]),
        ("seeded", False, []),
        ("min_sites", 5, []),
        ("max_epsilon", 10.0, ["privacy.epsilon=inf"]),
    ],
)
def test_a_site_refuses_a_task_beyond_its_policy(tmp_path, task, parts, key, value, sets):
    policy = Policy(**(OPEN.model_dump() | {key: value}))
    with pytest.raises(PrivacyError, match=f"this site's policy, {key} ="):
        federation(tmp_path, task, parts, sets, policy=policy)


def test_exact_sums_outside_a_secure_sum_need_the_site_s_consent(tmp_path, task, parts):
    policy = Policy(**(OPEN.model_dump() | {"plain_sums": False}))
    with pytest.raises(PrivacyError, match="plain_sums"):
        federation(
            tmp_path, task, parts, ["privacy.trust=central"], {"secure": False}, policy=policy
        )


def test_a_site_outside_the_roster_cannot_open_the_task(tmp_path, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"])
    with pytest.raises(Exception, match="must be in the task's roster"):
        Site(
            fed.agreement,
            Identity.new("site-9"),
            lambda: parts[0],
            tmp_path / "x",
            fed.sites["site-0"].ledger,
            OPEN,
        )


def test_the_ledger_stops_a_release_before_it_exists(tmp_path, task, parts):
    sets = ["privacy.trust=local", "privacy.epsilon=5"]
    fed = federation(tmp_path, task, parts, sets, {"quorum": 4})
    fed.sites["site-0"].ledger.cap(3.0, 1e-5)
    with pytest.raises(ProtocolError, match=r"site-0 \(the site refused \(PrivacyError\)"):
        fed.run()
    assert not list((tmp_path / "site-0").rglob("*.answered"))


def ask(fed, step, name, tensors=None):
    return write_letter(fed.leader, fed.agreement.digest, step, name, "ask", tensors or {})


def reopened(site, load):
    """Return the site as a new process would open it."""
    site.close()
    return Site(site.agreement, site.identity, load, site.folder.parent, site.ledger, site.policy)


def test_an_answer_may_be_as_long_as_its_numbers(tmp_path, task, parts):
    """Bytes are counted, not numbers: float32 weights take four times as many."""
    base = ["method.name=fedavg", "method.rounds=1", "method.recipe.width=32"]
    sets = ["privacy.trust=local", "privacy.epsilon=inf"]
    fed = federation(tmp_path, task, parts, sets, base=base)
    outcome, exchange = fed.run()
    assert not exchange.faults
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
