"""One site's side of a secure sum: five answers, each given once. See `privacy.secure_sum`."""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable
from typing import final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fedgist.errors import ConfigError, ProtocolError
from fedgist.privacy.secure_sum.masks import KEY, add_stream, agree, private_key
from fedgist.privacy.secure_sum.shamir import SHARE, split
from fedgist.privacy.secure_sum.terms import LABEL, STAGES, Terms
from fedgist.privacy.secure_sum.wire import (
    BODY,
    KEYS,
    NONCE,
    PAIR,
    PARCEL,
    SIGNATURE,
    TAG,
    check_keys,
    check_vote,
    commitment,
    keys_text,
    mask_key,
    pair_tags,
    read_bitmap,
    read_table,
    vote_text,
    write_table,
)
from fedgist.types import Tensors

__all__ = ["Member"]


@final
class Member:
    """The secret state of one site, from its first answer to its last.

    An answer changes the state only if it succeeds: a refused request leaves the member as it was.
    Whoever gives up drops the object and its dump; Python cannot promise to wipe memory.

    Attributes:
        terms: from the site's own copy of the task.
        me: the site's position in the roster.
    """

    def __init__(self, terms: Terms, me: int, signer: Ed25519PrivateKey) -> None:
        """Start before the first stage.

        Raises:
            ConfigError: ``signer`` is not the private key of roster position ``me``.
        """
        known = 0 <= me < len(terms.roster)
        if not known or signer.public_key().public_bytes_raw() != terms.roster[me]:
            raise ConfigError(f"the private key must belong to roster position {me}. Got another")
        self.terms, self.me, self._signer = terms, me, signer
        self._near = terms.neighbours(me)
        self._answered = 0
        self._secrets = b""  # mask key, channel key, self-mask's seed; gone after the upload
        self._bodies: dict[int, bytes] = {}  # own and neighbours' public keys
        self._held: dict[int, bytes] = {}  # pairs of shares by owner; own: the seed itself
        self._survivors = b""

    @property
    def stage(self) -> str:
        """The stage that this member answers next; ``done`` after the last."""
        return (*STAGES, "done")[self._answered]

    def answer(self, stage: str, request: bytes, tensors: Tensors | None = None) -> bytes:
        """Answer one stage, in order, once. Store the reply *and* `dump` before you send it.

        Args:
            stage: one of `STAGES`.
            request: what the server asks; trusted in nothing.
            tensors: int64 by block, at ``upload`` only.

        Raises:
            ProtocolError: the stage was answered or skipped, or the request breaks the terms.
            DataError: a number does not fit its block's bits. Nothing is clipped or wrapped.
        """
        if stage != self.stage or stage == "done":
            raise ProtocolError(
                f"site {self.me} answers each stage once: now '{self.stage}'. Got '{stage}'"
            )
        if (tensors is not None) != (stage == "upload"):
            raise ProtocolError(f"numbers must be given at stage 'upload' only. Got '{stage}'")
        if tensors is not None:
            reply = self._upload(request, tensors)
        else:
            answers: dict[str, Callable[[bytes], bytes]] = {
                "keys": self._keys,
                "shares": self._shares,
                "confirm": self._confirm,
                "unmask": self._unmask,
            }
            reply = answers[stage](request)
        self._answered += 1
        return reply

    def _keys(self, request: bytes) -> bytes:
        if request != self.terms.digest:
            raise ProtocolError("the server's terms must be this site's own. Got others")
        mask, channel, seed = (secrets.token_bytes(KEY) for _ in range(3))
        public = (private_key(k).public_key().public_bytes_raw() for k in (mask, channel))
        body = b"".join(public) + commitment(self.terms, self.me, seed)
        self._secrets, self._bodies = mask + channel + seed, {self.me: body}
        return body + self._signer.sign(keys_text(self.terms, self.me, body))

    def _shares(self, request: bytes) -> bytes:
        rows = read_table(request, KEYS, self._near)
        self._need(len(rows) + 1, "keys")
        for i, row in rows.items():
            check_keys(self.terms, i, row)
        bodies = self._bodies | {i: row[:BODY] for i, row in rows.items()}
        mask, channel, seed = self._three()
        points = [i + 1 for i in rows]
        t = self.terms.threshold
        pairs = zip(rows, split(mask, t, points), split(seed, t, points), strict=True)
        loaded = private_key(channel)
        parcels = {i: self._seal(i, loaded, bodies[i], a + b) for i, a, b in pairs}
        self._bodies = bodies
        self._held = {self.me: bytes(PAIR - KEY) + seed}
        return write_table(parcels)

    def _upload(self, request: bytes, tensors: Tensors) -> bytes:
        rows = read_table(request, PARCEL, self._bodies.keys() - {self.me})
        self._need(len(rows) + 1, "parcels")
        words = self.terms.encode(tensors)
        mask, channel, seed = self._three()
        private, loaded = private_key(mask), private_key(channel)
        held = self._held | {i: self._open(i, loaded, row) for i, row in rows.items()}
        add_stream(words, seed)
        for i in rows:
            key = mask_key(self.terms, self.me, private, i, self._bodies[i])
            add_stream(words, key, negative=self.me > i)
        self._held, self._secrets = held, b""
        return self.terms.to_wire(words)

    def _confirm(self, request: bytes) -> bytes:
        alive = read_bitmap(self.terms, request)
        near = [i for i in self._near if i in alive]
        strangers = [i for i in near if i not in self._held]
        if self.me not in alive or strangers:
            raise ProtocolError(
                f"the survivors must include site {self.me} and no neighbour that dealt it no "
                f"shares. Got {len(alive)} survivors, without shares: {strangers}"
            )
        self._need(len(near) + 1, "survivors")
        if len(alive) < self.terms.least:
            raise ProtocolError(f"a sum must hold {self.terms.least} sites. Got {len(alive)}")
        self._survivors = request
        return self._signer.sign(vote_text(self.terms, self.me, self._bodies[self.me], request))

    def _unmask(self, request: bytes) -> bytes:
        alive = read_bitmap(self.terms, self._survivors)
        rows = read_table(request, SIGNATURE, (self._held.keys() & alive) - {self.me})
        self._need(len(rows) + 1, "confirmations")
        for i, signature in rows.items():
            check_vote(self.terms, i, self._bodies[i], self._survivors, signature)
        # The one place where shares leave: of the seed or of the mask key, never of both.
        pairs = ((i in alive, self._held[i]) for i in sorted(self._held))
        reply = b"".join(pair[SHARE:] if lives else pair[:SHARE] for lives, pair in pairs)
        self._held, self._bodies, self._survivors = {}, {}, b""
        return reply

    def _three(self) -> tuple[bytes, bytes, bytes]:
        s = self._secrets
        return s[:KEY], s[KEY : 2 * KEY], s[2 * KEY :]

    def _need(self, got: int, what: str) -> None:
        if got < self.terms.threshold:
            raise ProtocolError(
                f"site {self.me} must get {what} from at least {self.terms.threshold} of the "
                f"{self.terms.group} sites around it. Got {got}"
            )

    def _channel(
        self, sender: int, receiver: int, channel: X25519PrivateKey, other: bytes
    ) -> ChaCha20Poly1305:
        info = LABEL + b"channel" + sender.to_bytes(4, "big") + receiver.to_bytes(4, "big")
        return ChaCha20Poly1305(agree(channel, other[KEY : 2 * KEY], self.terms.digest, info))

    def _seal(self, to: int, channel: X25519PrivateKey, body: bytes, pair: bytes) -> bytes:
        tags = pair_tags(self.terms, self.me, to, pair)
        nonce = secrets.token_bytes(NONCE)
        cipher = self._channel(self.me, to, channel, body)
        return tags + nonce + cipher.encrypt(nonce, pair, tags)

    def _open(self, sender: int, channel: X25519PrivateKey, parcel: bytes) -> bytes:
        tags, nonce = parcel[: 2 * TAG], parcel[2 * TAG : 2 * TAG + NONCE]
        cipher = self._channel(sender, self.me, channel, self._bodies[sender])
        try:
            pair = cipher.decrypt(nonce, parcel[2 * TAG + NONCE :], tags)
        except InvalidTag:
            raise ProtocolError(
                f"the parcel from site {sender} must open. Got an altered one"
            ) from None
        if pair_tags(self.terms, sender, self.me, pair) != tags:
            raise ProtocolError(f"shares from site {sender} must match their hashes. Got others")
        return pair

    def dump(self) -> bytes:
        """Return the whole state, secrets included: write it aside with mode 600, and rename.

        A state restored twice could answer one stage twice: replace the old dump by the new one
        before a reply leaves.
        """
        parts = [self._secrets, write_table(self._bodies), write_table(self._held), self._survivors]
        head = self.terms.hash(b"state", self.me) + bytes([self._answered])
        data = head + b"".join(len(p).to_bytes(4, "big") + p for p in parts)
        return data + hashlib.sha256(data).digest()

    @classmethod
    def restore(cls, terms: Terms, me: int, signer: Ed25519PrivateKey, state: bytes) -> Member:
        """Return the member whose `dump` this is.

        Raises:
            ProtocolError: the dump is damaged, or of another site or other terms.
        """
        member = cls(terms, me, signer)
        data, check = state[:-KEY], state[-KEY:]
        if hashlib.sha256(data).digest() != check or data[:KEY] != terms.hash(b"state", me):
            raise ProtocolError(f"the state must be site {me}'s in this sum. Got another or a part")
        member._answered, at, parts = data[KEY], KEY + 1, []
        for _ in range(4):
            end = at + 4 + int.from_bytes(data[at : at + 4], "big")
            parts.append(data[at + 4 : end])
            at = end
        everyone = {me, *member._near}
        member._secrets, member._survivors = parts[0], parts[3]
        member._bodies = read_table(parts[1], BODY, everyone)
        member._held = read_table(parts[2], PAIR, everyone)
        return member
