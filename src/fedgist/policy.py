"""What a site allows, whatever a task asks for: a TOML file of the site's own."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from fedgist.agreement import Agreement
from fedgist.config import Strict, read_strict
from fedgist.errors import DataError, PrivacyError
from fedgist.method import method_names
from fedgist.privacy.accounting import is_sampled
from fedgist.queries import MomentsQuery
from fedgist.types import Images, Trust

__all__ = ["Policy", "Rule"]

PUBLIC = ("no public data", "public images", "public ImageNet")


@dataclass(frozen=True)
class Rule:
    """One rule and what a task asks for.

    Attributes:
        name: the policy's key, or a name of a rule that no policy switches off.
        limit: what is allowed.
        got: what the task has.
        kept: whether it keeps to it.
    """

    name: str
    limit: Any
    got: Any
    kept: bool

    def record(self) -> dict[str, Any]:
        """Return plain values, for reading and for JSON."""
        return {
            "rule": self.name,
            "limit": _told(self.limit),
            "got": _told(self.got),
            "kept": self.kept,
        }


class Policy(Strict):
    """What a site allows, whatever a task asks for. The defaults are careful.

    Attributes:
        max_epsilon, max_delta: of one task.
        methods: names of methods that may run; empty for all that ship with FedGist.
        trust: who may be asked to add noise.
        raw: whether a method may read images without noise (its ε is infinite).
        seeded: whether noise may come from a seed. Simulations only.
        min_sites: the smallest federation to take part in.
        min_class: a class must have this many images at the site, or none.
        plain_sums: whether exact sums may go to the coordinator outside a secure sum.
        encoders: which public data encoders may have been trained on; ``private images`` is not
            one of them, since no ε covers what an encoder remembers.
        review: whether a person must look at every gist before it is sent (`fedgist inspect`).
    """

    max_epsilon: float = Field(default=10.0, gt=0)
    max_delta: float = Field(default=1e-5, gt=0, lt=1)
    methods: tuple[str, ...] = ()
    trust: tuple[Trust, ...] = ("local", "distributed")
    raw: bool = False
    seeded: bool = False
    min_sites: int = Field(default=1, ge=1)
    min_class: int = Field(default=0, ge=0)
    plain_sums: bool = False
    encoders: tuple[str, ...] = PUBLIC
    review: bool = False

    @staticmethod
    def load(path: Path | None) -> Policy:
        """Read a policy file, or return the defaults."""
        return Policy() if path is None else read_strict(path, Policy, "policy file")

    def check(self, agreement: Agreement) -> None:
        """Refuse a task that asks for more than the site allows.

        Raises:
            PrivacyError: what is asked for, what is allowed, and the policy's key.
        """
        for rule in self.rules(agreement):
            if not rule.kept:
                raise PrivacyError(
                    f"task '{agreement.task.name}' must keep to this site's policy, {rule.name} = "
                    f"{rule.limit}. Got {rule.got}: refuse the task, or change the policy file"
                )

    def rules(self, agreement: Agreement) -> list[Rule]:
        """Return every rule beside what the task asks for.

        The last three do not depend on the policy: noise wherever an ε is claimed, no exact counts
        where the presence of a record is hidden, and an accountant that knows of the sampling.
        """
        claim, privacy = agreement.plan.claim, agreement.privacy
        allowed = self.methods or tuple(method_names())
        raw = any(r.raw for r in agreement.plan.rounds)
        plain = privacy.trust == "central" and not agreement.secure
        n, name = len(agreement.sites), str(agreement.method["name"])
        seeded, track = privacy.noise, claim.track
        return [
            Rule("max_epsilon", self.max_epsilon, claim.epsilon, claim.epsilon <= self.max_epsilon),
            Rule("max_delta", self.max_delta, claim.delta, claim.delta <= self.max_delta),
            Rule("methods", allowed, name, name in allowed),
            Rule("trust", self.trust, privacy.trust, privacy.trust in self.trust),
            Rule("raw", self.raw, raw, self.raw or not raw),
            Rule("seeded", self.seeded, seeded, self.seeded or seeded == "system"),
            Rule("min_sites", self.min_sites, n, n >= self.min_sites),
            Rule("plain_sums", self.plain_sums, plain, self.plain_sums or not plain),
            Rule("encoders", self.encoders, track, track in self.encoders),
            *_sound(agreement),
        ]

    def check_images(self, images: Images) -> None:
        """Refuse data with a class so small that its images stand out.

        Raises:
            DataError: names the class; for the site's eyes only.
        """
        for name, count in zip(images.classes, images.counts().tolist(), strict=True):
            if 0 < count < self.min_class:
                raise DataError(
                    f"class '{name}' must have at least {self.min_class} images, the policy's "
                    f"min_class, or none. Got {count}"
                )


def _sound(agreement: Agreement) -> list[Rule]:
    """Return the rules without which a finite ε means nothing."""
    claim, rounds = agreement.plan.claim, agreement.plan.rounds
    finite = math.isfinite(claim.epsilon)
    exact = claim.adjacency != "replace-same-class" and any(
        isinstance(q, MomentsQuery) and q.exact_counts for r in rounds for q in r.queries
    )
    sampled = is_sampled(rounds)
    told = "Poisson-sampled" in claim.accountant
    noise = "noise" if claim.sigma > 0 else "no noise"
    return [
        Rule("noise under an ε", "noise", noise, claim.sigma > 0 or not finite),
        Rule("counts", "noised", "exact" if exact else "noised", not (exact and finite)),
        Rule("accountant", _drawn(sampled), _drawn(told), sampled == told),
    ]


def _drawn(sampled: bool) -> str:
    return "records are sampled" if sampled else "every record takes part"


def _told(value: Any) -> Any:
    """Return a value as people read it in a TOML file."""
    if isinstance(value, tuple):
        return ", ".join(map(str, value))
    if isinstance(value, bool):
        return "yes" if value else "no"
    return "inf" if isinstance(value, float) and math.isinf(value) else value
