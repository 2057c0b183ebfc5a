"""The server's side of a secure sum: five rounds of requests, one sum. See `privacy.secure_sum`."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import final

import numpy as np

from fedgist.errors import ProtocolError
from fedgist.privacy.packing import Words
from fedgist.privacy.secure_sum.masks import KEY, add_stream, private_key
from fedgist.privacy.secure_sum.shamir import SECRET, SHARE, join
from fedgist.privacy.secure_sum.terms import STAGES, Terms
from fedgist.privacy.secure_sum.wire import (
    BODY,
    PARCEL,
    TAG,
    bitmap,
    check_keys,
    check_order,
    check_vote,
    commitment,
    mask_key,
    read_table,
    share_tag,
    write_table,
)
from fedgist.types import Tensors

__all__ = ["Collector"]


@final
class Collector:
    """What the server keeps. It draws no random number: stored replies, replayed, give it back.

    A masked vector is added to one running sum when it arrives and is not kept, so memory does
    not grow with the number of sites by more than 64 bytes per pair of neighbours (200 between the
    stages ``shares`` and ``upload``).

    Attributes:
        terms: from the task file.
        stage: whose replies are awaited; ``done`` when the sum is ready.
        faults: what went wrong, by site: the stage and the cause. A site in it can still be in the
            sum: it may have fallen silent after its upload, or sent one bad share.
        survivors: who is in the sum; known from stage ``confirm`` on.
    """

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.stage = STAGES[0]
        self.faults: dict[int, str] = {}
        self.survivors: tuple[int, ...] = ()
        self._everyone = frozenset(range(len(terms.roster)))
        self._asked: set[int] = set(self._everyone)
        self._answered: set[int] = set()
        self._bodies: dict[int, bytes] = {}
        self._parcels: dict[int, dict[int, bytes]] = {}  # sender -> receiver -> parcel
        self._tags: dict[int, dict[int, bytes]] = {}  # owner -> holder -> two hashes
        self._sharers: set[int] = set()  # whose masks may be in the uploads
        self._total = np.zeros(terms.length, np.uint64)
        self._bits = b""
        self._votes: dict[int, bytes] = {}
        self._shares: dict[int, dict[int, bytes]] = {}  # owner -> holder -> share
        self._seeds: dict[int, bytes] = {}

    def open(self) -> dict[int, bytes]:
        """Return the requests of the first stage."""
        return dict.fromkeys(sorted(self._asked), self.terms.digest)

    def receive(self, site: int, reply: bytes) -> None:
        """Take one site's reply to the current stage; a bad one is noted in `faults`, not raised.

        The first good reply stands; a second is noted and left aside.
        """
        takes: dict[str, Callable[[int, bytes], None]] = {
            "keys": self._take_keys,
            "shares": self._take_parcels,
            "upload": self._take_vector,
            "confirm": self._take_vote,
            "unmask": self._take_shares,
        }
        try:
            if site not in self._asked or self.stage == "done":
                raise ProtocolError("a reply must answer a request. Got one from a site not asked")
            if site in self._answered:
                raise ProtocolError("a stage must be answered once. Got a second reply")
            takes[self.stage](site, reply)
            self._answered.add(site)
        except ProtocolError as e:
            self._note(site, str(e))

    def advance(self, replies: Mapping[int, bytes] | None = None) -> dict[int, bytes]:
        """Take replies (one at a time: the mapping may be lazy), close the stage, ask the next.

        Returns:
            The next stage's request by site; empty after the last stage.

        Raises:
            ProtocolError: too few sites are left around one of them, or the sum is not right. The
                stage stays open then: late replies can still be received.
        """
        if self.stage == "done":
            raise ProtocolError("the sum must not be closed twice. Got another call of advance")
        for site, reply in (replies or {}).items():
            self.receive(site, reply)
        for site in self._asked - self._answered:
            if not self.faults.get(site, "").startswith(self.stage):
                self._note(site, "no answer")
        closes: dict[str, Callable[[], dict[int, bytes]]] = {
            "keys": self._close_keys,
            "shares": self._close_shares,
            "upload": self._close_upload,
            "confirm": self._close_confirm,
            "unmask": self._close_unmask,
        }
        requests = closes[self.stage]()
        self.stage = (*STAGES, "done")[STAGES.index(self.stage) + 1]
        self._asked, self._answered = set(requests), set()
        return requests

    def result(self) -> Tensors:
        """Return the exact int64 sum over `survivors`, by block.

        Raises:
            ProtocolError: the last stage is not over.
        """
        if self.stage != "done":
            raise ProtocolError(f"the sum must be complete. Got stage '{self.stage}'")
        return self.terms.decode(self._total)[1]

    def _take_keys(self, site: int, reply: bytes) -> None:
        check_keys(self.terms, site, reply)
        check_order(self.terms, reply[:BODY])
        self._bodies[site] = reply

    def _close_keys(self) -> dict[int, bytes]:
        present = self._answered
        self._require(present, present)
        return {
            i: write_table({j: self._bodies[j] for j in self._around(i, present)})
            for i in sorted(present)
        }

    def _take_parcels(self, site: int, reply: bytes) -> None:
        near = self._around(site, self._asked)
        rows = read_table(reply, PARCEL, near)
        if len(rows) != len(near):
            raise ProtocolError(f"parcels must be for all {len(near)} neighbours. Got {len(rows)}")
        self._parcels[site] = rows

    def _close_shares(self) -> dict[int, bytes]:
        self._sharers = present = set(self._answered)
        self._require(present, present)
        requests = {}
        for i in sorted(present):
            near = self._around(i, present)
            requests[i] = write_table({j: self._parcels[j][i] for j in near})
            self._tags[i] = {j: self._parcels[i][j][: 2 * TAG] for j in near}
        self._parcels = {}
        return requests

    def _take_vector(self, site: int, reply: bytes) -> None:
        if len(reply) != self.terms.upload_bytes:
            raise ProtocolError(
                f"a masked vector must have {self.terms.upload_bytes} bytes. Got {len(reply)}"
            )
        self.terms.add_wire(self._total, reply)

    def _close_upload(self) -> dict[int, bytes]:
        present = self._answered
        self._require(self._sharers, present)
        if len(present) < self.terms.least:
            of = f"{len(self._everyone)} sites"
            raise self._short(len(present), self.terms.least, of, self._everyone - present)
        self.survivors = tuple(sorted(present))
        self._bits = bitmap(self.terms, present)
        return dict.fromkeys(self.survivors, self._bits)

    def _take_vote(self, site: int, reply: bytes) -> None:
        check_vote(self.terms, site, self._bodies[site][:BODY], self._bits, reply)
        self._votes[site] = reply

    def _close_confirm(self) -> dict[int, bytes]:
        present = self._answered
        self._require(self._sharers, present)
        return {
            i: write_table({j: self._votes[j] for j in self._around(i, present)})
            for i in sorted(present)
        }

    def _take_shares(self, site: int, reply: bytes) -> None:
        owners = sorted([site, *self._around(site, self._sharers)])
        if len(reply) != SHARE * len(owners):
            raise ProtocolError(f"shares must have {SHARE * len(owners)} bytes. Got {len(reply)}")
        for k, owner in enumerate(owners):
            share = reply[SHARE * k : SHARE * (k + 1)]
            if owner == site:
                self._take_seed(site, share)
                continue
            kind = int(owner in self.survivors)
            tag = self._tags[owner][site][TAG * kind : TAG * (kind + 1)]
            if share_tag(self.terms, owner, site, kind, share) == tag:
                self._shares.setdefault(owner, {})[site] = share
            else:
                self._note(site, f"the share of site {owner} must be as dealt. Got another")

    def _take_seed(self, site: int, share: bytes) -> None:
        seed = share[-SECRET:]
        if any(share[:-SECRET]) or not self._committed(site, seed):
            self._note(site, "the seed must be the one committed to. Got another")
        else:
            self._seeds[site] = seed

    def _close_unmask(self) -> dict[int, bytes]:
        alive = set(self.survivors)
        total = self._total.copy()  # a close that fails leaves all as it was
        for owner in sorted(self._sharers):
            if owner in alive:
                add_stream(total, self._seed(owner), negative=True)
            else:
                self._strip(total, owner, self._around(owner, alive))
        count, _ = self.terms.decode(total)
        if count != len(alive):
            raise ProtocolError(
                f"the unmasked sum must count {len(alive)} sites. Got {count}: a site sent a wrong "
                "vector or wrong masks"
            )
        self._total = total
        self._tags, self._shares, self._seeds = {}, {}, {}
        return {}

    def _seed(self, owner: int) -> bytes:
        if owner in self._seeds:
            return self._seeds[owner]
        seed = self._join(owner)
        if not self._committed(owner, seed):
            raise ProtocolError(f"shares of site {owner} must give its seed. It dealt wrong ones")
        return seed

    def _strip(self, total: Words, owner: int, alive: list[int]) -> None:
        """Take out of its neighbours' vectors the masks of a site that sent no vector itself."""
        if not alive:
            return
        private = private_key(self._join(owner))
        if private.public_key().public_bytes_raw() != self._bodies[owner][:KEY]:
            raise ProtocolError(f"shares of site {owner} must give its key. It dealt wrong ones")
        for i in alive:
            key = mask_key(self.terms, owner, private, i, self._bodies[i])
            add_stream(total, key, negative=i < owner)

    def _join(self, owner: int) -> bytes:
        shares, t = self._shares.get(owner, {}), self.terms.threshold
        if len(shares) < t:
            missing = {owner, *self.terms.neighbours(owner)} - shares.keys()
            raise self._too_few(len(shares), missing, owner)
        return join({i + 1: shares[i] for i in sorted(shares)[:t]})

    def _committed(self, site: int, seed: bytes) -> bool:
        return self._bodies[site][2 * KEY : BODY] == commitment(self.terms, site, seed)

    def _around(self, site: int, among: set[int]) -> list[int]:
        return [i for i in self.terms.neighbours(site) if i in among]

    def _require(self, owners: set[int], present: set[int]) -> None:
        """Stop when the secrets of one of ``owners`` could no longer be rebuilt by ``present``."""
        t = self.terms.threshold
        if not owners:
            raise self._too_few(0, self._everyone)
        for i in sorted(owners):
            got = len(self._around(i, present)) + (i in present)
            if got < t:
                raise self._too_few(got, {i, *self.terms.neighbours(i)} - present, i)

    def _too_few(
        self, got: int, missing: Iterable[int], centre: int | None = None
    ) -> ProtocolError:
        place = "" if self.terms.degree is None or centre is None else f" around site {centre}"
        return self._short(got, self.terms.threshold, f"{self.terms.group} sites{place}", missing)

    def _short(self, got: int, least: int, of: str, missing: Iterable[int]) -> ProtocolError:
        names = ", ".join(f"{i} ({self.faults.get(i, 'lost')})" for i in sorted(missing))
        return ProtocolError(
            f"stage '{self.stage}' must be answered by at least {least} of {of}. "
            f"Got {got}: missing {names}"
        )

    def _note(self, site: int, cause: str) -> None:
        """Keep the latest cause of a site: the one that explains why it is missing now."""
        self.faults[site] = f"{self.stage}: {cause}"
