"""A real run between sites: agree, open a site, coordinate, combine. Any exchange will do."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from hashlib import sha256
from pathlib import Path
from typing import Any

import fedgist
from fedgist.agreement import Agreement, agree
from fedgist.config import load, settings
from fedgist.data import open_source
from fedgist.errors import ConfigError
from fedgist.exchange.files import FileTransport
from fedgist.exchange.mailbox import MailboxTransport, mailbox_status
from fedgist.exchange.remote import RemoteExchange
from fedgist.exchange.site import Site
from fedgist.exchange.transport import Transport
from fedgist.inspection import look
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity, Public
from fedgist.privacy.ledger import Ledger
from fedgist.progress import Progress, by_client
from fedgist.report.folder import Clock, claim_folder, write_outcome, write_report
from fedgist.report.record import versions
from fedgist.run import drive
from fedgist.setup import blocks
from fedgist.train import evaluate
from fedgist.types import Images, Outcome, Task
from fedgist.whole import write_whole

__all__ = [
    "combine",
    "coordinate",
    "home",
    "mailbox_state",
    "new_task",
    "open_ledger",
    "open_site",
    "read_public",
    "serve_mailbox",
    "task_record",
]

Open = Callable[[Agreement, Path], Transport]


def home() -> Path:
    """Return the folder where a party keeps keys, ledger and memory unless told otherwise."""
    return Path.home() / ".fedgist"


def new_task(
    config: Path | None,
    coordinator: Path,
    sites: Sequence[Path],
    like: str | None,
    sets: Sequence[str],
    out: Path,
) -> dict[str, Any]:
    """Write a task file; return what it says (see `task_record`).

    Args:
        config: TOML with ``method``, ``privacy``, ``task``; None for the defaults.
        coordinator: its public key file.
        sites: the public key files of the sites, in order.
        like: images to take classes, channels and size from; None when ``task`` gives them.
        sets: ``key=value``, over the file. ``exchange.*`` sets the terms of the exchange.
        out: the file to write.

    Raises:
        ConfigError, DataError, PrivacyError: something is wrong or does not fit together.
    """
    ours = [s for s in sets if s.startswith("exchange.")]
    real = ["privacy.noise=system", "privacy.trust=distributed"]
    run = load(
        config, [*(real if config is None else real[:1]), *(s for s in sets if s not in ours)]
    )
    options = {k: v for k, v in run.task.model_dump().items() if v is not None}
    if like is not None:
        task = open_source(like).task(**options)
    elif "classes" in options:
        task = Task(**({"name": "task"} | options))
    else:
        raise ConfigError(
            "a task must have classes. Got neither --like IMAGES nor --set task.classes=[...]"
        )
    terms = settings(ours).get("exchange", {})
    agreement = agree(run, task, read_public(coordinator), [read_public(p) for p in sites], terms)
    write_whole(out, agreement.dumps().encode())
    return task_record(Agreement.load(out))


def task_record(agreement: Agreement) -> dict[str, Any]:
    """Return what a task asks of a site, as plain data."""
    plan = agreement.plan
    return {
        "title": agreement.task.name,
        "hash": agreement.digest,
        "task": asdict(agreement.task),
        "method": agreement.method["name"],
        "encoders": dict(agreement.encoders),
        "rounds": len(plan.rounds),
        "left": blocks(plan, agreement.task, agreement.privacy),
        "bytes_up": plan.bytes_up,
        "claim": plan.claim.record(),
        "secure_sum": agreement.secure,
        "exchange": agreement.exchange.model_dump(mode="json"),
        "missing": agreement.privacy.missing,
        "coordinator": {"name": agreement.leader.name, "fingerprint": agreement.leader.fingerprint},
        "sites": [{"name": s.name, "fingerprint": s.fingerprint} for s in agreement.roster],
    }


def read_public(path: Path) -> Public:
    """Return the public key in a ``.pub`` file, or the public half of a ``.key`` file.

    Raises:
        ConfigError: it cannot be read or holds no key; the message names the file.
    """
    if path.suffix == ".key":
        return Identity.load(path).public
    try:
        return Public.of(path.read_text(encoding="ascii"))
    except (OSError, UnicodeDecodeError, ConfigError) as e:
        raise ConfigError(f"a public key must be a readable .pub file. Got '{path}': {e}") from e


def open_ledger(path: Path | None = None) -> Ledger:
    """Open a ledger, by default the holder's own."""
    return Ledger(path or home() / "ledger.sqlite")


def open_site(
    task: Path,
    key: Path,
    data: str,
    state: Path | None = None,
    policy: Path | None = None,
    ledger: Path | None = None,
    *,
    review: bool = False,
) -> Site:
    """Open one site of a task.

    Args:
        task: the site's own copy of the task file.
        key: its private key file.
        data: a file, folder or named set with its images.
        state: folder where it remembers what it has answered.
        policy: its policy file; None for the careful defaults.
        ledger: what its data have spent.
        review: whether nothing may be sent before a person has looked at it (see
            `fedgist.inspection`); the policy may say so, too.

    Raises:
        ConfigError, PrivacyError, EncoderError, DataError: the task, key, policy or data cannot be
            used; one line says which.
    """
    agreement = Agreement.load(task)
    source = open_source(data)

    def images() -> Images:
        return source.prefer("train", agreement.task)

    return Site(
        agreement,
        Identity.load(key),
        images,
        state or home() / "site",
        open_ledger(ledger),
        Policy.load(policy),
        review,
        look(task, key, data, state),
    )


def coordinate(
    task: Path,
    key: Path,
    state: Path | None,
    transport: Open,
    out: Path,
    *,
    test: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run a task with its sites, from the first letter to the report.

    Args:
        task: the task file.
        key: the coordinator's private key file.
        state: folder where it remembers, so that it may be stopped and started again.
        transport: makes the transport from the task and that folder.
        out: folder for classifiers, synthetic images and report.
        test: real images of the coordinator's own to measure the classifiers on, if there are any.
        progress: told what happens.

    Returns:
        The report as plain data.

    Raises:
        ProtocolError: too few sites answered. Nothing is lost: run it again.
        FedGistError: what else is wrong, in one line.
    """
    tell, clock = progress or Progress(), Clock()
    agreement = Agreement.load(task)
    claim_folder(out)
    folder = state or home() / "coordinator"
    exchange = RemoteExchange(
        agreement,
        Identity.load(key),
        transport(agreement, folder / agreement.digest[:16]),
        folder,
        tell,
    )
    try:
        return _lead(exchange, out, test, clock)
    finally:
        exchange.close()


def _lead(exchange: RemoteExchange, out: Path, test: str | None, clock: Clock) -> dict[str, Any]:
    """Drive the protocol and write what comes of it."""
    agreement, tell = exchange.agreement, exchange.progress
    write_whole(out / "task.toml", agreement.dumps().encode())
    rounds = agreement.plan.rounds
    outcome = drive(agreement.built, agreement.task, exchange, rounds, agreement.seed, tell)
    clock.lap("protocol")
    title = f"{agreement.method['name']} on {agreement.task.name}".replace("_", "-")
    files = write_outcome(outcome, out, agreement.task, agreement.plan.claim, title)
    clock.lap("write")
    report = _report(agreement, outcome, exchange, title)
    report["heads"] = _scores(outcome, agreement, test)
    clock.lap("evaluate")
    report |= {"files": files, "timings": clock.laps}
    write_report(report, outcome, out, "task.toml")
    digest = sha256((out / "report.json").read_bytes()).hexdigest()
    sites = len(report["clients"])
    exchange.end(f"finished with {sites} of {len(exchange.names)} sites; report.json {digest}")
    return report


def serve_mailbox(
    task: Path,
    key: Path,
    mailbox: Path,
    out: Path,
    *,
    state: Path | None = None,
    test: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Coordinate a task through a shared folder. See `coordinate`."""

    def transport(agreement: Agreement, memory: Path) -> MailboxTransport:
        return MailboxTransport(mailbox, agreement, memory)

    return coordinate(task, key, state, transport, out, test=test, progress=progress)


def mailbox_state(task: Path, mailbox: Path) -> dict[str, Any]:
    """Return which step a run through a shared folder is in."""
    return mailbox_status(mailbox, Agreement.load(task))


def combine(
    task: Path,
    key: Path,
    gists: Sequence[Path],
    out: Path,
    *,
    state: Path | None = None,
    test: str | None = None,
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Run a task of one round from files that sites have contributed. See `coordinate`."""

    def files(agreement: Agreement, _: Path) -> FileTransport:
        return FileTransport(tuple(gists), {s.sign: s.name for s in agreement.roster})

    return coordinate(task, key, state, files, out, test=test, progress=progress)


def _report(
    agreement: Agreement, outcome: Outcome, exchange: RemoteExchange, title: str
) -> dict[str, Any]:
    visits = by_client(exchange.visits)
    claim = agreement.plan.claim.record()
    notes = [f"{site}, step {step}: {why}" for (step, site), why in exchange.faults.items()]
    notes += getattr(exchange.transport, "refused", [])  # letters of nobody that was asked
    return {
        "fedgist": fedgist.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "title": title,
        "simulation": False,
        "seed": agreement.seed,
        "config": agreement.model_dump(mode="json"),
        "task": asdict(agreement.task),
        "claim": claim | {"notes": [*claim["notes"], *notes]},
        "left": blocks(agreement.plan, agreement.task, agreement.privacy),
        "bytes_up": max((v.bytes_up for v in visits), default=0),
        "bytes_down": max((v.bytes_down for v in visits), default=0),
        "clients": [asdict(v) for v in visits],
        "chosen": next(iter(outcome.classifiers), None),
        "details": dict(outcome.details),
        "versions": versions(),
        "device": "cpu",
    }


def _scores(outcome: Outcome, agreement: Agreement, test: str | None) -> dict[str, dict[str, Any]]:
    """Measure every classifier on real images that the coordinator may use, if there are any."""
    if test is None:
        return {name: {} for name in outcome.classifiers}
    images = open_source(test).prefer("test", agreement.task)
    scores = {n: evaluate(c, images) for n, c in outcome.classifiers.items()}
    return {n: {"accuracy": s.accuracy, "per_class": s.per_class} for n, s in scores.items()}
