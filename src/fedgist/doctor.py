"""`fedgist doctor`: is everything there that this party needs, and if not, what to do."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import socket
import ssl
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Literal, TypedDict

from fedgist.agreement import Agreement
from fedgist.data import open_source
from fedgist.errors import FedGistError
from fedgist.federation import open_ledger
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity
from fedgist.report.record import versions

__all__ = ["Check", "examine"]

State = Literal["good", "warning", "bad"]
ROOM = 1 << 30  # free bytes below which a warning is given
SKEW = 120.0  # seconds that a clock may be wrong


class Check(TypedDict):
    """One thing that was looked at."""

    what: str
    state: State
    found: str
    remedy: str


def examine(
    *,
    task: Path | None = None,
    key: Path | None = None,
    mailbox: Path | None = None,
    data: str | None = None,
    policy: Path | None = None,
    ledger: Path | None = None,
    server: str | None = None,
    certificate: Path | None = None,
) -> list[Check]:
    """Look at whatever is given; nothing is changed and nothing leaves.

    Args:
        task: the task file.
        key: a private key file.
        mailbox: the shared folder.
        data: images.
        policy: the site's policy file.
        ledger: the ledger; None for the holder's own.
        server: HOST:PORT of a SuperLink.
        certificate: the certificate of the authority that signed the server's.

    Returns:
        One check after the other, the most basic first.
    """
    checks = [_versions()]
    agreement: Agreement | None = None
    identity: Identity | None = None
    if task is not None:
        agreement, check = _task(task)
        checks.append(check)
    if key is not None:
        identity, check = _key(key)
        checks.append(check)
    if agreement is not None:
        if identity is not None:
            checks.append(_roster(agreement, identity))
        checks.append(_try("encoders", lambda: _encoders(agreement)))
        site = identity is None or identity.public != agreement.leader
        if site:
            checks.append(_try("policy", lambda: _policy(agreement, policy)))
    if data is not None:
        checks.append(_try("data", lambda: _data(data, agreement)))
    checks.append(_try("ledger", lambda: _ledger(ledger)))
    if mailbox is not None:
        checks += _mailbox(mailbox)
    checks.append(_disk(mailbox or Path.home()))
    if server is not None:
        checks += _server(server, certificate)
    return checks


def _try(what: str, look: Callable[[], str]) -> Check:
    """Turn one of our own errors into a finding: it says what to do itself."""
    try:
        return _check(what, "good", look())
    except FedGistError as e:
        return _check(what, "bad", str(e))


def _check(what: str, state: State, found: str, remedy: str = "") -> Check:
    return {"what": what, "state": state, "found": found, "remedy": remedy}


def _versions() -> Check:
    found = versions()
    try:
        found["flwr"] = importlib.metadata.version("flwr")
    except importlib.metadata.PackageNotFoundError:
        found["flwr"] = "not installed (only `flower` exchanges need it)"
    shown = ("fedgist", "python", "torch", "opendp", "cryptography", "flwr")
    return _check("versions", "good", ", ".join(f"{k} {found.get(k, '?')}" for k in shown))


def _task(path: Path) -> tuple[Agreement | None, Check]:
    try:
        agreement = Agreement.load(path)
        line = agreement.plan.claim.line()
    except FedGistError as e:
        return None, _check("task", "bad", str(e))
    found = f"'{agreement.task.name}', hash {agreement.digest}; {line}"
    if agreement.overdue:
        late = f"its deadline was {agreement.exchange.deadline}"
        return agreement, _check("task", "bad", f"{found}; {late}", "agree on a new task")
    return agreement, _check("task", "good", found)


def _key(path: Path) -> tuple[Identity | None, Check]:
    try:
        identity = Identity.load(path)
    except FedGistError as e:
        return None, _check("key", "bad", str(e))
    return identity, _check("key", "good", f"{identity.name}, {identity.public.fingerprint}")


def _roster(agreement: Agreement, identity: Identity) -> Check:
    if identity.public == agreement.leader:
        return _check("roster", "good", f"{identity.name} coordinates the task")
    return _try("roster", lambda: f"site {agreement.place(identity.public)} of the task")


def _encoders(agreement: Agreement) -> str:
    agreement.check_encoders()
    return ", ".join(f"{k} {v[:12]}" for k, v in agreement.encoders.items()) or "none needed"


def _policy(agreement: Agreement, path: Path | None) -> str:
    Policy.load(path).check(agreement)
    return f"the task keeps to {path or 'the careful defaults'}"


def _data(where: str, agreement: Agreement | None) -> str:
    source = open_source(where)
    task = source.task() if agreement is None else agreement.task
    images = source.prefer("train", task)
    held = [f"{n} {c}" for c, n in zip(images.classes, images.counts().tolist(), strict=True) if n]
    return f"{len(images):,} images: {', '.join(held) or 'none'}"


def _ledger(path: Path | None) -> str:
    entries = open_ledger(path).show()
    return f"readable and writable; {entries['line']}"


def _mailbox(folder: Path) -> list[Check]:
    """Write, rename and read a probe; compare the share's clock with this machine's."""
    if not folder.is_dir():
        return [_check("mailbox", "bad", f"'{folder}' is not a folder", "mount or create it")]
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".doctor-", delete=False) as f:
            f.write(b"probe")
        aside = Path(f.name)
        place = aside.with_name(aside.name + ".there")
        os.replace(aside, place)
        skew = place.stat().st_mtime - time.time()
        same = place.read_bytes() == b"probe"
        place.unlink()
    except OSError as e:
        remedy = "ask for read and write access"
        return [_check("mailbox", "bad", f"'{folder}': {e.strerror or e}", remedy)]
    if not same:
        return [_check("mailbox", "bad", f"'{folder}' gave back other bytes", "do not use it")]
    out = [_check("mailbox", "good", f"'{folder}' can be written, renamed in and read")]
    if abs(skew) > SKEW:
        found = f"the share's clock is {skew:+.0f} s from this machine's"
        out.append(_check("clock", "warning", found, "set both by NTP: the deadline is in UTC"))
    else:
        out.append(
            _check("clock", "good", f"{time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime())} UTC")
        )
    return out


def _disk(folder: Path) -> Check:
    try:
        free = shutil.disk_usage(folder).free
    except OSError as e:
        return _check("disk", "bad", f"'{folder}': {e.strerror or e}")
    found = f"{free / 2**30:.1f} GiB free at '{folder}' ({platform.system()})"
    if free < ROOM:
        return _check("disk", "warning", found, "make room: gists and memory need some")
    return _check("disk", "good", found)


def _server(address: str, certificate: Path | None) -> list[Check]:
    """Open a TLS connection and say in one line what stands in its way."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal():
        return [_check("server", "bad", f"'{address}' must be HOST:PORT")]
    try:
        plain = socket.create_connection((host.strip("[]"), int(port)), timeout=5)
    except OSError as e:
        remedy = "is it started, is the port open in the firewall?"
        return [_check("port", "bad", f"{address}: {e.strerror or e}", remedy)]
    out = [_check("port", "good", f"{address} answers")]
    try:
        context = ssl.create_default_context(cafile=certificate)
        with plain, context.wrap_socket(plain, server_hostname=host.strip("[]")) as tls:
            out.append(_check("TLS", "good", f"{tls.version()}, certificate fits {host}"))
    except ssl.SSLCertVerificationError as e:
        names = e.verify_code in (62, 64)  # host name, address
        remedy = (
            "use the name that the certificate was made for"
            if names
            else "give the authority's certificate with --root-certificate"
        )
        out.append(_check("TLS", "bad", f"{address}: {e.verify_message}", remedy))
    except ssl.SSLError as e:
        found = f"{address} does not speak TLS ({e.reason or 'no reason given'})"
        out.append(_check("TLS", "bad", found, "start the SuperLink with its certificate"))
    except OSError as e:
        out.append(_check("TLS", "bad", f"{address}: {e}", "start it with TLS"))
    return out
