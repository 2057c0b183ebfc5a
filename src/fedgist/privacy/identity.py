"""Who is who: a site's private keys, and the public ones that a task's roster pins.

A party has an Ed25519 key that signs (RFC 8032) and an X25519 key that seals (RFC 7748). The
private half is one file that only its owner may read. The public half is one line that can be
pasted into a mail or a task file; its fingerprint is short enough to be read out over the
telephone, which is how two people find out whether the line was exchanged on its way.

Every signature is bound to a purpose, so that one made for a letter is never one for a mask key.
"""

from __future__ import annotations

import base64
import errno
import hashlib
import json
import os
import re
import secrets
import stat
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import final

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedgist.errors import ConfigError, PrivacyError

__all__ = ["Identity", "Public", "keys_new", "write_new"]

FORMAT = "fedgist1"
DOMAIN = b"fedgist signature 1\x00"
NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")  # it becomes a folder's name in a mailbox
MOST = 4096  # bytes of a key file
KEY = 32  # bytes of each key
NO_LINKS = (errno.EPERM, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOTSUP)


@final
@dataclass(frozen=True)
class Public:
    """The public half of an identity.

    Attributes:
        name: 1 to 64 of ``A-Z a-z 0-9 . _ -``, not starting with a dot or a dash.
        sign: Ed25519 public key, 32 bytes.
        seal: X25519 public key, 32 bytes.
    """

    name: str
    sign: bytes
    seal: bytes

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                "a name must be 1 to 64 letters, digits, '.', '_' or '-', and not start with '.' "
                f"or '-'. Got {_short(self.name)}"
            )
        if len(self.sign) != KEY or len(self.seal) != KEY:
            raise ConfigError(
                f"{self.name}: public keys must have {KEY} bytes. "
                f"Got {len(self.sign)} and {len(self.seal)}"
            )
        try:  # a point of small order would make every shared secret a known one
            X25519PrivateKey.from_private_bytes(bytes(KEY)).exchange(
                X25519PublicKey.from_public_bytes(self.seal)
            )
        except ValueError as e:
            raise ConfigError(
                f"{self.name}: the X25519 key must be a proper one. Got one that gives no secret"
            ) from e

    def text(self) -> str:
        """Return one line of ASCII: format, name, both keys and a checksum over all of them."""
        return ":".join((FORMAT, self.name, _base32(self.sign + self.seal), self._digest(5)))

    @classmethod
    def of(cls, text: str) -> Public:
        """Read `text` back; white space, such as a mail's line breaks, does not matter.

        Raises:
            ConfigError: it is not such a line, or its checksum says that something was mistyped.
        """
        parts = "".join(text.split()).split(":")
        if len(parts) != 4 or parts[0] != FORMAT:
            raise ConfigError(
                f"a public key must read '{FORMAT}:NAME:KEYS:CHECKSUM'. Got {_short(text)}"
            )
        _, name, keys, digest = parts
        data = _unbase32(keys)
        if len(data) == 2 * KEY:
            public = cls(name, data[:KEY], data[KEY:])
            if public.text().split(":")[2:] == [keys.upper(), digest.upper()]:
                return public
        raise ConfigError(
            f"the public key of {_short(name)} must match its checksum. Got a line with a typing "
            "error: copy it again, whole"
        )

    @property
    def fingerprint(self) -> str:
        """80 bits of a hash over name and keys, as four groups of four to read out."""
        digest = self._digest(10)
        return "-".join(digest[i : i + 4] for i in range(0, 16, 4))

    def verify(self, signature: bytes, message: bytes, purpose: bytes) -> bool:
        """Say whether this party signed ``message`` for ``purpose``. Never raises on bad bytes."""
        try:
            key = Ed25519PublicKey.from_public_bytes(self.sign)
            key.verify(signature, _bound(message, purpose))
        except (InvalidSignature, ValueError):
            return False
        return True

    def _digest(self, size: int) -> str:
        content = b"fedgist public key\n" + self.sign + self.seal + self.name.encode()
        return _base32(hashlib.sha256(content).digest()[:size])


@final
@dataclass(frozen=True)
class Identity:
    """A party's private keys. They are not shown by ``repr`` and cannot be pickled.

    Attributes:
        name: see `Public`.
        sign_key: signs.
        seal_key: agrees on secrets.
        public: what others may know.
    """

    name: str
    sign_key: Ed25519PrivateKey = field(repr=False)
    seal_key: X25519PrivateKey = field(repr=False)
    public: Public = field(init=False)

    def __post_init__(self) -> None:
        public = Public(
            self.name,
            self.sign_key.public_key().public_bytes_raw(),
            self.seal_key.public_key().public_bytes_raw(),
        )
        object.__setattr__(self, "public", public)

    @classmethod
    def new(cls, name: str) -> Identity:
        """Draw new keys from the system's entropy."""
        return cls(name, Ed25519PrivateKey.generate(), X25519PrivateKey.generate())

    def sign(self, message: bytes, purpose: bytes) -> bytes:
        """Return a signature, 64 bytes, that is valid for this purpose (1 to 255 bytes) only."""
        return self.sign_key.sign(_bound(message, purpose))

    def save(self, path: Path) -> None:
        """Write the private key file, mode 600; a file that is there already is kept.

        Raises:
            ConfigError: the file exists or cannot be written.
        """
        content = {
            "format": FORMAT,
            "public": self.public.text(),
            "sign": self.sign_key.private_bytes_raw().hex(),
            "seal": self.seal_key.private_bytes_raw().hex(),
        }
        _write_key(path, json.dumps(content, indent=1).encode() + b"\n", 0o600)

    @classmethod
    def load(cls, path: Path) -> Identity:
        """Read a private key file.

        Raises:
            ConfigError: it cannot be read, or is no key file.
            PrivacyError: others than its owner may read or change it.
        """
        try:
            with path.open("rb") as f:
                mode = stat.S_IMODE(os.fstat(f.fileno()).st_mode)  # of what is read, not of a name
                data = f.read(MOST + 1)
        except OSError as e:
            raise ConfigError(
                f"the private key must be a file that can be read. Got '{path}': {e.strerror or e}"
            ) from e
        if mode & 0o077 and os.name == "posix":
            raise PrivacyError(
                f"a private key must be for its owner's eyes only, mode 600. Got '{path}' with "
                f"mode {mode:o}: run chmod 600 '{path}', and make new keys if others had access"
            )
        try:
            return cls._parse(data)
        except (ConfigError, ValueError, KeyError, TypeError, RecursionError):
            raise ConfigError(
                f"the private key must be a file that `fedgist keys new` wrote. Got '{path}', "
                "which is cut short, altered or something else"
            ) from None  # the cause may quote the key

    @classmethod
    def _parse(cls, data: bytes) -> Identity:
        content = json.loads(data) if len(data) <= MOST else {}
        public = Public.of(str(content["public"]))
        found = cls(
            public.name,
            Ed25519PrivateKey.from_private_bytes(bytes.fromhex(content["sign"])),
            X25519PrivateKey.from_private_bytes(bytes.fromhex(content["seal"])),
        )
        if content["format"] != FORMAT or found.public != public:
            raise ValueError("the private keys are not those of the public line")
        return found


def keys_new(folder: Path, name: str) -> tuple[Path, Path]:
    """Make new keys in ``folder``: ``NAME.key`` (private, mode 600) and ``NAME.pub`` (one line).

    Returns:
        The private and the public file.

    Raises:
        ConfigError: the name is not allowed, one of the files exists, or they cannot be written.
    """
    identity = Identity.new(name)
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
    except OSError as e:
        raise ConfigError(
            f"the folder for keys must be one. Got '{folder}': {e.strerror or e}"
        ) from e
    # The public file first: a kill between the two leaves no key that nobody can be told of.
    _write_key(public, identity.public.text().encode() + b"\n", 0o644)
    try:
        identity.save(private)
    except ConfigError:
        with suppress(OSError):
            public.unlink()
        raise
    return private, public


def write_new(path: Path, data: bytes, mode: int) -> None:
    """Write a file aside, sync it and put it in place, unless one is there already.

    Raises:
        FileExistsError: one is there; it is untouched.
        OSError: it cannot be written; nothing is left.
    """
    aside = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    try:
        with open(os.open(aside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as f:
            f.write(data)
            f.flush()
            os.fsync(f.fileno())
        _put(aside, path)
    finally:
        with suppress(OSError):
            aside.unlink()


def _write_key(path: Path, data: bytes, mode: int) -> None:
    try:
        write_new(path, data, mode)
    except FileExistsError as e:
        raise ConfigError(
            f"a key file must be new. Got '{path}', which exists: choose another name or folder"
        ) from e
    except OSError as e:
        raise ConfigError(f"the key file must be writable. Got '{path}': {e.strerror or e}") from e


def _put(aside: Path, path: Path) -> None:
    """Give a file its name; `FileExistsError` if that is taken."""
    try:
        os.link(aside, path)  # the one call that never replaces
    except OSError as e:
        if e.errno not in NO_LINKS:
            raise
        if path.exists():
            raise FileExistsError(path) from e
        os.rename(aside, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)  # the name, too, is on the disk
    finally:
        os.close(folder)


def _bound(message: bytes, purpose: bytes) -> bytes:
    if not 1 <= len(purpose) <= 255:
        raise ValueError(f"a purpose must have 1 to 255 bytes. Got {len(purpose)}")
    return DOMAIN + bytes([len(purpose)]) + purpose + message


def _base32(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=")


def _unbase32(text: str) -> bytes:
    """Return the bytes, or none at all where the text is not base 32."""
    try:
        return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except ValueError:
        return b""


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else text[:40] + "…")
