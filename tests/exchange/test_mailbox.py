"""A shared folder: half-synced files, junk, lateness, and kill -9 at every write."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from functools import partial

import pytest
import torch

from federation_tools import OPEN, federation, outcome_bytes
from fedgist.errors import ProtocolError
from fedgist.exchange.mailbox import MailboxTransport, join, mailbox_status, task_folder
from fedgist.exchange.remote import RemoteExchange
from fedgist.exchange.site import Site
from fedgist.privacy.ledger import Ledger

TERMS = {"patience": 30.0}


@pytest.fixture
def parts(images):
    return [images.take(torch.arange(60) % 3 == i) for i in range(3)]


@pytest.fixture
def share(tmp_path):
    folder = tmp_path / "share"
    folder.mkdir()
    return folder


def lead(fed, share):
    return fed.run(MailboxTransport(share, fed.agreement, fed.folder / "asked", 0.02))


def start(fed, share, names=None):
    """Let sites answer in threads of this process."""
    said = {}
    threads = []
    for name, site in fed.sites.items():
        if names is None or name in names:
            lines = said.setdefault(name, [])

            def work(site=site, lines=lines):
                lines.append(join(site, share, say=lines.append, poll=0.02))

            threads.append(threading.Thread(target=work, daemon=True))
            threads[-1].start()
    return threads, said


@pytest.mark.parametrize("trust", ["local", "central", "distributed"])
def test_equal_to_the_local_exchange(tmp_path, share, task, parts, trust):
    fed = federation(tmp_path, task, parts, [f"privacy.trust={trust}"], TERMS)
    threads, said = start(fed, share)
    outcome, _ = lead(fed, share)
    for t in threads:
        t.join(10)
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    assert all(lines[-1] == "finished" for lines in said.values())
    assert mailbox_status(share, fed.agreement)["step"] == "end"


def test_one_site_dead_within_the_terms(tmp_path, share, task, parts):
    sets = ["privacy.trust=distributed", "privacy.missing=1"]
    fed = federation(tmp_path, task, parts, sets, {"patience": 1.5, "threshold": 2})
    start(fed, share, ["site-0", "site-2"])
    outcome, exchange = lead(fed, share)
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts, lost=(1,)))
    ((step, name), why), *_ = exchange.faults.items()
    assert (step, name) == ("0.keys", "site-1")
    assert "no answer in 1.5 s" in why and "fedgist join" in why


def test_half_synced_and_junk_files_are_left_alone(tmp_path, share, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], TERMS)
    root = task_folder(share, fed.agreement)
    start(fed, share, ["site-0", "site-1"])
    thread_result = []
    leader = threading.Thread(target=lambda: thread_result.append(lead(fed, share)))
    leader.start()
    request = root / "to" / "site-2" / "0.gist.letter"
    wait(request.is_file)
    reply = fed.sites["site-2"].answer(request.read_bytes())
    place = root / "from" / "site-2" / "0.gist.letter"
    place.parent.mkdir(parents=True, exist_ok=True)
    for junk in (b"", reply[:50], reply[:-100], reply[:-64] + bytes(64), b"\x80\x04K\x01."):
        place.write_bytes(junk)
        time.sleep(0.1)
        assert leader.is_alive()
    status = mailbox_status(share, fed.agreement)
    assert status["waiting"] == ["site-2"] and status["answered"] == ["site-0", "site-1"]
    place.write_bytes(reply)
    leader.join(20)
    (outcome, exchange), *_ = thread_result
    assert outcome_bytes(outcome) == outcome_bytes(fed.local(parts))
    assert not exchange.faults


def test_a_site_ignores_half_a_request_and_answers_the_whole(tmp_path, share, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], TERMS)
    transport = MailboxTransport(share, fed.agreement, tmp_path / "asked", 0.02)
    exchange = RemoteExchange(fed.agreement, fed.leader, transport, tmp_path / "leader")
    thread = threading.Thread(target=exchange.round, args=(0, fed.agreement.plan.rounds[0], {}))
    thread.start()
    root = task_folder(share, fed.agreement)
    path = root / "to" / "site-0" / "0.gist.letter"
    wait(path.is_file)
    whole = path.read_bytes()
    path.write_bytes(whole[:100])
    site, lines = fed.sites["site-0"], []
    assert join(site, share, say=lines.append, once=True) == ""
    assert not (root / "from").exists() and not lines
    path.write_bytes(whole)
    join(site, share, say=lines.append, once=True)
    assert lines and "step 0.gist answered" in lines[0]
    for name in ("site-1", "site-2"):
        join(fed.sites[name], share, say=lines.append, once=True)
    thread.join(20)
    assert not thread.is_alive()


def test_nothing_is_taken_after_the_deadline(tmp_path, share, task, parts):
    terms = TERMS | {"deadline": "2020-01-01T00:00:00Z"}
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], terms)
    with pytest.raises(ProtocolError, match="must be answered by at least"):
        lead(fed, share)
    lines = []
    with pytest.raises(ProtocolError, match="must be over by 2020"):
        join(fed.sites["site-0"], share, say=lines.append, poll=0.02)
    assert "must be answered before 2020" in lines[0]
    assert fed.sites["site-0"].ledger.show()["entries"] == []


def test_a_false_end_is_not_believed(tmp_path, share, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], TERMS)
    other = federation(tmp_path / "other", task, parts, ["privacy.trust=local"], TERMS)
    from fedgist.exchange.letter import write_letter

    false = write_letter(other.leader, fed.agreement.digest, "end", "site-0", "end", {}, text="x")
    inbox = task_folder(share, fed.agreement) / "to" / "site-0"
    inbox.mkdir(parents=True)
    (inbox / "end.letter").write_bytes(false)
    lines = []
    assert join(fed.sites["site-0"], share, say=lines.append, once=True) == ""
    assert "not the coordinator's" in lines[0]


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_everybody_killed_at_every_write(tmp_path, share, task, parts, trust):
    """Each life of each process is killed one durable write later than the one before."""
    fed = federation(tmp_path, task, parts, [f"privacy.trust={trust}"], TERMS)
    for site in fed.sites.values():
        site.close()
    jobs = {n: partial(site_life, fed, share, n, p) for n, p in zip(fed.sites, parts, strict=True)}
    jobs["leader"] = partial(leader_life, fed, share)
    lives = dict.fromkeys(jobs, 0)
    pids = {}
    deadline = time.time() + 120
    while jobs and time.time() < deadline:
        for name in [n for n in jobs if n not in pids.values()]:
            lives[name] += 1
            pids[fork(jobs[name], kill_at=lives[name])] = name
        pid, status = os.wait()
        name = pids.pop(pid)
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0, (tmp_path / f"{name}.log").read_text()
            del jobs[name]
    assert not jobs, f"not finished: {list(jobs)}"
    assert min(lives.values()) > 3
    expected = b"".join(outcome_bytes(fed.local(parts)))
    assert (tmp_path / "outcome").read_bytes() == expected
    for name in fed.sites:
        (entry,) = Ledger(tmp_path / f"{name}.sqlite").show()["entries"]
        assert entry["round"] == 0


def site_life(fed, share, name, part):
    old = fed.sites[name]
    ledger = Ledger(fed.folder / f"{name}.sqlite")
    site = Site(fed.agreement, old.identity, lambda: part, fed.folder / name, ledger, OPEN)
    with open(fed.folder / f"{name}.log", "a") as log:
        join(site, share, say=lambda line: log.write(line + "\n"), poll=0.01)


def leader_life(fed, share):
    outcome, exchange = lead(fed, share)
    assert not exchange.faults
    (fed.folder / "outcome").write_bytes(b"".join(outcome_bytes(outcome)))


def fork(job, kill_at):
    """Run a job in a child that dies at its ``kill_at``-th sync or rename."""
    pid = os.fork()
    if pid:
        return pid
    status = 1
    try:
        torch.set_num_threads(1)
        count = [0]
        for name in ("fsync", "replace"):
            setattr(os, name, partial(counted, getattr(os, name), count, kill_at))
        job()
        status = 0
    except BaseException as e:
        print(type(e), e, flush=True)
    finally:
        os._exit(status)


def counted(call, count, kill_at, *args):
    count[0] += 1
    if count[0] == kill_at:
        os.kill(os.getpid(), signal.SIGKILL)
    return call(*args)


def wait(until):
    deadline = time.time() + 20
    while not until():
        assert time.time() < deadline
        time.sleep(0.01)


def test_status_file_is_json(tmp_path, share, task, parts):
    fed = federation(tmp_path, task, parts, ["privacy.trust=local"], TERMS)
    assert mailbox_status(share, fed.agreement)["step"] == "not begun"
    (task_folder(share, fed.agreement)).mkdir()
    (task_folder(share, fed.agreement) / "status.json").write_text("{")
    with pytest.raises(ProtocolError, match="readable status"):
        mailbox_status(share, fed.agreement)
    assert json.dumps(fed.agreement.model_dump(mode="json"))
