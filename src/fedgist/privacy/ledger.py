"""What a holder's data have spent, over all tasks: one SQLite file, written before anything leaves.

A task's claim speaks of that task alone. The ledger knows which images each release has covered,
by a keyed hash of their pixels, and totals per image: releases of two data sets that share an image
add up for that image, whatever else the sets hold, in whatever order, with whatever labels. Images
that were covered by exactly the same data sets form one cell, so that totals are taken over a few
cells and not over a million images. How ρ adds up is said in `fedgist.privacy.spending`.

What sampling gains is in a table of its own, ``curves``, made when the first such release comes. A
FedGist that does not know it reads the same file, to larger totals.

What it cannot see: that a file was encoded anew, cropped or turned (another image to it), that two
images show the same person, that an image is twice in one set (two records), and what was released
without it. Data of other people belong in a ledger of their own. The key of the hashes is a second
file, ``NAME.salt``: without it the ledger does not say whether a known image is in the data. Back
up both; a ledger without its key can only be shown.

The file is in SQLite's rollback-journal mode with ``synchronous = EXTRA``. Write-ahead logging
needs memory that all processes share and so breaks on network drives; a rollback journal needs only
locks that work. A process killed at any point leaves a journal, which the next one rolls back.
"""

from __future__ import annotations

import csv
import io
import json
import math
import secrets
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any, final

from fedgist.errors import ConfigError, PrivacyError
from fedgist.privacy.accounting import check_budget
from fedgist.privacy.coverage import (
    TABLES,
    Book,
    admit,
    digest_of,
    fingerprint,
    hashes_of,
    keep_curve,
)
from fedgist.privacy.identity import write_new
from fedgist.privacy.spending import Release, Spent, release_of, rho_of
from fedgist.types import Images
from fedgist.whole import write_whole

__all__ = ["Ledger", "Release", "fingerprint", "release_of", "rho_of"]

APPLICATION = 0x46644C67  # "FdLg", in the header of the file
VERSION = 1
PATIENCE = 30.0  # seconds to wait for another process
DELTA = 1e-5  # until the holder says otherwise
SLACK = 1e-9  # relative: rounding must not refuse a plan calibrated to the cap itself

SCHEMA = f"""
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {VERSION};
CREATE TABLE holder (salt_hash BLOB NOT NULL, epsilon REAL NOT NULL, delta REAL NOT NULL);
{TABLES}"""


@final
@dataclass(frozen=True)
class Ledger:
    """A holder's ledger. Made when it does not exist; safe under several processes at once.

    Attributes:
        path: the SQLite file, mode 600.

    Raises:
        ConfigError: the file is damaged, something else, or of a newer FedGist; it is untouched.
        PrivacyError: it cannot be made or read: nothing may be sent.
    """

    path: Path

    def __post_init__(self) -> None:
        self._make()
        with self._open() as con:
            if (found := con.execute("PRAGMA quick_check(1)").fetchone()[0]) != "ok":
                raise self._damaged(found)

    def record(self, release: Release, images: Images, by: str = "") -> bool:
        """Write a release down. Call it before the release exists; without it nothing may leave.

        Args:
            release: see `release_of`.
            images: all images that the task may use, before any is left out.
            by: who will remember the answer, such as a random text kept beside it.

        Returns:
            True. False when the same round of the same task with the same images was recorded
            before by the same: it is not counted again, and may be answered anew only if the first
            answer cannot have left.

        Raises:
            PrivacyError: the cap would be passed; the round was recorded with other terms or by
                somebody else, whose answer may have left; or the ledger cannot be written
                (read-only, full, locked). Nothing was recorded.
        """
        with self._open() as con:
            salt = self._salt(con)
            hashes = hashes_of(images, salt, release.form)  # slow: before the file is locked
            with self._writing(con):
                return self._add(con, release, hashes, by)

    def check(self, releases: Sequence[Release], images: Images) -> None:
        """Raise what `record` would raise if all of ``releases`` were recorded; record nothing.

        For all rounds of a task, before the first is spent.
        """
        with self._open() as con:
            salt = self._salt(con)
            found = {f: hashes_of(images, salt, f) for f in {r.form for r in releases}}
            with self._writing(con, keep=False):
                for release in releases:
                    self._add(con, release, found[release.form], None)

    def preview(self, releases: Sequence[Release], images: Images) -> dict[str, Any]:
        """Say what ``releases`` of these images cost, whether or not they are recorded already.

        Nothing is recorded and no cap is enforced.

        Returns:
            ``cap`` (``epsilon``, ``delta``); ``before`` and ``after``: the worst total ε at the
            cap's δ of any of these images without and with the releases; ``releases``: how many
            others cover them; ``recorded``: whether all of them stand in the ledger.
        """
        with self._open() as con:
            salt, form = self._salt(con), releases[0].form
            hashes = hashes_of(images, salt, form)
            with self._writing(con, keep=False):
                rows = [self._insert(con, r, hashes, None) for r in releases]
                book, set_id = Book.read(con), rows[0][0]
        own = {i for _, sets in book.cells if set_id in sets for i in sets}
        others = sum(len(book.made.get(i, ())) for i in own) - len(releases)
        after = book.worst(set_id)
        for r in releases:
            book = book.swapped(r, replace(r, rho=dict.fromkeys(r.rho, 0.0), curve={}))
        return {
            "cap": {"epsilon": book.epsilon, "delta": book.delta},
            "before": book.worst(set_id),
            "after": after,
            "releases": others,
            "recorded": not any(added for _, added in rows),
        }

    def cap(self, epsilon: float, delta: float = DELTA) -> None:
        """Set the ε at ``delta`` that no record's total may pass from now on; inf for no limit.

        Raises:
            ConfigError: not a budget.
            PrivacyError: the ledger cannot be written.
        """
        check_budget(epsilon, delta)
        with self._open() as con, self._writing(con):
            con.execute("UPDATE holder SET epsilon = ?, delta = ?", (epsilon, delta))

    def show(self) -> dict[str, Any]:
        """Return everything as plain data.

        Returns:
            ``file``; ``line`` (a summary); ``cap`` (``epsilon``, ``delta``); ``epsilon`` (the worst
            total); ``totals``: for every reading that was promised ``unit``, ``adjacency``, ``rho``
            and ``epsilon`` at the cap's δ; ``data``: for each data set ``data`` (fingerprint),
            ``images``, ``form``, ``releases`` and ``epsilon`` of its worst record; ``entries``: the
            fields of every `Release` but its curve, with ``data``, ``images`` and ``time`` (UTC),
            oldest first. Every ``rho`` leaves out what sampling gains, every ``epsilon`` has it.
        """
        with self._open() as con, self._reading(con):
            book = Book.read(con)
            sets = con.execute("SELECT id, data, form, images FROM sets ORDER BY id").fetchall()
            rows = con.execute("SELECT set_id, time, body FROM releases ORDER BY id").fetchall()
        known = {i: {"data": d, "images": n} for i, d, _, n in sets}
        data = [
            known[i]
            | {"form": form, "releases": len(book.made.get(i, ())), "epsilon": book.worst(i)}
            for i, _, form, _ in sets
        ]
        entries = [json.loads(body) | known[i] | {"time": time} for i, time, body in rows]
        total = book.worst()
        limit = "no cap" if math.isinf(book.epsilon) else f"cap {book.epsilon:g}"
        return {
            "file": str(self.path),
            "line": f"{_many(len(rows), 'release')} of {_many(len(sets), 'data set')}, "
            f"worst total ε = {total:.4g} "
            f"at δ = {book.delta:g} ({limit})",
            "cap": {"epsilon": book.epsilon, "delta": book.delta},
            "epsilon": total,
            "totals": [
                {"unit": u, "adjacency": a, "rho": spent.rho, "epsilon": book.read_at(spent)}
                for (u, a), spent in book.totals().items()
            ],
            "data": data,
            "entries": entries,
        }

    def export(self, path: Path) -> None:
        """Write `show` as JSON (infinite numbers as the text "inf") or the entries as CSV.

        Raises:
            ConfigError: the name ends neither in .json nor in .csv, or cannot be written.
        """
        shown = _plain(self.show())
        if path.suffix == ".json":
            text = json.dumps(shown, indent=2, ensure_ascii=False, allow_nan=False) + "\n"
        elif path.suffix == ".csv":
            text = _csv(shown["entries"])
        else:
            raise ConfigError(f"a ledger must be exported as .json or .csv. Got '{path}'")
        write_whole(path, text.encode())

    def _add(
        self, con: sqlite3.Connection, release: Release, hashes: list[bytes], by: str | None
    ) -> bool:
        """Add a release within a transaction, unless it is there or passes the cap."""
        set_id, added = self._insert(con, release, hashes, by)
        if added:
            self._enforce(Book.read(con), release, set_id)
        return added

    def _insert(
        self, con: sqlite3.Connection, release: Release, hashes: list[bytes], by: str | None
    ) -> tuple[int, bool]:
        """Add a release unless it is there; return its data set and whether it was added."""
        facts = {k: v for k, v in asdict(release).items() if k != "curve"}
        body = json.dumps(facts, sort_keys=True)
        data = digest_of(hashes, release.form)
        row = con.execute("SELECT id FROM sets WHERE data = ?", (data,)).fetchone()
        set_id = int(row[0]) if row else admit(con, data, release.form, hashes)
        key = (release.task, release.round, set_id)
        kept = con.execute(
            "SELECT body, by FROM releases WHERE task = ? AND round = ? AND set_id = ?", key
        ).fetchone()
        if kept:
            if kept[0] != body:
                raise PrivacyError(
                    f"round {release.round} of task '{release.name}' must be what the ledger "
                    "recorded before. Got other terms for it"
                )
            if by is not None and kept[1] != by:
                raise PrivacyError(
                    f"round {release.round} of task '{release.name}' must be answered once with "
                    "these images. Got a ledger that has it from another folder: go on in the "
                    "folder that it was answered from, or agree on a new task"
                )
            return set_id, False
        now = datetime.now(UTC).isoformat(timespec="seconds")
        added = con.execute(
            "INSERT INTO releases (task, round, set_id, time, body, by) VALUES (?, ?, ?, ?, ?, ?)",
            (*key, now, body, by or ""),
        )
        keep_curve(con, added.lastrowid or 0, release.curve)
        return set_id, True

    def _enforce(self, book: Book, new: Release, set_id: int) -> None:
        """Refuse if a record of the data set has spent more than the cap, with the new release."""
        for reading, spent in book.totals(set_id).items():
            total = book.read_at(spent)
            if total > book.epsilon * (1 + SLACK):
                free = replace(new, rho=dict.fromkeys(new.rho, 0.0), curve={})
                before = book.swapped(new, free).totals(set_id).get(reading, Spent())
                hint = (
                    "; releases stated for a finer unit bound nothing for this one"
                    if any(r.under(reading).rho > max(r.rho.values()) for r in book.every)
                    else ""
                )
                raise PrivacyError(
                    f"task '{new.name}', round {new.round}, must keep the total of every "
                    f"{reading[0]} within the cap of '{self.path}', ε = {book.epsilon:g} at "
                    f"δ = {book.delta:g}. Got {total:.4g} under {reading[1]}, of which "
                    f"{book.read_at(before):.4g} was spent before{hint}: refuse the task, or "
                    "raise the cap"
                )

    def _make(self) -> None:
        """Put a new ledger in place where there is none, whole: an empty file is a damaged one."""
        try:
            if self.path.exists():
                return
            self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            with suppress(FileExistsError):  # another process was faster
                write_new(self._salt_path, secrets.token_bytes(32), 0o600)
            salt_hash = sha256(self._salt_path.read_bytes()).digest()
            with closing(sqlite3.connect(":memory:")) as con:
                con.executescript(SCHEMA)
                con.execute("INSERT INTO holder VALUES (?, ?, ?)", (salt_hash, math.inf, DELTA))
                con.commit()
                content = con.serialize()
            with suppress(FileExistsError):
                write_new(self.path, content, 0o600)
        except OSError as e:
            raise self._unusable(e.strerror or e) from e

    @property
    def _salt_path(self) -> Path:
        return self.path.with_name(self.path.name + ".salt")

    def _salt(self, con: sqlite3.Connection) -> bytes:
        """Return the key of the hashes: with another one, no image would be recognised."""
        try:
            salt = self._salt_path.read_bytes()
        except OSError as e:
            raise self._damaged(f"'{self._salt_path}' cannot be read, {e.strerror or e}") from e
        if sha256(salt).digest() != con.execute("SELECT salt_hash FROM holder").fetchone()[0]:
            raise self._damaged(f"'{self._salt_path}' belongs to another ledger")
        return salt

    @contextmanager
    def _open(self) -> Iterator[sqlite3.Connection]:
        """Connect, for one operation: a connection must not be carried into a forked process."""
        try:
            uri = self.path.absolute().as_uri() + "?mode=rw"
            con = sqlite3.connect(uri, uri=True, timeout=PATIENCE, isolation_level=None)
            with closing(con):
                for pragma in ("synchronous = EXTRA", "temp_store = MEMORY"):
                    con.execute(f"PRAGMA {pragma}")
                kind = con.execute("PRAGMA application_id").fetchone()[0]
                version = con.execute("PRAGMA user_version").fetchone()[0]
                if kind != APPLICATION:
                    raise self._damaged("another kind of file, or an empty one")
                if version != VERSION:
                    raise ConfigError(
                        f"the ledger must be of format {VERSION}. Got '{self.path}' of format "
                        f"{version}: use the FedGist that wrote it"
                    )
                yield con
        except sqlite3.OperationalError as e:  # locked, full, read-only, gone
            raise self._unusable(e) from e
        except sqlite3.Error as e:
            raise self._damaged(e) from e

    @contextmanager
    def _writing(self, con: sqlite3.Connection, *, keep: bool = True) -> Iterator[None]:
        con.execute("BEGIN IMMEDIATE")
        try:
            yield
            con.execute("COMMIT" if keep else "ROLLBACK")
        finally:
            if con.in_transaction:
                with suppress(sqlite3.Error):  # a full disk may have ended it
                    con.execute("ROLLBACK")

    @contextmanager
    def _reading(self, con: sqlite3.Connection) -> Iterator[None]:
        con.execute("BEGIN")
        yield
        con.execute("COMMIT")

    def _unusable(self, why: object) -> PrivacyError:
        return PrivacyError(
            f"the ledger must be writable before anything leaves. Got '{self.path}': {why}. "
            "Nothing was recorded, nothing may be sent"
        )

    def _damaged(self, why: object) -> ConfigError:
        line = " ".join(str(why).split())  # SQLite finds several faults at a time
        return ConfigError(
            f"the ledger must be a file that FedGist wrote. Got '{self.path}': {line}. It is "
            "untouched: restore it from a backup"
        )


def _many(n: int, what: str) -> str:
    return f"{n:,} {what}" if n == 1 else f"{n:,} {what}s"


def _plain(value: Any) -> Any:
    """Replace infinite numbers, which JSON does not have, by text."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return "inf" if isinstance(value, float) and math.isinf(value) else value


def _csv(entries: list[dict[str, Any]]) -> str:
    """Return one line per entry; no cell can be taken for a formula."""
    out = io.StringIO()
    rows = []
    for e in entries:
        flat = {k: v for k, v in e.items() if k != "rho"}
        flat |= {f"rho {a}": v for a, v in e["rho"].items()}
        rows.append({k: f"'{v}" if str(v)[:1] in "=+-@\t\r" else v for k, v in flat.items()})
    if rows:
        writer = csv.DictWriter(out, list(rows[0]))
        writer.writeheader()
        writer.writerows(rows)
    return out.getvalue()
