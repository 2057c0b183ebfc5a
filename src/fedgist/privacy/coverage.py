"""Which images each release has covered: the tables of a ledger and what is read out of them.

A data set is known by the keyed hashes of its images. The images that exactly the same data sets
hold form a *cell*; a new data set splits the cells that it cuts. So the images are gone through
once, when a data set is first seen, and totals are taken over cells.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b, sha256
from typing import Any, Protocol

import torch

from fedgist.privacy.accounting import ORDERS, Law
from fedgist.privacy.spending import Cell, Reading, Release, Spent, resampled, totals
from fedgist.types import Adjacency, Images

__all__ = ["TABLES", "Book", "admit", "digest_of", "fingerprint", "hashes_of", "keep_curve"]

HASH = 16  # bytes: no two of 1e6 images meet by chance (2^-89)

TABLES = """
CREATE TABLE sets (id INTEGER PRIMARY KEY, data TEXT NOT NULL UNIQUE, form TEXT NOT NULL,
                   images INTEGER NOT NULL);
CREATE TABLE images (hash BLOB PRIMARY KEY, cell INTEGER NOT NULL) WITHOUT ROWID;
CREATE TABLE cells (id INTEGER PRIMARY KEY, images INTEGER NOT NULL);
CREATE TABLE cover (cell INTEGER NOT NULL, set_id INTEGER NOT NULL,
                    PRIMARY KEY (cell, set_id)) WITHOUT ROWID;
CREATE TABLE releases (id INTEGER PRIMARY KEY, task TEXT NOT NULL, round INTEGER NOT NULL,
                       set_id INTEGER NOT NULL, time TEXT NOT NULL, body TEXT NOT NULL,
                       by TEXT NOT NULL, UNIQUE (task, round, set_id));
"""

# Made with the first release that has a curve. Whoever does not know of it reads ρ, which is more.
CURVES = "CREATE TABLE IF NOT EXISTS curves (release INTEGER PRIMARY KEY, body TEXT NOT NULL)"


def fingerprint(images: Images, salt: bytes, form: str = "") -> str:
    """Return a hash of a data set (64 hex digits): the same in any order and with any labels.

    Args:
        images: the data set.
        salt: 16 to 64 bytes, the ledger's own.
        form: what the images were brought to; another form is another data set.
    """
    return digest_of(hashes_of(images, salt, form), form)


class Database(Protocol):
    """What is needed of a connection to the ledger's file, within a transaction."""

    def execute(self, sql: str, values: Sequence[Any] = ..., /) -> Any:
        """Run one statement."""

    def executemany(self, sql: str, rows: Iterable[Sequence[Any]], /) -> Any:
        """Run one statement for each row."""


@dataclass(frozen=True)
class Book:
    """All that totals need of a ledger.

    Attributes:
        epsilon, delta: the cap.
        made: data set -> its releases.
        cells: form and data sets of each cell.
    """

    epsilon: float
    delta: float
    made: dict[int, list[Release]]
    cells: list[tuple[str, frozenset[int]]]

    @classmethod
    def read(cls, con: Database) -> Book:
        """Read all but the hashes."""
        epsilon, delta = con.execute("SELECT epsilon, delta FROM holder").fetchone()
        made: dict[int, list[Release]] = {}
        curves = _curves(con)
        for n, i, body in con.execute("SELECT id, set_id, body FROM releases ORDER BY id"):
            release = Release(**json.loads(body), curve=curves.get(n, {}))
            made.setdefault(i, []).append(release)
        form = dict(con.execute("SELECT id, form FROM sets"))
        cover: dict[int, set[int]] = {}
        for cell, i in con.execute("SELECT cell, set_id FROM cover"):
            cover.setdefault(cell, set()).add(i)
        cells = [(form[min(sets)], frozenset(sets)) for sets in cover.values()]
        return cls(epsilon, delta, made, cells)

    @property
    def every(self) -> list[Release]:
        """All releases of the holder."""
        return [r for releases in self.made.values() for r in releases]

    @property
    def law(self) -> Law:
        """The noise law that totals are read by."""
        # The tighter curve of continuous noise holds where all of it is continuous.
        return "gaussian" if {r.law for r in self.every} == {"gaussian"} else "discrete-gaussian"

    def totals(self, through: int | None = None) -> dict[Reading, Spent]:
        """Return what was spent by reading; by records of one data set, or by all."""
        own = [c for c in self.cells if through is None or through in c[1]]
        if through is not None:  # their people may be in sets of other forms
            forms = {form for form, _ in own}
            own += [c for c in self.cells if forms and c[0] not in forms]
        cells = [
            Cell(form, tuple(r for i in sorted(sets) for r in self.made.get(i, ())))
            for form, sets in own
        ]
        return totals(cells, self.every, self.read_at)

    def worst(self, through: int | None = None) -> float:
        """Return the largest ε of all promised readings."""
        return max(map(self.read_at, self.totals(through).values()), default=0.0)

    def read_at(self, spent: Spent) -> float:
        """Return ε of a total at the cap's δ."""
        return spent.epsilon(self.delta, self.law)

    def swapped(self, old: Release, new: Release) -> Book:
        """Return the same with one release in the place of another."""
        made = {i: [new if r == old else r for r in rs] for i, rs in self.made.items()}
        return replace(self, made=made)


def keep_curve(con: Database, release: int, curve: Mapping[Adjacency, Sequence[float]]) -> None:
    """Write down what sampling gains for a release, known by its number."""
    if curve:
        con.execute(CURVES)
        body = json.dumps({"orders": ORDERS, "curve": curve}, sort_keys=True)
        con.execute("INSERT INTO curves VALUES (?, ?)", (release, body))


def _curves(con: Database) -> dict[int, dict[Adjacency, tuple[float, ...]]]:
    """Return release -> adjacency -> curve, wherever one was written down."""
    if not con.execute("SELECT 1 FROM sqlite_master WHERE name = 'curves'").fetchone():
        return {}
    kept = [(i, json.loads(body)) for i, body in con.execute("SELECT release, body FROM curves")]
    return {i: {a: resampled(k["orders"], c) for a, c in k["curve"].items()} for i, k in kept}


def admit(con: Database, data: str, form: str, hashes: list[bytes]) -> int:
    """Add a data set and split the cells that it cuts; return its number."""
    con.execute("DROP TABLE IF EXISTS temp.incoming")
    con.execute("CREATE TEMP TABLE incoming (hash BLOB PRIMARY KEY) WITHOUT ROWID")
    con.executemany("INSERT OR IGNORE INTO incoming VALUES (?)", ((h,) for h in hashes))
    set_id = _insert(con, "sets (data, form, images)", data, form, len(hashes))
    touched = con.execute(
        "SELECT i.cell, count(*), c.images FROM incoming CROSS JOIN images i USING (hash) "
        "JOIN cells c ON c.id = i.cell GROUP BY i.cell"
    ).fetchall()
    moves = []
    for cell, inside, size in touched:
        target = cell
        if inside < size:
            target = _insert(con, "cells (images)", inside)
            moves.append((cell, target))
            con.execute("UPDATE cells SET images = images - ? WHERE id = ?", (inside, cell))
            con.execute(
                "INSERT INTO cover SELECT ?, set_id FROM cover WHERE cell = ?", (target, cell)
            )
        con.execute("INSERT INTO cover VALUES (?, ?)", (target, set_id))
    con.execute("DROP TABLE IF EXISTS temp.moves")
    con.execute("CREATE TEMP TABLE moves (cell INTEGER PRIMARY KEY, target INTEGER)")
    con.executemany("INSERT INTO moves VALUES (?, ?)", moves)
    if moves:
        con.execute(
            "UPDATE images SET cell = (SELECT target FROM moves m WHERE m.cell = images.cell) "
            "WHERE hash IN incoming AND cell IN (SELECT cell FROM moves)"
        )
    fresh = len(set(hashes)) - sum(inside for _, inside, _ in touched)
    if fresh:
        cell = _insert(con, "cells (images)", fresh)
        con.execute("INSERT OR IGNORE INTO images SELECT hash, ? FROM incoming", (cell,))
        con.execute("INSERT INTO cover VALUES (?, ?)", (cell, set_id))
    return set_id


def _insert(con: Database, into: str, *values: object) -> int:
    marks = ", ".join("?" * len(values))
    return int(con.execute(f"INSERT INTO {into} VALUES ({marks})", values).lastrowid or 0)


def hashes_of(images: Images, salt: bytes, form: str) -> list[bytes]:
    """Return the sorted keyed hashes of all images, from their pixels on a grid of 256 levels."""
    keyed = blake2b(key=salt, digest_size=HASH)
    keyed.update(f"{form} {list(images.pixels.shape[1:])}\n".encode())
    out = []
    for block in torch.split(images.pixels, 1024):
        if block.dtype != torch.uint8:
            block = block.clamp(0, 1).mul(255).round().to(torch.uint8)
        for row in block.cpu().contiguous().numpy():
            one = keyed.copy()
            one.update(row)
            out.append(one.digest())
    return sorted(out)


def digest_of(hashes: list[bytes], form: str) -> str:
    """Return the fingerprint that belongs to sorted hashes."""
    return sha256(form.encode() + b"\n" + b"".join(hashes)).hexdigest()
