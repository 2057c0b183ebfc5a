"""Monte-Carlo audit of the noise path, as it is really executed, against the claim.

Two neighbouring worlds differ in a canary (`audit.worlds`): a record at ten times the clip radius,
or, under replacement, the worst pair of records. The guard clips, quantises and sums each world;
the exchange's own `Duty.noised` adds noise T times. Queries are as the plan's but for their shape:
the few numbers that the canary touches. `measured_noise` looks at releases of full size.

The adversary knows all but the canary and sees every number of every round (under local noise: of
one client; under distributed noise: the sum, less the shares of the clients that may be missing).
Scores: the likelihood ratio under the claimed noise, and a discriminant learned on trials that are
not counted, which is the likelihood ratio of whatever Gaussian the noise really is: noise left out
or used twice shows as directions without any. The other trials are counted (`audit.bounds`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
from scipy import stats
from torch import Tensor

from fedgist.audit.bounds import Rates, choose_threshold, count_errors, discriminant
from fedgist.audit.worlds import (
    add_noise,
    claimed_scales,
    flat,
    noise_shares,
    released,
    row_scale,
    unrated,
    worst_worlds,
)
from fedgist.exchange.gist import Duty
from fedgist.privacy.accounting import epsilon_gaussian
from fedgist.privacy.claim import Claim
from fedgist.privacy.noise import noise_scales
from fedgist.queries import Query, blocks_of, prefixed
from fedgist.run import derive
from fedgist.types import Round, Tensors

__all__ = [
    "ALPHA",
    "State",
    "Verdict",
    "audit_sums",
    "measured_noise",
    "squares",
    "trials_for",
    "verdict",
]

ALPHA = 1e-3  # chance that a mechanism that keeps its claim is flagged
ENOUGH = 0.85  # share of the claim that a bound must reach, or the audit is too weak
CHUNK = 20_000  # trials at a time
LEARNING = 100_000  # trials of each world that choose score and threshold, at most
HELD = 10_000_000  # numbers of them that are held
State = Literal["pass", "inconclusive", "contradicted", "no claim"]


@dataclass(frozen=True)
class Verdict:
    """What an audit of the noise found.

    Attributes:
        state: ``pass``, ``inconclusive`` (not contradicted, but the bound is below 85 % of the
            claim), ``contradicted`` or ``no claim``.
        mu_low: lower bound on the Gaussian-DP distance, at confidence 1 - `ALPHA`.
        mu_claimed: sensitivity / σ of the claim; None for sampled plans.
        mu_attained: what the canary can reach on its grid of integers; None for sampled plans.
        epsilon_low: ε of that distance at the claim's δ (sampled plans: of their own curve).
        epsilon_raw: lower bound on ε that assumes nothing.
        epsilon: what is claimed.
        rates: bounds on both error rates.
        score: the adversary's score.
        canary: what the worlds differ in.
    """

    state: State
    mu_low: float
    mu_claimed: float | None
    mu_attained: float | None
    epsilon_low: float
    epsilon_raw: float
    epsilon: float
    rates: Rates
    score: str
    canary: str


def trials_for(mu: float) -> int:
    """Return how many trials of each world are to be counted to show a distance ``mu``.

    With c/mu² of them the bound lies about 9/√c below the truth, give or take 1.8/√c.
    """
    return int(min(max(25_000 / max(mu, 1e-3) ** 2, 30_000), 1_000_000))


def audit_sums(
    duty: Duty, rounds: Sequence[Round], claim: Claim, *, trials: int, seed: int
) -> Verdict:
    """Audit the joint release of all rounds of a plan without sampling.

    Args:
        duty: the exchange's; its noise is drawn by seeds of this audit.
        rounds: of the plan.
        claim: what is promised.
        trials: of each world that are counted; as many again, or `LEARNING`, choose score and
            threshold.
        seed: of all draws.
    """
    plan = [r for r in rounds if r.queries]
    worlds, asked, canary = worst_worlds(duty, plan, claim)
    scale, base = claimed_scales(asked, duty.sigma), flat(asked, worlds[0])
    gap = ((flat(asked, worlds[1]) - base) / scale)[0]

    def rows(world: int, part: str, n: int) -> Iterator[Tensor]:
        for i, size in enumerate(min(CHUNK, n - start) for start in range(0, n, CHUNK)):
            at = replace(duty, seed=derive(seed, part, world, i))
            yield (flat(asked, released(at, asked, worlds[world], size)) - base) / scale

    few = max(2, min(trials, LEARNING, HELD // len(gap)))
    seen = [torch.cat(list(rows(world, "learn", few))) for world in (0, 1)]
    scores = {"likelihood ratio": gap, "learned discriminant": discriminant(*seen)}
    weights = torch.stack(list(scores.values()), 1)
    chosen = [x @ weights for x in seen]
    counted = [torch.cat([x @ weights for x in rows(world, "count", trials)]) for world in (0, 1)]
    alpha = ALPHA / len(scores)
    found = {}
    for j, name in enumerate(scores):
        threshold = choose_threshold(chosen[0][:, j], chosen[1][:, j], alpha)
        found[name] = count_errors(counted[0][:, j], counted[1][:, j], threshold, alpha)
    best = max(found, key=lambda name: found[name].mu)
    return verdict(found[best], best, claim, float(gap.norm()), canary)


def verdict(rates: Rates, score: str, claim: Claim, attained: float, canary: str) -> Verdict:
    """Set a bound beside a claim that comes from a Gaussian law."""
    mu = claim.sensitivity / claim.sigma if claim.sigma > 0 else math.inf
    low = epsilon_gaussian(1 / rates.mu, claim.delta) if rates.mu > 0 else 0.0
    low = max(low, raw := rates.epsilon(claim.delta))
    state: State
    if math.isinf(claim.epsilon):
        state = "no claim"
    elif rates.mu > mu or low > claim.epsilon:
        state = "contradicted"
    else:
        reached = max(rates.mu / mu, low / claim.epsilon)
        state = "pass" if reached >= ENOUGH else "inconclusive"
    return Verdict(state, rates.mu, mu, attained, low, raw, claim.epsilon, rates, score, canary)


def measured_noise(
    duty: Duty, rounds: Sequence[Round], seed: int, most: int = 3_000_000
) -> dict[str, dict[str, float | int | bool]]:
    """Measure the noise of releases of full size, block by block, against the plan.

    Distinct rounds are looked at once, up to ``most`` numbers. Blocks whose shape the plan does not
    know are left out.

    Returns:
        block -> ``numbers``, ``ratio`` (measured over planned deviation), ``least`` (what chance
        allows it to be) and ``small``: whether it is below, wrongly so with probability `ALPHA`
        over all blocks.
    """
    sums: dict[str, tuple[float, int]] = {}
    seen: set[tuple[Query, ...]] = set()
    left = most
    for r, rnd in enumerate(rounds):
        shapes = {k: v for q in rnd.queries for k, v in prefixed(q, q.shapes(noised=True)).items()}
        numbers = sum(math.prod(s) for s in shapes.values()) * noise_shares(duty)
        if not rnd.queries or rnd.queries in seen or not shapes or numbers > left:
            continue
        left -= numbers
        seen.add(rnd.queries)
        zeros = {k: torch.zeros(s, dtype=torch.int64) for k, s in shapes.items()}
        at = replace(duty, seed=derive(seed, "noise of full size"))
        noise = add_noise(
            at, replace(rnd, queries=tuple(unrated(q) for q in rnd.queries)), r, zeros
        )
        for q in rnd.queries:
            for name, (square, n) in squares(q, duty.sigma, blocks_of(q, noise)).items():
                before = sums.get(name, (0.0, 0))
                sums[name] = before[0] + square, before[1] + n
    alpha = ALPHA / max(1, len(sums))
    out: dict[str, dict[str, float | int | bool]] = {}
    for name, (s, n) in sums.items():
        least = float(stats.chi2.ppf(alpha, n))
        out[name] = {
            "numbers": n,
            "ratio": math.sqrt(s / n),
            "least": math.sqrt(least / n),
            "small": bool(s < least),
        }
    return out


def squares(query: Query, sigma: float, noise: Tensors) -> dict[str, tuple[float, int]]:
    """Sum the squares of a query's noise over its planned deviation, block by block.

    Args:
        query: what was asked.
        sigma: the multiplier of the noise.
        noise: block -> noise in grid units; blocks that carry none are left out.

    Returns:
        Name (view and block) -> sum of squares and how many numbers: χ² of as many degrees of
        freedom where the noise is as planned.
    """
    scales, out = noise_scales(query, sigma), {}
    for name, x in noise.items():
        if name in scales and min(scales[name]) > 0:
            square = (x / row_scale(query, scales[name], x.shape[-1])).square().sum()
            out[f"{query.name} {name}".strip()] = float(square), x.numel()
    return out
