"""The messages of a secure sum: layouts, hashes and signatures that both sides read and check.

No message carries a length or a type of its own: the terms fix every size, so a parser has one
thing to check before it uses a byte.

==========  ==============================================  =======================================
stage       server to site                                  site to server
==========  ==============================================  =======================================
keys        hash of the terms, 32                           keys, 160
shares      per neighbour: id, keys, 4 + 160                per neighbour: id, parcel, 4 + 192
upload      per neighbour: id, parcel, 4 + 192              masked vector, `Terms.upload_bytes`
confirm     survivors, one bit per rostered site            signature, 64
unmask      per neighbour: id, signature, 4 + 64            per owner: one share, 66
==========  ==============================================  =======================================

*Keys* are two X25519 keys, a commitment to the self-mask's seed, and a signature over the three. A
*parcel* is two 16-byte hashes of shares, a nonce, and the two shares encrypted (ChaCha20-Poly1305).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fedgist.errors import ProtocolError
from fedgist.privacy.secure_sum.masks import KEY, agree, private_key
from fedgist.privacy.secure_sum.shamir import SHARE
from fedgist.privacy.secure_sum.terms import LABEL, Terms

__all__ = [
    "BODY",
    "KEYS",
    "NONCE",
    "PAIR",
    "PARCEL",
    "SIGNATURE",
    "TAG",
    "bitmap",
    "check_keys",
    "check_order",
    "check_vote",
    "commitment",
    "keys_text",
    "mask_key",
    "pair_tags",
    "read_bitmap",
    "read_table",
    "share_tag",
    "vote_text",
    "write_table",
]

SIGNATURE = 64
BODY = 3 * KEY  # public mask key, public channel key, commitment to the self-mask's seed
KEYS = BODY + SIGNATURE
TAG = 16  # bytes of a share's hash: a second share with the same hash takes 2^128 tries
NONCE = 12
PARCEL = 2 * TAG + NONCE + 2 * SHARE + 16
PAIR = 2 * SHARE  # a share of the mask key, a share of the self-mask's seed


def write_table(rows: Mapping[int, bytes]) -> bytes:
    """Join rows of one length, ids ascending: a site's id (4 bytes, big-endian), its bytes."""
    return b"".join(i.to_bytes(4, "big") + rows[i] for i in sorted(rows))


def read_table(data: bytes, width: int, allowed: Collection[int]) -> dict[int, bytes]:
    """Undo `write_table`.

    Raises:
        ProtocolError: another length, ids that do not ascend, or an id that is not ``allowed``.
    """
    step = 4 + width
    if len(data) % step:
        raise ProtocolError(f"message must be rows of {step} bytes. Got {len(data)} bytes")
    rows = {}
    last = -1
    for at in range(0, len(data), step):
        site = int.from_bytes(data[at : at + 4], "big")
        if site <= last or site not in allowed:
            raise ProtocolError(f"ids of rows must ascend and be neighbours. Got {site}")
        rows[site], last = data[at + 4 : at + step], site
    return rows


def commitment(terms: Terms, site: int, seed: bytes) -> bytes:
    """Return what a site publishes of its self-mask's seed, so that another one is noticed."""
    return terms.hash(b"seed", site, seed)


def share_tag(terms: Terms, owner: int, holder: int, kind: int, share: bytes) -> bytes:
    """Return the hash by which a share is known again; a share is as random as the field is wide.

    Args:
        terms: of the sum.
        owner: whose secret it is a share of.
        holder: who keeps it.
        kind: 0 for the mask key, 1 for the self-mask's seed.
        share: its bytes.
    """
    return terms.hash(b"share", owner, holder, kind, share)[:TAG]


def pair_tags(terms: Terms, owner: int, holder: int, pair: bytes) -> bytes:
    """Return the hashes of both shares of a parcel."""
    halves = (pair[:SHARE], pair[SHARE:])
    return b"".join(share_tag(terms, owner, holder, k, s) for k, s in enumerate(halves))


def mask_key(terms: Terms, site: int, private: X25519PrivateKey, other: int, body: bytes) -> bytes:
    """Return the key of the mask that two sites share: the lower id adds it, the higher subtracts.

    Args:
        terms: of the sum.
        site: whose private mask key is given.
        private: that key.
        other: the other site.
        body: its public keys.

    Raises:
        ProtocolError: the other site's public key is weak.
    """
    low, high = sorted((site, other))
    info = LABEL + b"mask" + low.to_bytes(4, "big") + high.to_bytes(4, "big")
    return agree(private, body[:KEY], terms.digest, info)


def check_order(terms: Terms, body: bytes) -> None:
    """Refuse public keys of low order, on which no secret can be agreed: any key finds them out.

    Raises:
        ProtocolError: one of the two is.
    """
    probe = private_key(terms.hash(b"probe"))
    for key in (body[:KEY], body[KEY : 2 * KEY]):
        agree(probe, key, b"", b"")


def bitmap(terms: Terms, sites: set[int]) -> bytes:
    """Return one bit per rostered site, low bits first."""
    bits = sum(1 << i for i in sites)
    return bits.to_bytes((len(terms.roster) + 7) // 8, "little")


def read_bitmap(terms: Terms, data: bytes) -> set[int]:
    """Undo `bitmap`.

    Raises:
        ProtocolError: another length, or a bit beyond the roster.
    """
    n = len(terms.roster)
    bits = int.from_bytes(data, "little")
    if len(data) != (n + 7) // 8 or bits >> n:
        raise ProtocolError(f"survivors must be {n} bits. Got {len(data)} bytes")
    return {i for i in range(n) if bits >> i & 1}


def check_keys(terms: Terms, site: int, reply: bytes) -> None:
    """Check a site's answer to stage ``keys`` against the roster.

    Raises:
        ProtocolError: wrong length or signature.
    """
    if len(reply) != KEYS:
        raise ProtocolError(f"keys of site {site} must have {KEYS} bytes. Got {len(reply)}")
    body, signature = reply[:BODY], reply[BODY:]
    _verify(terms, site, signature, keys_text(terms, site, body), "keys")


def check_vote(terms: Terms, site: int, body: bytes, survivors: bytes, signature: bytes) -> None:
    """Check a site's answer to stage ``confirm``.

    Raises:
        ProtocolError: the signature is wrong, or over other survivors or other keys of the site.
    """
    _verify(terms, site, signature, vote_text(terms, site, body, survivors), "survivors")


def keys_text(terms: Terms, site: int, body: bytes) -> bytes:
    """Return what a site signs at stage ``keys``."""
    return LABEL + b"signs " + terms.hash(b"keys", site, body)


def vote_text(terms: Terms, site: int, body: bytes, survivors: bytes) -> bytes:
    """Return what a site signs at stage ``confirm``."""
    # The site's own keys are in it, so that a vote of an earlier attempt does not count again.
    return LABEL + b"signs " + terms.hash(b"confirm", site, body, survivors)


def _verify(terms: Terms, site: int, signature: bytes, text: bytes, what: str) -> None:
    try:
        Ed25519PublicKey.from_public_bytes(terms.roster[site]).verify(signature, text)
    except (InvalidSignature, ValueError):
        raise ProtocolError(
            f"{what} of site {site} must be signed by its rostered key. Got another signature"
        ) from None
