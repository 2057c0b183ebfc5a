"""Was this record used? Two attacks on single records. They give scores, `measure` gives figures.

1. The likelihood-ratio attack on noised statistics. The attacker sees the noised sum and knows all
   other records: by Neyman and Pearson nobody who sees that sum, or what is made from it, does
   better. A record u moves the sum by φ = (u; svec uuᵀ in its class; the same in the pooled block;
   count_weight) against independent noise of deviation s_j. So T = Σ φ_j x_j / s_j² has one
   variance, and two means μ_z² = Σ φ_j² / s_j² apart. A second moment gives
   Σ_i u_i⁴/s² + Σ_{i<j} (u_i u_j)² / (s/√2)² = |u|⁴/s², hence

       μ_z² = |u|²/s_mean² + |u|⁴/s_second² + |u|⁴/s_pooled² + (count_weight/s_count)² <= 1/σ²

   with equality at the clip radius. AUC = Φ(μ_z/√2); TPR at FPR a is Φ(Φ⁻¹(a) + μ_z).
   The normal law stands for integer noise: discrete Gaussians have the same T, with moments that
   agree to exp(-2π²s²). What differs is the lattice of T, which vanishes for codes of more than a
   few numbers; for a code of zeros, which only the count betrays, it is 0.0004 of AUC at s = 3.

2. The distance to the closest synthetic image. **A similarity figure, not a privacy guarantee**: it
   finds copies, and reads 0.5 on releases that leak ("The DCR Delusion", arXiv 2505.01524).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fedgist.audit.roc import Curve, closed_form, empirical
from fedgist.errors import ConfigError, DataError
from fedgist.privacy.accounting import Law, sigma_for
from fedgist.privacy.noise import Noise, noise_scales, noise_tensors
from fedgist.privacy.statistics import to_triangle
from fedgist.queries import MomentsQuery, Query, SumQuery
from fedgist.types import BATCH, Images

__all__ = [
    "DistanceAttack",
    "LikelihoodRatio",
    "Measured",
    "Risk",
    "claimed",
    "closest_record",
    "likelihood_ratio",
    "measure",
    "play",
    "risk",
    "strength",
    "table",
]

Encode = Callable[[Tensor], Tensor]
Released = Sequence[tuple[Query, "Tensor | Iterable[Tensor]"]]
PLAYED = 4_000_000  # numbers of one batch of outer products
FPRS = (0.001, 0.01)  # the false-positive rates at which true-positive rates are given
COLUMNS = 1024  # so many products of numbers in -128..127 sum to at most 2^24: exact in float32


@dataclass(frozen=True)
class Risk:
    """What an attack reaches in theory: area under the ROC curve, and TPR at 0.1 % and 1 % FPR."""

    auc: float
    tpr: tuple[float, ...]


@dataclass(frozen=True)
class Measured:
    """What an attack reached on ``members`` used and ``others`` unused records.

    ``low`` .. ``high`` is the 95 % interval of ``auc``. ``tpr`` is at expected FPRs of at most
    0.1 % and 1 %; None where fewer than 999 and 99 unused records cannot tell. ``roc`` is the whole
    curve.
    """

    auc: float
    low: float
    high: float
    tpr: tuple[float | None, ...]
    members: int
    others: int
    roc: Curve


@dataclass(frozen=True)
class LikelihoodRatio:
    """The likelihood-ratio attack in closed form.

    Attributes:
        mu: float64 ``[n]``: by how many standard deviations each record moves the best statistic.
        mean: the mean of all records' ROC curves at a common FPR (one threshold per record).
        median, worst: the record of median and of largest ``mu``.
        cap: what no record can exceed under this noise, μ = 1/σ.
    """

    mu: Tensor
    mean: Risk
    median: Risk
    worst: Risk
    cap: Risk


@dataclass(frozen=True)
class DistanceAttack:
    """The closest synthetic image, by pixels and by codes: a similarity figure, no guarantee."""

    pixels: Measured
    codes: Measured | None


def risk(mu: Tensor | float) -> Risk:
    """Return the ROC of N(0, 1) against N(mu, 1); of several mu, the mean of the curves."""
    mu = torch.as_tensor(mu, dtype=torch.float64).reshape(-1, 1)
    at = torch.special.ndtri(torch.tensor(FPRS, dtype=torch.float64))
    tpr = torch.special.ndtr(at + mu).mean(0)
    return Risk(float(torch.special.ndtr(mu / math.sqrt(2)).mean()), tuple(tpr.tolist()))


def claimed(epsilon: float, delta: float, law: Law) -> Risk:
    """Return the most that (``epsilon``, ``delta``) allows when it comes from noise of ``law``."""
    sigma = sigma_for(epsilon, delta, law)
    return risk(1 / sigma if sigma > 0 else math.inf)


def strength(u: Tensor, query: Query, sigma: float) -> Tensor:
    """Return μ_z, float64 ``[n]``: inf where counts are exact or ``sigma`` is 0.

    For a `SumQuery`, φ is the record itself: μ_z = |u| / s.

    Args:
        u: records ``[n, dim]`` as `clip_to_grid` gives them: integers, norm at most ``levels``.
        query: the release.
        sigma: the multiplier of the noise in what the attacker sees (for a sum `Merged.sigma`).

    Raises:
        ConfigError: ``sigma`` is negative.
        DataError: a record is too long or has another dimension.
    """
    if not sigma >= 0:
        raise ConfigError(f"sigma must be at least 0. Got {sigma}")
    dim = query.dim if isinstance(query, MomentsQuery) else query.row or u.shape[-1]
    if u.ndim != 2 or u.shape[1] != dim:
        raise DataError(f"records must have shape [n, {dim}]. Got {list(u.shape)}")
    square = u.to(torch.float64) ** 2
    norm2 = square.sum(1)
    if not bool((norm2 <= query.levels**2).all()):
        longest = math.sqrt(float(norm2.max()))
        raise DataError(f"records must be clipped to norm {query.levels}. Got {longest:g}")
    if not _hidden(query, sigma):
        return torch.full_like(norm2, math.inf)
    scales = noise_scales(query, sigma / math.sqrt(query.times))
    if isinstance(query, SumQuery):
        return norm2.sqrt() / scales["rows"][0]
    diagonal = (square**2).sum(1)
    off = (norm2**2 - diagonal) / 2  # Σ_{i<j} (u_i u_j)²
    mu2 = norm2 / scales["mean"][0] ** 2 + (query.count_weight / scales["count"][0]) ** 2
    for s, s_off in (scales[block] for block in ("second", "pooled") if block in scales):
        mu2 = mu2 + diagonal / s**2 + off / s_off**2
    return mu2.sqrt()


def _hidden(query: Query, sigma: float) -> bool:
    return sigma > 0 and not (isinstance(query, MomentsQuery) and query.exact_counts)


def likelihood_ratio(released: Released, sigma: float) -> LikelihoodRatio:
    """Work out the likelihood-ratio attack on all that was released of each record.

    Args:
        released: each query with its records (or batches of them), as `strength` takes them; row i
            is the same record in every query. Independent noise: the squares of μ_z add up.
        sigma: the multiplier of the noise in what the attacker sees.
    """
    square: Tensor | float = 0.0
    for query, records in released:
        batches = [records] if isinstance(records, Tensor) else records
        parts = [strength(u, query, sigma).square() for u in batches]
        square = square + (torch.cat(parts) if parts else torch.empty(0))
    if not isinstance(square, Tensor) or not len(square):
        raise DataError("records must be at least one. Got 0")
    hidden = all(_hidden(query, sigma) for query, _ in released)
    total = sum(query.times / query.scale**2 for query, _ in released)
    cap = risk(math.sqrt(total) / sigma if hidden else math.inf)
    mu = square.sqrt()
    return LikelihoodRatio(mu, risk(mu), risk(mu.median()), risk(mu.max()), cap)


def play(
    members: Sequence[tuple[Query, Tensor]],
    others: Sequence[tuple[Query, Tensor]],
    sigma: float,
    noise: Noise,
) -> Measured:
    """Play the likelihood-ratio attack with real noise: a check on the members' mean AUC.

    Takes records as `likelihood_ratio` does and gives each a release of its own: when the attacker
    has subtracted all that is known, the blocks that a record touches hold noise (dim² numbers,
    drawn here), plus φ for members. Scores are T/μ_z: one threshold has the same FPR for all
    records.
    """
    seen, unseen = (
        _scores(released, used, sigma, noise) for released, used in ((members, 1.0), (others, 0.0))
    )
    return measure(seen, unseen)


def _scores(
    released: Sequence[tuple[Query, Tensor]], used: float, sigma: float, noise: Noise
) -> Tensor:
    if not all(_hidden(query, sigma) for query, _ in released):
        return torch.full((len(released[0][1]),), used)  # nothing hides the record
    t = square = torch.zeros(len(released[0][1]), dtype=torch.float64)
    for query, u in released:
        batches = torch.split(u, max(1, PLAYED // u.shape[1] ** 2))
        mu2 = strength(u, query, sigma).square()
        t = t + used * mu2 + torch.cat([_drawn(part, query, sigma, noise) for part in batches])
        square = square + mu2
    return t / square.sqrt()


def _drawn(u: Tensor, query: Query, sigma: float, noise: Noise) -> Tensor:
    """Draw what the noise alone adds to T of one query, for each record."""
    sigma = sigma / math.sqrt(query.times)
    scales = noise_scales(query, sigma)
    if isinstance(query, SumQuery):
        s = scales["rows"][0]
        return (u * noise_tensors(query, sigma, noise, {"": u})[""]).sum(1) / s**2
    outer = to_triangle(u[:, :, None] * u[:, None, :])
    weight = torch.full((len(u), 1), query.count_weight, dtype=torch.float64)
    phi = {"mean": u, "second": outer, "pooled": outer, "count": weight}
    drawn = noise_tensors(query, sigma, noise, {block: phi[block] for block in scales})
    t = torch.zeros(len(u), dtype=torch.float64)
    for block, (s, s_off) in scales.items():
        diagonal, off = (phi[block] * drawn[block]).tensor_split([query.dim], dim=1)
        t = t + diagonal.sum(1) / s**2 + off.sum(1) / s_off**2
    return t


def measure(members: Tensor, others: Tensor) -> Measured:
    """Turn scores (higher means "used") of used and unused records into figures.

    The interval is DeLong's (1988). Where the two kinds do not overlap that has no width, and the
    bound is Clopper and Pearson's for min(m, n) disjoint pairs that all agree.
    """
    m, n = len(members), len(others)
    if min(m, n) < 2:
        raise DataError(f"scores must be two or more of each kind. Got {m} used, {n} unused")
    ranks = _midranks(torch.cat([members, others]))
    wins = (ranks[:m] - _midranks(members)) / n  # share of the others that each member beats
    losses = (ranks[m:] - _midranks(others)) / m
    auc = float(wins.mean())
    half = 1.959964 * math.sqrt(float(wins.var() / m + losses.var() / n))
    edge = 0.025 ** (1 / min(m, n))
    low = edge if auc == 1 else max(0.0, auc - half)
    high = 1 - edge if auc == 0 else min(1.0, auc + half)
    falling = others.sort(descending=True).values
    # above the k-th largest of n lies k/(n+1) of their distribution, in expectation
    allowed = [int(a * (n + 1) + 1e-9) for a in FPRS]
    tpr = [float((members > falling[k - 1]).double().mean()) if k else None for k in allowed]
    return Measured(auc, low, high, tuple(tpr), m, n, empirical(members, others))


def _midranks(x: Tensor) -> Tensor:
    _, place, count = torch.unique(x, return_inverse=True, return_counts=True)
    middle: Tensor = count.cumsum(0).double() - (count - 1) / 2
    return middle[place]


def closest_record(
    members: Images, others: Images, synthetic: Images, encode: Encode | None = None
) -> DistanceAttack:
    """Guess "used" from the exact L2 distance to the closest synthetic image.

    ``members`` were used, ``others`` of the same distribution were not. ``encode`` maps float32
    ``[b, c, h, w]`` (b <= 250) to ``[b, d]``; None leaves codes out.
    """
    shape = synthetic.pixels.shape[1:]
    for name, images in (("used", members), ("unused", others), ("synthetic", synthetic)):
        if not len(images) or images.pixels.shape[1:] != shape:
            got = list(images.pixels.shape)
            raise DataError(f"{name} images must be one or more of {list(shape)}. Got {got}")

    def attack(space: Encode) -> Measured:
        used, unused, seen = (
            torch.cat([space(x) for x, _ in images.batches()])
            for images in (members, others, synthetic)
        )
        return measure(-_closest(used, seen), -_closest(unused, seen))

    # 8-bit pixels as float32 integers in -128..127: their products are exact
    pixels = attack(lambda x: (x * 255).round().flatten(1) - 128)
    return DistanceAttack(pixels, attack(lambda x: encode(x).double()) if encode else None)


def _closest(rows: Tensor, synthetic: Tensor) -> Tensor:
    """Return float64 ``[n]``: the distance of each row to the nearest row of ``synthetic``."""
    out = []
    blocks = [(b, b.double().square().sum(1) / 2) for b in torch.split(synthetic, 4 * BATCH)]
    for a in torch.split(rows, BATCH):
        best = torch.full((len(a),), math.inf, dtype=torch.float64)
        for b, gap in blocks:  # |b|²/2 - a·b: half the squared distance, but for |a|²
            for x, y in zip(torch.split(a, COLUMNS, 1), torch.split(b, COLUMNS, 1), strict=True):
                gap = gap - x @ y.T
            best = torch.minimum(best, gap.amin(1))
        out.append((a.double().square().sum(1) + 2 * best).clamp(min=0).sqrt())
    return torch.cat(out)


def table(
    ratio: LikelihoodRatio,
    distance: DistanceAttack | None = None,
    *,
    played: Measured | None = None,
    claim: Risk | None = None,
) -> list[dict[str, Any]]:
    """Return the figures as rows of plain JSON values, the strongest attack first.

    ``played`` gives the first row its interval (else None), ``claim`` a second cap. The caps bound
    the second attack in expectation, when it is chance which records are used.
    """
    caps: dict[str, Any] = {"cap": ratio.cap.auc} | _tpr(ratio.cap, "cap_")
    if claim:
        caps |= {"claim_cap": claim.auc} | _tpr(claim, "claim_cap_")
    exact = {
        "attack": "likelihood ratio",
        "sees": "the noised sum, all other records",
        "note": "the optimal attack; mean over records, one threshold for each",
        "auc": ratio.mean.auc,
        "low": played and played.low,
        "high": played and played.high,
        "auc_played": played and played.auc,
        "auc_median": ratio.median.auc,
        "auc_worst": ratio.worst.auc,
        "records": len(ratio.mu),
        "roc": closed_form(ratio.mu).record(),
    }
    rows = [exact | _tpr(ratio.mean) | caps]
    for space, got in vars(distance).items() if distance else ():
        if got:
            closest = {
                "attack": f"closest synthetic image, {space}",
                "sees": "the synthetic images",
                "note": "a similarity figure, not a privacy guarantee",
            }
            area = {"auc": got.auc, "low": got.low, "high": got.high}
            seen = {"records": got.members + got.others, "roc": got.roc.record()}
            rows.append(closest | area | seen | _tpr(got) | caps)
    return rows


def _tpr(figures: Risk | Measured, prefix: str = "") -> dict[str, float | None]:
    return {f"{prefix}tpr_at_{100 * a:g}pct": t for a, t in zip(FPRS, figures.tpr, strict=True)}
