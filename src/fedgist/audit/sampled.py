"""Monte-Carlo audit of queries that are asked of Poisson samples, with rounded Gaussian noise.

Every class of a client that holds one canary in each is a trial of its own: `Client.sum` samples,
clips and adds up class by class, and `Client.release` adds noise to each, so one call makes all
trials by the code that a run executes. The canary's row is the same whenever it is asked for, which
is the worst case: the releases are then pairs of a Gaussian and a mixture that dominate.

The score is the likelihood ratio, Σ log(1 - q + q exp(⟨x, u⟩/s² - |u|²/2s²)) over releases. Its
error rates are held against the plan's own trade-off curve at smaller and smaller noise: for every
δ, 1-β <= e^ε(δ) α + δ and the same with α and β exchanged. The largest noise that the rates allow
gives the bound on ε.

Not covered: what an adversary gains from several records, or from a changed one, which the claim
reads by group privacy; noise used twice; samples that depend on each other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.audit.bounds import Rates, choose_threshold, count_errors
from fedgist.audit.mechanism import ALPHA, ENOUGH, State, Verdict
from fedgist.audit.worlds import BEYOND
from fedgist.exchange.gist import Duty
from fedgist.privacy.accounting import sampled_epsilon
from fedgist.privacy.claim import Claim
from fedgist.privacy.client import Client
from fedgist.queries import Query, SumQuery
from fedgist.run import derive
from fedgist.types import Images, Round

__all__ = ["audit_sampled"]

DELTAS = tuple(10 ** (-i / 2) for i in range(1, 25))
SPAN, STEPS = 3.0, 7  # the bound is sought within this factor of σ, to within 1 %
TRIALS = 5_000  # at a time


def audit_sampled(
    duty: Duty, rounds: Sequence[Round], claim: Claim, *, trials: int, seed: int
) -> Verdict:
    """Audit one record in or out of all sampled releases of one client.

    Args:
        duty: the exchange's; noise and samples are drawn by seeds of this audit.
        rounds: of the plan, all of whose queries have sampling rates.
        claim: what is promised. Where it is of other neighbours than one record more or less, the
            reading of those is audited.
        trials: of each world that are counted; as many again choose the threshold.
        seed: of all draws.
    """
    plan = [r for r in rounds if r.queries]
    single = claim.adjacency == "add-remove" and claim.records == 1
    epsilon = claim.epsilon
    if not single and math.isfinite(epsilon):
        epsilon = sampled_epsilon(plan, claim.sigma, claim.delta)
    chosen, counted = (
        [_scores(duty, plan, world, trials, derive(seed, part, world)) for world in (0, 1)]
        for part in ("choose", "count")
    )
    threshold = choose_threshold(chosen[0], chosen[1], ALPHA)
    rates = count_errors(counted[0], counted[1], threshold, ALPHA)
    low = _epsilon_low(rates, plan, claim)
    raw = rates.epsilon(claim.delta)
    low = max(low, raw)
    state: State = "pass" if low >= ENOUGH * epsilon else "inconclusive"
    if math.isinf(epsilon):
        state = "no claim"
    elif low > epsilon * 1.001 and _broken(rates, plan, claim.sigma):
        state = "contradicted"
    return Verdict(
        state,
        rates.mu,
        None,
        None,
        low,
        raw,
        epsilon,
        rates,
        "likelihood ratio of sampled releases",
        "1 record, in or out, the same row in every sample",
    )


def _scores(duty: Duty, plan: Sequence[Round], world: int, trials: int, seed: int) -> Tensor:
    parts = []
    for start in range(0, trials, TRIALS):
        n = min(TRIALS, trials - start)
        at = replace(duty, seed=derive(seed, start))
        parts.append(
            sum((_round(at, rnd, r, world, n) for r, rnd in enumerate(plan)), torch.zeros(n))
        )
    return torch.cat(parts)


def _round(duty: Duty, rnd: Round, r: int, world: int, n: int) -> Tensor:
    """Return the log-likelihood ratios of one round's releases, float64 ``[n]``."""
    small = tuple(_small(q, n) for q in rnd.queries)
    labels = torch.arange(n if world else 0)
    images = Images(
        torch.zeros(len(labels), 1, 4, 4, dtype=torch.uint8), labels, tuple(map(str, range(n)))
    )
    client = Client(
        "audit",
        images,
        replace(rnd, queries=small),
        sigma=duty.sigma,
        noise=duty.noise(r, "client 0"),
        max_images=n,
    )
    total = torch.zeros(n, dtype=torch.float64)
    for q in small:
        far, u = BEYOND * q.clip, float(q.levels)
        s2 = (duty.sigma * q.scale * q.levels) ** 2
        for _ in range(q.times):
            made = client.sum(lambda x, y, f=far: {"rows": torch.full((len(x), 1), f)}, q)  # type: ignore[misc]
            t = (client.release(made)["rows"][:, 0] * u - u * u / 2) / s2
            if q.rate < 1:
                at = torch.tensor(q.rate, dtype=torch.float64).log()
                t = torch.logaddexp(torch.log1p(torch.tensor(-q.rate, dtype=torch.float64)), at + t)
            total += t
    return total


def _small(query: Query, n: int) -> SumQuery:
    assert isinstance(query, SumQuery)
    return replace(query, per_class=True, shape=(n, 1), rates=(query.rate,))


def _epsilon_low(rates: Rates, plan: Sequence[Round], claim: Claim) -> float:
    """Return ε at the claim's δ of the largest noise that the rates do not contradict."""
    low, high = -math.log(SPAN), math.log(SPAN)
    if not _broken(rates, plan, claim.sigma * SPAN):
        return 0.0
    for _ in range(STEPS):
        middle = (low + high) / 2
        if _broken(rates, plan, claim.sigma * math.exp(middle)):
            high = middle
        else:
            low = middle
    return sampled_epsilon(plan, claim.sigma * math.exp(high), claim.delta)


def _broken(rates: Rates, plan: Sequence[Round], sigma: float) -> bool:
    """Say whether error rates are lower than noise of this multiplier allows."""
    a, b = rates.false_positive, rates.false_negative
    for delta in DELTAS:
        factor = math.exp(min(sampled_epsilon(plan, sigma, delta), 500.0))
        if 1 - b > factor * a + delta or 1 - a > factor * b + delta:
            return True
    return False
