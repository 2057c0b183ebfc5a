"""What stands behind a gist: the rules it keeps to, what it spends, and what its images show.

Everything here is worked out anew from the task, the gist and the site's own images: nothing is
taken from what the gist says of itself, which is compared instead.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from fedgist.agreement import Agreement
from fedgist.audit.evidence import (
    clip_and_exposure,
    faint_classes,
    noise_in,
    share_of,
    without_noise,
)
from fedgist.encoders import encoder_info
from fedgist.exchange.gist import answer
from fedgist.exchange.wire import duty_of, from_wire, wire_blocks
from fedgist.method import Picturing
from fedgist.policy import Policy, Rule
from fedgist.privacy.accounting import is_sampled
from fedgist.privacy.ledger import Ledger
from fedgist.queries import MomentsQuery, Query
from fedgist.run import derive, generator
from fedgist.types import Images, Merged, Round, Tensors

__all__ = [
    "FIXED",
    "Examined",
    "asked_of",
    "evidence_of",
    "first_of",
    "ledger_of",
    "origins_of",
    "pictures_of",
    "rules_of",
]

SHOWN = 5  # decoded images of each class
FIXED = {"noise under an ε", "counts", "accountant", "statement", "noise in it", "ledger"}
SHARES = ("mean", "second", "pooled", "count")


@dataclass(frozen=True)
class Examined:
    """A gist beside what it was made of.

    Attributes:
        agreement: the task.
        r: number of the round.
        gist: as it would leave, before any mask of a secure sum.
        place: the site's number.
        name: for messages.
        images: the site's own, all of them, or None where they are not at hand.
        used: those that may be used.
    """

    agreement: Agreement
    r: int
    gist: Tensors
    place: int
    name: str
    images: Images | None
    used: Images | None

    @property
    def round(self) -> Round:
        """The round's declaration."""
        return self.agreement.plan.rounds[self.r]

    @property
    def sums(self) -> Tensors | None:
        """The gist as int64 sums; None where it holds none."""
        if not self.round.noised:
            return None
        if self.agreement.secure:
            return self.gist
        return from_wire(self.gist, wire_blocks(duty_of(self.agreement), self.round))

    @property
    def exact(self) -> Tensors | None:
        """Sum the same images anew, without noise; None where that cannot be told again."""
        a, rnd = self.agreement, self.round
        if self.used is None or not rnd.noised or is_sampled([rnd]) or self.r > 0:
            return None  # what a later round is asked about, the server alone knows
        plain = replace(a.privacy, trust="central", missing=0)
        duty = replace(duty_of(a), privacy=plain)
        shared = a.built.start(a.task, generator(a.seed, "start")).shared
        used = self.used
        return answer(duty, self.place, self.name, lambda: used, self.r, rnd, shared, {}).gist


def asked_of(rnd: Round) -> list[dict[str, Any]]:
    """Return what a round asks of each image: ``view``, ``radius``, ``grid``, ``shares``."""
    return [_asked(q) for q in rnd.queries]


def _asked(q: Query) -> dict[str, Any]:
    out: dict[str, Any] = {"view": q.name, "radius": q.clip, "grid": q.levels, "times": q.times}
    if isinstance(q, MomentsQuery):
        shares = {k: getattr(q, k) for k in SHARES if getattr(q, k)}
        return out | {"numbers": q.dim, "shares": shares, "scale": q.scale}
    return out | {"numbers": q.row, "shares": {"sum": 1.0}, "scale": q.scale}


def origins_of(agreement: Agreement) -> list[dict[str, Any]]:
    """Return where every encoder comes from: name, hash, track, licences, who vouches for it."""
    rows = []
    for name, digest in agreement.encoders.items():
        info = encoder_info(name)
        rows.append(
            {
                "name": name,
                "digest": digest,
                "track": info["track"],
                "shipped": info["shipped"],
                "fitted_on": info.get("fitted_on"),
                "sources": info.get("sources", []),
            }
        )
    return rows


def ledger_of(
    site: Examined, ledger: Ledger | None, rounds: Sequence[int]
) -> dict[str, Any] | None:
    """Return what these rounds cost the site's images (`Ledger.preview`), or None."""
    if ledger is None or site.images is None or not rounds:
        return None
    return ledger.preview([site.agreement.release(n) for n in rounds], site.images)


def evidence_of(site: Examined) -> dict[str, Any]:
    """Look for evidence in the site's own images.

    Returns:
        ``noise`` (`noise_in`; empty where it cannot be told), ``classes`` (`faint_classes`),
        ``codes`` (`clip_and_exposure`, or None for a method whose records are not known).
    """
    out: dict[str, Any] = {"noise": {}, "classes": [], "codes": None}
    if site.images is None or site.used is None:
        return out
    a, rnd = site.agreement, site.round
    duty, sums = duty_of(a), site.sums
    out["classes"] = faint_classes(rnd, a.plan.sigma, site.images, site.used)
    if sums is not None and share_of(duty) > 0 and (exact := site.exact) is not None:
        out["noise"] = noise_in(duty, rnd, sums, exact)
    records = getattr(a.built, "records", None)
    if records is not None and site.r == 0:
        seed = derive(a.seed, "inspect")
        out["codes"] = clip_and_exposure(records(a.task), a.plan.sigma, site.used, seed)
    return out


def pictures_of(site: Examined) -> Images | None:
    """Decode images from this site's own sums, as they would leave; None where there is no way."""
    a, sums = site.agreement, site.sums
    if sums is None or not isinstance(a.built, Picturing):
        return None
    duty = duty_of(a)
    sigma = share_of(duty)
    whole = sums if sigma > 0 else without_noise(duty, site.round, sums)
    merged = Merged(whole, sigma, 1)
    return a.built.pictures(a.task, merged, SHOWN, generator(a.seed, "inspect"))


def rules_of(
    site: Examined,
    policy: Policy,
    stated: Sequence[tuple[str, str, str]],
    ledger: dict[str, Any] | None,
    noise: dict[str, dict[str, Any]],
) -> list[Rule]:
    """Return every rule with what was found: the policy's, the ledger's, the gist's own.

    Args:
        site: the gist.
        policy: what the site allows.
        stated: what the gist says of itself and the task does not (`Handed.broken`).
        ledger: from `ledger_of`.
        noise: from `evidence_of`.
    """
    rules = policy.rules(site.agreement)
    rules.append(
        Rule("statement", "as the task", "as the task", True)
        if not stated
        else Rule("statement", *stated[0][1:], False)
    )
    if noise:
        small = [name for name, block in noise.items() if block["state"] == "small"]
        got = f"too little in {', '.join(small)}" if small else "not less"
        rules.append(Rule("noise in it", "not less than planned", got, not small))
    if ledger is not None:
        cap, after = ledger["cap"]["epsilon"], ledger["after"]
        fine = math.isinf(cap) or after <= cap * (1 + 1e-9)
        rules.append(Rule("ledger", cap, after, fine))
    if site.images is not None and policy.min_class:
        counts = [n for n in (site.used or site.images).counts().tolist() if n]
        least = min(counts, default=0)
        rules.append(Rule("min_class", policy.min_class, least, least >= policy.min_class))
    return rules


def first_of(images: Images, per_class: int = SHOWN) -> dict[int, Tensor]:
    """Return class -> rows of its first images."""
    return {
        c: (images.labels == c).nonzero().flatten()[:per_class] for c in range(len(images.classes))
    }
