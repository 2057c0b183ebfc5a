"""Flower as a carrier: what arrives, who is who, and what is said when something goes wrong."""

from __future__ import annotations

import random
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("flwr")

from flwr.app import Array, ArrayRecord, ConfigRecord, Message, RecordDict
from flwr.clientapp import ClientApp

from fedgist.errors import ConfigError
from fedgist.exchange.flower import FlowerTransport, client_app, find_sites
from fedgist.exchange.transport import Failure
from fedgist.exchange.worker import Place, answer_apart
from fedgist.privacy.identity import Identity, keys_new
from flower_tools import InProcessGrid, Node

FAST = 0.01
SECRET = "ward-7-Jane-Doe.png"


def echo(place: Place, request: bytes, limit: float) -> bytes:
    return place.data.encode() + b" " + request


def fleet(tmp_path: Path, names: str, apart=echo, **faults) -> tuple[InProcessGrid, list[Identity]]:
    """Return nodes 101, 102, ... of sites a, b, ... and the sites' identities."""
    nodes, people = {}, []
    for i, name in enumerate(names):
        private, _ = keys_new(tmp_path / name, name)
        people.append(Identity.load(private))
        config = {"task": "t.toml", "key": str(private), "data": f"data-{name}"}
        nodes[101 + i] = Node(client_app(apart), config, faults.get(name, {}))
    return InProcessGrid(nodes), people


def transport(grid: InProcessGrid, people: list[Identity], patience: float = 0.2):
    sites = {p.name: 101 + i for i, p in enumerate(people)}
    return FlowerTransport(grid, sites, patience, FAST)


def ask(carrier: FlowerTransport, requests: dict[str, bytes], step: str = "0.gist"):
    got: dict[str, bytes] = {}

    def take(name: str, letter: bytes) -> bool:
        got[name] = letter
        return True

    return got, dict(carrier.ask(step, requests, take))


def test_letters_arrive_as_they_were_and_answers_come_from_whom_was_asked(tmp_path):
    grid, people = fleet(tmp_path, "abc")
    rng = random.Random(5)
    repeated = rng.randbytes(5 << 20) * 2  # two equal chunks travel once
    letters = {"a": rng.randbytes(12_000_001), "b": b"\0", "c": repeated}
    got, failures = ask(transport(grid, people), letters)
    assert not failures
    assert got == {n: f"data-{n} ".encode() + letter for n, letter in letters.items()}


def test_messages_expire_and_replies_are_looked_for_one_by_one(tmp_path):
    grid, people = fleet(tmp_path, "ab")
    ask(transport(grid, people, patience=7.0), {"a": b"x", "b": b"y"})
    assert [m.metadata.ttl for m in grid.pushed] == [37.0, 37.0]
    assert set(grid.pulls.values()) == {1}  # an answer in hand is not asked for again


def test_each_failure_names_cause_and_remedy_and_the_others_are_kept(tmp_path):
    faults = {
        "b": {0: "silent"},
        "c": {0: "error"},
        "d": {0: "killed"},
        "e": {0: "garbage"},
    }
    grid, people = fleet(tmp_path, "abcde", **faults)
    carrier = transport(grid, people)
    got, failures = ask(carrier, dict.fromkeys("abcdef", b"letter"))
    assert got == {"a": b"data-a letter"}
    said = {name: str(failure) for name, failure in failures.items()}
    assert set(said) == set("bcdef")
    assert "no answer in 0.2 s" in said["b"] and "another run" in said["b"]
    assert "code 2" in said["c"] and "log of its SuperNode" in said["c"]
    assert "no sign of life" in said["d"] and "flower-supernode runs there" in said["d"]
    assert "could not be read (KeyError)" in said["e"]
    assert "no node has its key" in said["f"]
    assert all(f.remedy for f in failures.values())
    assert carrier.silent == set("bcdef")


def test_a_late_answer_of_a_site_that_was_lost_once_is_asked_for_anew(tmp_path):
    grid, people = fleet(tmp_path, "ab", b={0: "silent"})
    carrier = transport(grid, people)
    ask(carrier, {"a": b"1", "b": b"1"})
    got, failures = ask(carrier, {"a": b"2", "b": b"2"}, "1.gist")
    assert set(got) == {"a", "b"} and not failures and not carrier.silent


def test_an_answer_that_is_not_taken_is_a_failure(tmp_path):
    grid, people = fleet(tmp_path, "ab")
    failures = transport(grid, people).ask("s", {"a": b"", "b": b""}, lambda name, _: name == "a")
    assert list(failures) == ["b"] and "no good" in failures["b"].cause


def test_the_end_is_told_to_whom_it_may_concern_and_wants_no_answer(tmp_path):
    heard: list[bytes] = []

    def last(place: Place, request: bytes, limit: float) -> bytes:
        heard.append(request)
        return b""  # an empty answer must survive the wire, too

    grid, people = fleet(tmp_path, "abc", last, b={0: "silent"})
    carrier = transport(grid, people)
    got, failures = ask(carrier, dict.fromkeys("abc", b"first"))
    assert got == {"a": b"", "c": b""} and list(failures) == ["b"]
    carrier.end({n: n.encode() for n in "abc"})
    assert heard[-2:] == [b"a", b"c"]


def test_no_text_of_an_error_leaves_the_site(tmp_path, capfd):
    def broken(place: Place, request: bytes, limit: float) -> bytes:
        raise ValueError(f"cannot read {SECRET}")

    grid, people = fleet(tmp_path, "a", broken)
    _, failures = ask(transport(grid, people), {"a": b"letter"})
    assert failures["a"].cause == "it gave up (ValueError)"
    replies = [m for m in grid.pushed if SECRET in repr(m)]
    assert not replies and SECRET not in str(failures)
    assert SECRET in capfd.readouterr().err  # the site's own people need it


@pytest.mark.parametrize(("own", "want"), [(None, 50.0), (4, 4.0), (900, 50.0)])
def test_a_site_works_no_longer_than_the_task_and_it_itself_allow(tmp_path, own, want):
    limits = []

    def note(place: Place, request: bytes, limit: float) -> bytes:
        limits.append(limit)
        return b"ok"

    grid, people = fleet(tmp_path, "a", note)
    if own is not None:
        grid.nodes[101].config["limit"] = own
    ask(transport(grid, people, patience=50.0), {"a": b"letter"})
    assert limits == [want]


def test_a_node_that_is_not_configured_says_so(tmp_path, capfd):
    grid, people = fleet(tmp_path, "a")
    del grid.nodes[101].config["data"]
    _, failures = ask(transport(grid, people), {"a": b"letter"})
    assert failures["a"].cause == "it gave up (ConfigError)"
    assert "must give data" in capfd.readouterr().err


@pytest.mark.parametrize(
    "records",
    [
        {"fault": ConfigRecord({})},
        {"letter": ConfigRecord({"bytes": b"x"})},
        {"letter": ArrayRecord({})},
        {"letter": ArrayRecord({k: Array("uint8", (1,), "x", b"x") for k in ("bytes", "more")})},
        {},
    ],
)
def test_an_answer_of_the_wrong_form_is_a_failure(tmp_path, records):
    app = ClientApp()

    @app.query("fedgist")
    def answer(message, context):
        return Message(RecordDict(records), reply_to=message)

    grid, people = fleet(tmp_path, "a")
    grid.nodes[101].app = app
    got, failures = ask(transport(grid, people), {"a": b"letter"})
    assert not got and "could not be read" in failures["a"].cause


# --- which node is which site ------------------------------------------------------------------


def find(grid: InProcessGrid, people: list[Identity], patience: float = 0.1):
    said: list[str] = []
    roster = [p.public for p in people]
    return find_sites(grid, roster, patience, say=said.append, poll=FAST), said


def test_nodes_are_found_by_the_keys_they_hold(tmp_path):
    grid, people = fleet(tmp_path, "abc")
    assert find(grid, people[::-1]) == ({"a": 101, "b": 102, "c": 103}, [])


def test_an_intruder_is_named_and_left_out(tmp_path):
    grid, people = fleet(tmp_path, "abx")
    sites, said = find(grid, people[:2])
    assert sites == {"a": 101, "b": 102}
    sites, said = find(grid, people[1:])  # as many answers as sites: but not the right ones
    assert sites == {"b": 102, "x": 103}
    assert said == [
        f"node 101 is not used: its key, 'a' {people[0].public.fingerprint}, is not in the task's "
        "roster"
    ]


def claiming(public, signature):
    app = ClientApp()

    @app.query("fedgist_who")
    def who(message, context):
        nonce = message.content.config_records["about"]["nonce"]
        about = {"site": public.text(), "signature": signature(nonce, context)}
        return Message(RecordDict({"about": ConfigRecord(about)}), reply_to=message)

    return app


@pytest.mark.parametrize("trick", ["none", "own key", "old number", "other run", "other node"])
def test_nobody_takes_a_site_s_name_without_its_key(tmp_path, trick):
    grid, (a, b) = fleet(tmp_path, "ab")

    def signature(nonce, context):
        run, node = context.run_id, context.node_id
        if trick == "none":
            return b"\0" * 64
        if trick == "own key":
            return b.sign(nonce + run.to_bytes(8, "big") + node.to_bytes(8, "big"), b"flower node")
        nonce = bytes(32) if trick == "old number" else nonce
        run -= trick == "other run"
        node -= trick == "other node"
        return a.sign(nonce + run.to_bytes(8, "big") + node.to_bytes(8, "big"), b"flower node")

    grid.nodes[102].app = claiming(a.public, signature)
    del grid.nodes[101]
    sites, said = find(grid, [a, b])
    assert not sites
    assert said == ["node 102 is not used: it does not hold the key of 'a'"]


def test_the_second_node_of_a_site_is_left_out(tmp_path):
    grid, people = fleet(tmp_path, "ab")
    grid.nodes[102].config = dict(grid.nodes[101].config)
    sites, said = find(grid, people)
    assert list(sites) == ["a"]
    other = ({101, 102} - {sites["a"]}).pop()
    assert said == [f"node {other} is not used: 'a' is node {sites['a']} already"]


def test_whoever_comes_later_is_waited_for(tmp_path):
    grid, people = fleet(tmp_path, "ab")
    grid.nodes[102].appears = 0.1
    assert find(grid, people, patience=20.0) == ({"a": 101, "b": 102}, [])


def test_a_node_that_cannot_say_who_it_is_does_no_harm(tmp_path):
    grid, people = fleet(tmp_path, "abc")
    grid.nodes[101].app = ClientApp()
    grid.nodes[102].config["key"] = str(tmp_path / "gone.key")
    sites, said = find(grid, people)
    assert sites == {"c": 103}
    assert "code 2" in said[0] and "gave up (ConfigError)" in said[1]


def test_a_number_of_another_size_is_not_signed(tmp_path):
    """A signature over bytes of the server's choice would be a letter of recommendation."""
    grid, _ = fleet(tmp_path, "a")
    for nonce in (b"", b"x" * 31, b"x" * 300, "x" * 32):
        message = RecordDict({"about": ConfigRecord({"nonce": nonce})})
        [sent] = grid.push_messages([Message(message, 101, "query.fedgist_who")])
        [reply] = grid.pull_messages([sent])
        assert list(reply.content) == ["fault"]


# --- the worker --------------------------------------------------------------------------------

PLACE = Place(Path("t.toml"), Path("k.key"), "data")
SITE = """
import ctypes, os, sys, time
from fedgist.errors import DataError, PrivacyError, ProtocolError
from fedgist.exchange.worker import serve_one

class Site:
    def ended(self, data):
        if data != b"end":
            raise ProtocolError("not the end")
        return "it is over"
    def fault(self, request, error):
        return b"fault " + type(error).__name__.encode()
    def answer(self, request):
        {body}

def open_site(place):
    {opened}
    return Site()

sys.exit(serve_one(open_site))
"""


def worker(body: str = "return request", opened: str = "") -> tuple[str, ...]:
    return (sys.executable, "-c", SITE.format(body=body, opened=opened))


def test_a_worker_answers_with_bytes_alone():
    noise = "print('hello'); os.system('echo more'); return bytes(range(256)) + request"
    assert answer_apart(PLACE, b"\n\0", 60.0, worker(noise)) == bytes(range(256)) + b"\n\0"


def test_a_worker_hears_of_the_end(capfd):
    assert answer_apart(PLACE, b"end", 60.0, worker("raise SystemExit(9)")) == b""
    assert "it is over" in capfd.readouterr().err


def test_a_refusal_is_signed_and_its_text_stays(capfd):
    body = f"raise DataError('{SECRET}')"
    assert answer_apart(PLACE, b"x", 60.0, worker(body)) == b"fault DataError"
    assert SECRET in capfd.readouterr().err


@pytest.mark.parametrize(
    ("how", "word"),
    [
        ({"opened": "raise PrivacyError('no')"}, "PrivacyError"),
        ({"body": f"raise ValueError('{SECRET}')"}, "exit 1"),
        ({"body": "os.kill(os.getpid(), 9)"}, "exit -9"),
        ({"body": "os._exit(0)"}, "exit 0"),
    ],
)
def test_a_worker_without_an_answer_is_a_failure(how, word, capfd):
    assert answer_apart(PLACE, b"x", 60.0, worker(**how)) == Failure(word)


def alive(group: int) -> list[str]:
    """Return the command lines of a process group's members that are more than a memory."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, member = stat.read_text().rpartition(")")[2].split()[:3]
            if int(member) == group and state != "Z":
                found.append(stat.with_name("cmdline").read_text())
        except OSError:
            continue
    return found


@pytest.mark.parametrize(
    "hang",
    [
        "time.sleep(600)",
        "ctypes.PyDLL(None).sleep(600)",  # holds Python's lock: no signal handler, no thread runs
        "os.system('sleep 600')",
    ],
)
def test_a_worker_that_hangs_is_ended_with_all_it_started(hang, monkeypatch):
    started = []

    class Watched(subprocess.Popen):
        def __init__(self, *args, **more):
            super().__init__(*args, **more)
            started.append(self.pid)

    monkeypatch.setattr("fedgist.exchange.worker.subprocess.Popen", Watched)
    assert answer_apart(PLACE, b"x", 1.5, worker(hang)) == Failure("TimeoutError")
    while alive(started[0]):
        time.sleep(0.01)


def test_a_worker_ends_when_its_parent_is_killed(tmp_path):
    note = tmp_path / "pid"
    body = f"open({str(note)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    script = (
        "from pathlib import Path\n"
        "from fedgist.exchange.worker import Place, answer_apart\n"
        f"answer_apart(Place(Path('t'), Path('k'), 'd'), b'x', 500.0, {worker(body)!r})"
    )
    parent = subprocess.Popen([sys.executable, "-c", script])
    while not note.is_file() or not note.read_text():
        assert parent.poll() is None
        time.sleep(0.01)
    parent.kill()
    parent.wait()
    while alive(int(note.read_text())):
        time.sleep(0.05)


def test_a_place_is_read_from_plain_values():
    place = Place.of({"task": "t", "key": "k", "data": "d@1/3", "policy": "", "limit": 5})
    assert place == Place(Path("t"), Path("k"), "d@1/3")
    with pytest.raises(ConfigError, match="must give key, data"):
        Place.of({"task": "t"})
