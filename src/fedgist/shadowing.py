"""Shadow classifiers of a finished simulation, for the attacks of `audit.shadow`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fedgist.audit.limits import Limit
from fedgist.audit.membership import Measured, measure
from fedgist.audit.shadow import Records, confidence, lira, rmia, shadow_sums
from fedgist.errors import ConfigError
from fedgist.exchange.gist import Duty
from fedgist.exchange.local import LocalExchange
from fedgist.heads.linear import KINDS, Coded
from fedgist.privacy.claim import summed_sigma
from fedgist.privacy.noise import SeededNoise
from fedgist.privacy.statistics import clip_to_grid
from fedgist.run import derive, generator
from fedgist.setup import Prepared, Sites
from fedgist.types import Classifier, Images, Merged, Outcome, State

__all__ = ["attack_row", "shadow_rows"]

ATTACKED = 500  # used records that are attacked, at most; as many unused ones stand beside them


def shadow_rows(
    made: Prepared,
    outcome: Outcome,
    sites: Sites,
    test: Images,
    shadows: int,
    heads: Sequence[str],
    cap: Limit | None,
) -> tuple[list[dict[str, Any]], str | None]:
    """Attack the final classifiers with LiRA and RMIA.

    Args:
        made: the run.
        outcome: what it left; its classifiers are attacked.
        sites: its clients.
        test: unused images: half are attacked, the rest are RMIA's population.
        shadows: how many; 0 for none.
        heads: which classifiers; none given: the closed-form ones.
        cap: what the claim allows.

    Returns:
        Rows of the table of attacks, and why there are none.

    Raises:
        ConfigError: a head that the run does not have.
    """
    unknown = [h for h in heads if h not in outcome.classifiers]
    if unknown:
        raise ConfigError(f"--head must be one of {list(outcome.classifiers)}. Got '{unknown[0]}'")
    closed = [h for h, c in outcome.classifiers.items() if c.kind in KINDS]
    wanted = list(heads) or closed
    additive = hasattr(made.method, "records") and len(made.plan.rounds) == 1
    if shadows < 1 or not additive or not wanted:
        why = "LiRA and RMIA need a method of one sum whose records are known, and --shadows"
        return [], None if shadows < 1 else f"{why}; this run has no such classifier"
    runs = _Shadows(made, sites, test)
    build = made.method.ceiling if set(wanted) <= set(closed) else runs.finished  # type: ignore[attr-defined]
    logits: dict[str, list[Tensor]] = {h: [runs.seen(outcome.classifiers[h])] for h in wanted}
    inside = []
    rng = generator(made.run.seed, "audit", "shadows")
    for i, (sums, held) in enumerate(
        shadow_sums(runs.exact, runs.records, len(made.task.classes), shadows, rng)
    ):
        made_of = runs.built(build, sums, i)
        inside.append(held)
        for h in wanted:
            logits[h].append(runs.seen(made_of[h]))
    rows = []
    for h in wanted:
        for name, found in _attacks(torch.stack(logits[h]), torch.stack(inside), runs).items():
            sees = f"the final classifier, all other images, {shadows} shadows"
            rows.append(attack_row(f"{name} (offline), {h}", sees, found, cap))
    return rows, None


def _attacks(logits: Tensor, inside: Tensor, runs: _Shadows) -> dict[str, Measured]:
    """Attack one head; ``logits`` ``[1 + S, n + z]``: the final classifier's, then the shadows'."""
    used = runs.records.used
    n, p = len(used), torch.sigmoid(logits)
    scores = {
        "LiRA": lira(logits[0, :n], logits[1:, :n], inside),
        "RMIA": rmia(p[0, :n], p[1:, :n], inside, p[0, n:], p[1:, n:]),
    }
    return {name: measure(s[used], s[~used]) for name, s in scores.items()}


class _Shadows:
    """What all shadows share: exact sums, the attacked records, the images as heads see them."""

    def __init__(self, made: Prepared, sites: Sites, test: Images) -> None:
        rng = generator(made.run.seed, "audit", "attacked")
        members = sites.together()
        size = min(ATTACKED, len(members), len(test) // 2)
        order = torch.randperm(len(test), generator=rng)
        used = members.take(torch.randperm(len(members), generator=rng)[:size])
        images = _joined(used, test.take(order))
        images = images.take(torch.arange(min(len(images), 3 * ATTACKED)))
        self.coded, attacked = Coded(images), images.take(torch.arange(2 * size))
        released = [
            (q, torch.cat([clip_to_grid(of(x), q.clip, q.levels) for x, _ in attacked.batches()]))
            for q, of in made.method.records(made.task)  # type: ignore[attr-defined]
        ]
        self.records = Records(released, attacked.labels, torch.arange(2 * size) < size)
        self._made, self._clients = made, len(sites.names)
        # noise is added anew for every shadow, so that of the run itself is of no use here
        privacy = replace(made.run.privacy, noise="seeded")
        exchange = LocalExchange(
            made.method,
            made.task,
            privacy,
            made.plan.sigma,
            sites.loaders,
            sites.names,
            seed=made.run.seed,
            observe=True,
        )
        exchange.round(0, made.plan.rounds[0], {})
        self.exact = exchange.exact
        self._sigma = summed_sigma(privacy, made.plan.sigma, len(sites.names))
        self._duty = Duty(made.method, made.task, privacy, self._sigma, self._clients)

    def built(
        self, build: Callable[..., Outcome], sums: dict[str, Tensor], i: int
    ) -> Mapping[str, Classifier]:
        """Add noise to a shadow's sums and build its classifiers."""
        noise = SeededNoise(derive(self._made.run.seed, "audit", "noise", i))
        noised = self._duty.noised(self._made.plan.rounds[0], sums, noise)
        merged = Merged(noised, self._sigma, self._clients)
        rng = generator(self._made.run.seed, "audit", "build", i)
        return build(self._made.task, merged, rng).classifiers

    def finished(self, task: Any, merged: Merged, rng: torch.Generator) -> Outcome:
        """Build all heads, networks too."""
        state = self._made.method.start(task, rng)
        after = self._made.method.update(0, task, state, merged, rng)
        return self._made.method.finish(task, State(after.shared, after.server), rng)

    def seen(self, classifier: Classifier) -> Tensor:
        """Return the logits of the true class, float64 ``[n + z]``; codes are made once."""
        return confidence(self.coded.scores(classifier), self.coded.images.labels)[0]


def attack_row(attack: str, sees: str, found: Measured, cap: Limit | None) -> dict[str, Any]:
    """Return one row of the table of attacks; the cap is what the claim allows in theory."""
    return {
        "attack": attack,
        "sees": sees,
        "auc": found.auc,
        "low": found.low,
        "high": found.high,
        "tpr_at_0.1pct": found.tpr[0],
        "tpr_at_1pct": found.tpr[1],
        "records": found.members + found.others,
        "roc": found.roc.record(),
        "claim_cap": cap and cap.risk.auc,
        "claim_cap_tpr_at_0.1pct": cap and cap.risk.tpr[0],
        "claim_cap_tpr_at_1pct": cap and cap.risk.tpr[1],
    }


def _joined(a: Images, b: Images) -> Images:
    return Images(torch.cat([a.pixels, b.pixels]), torch.cat([a.labels, b.labels]), a.classes)
