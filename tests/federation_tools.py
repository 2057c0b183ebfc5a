"""A federation in one process: real sites and letters, a transport that loses or alters them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from fedgist.agreement import agree
from fedgist.config import load
from fedgist.errors import FedGistError
from fedgist.exchange.local import LocalExchange
from fedgist.exchange.remote import RemoteExchange
from fedgist.exchange.site import Site
from fedgist.exchange.transport import Failure
from fedgist.policy import Policy
from fedgist.privacy.identity import Identity
from fedgist.privacy.ledger import Ledger
from fedgist.run import drive, plan_of

QUICK = ["method.features=scattering:32", "method.heads=['lda']", "privacy.noise=seeded"]
OPEN = Policy(
    max_epsilon=float("inf"),
    trust=("local", "central", "distributed"),
    raw=True,
    seeded=True,
    plain_sums=True,
)


def run_locally(method, task, parts, privacy, seed=0, **options):
    """Return (outcome, exchange) of a run in one process, one client for each part."""
    plan = plan_of(method, task, privacy)
    loaders = [lambda p=p: p for p in parts]
    names = [f"client {i}" for i in range(len(parts))]
    exchange = LocalExchange(
        method, task, privacy, plan.sigma, loaders, names, seed=seed, **options
    )
    return drive(method, task, exchange, plan.rounds, seed), exchange


@dataclass
class Direct:
    """Calls sites as functions.

    lost: {(step, site)} that never answer; alter: {(step, site): bytes -> bytes}.
    """

    sites: dict[str, Site]
    lost: set[tuple[str, str]] = field(default_factory=set)
    alter: dict[tuple[str, str], object] = field(default_factory=dict)
    log: list[str] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)

    def ask(self, step, requests, take):
        self.log.append(step)
        failures = {}
        for name, request in requests.items():
            if (step, name) in self.lost or ("*", name) in self.lost:
                failures[name] = Failure("lost")
                continue
            try:
                reply = self.sites[name].answer(request)
            except FedGistError as e:
                self.said[name] = str(e)
                reply = self.sites[name].fault(request, e)
            change = self.alter.get((step, name), lambda b: b)
            if not take(name, change(reply)):
                failures[name] = Failure("refused")
        return failures

    def end(self, letters):
        for name, letter in letters.items():
            self.said[name] = self.sites[name].ended(letter)


@dataclass
class Federation:
    """Keys, task, sites and transport of one run."""

    leader: Identity
    members: list[Identity]
    agreement: object
    sites: dict[str, Site]
    transport: Direct
    folder: Path

    def run(self, transport=None):
        """Return (outcome, exchange) of the run over letters, to its end."""
        a, carrier = self.agreement, transport or self.transport
        exchange = RemoteExchange(a, self.leader, carrier, self.folder / "leader")
        try:
            outcome = drive(a.built, a.task, exchange, a.plan.rounds, a.seed)
            exchange.end("finished")
        finally:
            exchange.close()
        return outcome, exchange

    def local(self, parts, lost=()):
        """Return the outcome of the same run in one process."""
        a = self.agreement
        names = [m.name for m in self.members]
        loaders = [lambda p=p: p for p in parts]
        exchange = LocalExchange(
            a.built, a.task, a.privacy, a.plan.sigma, loaders, names, seed=a.seed, lost=lost
        )
        return drive(a.built, a.task, exchange, a.plan.rounds, a.seed)


def federation(folder, task, parts, sets=(), terms=None, policy=OPEN, identities=None, base=QUICK):
    """Build a federation with one site for each part."""
    folder.mkdir(parents=True, exist_ok=True)
    run = load(None, [*base, *sets])
    leader = Identity.new("leader")
    members = identities or [Identity.new(f"site-{i}") for i in range(len(parts))]
    agreement = agree(run, task, leader.public, [m.public for m in members], terms or {})
    sites = {
        m.name: Site(
            agreement,
            m,
            lambda p=p: p,
            folder / m.name,
            Ledger(folder / f"{m.name}.sqlite"),
            policy,
        )
        for m, p in zip(members, parts, strict=True)
    }
    return Federation(leader, members, agreement, sites, Direct(sites), folder)


def outcome_bytes(outcome):
    """Return everything in an outcome that two equal runs must agree on."""
    out = []
    if outcome.synthetic is not None:
        out.append(outcome.synthetic.pixels.numpy().tobytes())
    for name in sorted(outcome.classifiers):
        tensors = outcome.classifiers[name].tensors()
        out += [tensors[k].detach().numpy().tobytes() for k in sorted(tensors)]
    return out
