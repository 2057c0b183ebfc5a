"""The ledger: what one image has spent, exactly; under races, kills, full and read-only disks."""

from __future__ import annotations

import contextlib
import csv
import ctypes
import json
import math
import os
import random
import resource
import signal
import sqlite3
import subprocess
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy import ledger as module
from fedgist.privacy.accounting import ORDERS, epsilon_of, epsilon_zcdp
from fedgist.privacy.claim import Privacy, calibrate, claim_of
from fedgist.privacy.ledger import Ledger, Release, fingerprint, release_of, rho_of
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.types import Images, Round, Task

TASK = Task("toy", ("a", "b"), channels=1, size=4, max_images=10_000)
ROUNDS = (
    Round("sum", (MomentsQuery(clip=1.0, dim=3, classes=2),)),
    Round("sum", (SumQuery(clip=1.0, times=2, name="a"), SumQuery(clip=1.0, scale=2.0, name="b"))),
)
DELTA = 1e-5


def photos(*numbers: int, size: int = 4) -> Images:
    """Image i shows i, and always the same."""
    n = torch.tensor(numbers)
    pixels = torch.zeros(len(n), 1, size, size, dtype=torch.uint8)
    for k in range(3):
        pixels[:, 0, 0, k] = (n >> (8 * k)) & 255
    return Images(pixels, torch.arange(len(numbers)) % 2, TASK.classes)


def entry(task: str = "t", rho: float = 0.1, r: int = 0, **changes) -> Release:
    """A release that spends ``rho`` under add-remove and four times that under replace-one."""
    spent = {"add-remove": rho, "replace-one": 4 * rho, "replace-same-class": 2 * rho}
    made = Release(
        task=task, name=f"task {task}", method="m", round=r, unit="image", records=1,
        adjacency="add-remove", mechanism="noise", law="discrete-gaussian", sigma=1.0,
        sensitivity=1.0, rho=spent, epsilon=1.0, delta=DELTA, form="4x4x1 stretch",
    )  # fmt: skip
    return replace(made, **changes)


@pytest.fixture
def book(tmp_path) -> Ledger:
    return Ledger(tmp_path / "ledger.sqlite")


def eps(rho: float) -> float:
    return epsilon_zcdp(rho, DELTA)


def spent(book: Ledger) -> float:
    return book.show()["epsilon"]


# --- what a release costs


@pytest.mark.parametrize("adjacency", ["add-remove", "replace-one", "replace-same-class"])
@pytest.mark.parametrize("unit,records", [("image", 1), ("person", 3)])
def test_the_rounds_of_a_plan_add_up_to_its_claim(book, adjacency, unit, records):
    privacy = Privacy(4.0, DELTA, adjacency, unit, records, noise="system")
    sigma = calibrate(ROUNDS, privacy)
    claim = claim_of(ROUNDS, privacy, sigma, track="none")
    book.cap(4.0, DELTA)  # what was calibrated to the cap must not fail by rounding
    for r in range(len(ROUNDS)):
        release = release_of("t", TASK, "m", claim, ROUNDS, r)
        assert release.rho[adjacency] == rho_of(ROUNDS[r : r + 1], sigma, adjacency, records)
        assert release.form == "4x4x1 stretch"
        book.record(release, photos(1, 2))
    assert spent(book) == pytest.approx(claim.epsilon, rel=1e-9)
    (total,) = book.show()["totals"]
    assert (total["unit"], total["adjacency"]) == (unit, adjacency)
    assert total["rho"] == pytest.approx(rho_of(ROUNDS, sigma, adjacency, records), rel=1e-12)


def test_noise_that_is_none_or_known_spends_everything(book):
    assert rho_of(ROUNDS, 0.0, "add-remove") == math.inf
    assert rho_of((Round("pool", raw=True),), 1.0, "add-remove") == math.inf
    assert rho_of((Round("pool"),), 0.0, "add-remove") == 0.0
    privacy = Privacy(4.0, DELTA, noise="seeded")
    claim = claim_of(ROUNDS, privacy, calibrate(ROUNDS, privacy), track="none")
    assert release_of("t", TASK, "m", claim, ROUNDS, 0).rho["add-remove"] == math.inf


def test_after_an_infinite_release_all_is_spent(book):
    book.record(entry("a", math.inf), photos(1, 2))
    book.record(entry("b", 0.1), photos(2, 3))
    book.record(entry("c", 0.1), photos(4))
    found = [d["epsilon"] for d in book.show()["data"]]
    assert found == [math.inf, math.inf, pytest.approx(eps(0.1))]
    book.cap(50.0)
    with pytest.raises(PrivacyError, match=r"Got inf under add-remove, of which inf was spent"):
        book.record(entry("d", 1e-9), photos(1))
    assert book.record(entry("d", 1e-9), photos(3, 4)) is True  # neither was in a's data


# --- which releases add up


def test_only_releases_of_the_same_image_add_up(book):
    book.record(entry("a", 0.1), photos(1, 2, 3))
    book.record(entry("b", 0.2), photos(4, 5))
    assert spent(book) == pytest.approx(eps(0.2))
    book.record(entry("c", 0.3), photos(3, 4, 6))
    shown = book.show()
    assert shown["epsilon"] == pytest.approx(eps(0.5))  # image 4: b and c; never a, b and c
    assert [d["epsilon"] for d in shown["data"]] == pytest.approx([eps(0.4), eps(0.5), eps(0.5)])


@pytest.mark.parametrize("seed", range(6))
def test_totals_are_those_of_counting_image_by_image(book, seed):
    rng = random.Random(seed)
    ledger: dict[int, float] = {}
    for t in range(12):
        held = rng.sample(range(30), rng.randint(1, 15))
        rho = rng.choice([0.01, 0.1, 0.5])
        for _ in range(rng.randint(1, 2)):  # a second task on just the same images
            book.record(entry(f"{t}-{_}", rho), photos(*held))
            for i in held:
                ledger[i] = ledger.get(i, 0.0) + rho
        assert spent(book) == pytest.approx(eps(max(ledger.values())))
    rows = sqlite3.connect(book.path)
    sizes = rows.execute("SELECT c.images, (SELECT count(*) FROM images WHERE cell = c.id) "
                         "FROM cells c").fetchall()  # fmt: skip
    rows.close()
    assert all(noted == real > 0 for noted, real in sizes)
    assert sum(real for _, real in sizes) == len(ledger)


def test_order_labels_and_float_pixels_make_no_other_images(book):
    one = photos(1, 2, 3)
    turned = one.take(torch.tensor([2, 0, 1]))
    relabelled = replace(turned, labels=1 - turned.labels, pixels=turned.floats())
    assert fingerprint(one, b"s" * 32) == fingerprint(relabelled, b"s" * 32)
    assert fingerprint(one, b"s" * 32) != fingerprint(one, b"t" * 32)
    assert fingerprint(one, b"s" * 32) != fingerprint(photos(1, 2, 3, 3), b"s" * 32)
    assert book.record(entry(), one) is True
    assert book.record(entry(), relabelled) is False
    assert len(book.show()["entries"]) == 1


def test_images_of_another_form_may_be_anybody(book):
    """Resized copies have other pixels, so all of them are taken for the same people."""
    book.record(entry("a", 0.1), photos(1, 2))
    book.record(entry("b", 0.2), photos(2, 3))
    book.record(entry("c", 0.4, form="8x8x1 crop"), photos(9, size=8))
    assert spent(book) == pytest.approx(eps(0.7))  # image 2 and, for all we know, 9
    book.cap(eps(0.75), DELTA)
    with pytest.raises(PrivacyError, match="cap"):
        book.record(entry("d", 0.1, form="8x8x1 crop"), photos(10, 9, size=8))
    book.record(entry("d", 0.05), photos(7))  # 7 + the worst of the other form = 0.45


def test_a_promise_is_kept_by_all_that_follow(book):
    book.record(entry("a", 0.1), photos(1))
    assert spent(book) == pytest.approx(eps(0.1))
    book.record(entry("b", 0.1, adjacency="replace-one"), photos(1))
    found = {t["adjacency"]: t["rho"] for t in book.show()["totals"]}
    assert found == pytest.approx({"add-remove": 0.2, "replace-one": 0.8})
    book.cap(eps(0.85), DELTA)
    with pytest.raises(PrivacyError, match="under replace-one"):
        book.record(entry("c", 0.1), photos(1))
    book.record(entry("c", 0.1), photos(2))  # nobody was promised anything about image 2


def test_units_are_not_mixed_up(book):
    person = {"unit": "person", "records": 2}
    book.record(entry("a", 0.1, **person), photos(1))
    book.record(entry("b", 0.1, **person), photos(2))  # may be the same person
    assert spent(book) == pytest.approx(eps(0.2))
    book.record(entry("c", 0.1), photos(1))
    found = {t["unit"]: t["rho"] for t in book.show()["totals"]}
    # one image more may move another of the same person out: a's part counts as replace-one
    assert found == {"image": pytest.approx(0.1 + 0.4), "person": math.inf}
    book.cap(100.0)
    with pytest.raises(PrivacyError, match=r"every person.*finer unit bound nothing"):
        book.record(entry("d", 1e-6, **person), photos(7))


def test_the_curve_of_continuous_noise_is_used_where_all_of_it_is(book):
    book.record(entry("a", 0.1, law="gaussian"), photos(1))
    book.record(entry("b", 0.4, law="gaussian"), photos(1))
    assert spent(book) == pytest.approx(epsilon_of(1.0, DELTA, "gaussian"))
    book.record(entry("c", 1e-12), photos(1))
    assert spent(book) == pytest.approx(eps(0.5))


# --- recording


def test_the_same_again_is_no_second_spend_and_other_terms_are_refused(book):
    assert book.record(entry(), photos(1, 2)) is True
    assert book.record(entry(), photos(1, 2)) is False
    with pytest.raises(PrivacyError, match="other terms"):
        book.record(entry(rho=0.2), photos(1, 2))
    assert spent(book) == pytest.approx(eps(0.1))
    assert book.record(entry(r=1), photos(1, 2)) is True
    assert book.record(entry(), photos(1, 2, 3)) is True  # other data: a release of its own
    assert spent(book) == pytest.approx(eps(0.3))


def test_the_cap_is_what_may_be_spent_and_not_a_bit_more(book):
    book.cap(eps(0.3), DELTA)
    book.record(entry("a", 0.1), photos(1))
    book.record(entry("b", 0.2), photos(1))
    with pytest.raises(PrivacyError, match=r"task 'task c'.*ε = .*Got .* of which .* spent") as e:
        book.record(entry("c", 1e-4), photos(1, 5))
    assert "\n" not in str(e.value)
    shown = book.show()
    assert len(shown["entries"]) == 2 and len(shown["data"]) == 1  # no trace of the refused one
    book.record(entry("c", 0.3), photos(5))
    book.cap(eps(0.2), DELTA)  # lowered: what is beyond it stays, what is within goes on
    assert book.record(entry("b", 0.2), photos(1)) is False
    book.record(entry("d", 0.2), photos(8))


def test_a_plan_can_be_checked_before_its_first_round_is_spent(book):
    book.cap(eps(0.3), DELTA)
    rounds = [entry("a", 0.1, r=r) for r in range(4)]
    book.check(rounds[:3], photos(1))
    before = book.path.read_bytes()
    with pytest.raises(PrivacyError, match="round 3"):
        book.check(rounds, photos(1))
    assert book.path.read_bytes() == before
    assert book.show()["entries"] == []


@pytest.mark.parametrize("epsilon,delta", [(0, 1e-5), (-1, 1e-5), (math.nan, 1e-5), (1, 0), (1, 1)])
def test_a_cap_is_a_budget(book, epsilon, delta):
    with pytest.raises(ConfigError):
        book.cap(epsilon, delta)


def test_a_set_without_images_spends_nothing(book):
    book.cap(1e-3)
    empty = Images(torch.zeros(0, 1, 4, 4, dtype=torch.uint8), torch.zeros(0).long(), ("a", "b"))
    book.record(entry("a", math.inf), empty)
    assert spent(book) == 0.0


def test_hashes_need_their_key_and_files_are_private(book):
    book.record(entry(), photos(1))
    salt = book.path.with_name("ledger.sqlite.salt")
    assert salt.read_bytes() not in book.path.read_bytes()
    assert {p.stat().st_mode & 0o777 for p in book.path.parent.iterdir()} == {0o600}
    salt.write_bytes(b"x" * 32)
    with pytest.raises(ConfigError, match="another ledger"):
        book.record(entry("b"), photos(1))
    salt.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        Ledger(book.path).record(entry("b"), photos(1))
    assert len(Ledger(book.path).show()["entries"]) == 1


# --- showing


def test_exports_for_people_and_programs(book, tmp_path):
    book.record(entry("a", math.inf, name="=SUM(A1)"), photos(1))
    book.record(entry("b"), photos(2))
    book.export(tmp_path / "out.json")
    book.export(tmp_path / "out.csv")
    read = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert [e["task"] for e in read["entries"]] == ["a", "b"]
    assert read["epsilon"] == "inf" and read["cap"] == {"epsilon": "inf", "delta": DELTA}
    assert read["entries"][0]["time"].endswith("+00:00")
    with (tmp_path / "out.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert rows[0]["name"] == "'=SUM(A1)" and rows[1]["rho replace-one"] == "0.4"
    assert book.show()["line"].startswith("2 releases of 2 data sets, worst total ε = inf")
    with pytest.raises(ConfigError, match="csv"):
        book.export(tmp_path / "out.xml")
    with pytest.raises(ConfigError, match="writable"):
        book.export(tmp_path / "nowhere" / "out.json")


# --- files of before, and of releases that have a curve

BODY = (
    '{"adjacency": "add-remove", "delta": 1e-05, "epsilon": 1.0, "form": "4x4x1 stretch", '
    '"law": "discrete-gaussian", "mechanism": "noise", "method": "m", "name": "task t", '
    '"records": 1, "rho": {"add-remove": 0.1, "replace-one": 0.4, "replace-same-class": 0.2}, '
    '"round": 0, "sensitivity": 1.0, "sigma": 1.0, "task": "t", "unit": "image"}'
)


def test_the_file_is_what_it_was_before_curves(book):
    """Written by hand as format 1 has always been, and read to the same totals, both ways."""
    book.record(entry(), photos(1))
    con = sqlite3.connect(book.path)
    assert con.execute("SELECT body FROM releases").fetchall() == [(BODY,)]
    assert con.execute("PRAGMA user_version").fetchone() == (1,)
    assert {n for (n,) in con.execute("SELECT name FROM sqlite_master WHERE sql IS NOT NULL")} == {
        "holder", "sets", "images", "cells", "cover", "releases",
    }  # fmt: skip
    con.execute("UPDATE releases SET body = ?", (BODY.replace("0.1", "0.25"),))
    con.commit()
    con.close()
    assert spent(book) == pytest.approx(eps(0.25), rel=1e-12)
    assert book.record(entry("b", 0.5), photos(1, 2)) is True
    assert spent(book) == pytest.approx(eps(0.75), rel=1e-12)


def test_a_release_with_a_curve_is_shown_in_the_same_columns(book, tmp_path):
    book.record(entry("a"), photos(1))
    book.export(tmp_path / "plain.csv")
    columns = (tmp_path / "plain.csv").read_text().splitlines()[0]
    book.record(entry("b", 2.0, curve={"add-remove": (0.5,) * len(ORDERS)}), photos(2))
    book.export(tmp_path / "out.csv")
    book.export(tmp_path / "out.json")
    with (tmp_path / "out.csv").open(newline="") as f:
        rows = list(csv.DictReader(f))
    assert ",".join(rows[1]) == columns and rows[1]["rho add-remove"] == "2.0"
    shown = json.loads((tmp_path / "out.json").read_text(), parse_constant=pytest.fail)
    assert shown["entries"][0].keys() == shown["entries"][1].keys()
    assert shown["totals"][0]["epsilon"] == spent(book) == pytest.approx(eps(0.1))
    assert shown["totals"][0]["rho"] == 0.1  # of the image that spent the most, not the larger ρ


# --- files that are no ledger


def other_database(path, **pragmas):
    con = sqlite3.connect(path)
    con.execute("CREATE TABLE x (y)")
    for name, value in pragmas.items():
        con.execute(f"PRAGMA {name} = {value}")
    con.commit()
    con.close()


@pytest.mark.parametrize("kind", ["text", "empty", "other", "newer", "cut", "zeros"])
def test_what_is_no_ledger_is_one_line_and_untouched(book, kind):
    book.record(entry(), photos(*range(400)))
    path = book.path
    good = path.read_bytes()
    if kind in ("other", "newer"):
        path.unlink()
        new = {"application_id": module.APPLICATION, "user_version": 2} if kind == "newer" else {}
        other_database(path, **new)
    else:
        data = {
            "text": b"not a database, but long enough to be looked at" * 50,
            "empty": b"",
            "cut": good[: len(good) // 2],
            "zeros": good[:4096] + bytes(len(good) - 4096),
        }
        path.write_bytes(data[kind])
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"ledger\.sqlite'") as e:
        Ledger(path)
    assert "\n" not in str(e.value)
    assert path.read_bytes() == before
    assert ("format 2" in str(e.value)) == (kind == "newer")


def test_nothing_is_sent_where_no_ledger_can_be_made(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(PrivacyError, match="nothing may be sent"):
        Ledger(tmp_path / "file" / "ledger.sqlite")


def test_a_ledger_that_went_away_records_nothing(book):
    book.path.unlink()
    with pytest.raises(PrivacyError, match="nothing may be sent"):
        book.record(entry(), photos(1))


# --- real processes


class Child:
    """A forked process that waits for a word, does its work and writes down what came of it."""

    def __init__(self, work: Callable[[Callable[[object], None]], None]) -> None:
        go, self._go = os.pipe()
        self._out, out = os.pipe()
        self.pid = os.fork()
        if self.pid == 0:
            status = 1
            with contextlib.suppress(BaseException):
                os.close(self._go)
                torch.set_num_threads(1)  # the parent's threads did not come along
                os.read(go, 1)
                try:
                    work(lambda word: os.write(out, f"{word}\n".encode()))
                    status = 0
                except PrivacyError as e:
                    os.write(out, f"refused {e}\n".encode())
            os._exit(status)
        os.close(go)
        os.close(out)

    def start(self) -> None:
        os.write(self._go, b"!")
        os.close(self._go)

    def hear(self, count: int) -> str:
        """Return what it says until it has said ``count`` lines, or is no more."""
        said = b""
        while said.count(b"\n") < count and (more := os.read(self._out, 1)):
            said += more
        return said.decode()

    def lines(self) -> list[str]:
        with os.fdopen(self._out) as f:
            said = f.read().splitlines()
        self.status = os.waitpid(self.pid, 0)[1]
        return said


def outcomes(*works: Callable[[Callable[[object], None]], None]) -> list[list[str]]:
    children = [Child(w) for w in works]
    for c in children:
        c.start()
    return [c.lines() for c in children]


def test_of_two_that_race_for_the_last_of_the_budget_one_wins(book):
    book.cap(eps(1.0), DELTA)
    book.record(entry("first", 0.95), photos(1))

    def spend(who, say):
        for i in range(20):
            if book.record(entry(f"{who}{i}", 0.01), photos(1, who)):
                say("won")

    said = outcomes(partial(spend, 2), partial(spend, 3), partial(spend, 4))
    assert sum(lines.count("won") for lines in said) == 5
    assert all(lines[-1].startswith("refused") for lines in said)
    assert spent(book) == pytest.approx(eps(1.0))


def test_two_that_record_the_same_spend_once(book):
    said = outcomes(*[lambda say: say(book.record(entry(), photos(1, 2)))] * 3)
    assert sorted(said) == [["False"], ["False"], ["True"]]
    assert spent(book) == pytest.approx(eps(0.1))


def test_all_that_make_a_ledger_make_one(tmp_path):
    path = tmp_path / "new" / "ledger.sqlite"

    def work(i, say):
        say(Ledger(path).record(entry(str(i)), photos(1)))

    assert outcomes(*(partial(work, i) for i in range(4))) == [["True"]] * 4
    assert spent(Ledger(path)) == pytest.approx(eps(0.4))
    assert len(list(path.parent.iterdir())) == 2


def test_a_kill_in_the_middle_of_writing_leaves_all_or_nothing(book, monkeypatch):
    book.record(entry("before"), photos(*range(100)))
    size = book.path.stat().st_size

    def work(_):
        # dies when pages are on the disk already, right before the commit
        monkeypatch.setattr(Ledger, "_enforce", lambda *_: os.kill(os.getpid(), signal.SIGKILL))
        book.record(entry(), photos(*range(50, 120_000)))

    victim = Child(work)
    victim.start()
    assert victim.lines() == [] and os.WTERMSIG(victim.status) == signal.SIGKILL
    assert book.path.stat().st_size > 2 * size  # pages had been written
    assert book.path.with_name("ledger.sqlite-journal").exists()
    again = Ledger(book.path)
    assert [e["task"] for e in again.show()["entries"]] == ["before"]
    assert again.record(entry(), photos(*range(50, 120))) is True
    assert spent(again) == pytest.approx(eps(0.2))
    assert book.path.stat().st_size < 2 * size


def test_kills_at_any_moment_lose_nothing_that_was_recorded(book):
    def work(say):
        for i in range(10**6):
            if book.record(entry(str(i), 0.01), photos(1, i)):
                say(i)

    rng = random.Random(3)
    told: set[str] = set()
    for kills in range(1, 7):
        victim = Child(work)
        victim.start()
        heard = victim.hear(rng.randint(1, 3))
        time.sleep(0.02 * rng.random())
        os.kill(victim.pid, signal.SIGKILL)
        told |= {*heard.splitlines(), *victim.lines()}
        kept = [e["task"] for e in Ledger(book.path).show()["entries"]]
        assert told <= set(kept) and kept == [str(i) for i in range(len(kept))]
        assert len(kept) <= len(told) + kills  # one kill interrupts one
        assert spent(book) == pytest.approx(eps(0.01 * len(kept)))


def test_a_full_disk_records_nothing_and_says_so(book):
    book.record(entry("before"), photos(1))
    size = book.path.stat().st_size

    def work(say):
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, size))
        say(book.record(entry(), photos(*range(9000))))

    ((said,),) = outcomes(work)
    assert said.startswith("refused") and "nothing may be sent" in said
    assert [e["task"] for e in Ledger(book.path).show()["entries"]] == ["before"]
    assert book.record(entry(), photos(*range(9000))) is True


def test_a_locked_ledger_is_waited_for_and_then_refused(book, monkeypatch):
    monkeypatch.setattr(module, "PATIENCE", 0.05)
    other = sqlite3.connect(book.path, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    with pytest.raises(PrivacyError, match=r"locked.*nothing may be sent"):
        book.record(entry(), photos(1))
    assert book.show()["entries"] == []  # can still be read
    other.execute("ROLLBACK")
    other.close()
    assert book.record(entry(), photos(1)) is True


def test_a_read_only_disk_can_be_shown_and_spends_nothing(book, tmp_path):
    """A mount that is read-only for root too, in a mount namespace of the child's own."""
    book.record(entry("before"), photos(1))

    def work(say):
        if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
            return
        for how in (["--make-rprivate", "/"], ["--bind", tmp_path, tmp_path],
                    ["-o", "remount,ro,bind", tmp_path]):  # fmt: skip
            subprocess.run(["mount", *how], check=True, capture_output=True)
        say("mounted")
        again = Ledger(book.path)
        say(len(again.show()["entries"]))
        say(again.record(entry(), photos(2)))

    (said,) = outcomes(work)
    if not said:
        pytest.skip("cannot mount here")
    assert said[:2] == ["mounted", "1"]
    assert said[2].startswith("refused") and "nothing may be sent" in said[2]
    assert len(book.show()["entries"]) == 1


def test_a_write_protected_ledger_spends_nothing(book, monkeypatch):
    """The same without a mount: SQLite is told that it may only read."""
    connect = sqlite3.connect
    monkeypatch.setattr(
        sqlite3, "connect", lambda db, **k: connect(db.replace("mode=rw", "mode=ro"), **k)
    )
    with pytest.raises(PrivacyError, match=r"readonly.*nothing may be sent"):
        book.record(entry(), photos(1))
    with pytest.raises(PrivacyError, match="readonly"):
        book.cap(1.0)
    assert book.show()["entries"] == []
