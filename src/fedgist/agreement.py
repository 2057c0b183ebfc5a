"""The task file: everything that sites agree on, in one TOML with one hash.

The task file is public. Whoever coordinates writes it (``fedgist task new``) and gives it to every
site by a way of their own (mail, a meeting); its hash is read out over the telephone, and from then
on is in every message. A site works from its own copy, never from what the coordinator sends later.
"""

from __future__ import annotations

import hashlib
import json
import math
import secrets
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import tomli_w
from pydantic import Field

from fedgist.config import Run, Strict, make_method, plain_toml, read_strict, validated
from fedgist.encoders import load_encoder
from fedgist.errors import ConfigError, EncoderError, PrivacyError
from fedgist.method import Method
from fedgist.privacy.claim import Privacy, claim_of
from fedgist.privacy.identity import Public
from fedgist.privacy.noise import MIN_SHARE_SCALE, noise_scales
from fedgist.privacy.secure_sum.graph import choose_graph
from fedgist.privacy.spending import Release, release_of
from fedgist.queries import MomentsQuery
from fedgist.run import Plan, plan_of
from fedgist.types import Task

__all__ = ["Agreement", "Terms", "agree"]

FORMAT: Literal[1] = 1
COMPLETE = 200  # sites up to which every two of them share a mask


class Terms(Strict):
    """How gists travel.

    Attributes:
        secure: sums go through the secure sum: the coordinator sees their total only.
        threshold: how many sites must stay until a secure sum ends; fewer, and it is given up.
        degree: with how many others a site shares masks; None for all of them.
        quorum: sites without which a round is not finished.
        patience: seconds that one step waits for sites that do not answer.
        deadline: UTC time after which nothing is sent or taken, or None.
        most_bytes: the largest gist of a method whose gist is not of a known size.
    """

    secure: bool = True
    threshold: int = Field(ge=1)
    degree: int | None = Field(default=None, ge=2)
    quorum: int = Field(ge=1)
    patience: float = Field(default=86_400.0, gt=0)
    deadline: datetime | None = None
    most_bytes: int = Field(default=1 << 30, ge=1)


class Agreement(Strict):
    """What the sites agree on.

    Attributes:
        format: version of this file.
        id: random; two tasks with the same content are two tasks.
        seed: public randomness of the method; it decides no noise in a real release.
        task: classes and image policy.
        method: name and all fields.
        encoders: name -> hash of the frozen encoders that clients use.
        privacy: ε, δ, unit, adjacency, who adds noise.
        coordinator: the coordinator's public key.
        sites: every site's public key; a site's place in it is its number.
        exchange: how gists travel.
    """

    format: Literal[1] = FORMAT
    id: str = Field(pattern="^[0-9a-f]{16}$")
    seed: int = Field(ge=0)
    task: Task
    method: dict[str, Any]
    encoders: dict[str, str]
    privacy: Privacy
    coordinator: str
    sites: tuple[str, ...]
    exchange: Terms

    @cached_property
    def digest(self) -> str:
        """SHA-256 of the content, whatever the layout of the file."""
        text = json.dumps(self.model_dump(mode="json"), sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(b"fedgist task\n" + text.encode()).hexdigest()

    @cached_property
    def leader(self) -> Public:
        """The coordinator's public key."""
        return Public.of(self.coordinator)

    @cached_property
    def roster(self) -> tuple[Public, ...]:
        """The sites' public keys, in order."""
        return tuple(Public.of(s) for s in self.sites)

    @cached_property
    def built(self) -> Method:
        """The method."""
        return make_method(Run(method=self.method, privacy=self.privacy))

    @cached_property
    def plan(self) -> Plan:
        """Rounds, noise, claim and bytes, worked out from this file alone."""
        notes, n, missing = [], len(self.sites), self.privacy.missing
        if self.privacy.trust == "distributed" and missing:
            notes.append(
                f"room for {missing} missing of {n} noise shares costs "
                f"{math.sqrt(n / (n - missing)):.2f} times the noise of trust 'central' while "
                "nobody is missing"
            )
        if self.privacy.trust == "distributed" and self.exchange.degree:
            notes.append(
                f"with {self.exchange.degree} neighbours a site, the noise shares cover a "
                "coordinator that follows the protocol, not one that breaks it"
            )
        group = n if self.exchange.degree is None else self.exchange.degree + 1
        if (
            self.privacy.trust == "distributed"
            and 2 * self.exchange.threshold - group - 1 < missing
        ):
            notes.append(
                f"the bound with {missing} of {n} sites on the coordinator's side is that of a "
                "coordinator that follows the protocol; one that breaks it could single out a "
                f"site, whose own share is less noise: covered from {3 * missing + 1} sites on"
            )
        plan = plan_of(self.built, self.task, self.privacy, secure=self.secure, notes=notes)
        if self.privacy.trust != "distributed" or missing or n < 2 or plan.sigma <= 0:
            return plan
        known = plan.sigma * math.sqrt((n - 1) / n)
        seen = claim_of(plan.rounds, self.privacy, known, track="", secure=True).epsilon
        note = (
            f"a site that takes its own noise share off the total faces ε = {seen:.4g}; with "
            "privacy.missing = 1 it would face no more than is stated"
        )
        return replace(plan, claim=replace(plan.claim, notes=(*plan.claim.notes, note)))

    def release(self, r: int) -> Release:
        """Return how a ledger names round ``r``."""
        plan = self.plan
        method = str(self.method["name"])
        return release_of(self.digest, self.task, method, plan.claim, plan.rounds, r)

    @property
    def secure(self) -> bool:
        """Whether sums go through the secure sum; where each site adds all noise none is needed."""
        return self.exchange.secure and self.privacy.trust != "local"

    @property
    def overdue(self) -> bool:
        """Whether the deadline has passed."""
        deadline = self.exchange.deadline
        if deadline is None:
            return False
        return datetime.now(UTC) > (deadline if deadline.tzinfo else deadline.replace(tzinfo=UTC))

    def place(self, who: Public) -> int:
        """Return a site's number.

        Raises:
            ConfigError: it is not in the roster.
        """
        if who not in self.roster:
            raise ConfigError(
                f"a site must be in the task's roster {[s.name for s in self.roster]}. "
                f"Got {who.name} ({who.fingerprint})"
            )
        return self.roster.index(who)

    def check(self) -> Agreement:
        """Return self, if it hangs together.

        Raises:
            ConfigError: a key is wrong or names or numbers do not fit together.
            PrivacyError: the noise shares do not cover what the terms allow to go missing.
        """
        n, terms = len(self.sites), self.exchange
        names = [self.leader.name, *(s.name for s in self.roster)]
        if len(set(names)) <= n or len({s.sign for s in self.roster}) < n or n < 1:
            raise ConfigError(f"coordinator and sites must have names of their own. Got {names}")
        if not terms.quorum <= n or not terms.threshold <= n:
            raise ConfigError(
                f"quorum and threshold must be at most the {n} sites. "
                f"Got {terms.quorum} and {terms.threshold}"
            )
        if self.secure and n < 2:
            raise ConfigError("a secure sum must have at least two sites. Got one: trust 'local'")
        if self.privacy.trust == "distributed":
            if not self.secure:
                raise PrivacyError(
                    "noise shares must travel in a secure sum. Got exchange.secure = false with "
                    "trust 'distributed'"
                )
            if terms.quorum < n - self.privacy.missing:
                raise PrivacyError(
                    f"the quorum must be at least {n - self.privacy.missing}, the noise shares "
                    f"that the claim needs. Got {terms.quorum}: raise it, or privacy.missing"
                )
        return self

    def check_encoders(self) -> None:
        """Load every encoder that clients use and compare its hash.

        Raises:
            EncoderError: one is missing or is not the one agreed on.
        """
        if set(self.encoders) != set(self.built.encoders()):
            raise EncoderError(
                f"the task must pin the encoders {sorted(self.built.encoders())}. "
                f"Got {sorted(self.encoders)}"
            )
        for name, digest in self.encoders.items():
            load_encoder(name, digest)

    def dumps(self) -> str:
        """Return the task file; `loads` reads it back to an equal task."""
        head = f"# FedGist task '{self.task.name}'. Hash: {self.digest}\n"
        return head + tomli_w.dumps(plain_toml(self.model_dump(mode="python")))

    @staticmethod
    def load(path: Path) -> Agreement:
        """Read a task file.

        Raises:
            ConfigError: it cannot be read, or a value is wrong; the message names it.
        """
        return read_strict(path, Agreement, "task file").check()


def agree(
    run: Run, task: Task, coordinator: Public, sites: Sequence[Public], terms: dict[str, Any]
) -> Agreement:
    """Make a task file's content out of a run's configuration.

    Args:
        run: method, privacy and seed. Where it says ``noise = "seeded"`` the task is a rehearsal.
        task: classes and image policy.
        coordinator: its public key.
        sites: the roster.
        terms: fields of `Terms`; what is missing gets a default that depends on the number of
            sites and on ``privacy.missing``.

    Raises:
        ConfigError, PrivacyError: something does not fit together.
    """
    n, privacy = len(sites), run.privacy
    lost = privacy.missing if privacy.trust == "distributed" else n - 1
    degree, threshold = _graph(n, privacy.missing)
    default = {"threshold": threshold, "degree": degree, "quorum": max(1, n - lost)}
    method = make_method(run)
    if privacy.trust == "distributed" and (weight := _count_weight(method, task, privacy, n)) > 1:
        run = run.model_copy(update={"method": run.method | {"count_weight": weight}})
        method = make_method(run)
    return Agreement(
        id=secrets.token_hex(8),
        seed=run.seed,
        task=task,
        method=plain_toml(run.method),
        encoders={name: load_encoder(name).digest for name in method.encoders()},
        privacy=run.privacy,
        coordinator=coordinator.text(),
        sites=tuple(s.text() for s in sites),
        exchange=validated(Terms, default | terms, "exchange"),
    ).check()


def _graph(n: int, missing: int) -> tuple[int | None, int]:
    """Return with how many others a site shares masks, and how many of them must stay.

    More than half must, so that no coordinator can tell one half that a site is alive and the other
    half that it is gone.
    """
    if n > COMPLETE:
        return choose_graph(n, max(missing, n // 10), missing)
    return None, max(n // 2 + 1, n - max(missing, n // 3))


def _count_weight(method: Method, task: Task, privacy: Privacy, n: int) -> int:
    """Return what a record must add to its class's count for noise shares to be fine enough."""
    plan = plan_of(method, task, privacy)
    weight = int(getattr(method, "count_weight", 1))
    for query in (q for rnd in plan.rounds for q in rnd.queries):
        if isinstance(query, MomentsQuery) and plan.sigma > 0 and not query.exact_counts:
            per_unit = noise_scales(query, plan.sigma)["count"][0] / query.count_weight
            share = MIN_SHARE_SCALE * math.sqrt(max(1, n - privacy.missing))
            weight = max(weight, math.ceil(share / per_unit))
    return weight if hasattr(method, "count_weight") else 1
