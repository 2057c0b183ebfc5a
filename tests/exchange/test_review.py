"""Review: nothing leaves undecided, what leaves is what was looked at, what is withheld stays."""

from __future__ import annotations

import json
import os
import stat
import threading
import time
from hashlib import sha256
from pathlib import Path

import pytest
import torch

from federation_tools import OPEN, federation
from fedgist.errors import Awaiting, DataError, PrivacyError, ProtocolError, Withheld
from fedgist.exchange.letter import read_letter, write_letter
from fedgist.exchange.mailbox import MailboxTransport, join, task_folder
from fedgist.exchange.receipt import Receipt, WithheldImages, image_hashes
from fedgist.exchange.remote import RemoteExchange
from fedgist.exchange.review import Review
from fedgist.exchange.site import Site
from fedgist.exchange.wire import to_shared
from fedgist.exchange.worker import Place, _answer
from fedgist.privacy.identity import Identity
from fedgist.privacy.ledger import Ledger
from fedgist.run import generator

REVIEW = OPEN.model_copy(update={"review": True})
UPLOADS = [
    "method.name=downsample",
    "method.side=4",
    "method.recipe.steps=3",
    "privacy.epsilon=inf",
]
ROUNDS = [
    "method.name=scaffold",
    "method.rounds=2",
    "method.recipe.width=4",
    "method.recipe.steps=2",
    "privacy.epsilon=inf",
]
NOISED = ["method.features=scattering:32", "method.heads=['lda']", "privacy.noise=system"]
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def parts(images):
    return [images.take(torch.arange(60) % 2 == i) for i in range(2)]


def made(folder, task, parts, sets=UPLOADS, policy=REVIEW, terms=None):
    sets = [*sets, "privacy.trust=local"]
    return federation(folder, task, parts, sets, terms, policy=policy, base=())


def asking(fed, r=0, shared=None, name="site-0", **more):
    """Return the coordinator's request for a round's gist."""
    a = fed.agreement
    if shared is None:
        shared = a.built.start(a.task, generator(a.seed, "start")).shared
    body = to_shared(shared)
    return write_letter(fed.leader, a.digest, f"{r}.gist", name, "ask", body, **more)


def desk(fed, name="site-0"):
    return Review(fed.sites[name].folder, fed.agreement, fed.sites[name].identity.public)


def decide(fed, verdict="send", withheld=None, name="site-0"):
    review = desk(fed, name)
    waiting = review.waiting()
    identity = fed.sites[name].identity
    return review.decide(identity, waiting.step, waiting.digest, verdict, withheld)


def body(fed, letter, name="site-0"):
    public = fed.sites[name].identity.public
    return read_letter(letter, [public], fed.agreement.digest, to="leader")


def reopened(fed, part, name="site-0", **more):
    old = fed.sites[name]
    old.close()
    ledger = Ledger(fed.folder / f"{name}.sqlite")
    more = {"policy": old.policy} | more
    fed.sites[name] = Site(
        fed.agreement, old.identity, lambda: part, fed.folder / name, ledger, **more
    )
    return fed.sites[name]


def spent(fed, name="site-0"):
    return fed.sites[name].ledger.show()["entries"]


def test_nothing_leaves_before_the_decision_and_then_what_was_looked_at(tmp_path, task, parts):
    fed = made(tmp_path, task, parts)
    site, request = fed.sites["site-0"], asking(fed)
    for _ in range(2):
        with pytest.raises(Awaiting, match="waits for your decision"):
            site.answer(request)
    waiting = desk(fed).waiting()
    file = site.folder / "review" / "0.gist.pending"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert not spent(fed) and not (site.folder / "0.gist.answered").exists()
    receipt = decide(fed)
    reply = site.answer(request)
    assert body(fed, reply).body == waiting.gist
    assert body(fed, reply).header["sha256"] == waiting.digest == receipt.said["gist"]
    assert len(spent(fed)) == 1 and not file.exists()
    assert site.answer(request) == reply
    done = desk(fed).receipt("0.gist")
    assert done.said == receipt.said and done.sent["gist"] == waiting.digest
    assert done.said["claim"] == fed.agreement.plan.claim.line()


def test_without_review_all_is_as_before(tmp_path, task, parts):
    plain = made(tmp_path / "a", task, parts, policy=OPEN)
    request = asking(plain)
    reply = plain.sites["site-0"].answer(request)
    seen = federation(
        tmp_path / "b",
        task,
        parts,
        [*UPLOADS, "privacy.trust=local"],
        policy=REVIEW,
        base=(),
        identities=plain.members,
    )
    with pytest.raises(Awaiting):
        seen.sites["site-0"].answer(asking(seen))
    decide(seen)
    again = seen.sites["site-0"].answer(asking(seen))
    assert body(plain, reply).body == body(seen, again).body
    files = {p.name for p in plain.sites["site-0"].folder.iterdir()}
    assert files == {"lock", "token", "0.gist.answered"}


def test_a_mailbox_is_empty_until_then_and_other_sites_go_on(tmp_path, task, parts):
    fed = made(tmp_path, task, parts, policy=OPEN, terms={"patience": 30.0})
    reopened(fed, parts[0], review=True, look="fedgist inspect --task t --key k --data d")
    share = tmp_path / "share"
    share.mkdir()
    carrier = MailboxTransport(share, fed.agreement, tmp_path / "asked", 0.02)
    exchange = RemoteExchange(fed.agreement, fed.leader, carrier, tmp_path / "leader")
    found = []
    leader = threading.Thread(
        target=lambda: found.append(exchange.round(0, fed.agreement.plan.rounds[0], {}))
    )
    leader.start()
    root = task_folder(share, fed.agreement)
    until((root / "to" / "site-0" / "0.gist.letter").is_file)
    said = {n: [] for n in fed.sites}
    for name, site in fed.sites.items():
        assert join(site, share, say=said[name].append, once=True) == ""
    assert "fedgist inspect --task t --key k --data d" in said["site-0"][0]
    assert len(said["site-0"]) == 1 and "answered" in said["site-1"][0]
    assert not (root / "from" / "site-0").exists() and leader.is_alive()
    stop = threading.Thread(
        target=join,
        args=(fed.sites["site-0"], share),
        kwargs={"say": said["site-0"].append, "poll": 0.02},
        daemon=True,
    )
    stop.start()
    until(lambda: len(said["site-0"]) > 1)
    time.sleep(0.1)
    assert len(said["site-0"]) == 2  # once for each start, not at every look
    decide(fed)
    leader.join(20)
    assert found and found[0].clients == 2 and not exchange.faults
    exchange.end("over")
    stop.join(20)
    assert not stop.is_alive()


def test_what_is_withheld_is_absent_now_and_later(tmp_path, task, parts):
    out = WithheldImages(("b",), tuple(image_hashes(parts[0].take(torch.tensor([0, 5])))))
    left = out.left(parts[0])
    assert 0 < len(left) < 20 and not (left.labels == 1).any()
    fed = made(tmp_path / "a", task, parts, ROUNDS)
    plain = made(tmp_path / "b", task, [left, parts[1]], ROUNDS, policy=OPEN)
    a = fed.agreement
    shared = a.built.start(a.task, generator(a.seed, "start")).shared
    for r in (0, 1):  # the second round reads the memory that the first left
        with pytest.raises(Awaiting):
            fed.sites["site-0"].answer(asking(fed, r, shared))
        waiting = desk(fed).waiting()
        if r == 0:
            assert decide(fed, withheld=out).withheld == out
        else:
            assert waiting.withheld == out and decide(fed).withheld == out
        reply = body(fed, fed.sites["site-0"].answer(asking(fed, r, shared)))
        other = body(plain, plain.sites["site-0"].answer(asking(plain, r, shared)))
        assert reply.body == other.body
        sent = desk(fed).receipt(f"{r}.gist").sent["gist"]
        assert sent == sha256(reply.body).hexdigest()
        assert (sent == waiting.digest) == (r == 1)
        memory = [f.sites["site-0"].folder / "memory.safetensors" for f in (fed, plain)]
        assert memory[0].read_bytes() == memory[1].read_bytes()
    assert [e["images"] for e in spent(fed)] == [30, 30]  # whoever could have been chosen


def test_rows_of_uploads_that_are_withheld_do_not_leave(tmp_path, task, parts):
    fed = made(tmp_path, task, parts)
    request = asking(fed)
    with pytest.raises(Awaiting):
        fed.sites["site-0"].answer(request)
    decide(fed, withheld=WithheldImages(images=tuple(image_hashes(parts[0])[3:4])))
    sent = body(fed, fed.sites["site-0"].answer(request)).tensors()
    rest = [i for i in range(30) if i != 3]
    assert sent["labels"].tolist() == parts[0].labels[rest].tolist()
    assert len(sent["pixels"]) == 29


def test_fresh_noise_when_something_is_withheld(tmp_path, task, parts):
    fed = made(tmp_path, task, parts, NOISED)
    request = asking(fed)
    with pytest.raises(Awaiting):
        fed.sites["site-0"].answer(request)
    first = desk(fed).waiting().gist
    decide(fed, withheld=WithheldImages(images=("0" * 64,)))  # nobody's: only the noise is new
    reply = body(fed, fed.sites["site-0"].answer(request))
    assert len(reply.body) == len(first) and reply.body != first
    assert not list((fed.sites["site-0"].folder / "review").glob("*.pending"))
    assert len(spent(fed)) == 1


def test_a_changed_waiting_file_is_refused(tmp_path, task, parts):
    fed = made(tmp_path, task, parts)
    request = asking(fed)
    with pytest.raises(Awaiting):
        fed.sites["site-0"].answer(request)
    decide(fed)
    file = fed.sites["site-0"].folder / "review" / "0.gist.pending"
    data = file.read_bytes()
    flipped = data[:-1] + bytes([data[-1] ^ 1])
    other = made(tmp_path / "b", task, parts)
    with pytest.raises(Awaiting):
        other.sites["site-0"].answer(asking(other))
    foreign = (other.sites["site-0"].folder / "review" / "0.gist.pending").read_bytes()
    for junk in (b"", data[:50], data[:-1], data + b"x", flipped, foreign):
        file.write_bytes(junk)
        with pytest.raises(ProtocolError, match="must be the gist that this site made"):
            fed.sites["site-0"].answer(request)
        with pytest.raises(ProtocolError, match="must be the gist that this site made"):
            desk(fed).waiting()
    assert not spent(fed)
    file.write_bytes(data)
    assert body(fed, fed.sites["site-0"].answer(request))


def test_a_decision_about_another_gist_is_ignored(tmp_path, task, parts):
    fed = made(tmp_path, task, parts)
    request = asking(fed)
    with pytest.raises(Awaiting):
        fed.sites["site-0"].answer(request)
    waiting = desk(fed).waiting()
    decide(fed)
    anew = reopened(fed, parts[0].take(torch.arange(20)))  # the data changed meanwhile
    with pytest.raises(Awaiting):
        anew.answer(request)
    assert desk(fed).waiting().digest != waiting.digest and not spent(fed)
    with pytest.raises(ProtocolError, match="must be about the gist that waits"):
        desk(fed).decide(anew.identity, "0.gist", "0" * 64, "send")
    with pytest.raises(Awaiting):
        anew.answer(asking(fed, more="another request"))
    decide(fed)
    assert body(fed, anew.answer(asking(fed, more="another request")))


def test_receipts_verify_and_forged_ones_are_refused(tmp_path, task, parts):
    fed = made(tmp_path, task, parts)
    site, request = fed.sites["site-0"], asking(fed)
    with pytest.raises(Awaiting):
        site.answer(request)
    decide(fed, "refuse")
    place = desk(fed).place("0.gist")
    said = json.loads(place.read_text())
    forged = said | {"decision": said["decision"] | {"decision": "send"}}
    eve = Receipt(forged["decision"]).dump(Identity.new("site-0"))
    moved = Receipt(said["decision"] | {"step": "1.gist"}).dump(site.identity)
    for junk in (json.dumps(forged).encode(), eve, moved, b"{}", b"[]", b"\xff", b"["):
        place.write_bytes(junk)
        with pytest.raises(ProtocolError, match="must be a decision that this site signed"):
            site.answer(request)
    late = forged | {"decision": said["decision"], "sent": {"gist": "0" * 64}, "sent_signature": ""}
    place.write_text(json.dumps(late))
    with pytest.raises(ProtocolError, match="must be a decision"):
        site.answer(request)
    assert not spent(fed)


def test_a_refusal_reaches_the_coordinator_as_a_fault(tmp_path, task, parts):
    fed = made(tmp_path, task, parts, terms={"quorum": 1})
    for name in fed.sites:
        with pytest.raises(Awaiting):
            fed.sites[name].answer(asking(fed, name=name))
        decide(fed, "refuse" if name == "site-0" else "send", name=name)
    _, exchange = fed.run()
    assert "the site refused (Withheld)" in exchange.faults["0.gist", "site-0"]
    assert not spent(fed) and len(spent(fed, "site-1")) == 1
    with pytest.raises(Withheld):
        fed.sites["site-0"].answer(asking(fed))
    decide(fed, "send")  # not sent so far: it may still be changed
    assert body(fed, fed.sites["site-0"].answer(asking(fed)))


def test_no_other_decision_after_sending(tmp_path, task, parts):
    fed = made(tmp_path, task, parts)
    site, request = fed.sites["site-0"], asking(fed)
    with pytest.raises(Awaiting):
        site.answer(request)
    receipt = decide(fed)
    site.answer(request)
    before = desk(fed).place("0.gist").read_bytes()
    gist = receipt.said["gist"]
    with pytest.raises(ProtocolError, match="must come before"):
        desk(fed).decide(site.identity, "0.gist", gist, "refuse")
    with pytest.raises(ProtocolError, match="must come before"):
        desk(fed).decide(site.identity, "0.gist", gist, "send", WithheldImages(("a",)))
    assert desk(fed).decide(site.identity, "0.gist", gist, "send").said == receipt.said
    assert desk(fed).place("0.gist").read_bytes() == before


def test_review_stays_on_and_policy_or_option_switches_it_on(tmp_path, task, parts):
    fed = made(tmp_path, task, parts, policy=OPEN)
    assert not fed.sites["site-0"].review
    assert reopened(fed, parts[0], review=True).review
    with pytest.raises(Awaiting):
        fed.sites["site-0"].answer(asking(fed))
    forgotten = reopened(fed, parts[0], review=False)
    with pytest.raises(Awaiting):
        forgotten.answer(asking(fed))
    assert reopened(fed, parts[1], name="site-1", policy=REVIEW).review


def test_contribute_waits_and_a_small_class_stops_what_is_left(tmp_path, task, parts):
    policy = REVIEW.model_copy(update={"min_class": 10})
    fed = made(tmp_path, task, parts, policy=policy)
    with pytest.raises(Awaiting):
        fed.sites["site-0"].contribute()
    one = tuple(image_hashes(parts[0])[:1])
    decide(fed, withheld=WithheldImages(images=one))
    with pytest.raises(DataError, match="must have at least 10 images"):
        fed.sites["site-0"].contribute()
    assert not spent(fed)
    decide(fed, withheld=WithheldImages(classes=("a",)))
    gist = fed.sites["site-0"].contribute()
    assert fed.sites["site-0"].contribute() == gist
    assert 0 not in body(fed, gist).tensors()["labels"]


def test_a_full_ledger_is_found_before_anybody_looks(tmp_path, task, parts):
    fed = made(tmp_path, task, parts, NOISED)
    fed.sites["site-0"].ledger.cap(0.1)
    with pytest.raises(PrivacyError, match="within the cap"):
        fed.sites["site-0"].answer(asking(fed))
    assert desk(fed).waiting() is None


def test_a_secure_sum_is_looked_at_before_the_masks(tmp_path, task, parts):
    sets = ["privacy.trust=distributed", *NOISED]
    fed = federation(tmp_path, task, parts, sets, policy=OPEN, base=())
    reopened(fed, parts[0], policy=REVIEW)
    out = WithheldImages(images=("0" * 64,))
    site, answer = fed.sites["site-0"], fed.sites["site-0"].answer
    steps = []

    def patient(request):
        """Decide, and ask again, whenever something waits."""
        try:
            return answer(request)
        except Awaiting:
            steps.append(desk(fed).waiting().step)
            decide(fed, withheld=out)
            return answer(request)

    site.answer = patient
    outcome, exchange = fed.run()
    assert steps == ["0.upload"] and not exchange.faults
    assert outcome.classifiers and desk(fed).receipt("0.upload").sent


def test_flower_refuses_review(capsys):
    class Reviewed:
        review = True

        def ended(self, data):
            raise ProtocolError("no end")

        def answer(self, request):
            raise AssertionError

    word, letter = _answer(lambda _: Reviewed(), Place(Path("t"), Path("k"), "d"), b"")
    assert (word, letter) == (b"ConfigError", b"")
    assert "must take part through a shared folder" in capsys.readouterr().err


WRITES = ((os, "fsync"), (os, "replace"), (Ledger, "record"), (Path, "unlink"))


class Killed(BaseException):
    """The process is gone: nothing after it is run."""


@pytest.mark.parametrize(
    ("sets", "withholds"),
    [(NOISED, True), (NOISED, False), (ROUNDS, True)],
    ids=["noised, withheld", "noised", "memory, withheld"],
)
def test_killed_at_every_write(tmp_path, task, parts, monkeypatch, sets, withholds):
    """One gist leaves, it is spent once, and the memory is that of one making."""
    out = WithheldImages(images=tuple(image_hashes(parts[0])[2:4])) if withholds else None
    left = [out.left(parts[0]) if out else parts[0], parts[1]]
    plain = made(tmp_path / "plain", task, left, sets, policy=OPEN)
    want = body(plain, plain.sites["site-0"].answer(asking(plain))).body
    fed = made(tmp_path, task, parts, sets)
    request, kill_at, kills = asking(fed), 0, 1
    while kills:
        kill_at += 1
        fed.folder = tmp_path / str(kill_at)
        fed.folder.mkdir()
        reopened(fed, parts[0])
        kills, replies, reviewed = lives(fed, parts[0], request, out, kill_at, monkeypatch)
        assert replies[0] == replies[1]
        sent = body(fed, replies[0]).body
        assert len(spent(fed)) == 1 and desk(fed).waiting() is None
        assert not list(desk(fed).folder.glob("*.pending"))
        receipt = desk(fed).receipt("0.gist")
        assert receipt.sent["gist"] == sha256(sent).hexdigest()
        assert receipt.said["gist"] in reviewed
        assert withholds or sha256(sent).hexdigest() in reviewed
        if sets is ROUNDS:
            assert sent == want
            memory = [f.sites["site-0"].folder / "memory.safetensors" for f in (fed, plain)]
            assert memory[0].read_bytes() == memory[1].read_bytes()
    assert kill_at > 10


def lives(fed, part, request, out, kill_at, monkeypatch):
    """Ask until two answers have come; return how often it was killed, answers, gists seen."""
    kills, replies, reviewed, count = 0, [], set(), [0]
    with monkeypatch.context() as patch:
        for owner, name in WRITES:
            patch.setattr(owner, name, counted(getattr(owner, name), count, kill_at))
        while len(replies) < 2:
            try:
                replies.append(fed.sites["site-0"].answer(request))
            except Awaiting:
                reviewed.add(desk(fed).waiting().digest)
                try:
                    decide(fed, withheld=out)
                except Killed:
                    kills += 1
            except Killed:
                kills += 1
                reopened(fed, part)
    return kills, replies, reviewed


def counted(call, count, kill_at):
    """Return a call that is the last one of the process when its turn comes: made, or not."""

    def wrapped(*args, **kwargs):
        count[0] += 1
        if count[0] == kill_at and kill_at % 2:
            raise Killed
        out = call(*args, **kwargs)
        if count[0] == kill_at:
            raise Killed
        return out

    return wrapped


def until(holds):
    deadline = time.time() + 20
    while not holds():
        assert time.time() < deadline
        time.sleep(0.01)
