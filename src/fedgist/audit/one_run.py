"""How much privacy is gone for certain? A lower bound on ε from a single run of a mechanism.

Steinke, Nasr and Jagielski, "Privacy Auditing with One (1) Training Run", NeurIPS 2023
(https://arxiv.org/abs/2305.08846). Each of m canaries enters the data with probability 1/2. Who
sees only what the mechanism let out says "in" of some, "out" of others, and nothing of the rest.
If the mechanism is (ε, δ)-DP under add/remove, r such guesses are right at least v times with
probability at most (Theorem 5.2)

    p(ε) = P[W >= v] + 2mδ max_i P[v > W >= v - i] / i,    W ~ Bin(r, e^ε / (1 + e^ε)).

An ε with p(ε) <= 5 % is refuted. **A bound of 0 refutes nothing and proves nothing**: a better
attacker, or a worse canary, may exist. What the audit finds are mistakes: a bound above the claim
means that the claim is false. It is loose even so: m right guesses out of m show ε of about
log(m / 3), whatever the true one.

This is the audit for clients that distil synthetic images, whose release has no closed form as
that of `fedgist.audit.membership` has. It tests claims about one image, or one person, added or
removed. Data sets with and without a canary are no neighbours under replacement, nor where the
unit is a client: such claims are not refuted by a bound above them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fedgist.audit.membership import FPRS, measure
from fedgist.audit.roc import Curve
from fedgist.encoders.random_conv import RandomConv
from fedgist.errors import ConfigError, DataError
from fedgist.types import Images, Tensors

__all__ = [
    "OneRun",
    "audit_gists",
    "canaries",
    "canary_scores",
    "epsilon_low",
    "judge",
    "row",
    "with_canaries",
]

CONFIDENCE = 0.95
SHARES = (0.1, 0.25, 0.5, 1.0)  # of the canaries that are guessed: fixed before any score is seen
HIGHEST = 60.0  # no audit gets there: it would take e^57 canaries
CELLS = 7  # per side of a canary
NETS, WIDTH = 8, 32  # the attacker's own networks


@dataclass(frozen=True)
class OneRun:
    """What one run gave away.

    Attributes:
        canaries: m, how many there were.
        inserted: how many of them were used.
        guesses: r, how many the attacker spoke of, in the best of the ways that were tried.
        right: v, how many of those guesses were right.
        delta: δ of the claim that is tested.
        epsilon_low: the largest ε refuted at 95 % confidence, all ways together; 0 when none is.
        auc: area under the ROC curve of the scores; ``low`` .. ``high`` is its 95 % interval
            (as if scores were independent).
        roc: the whole curve of the scores.
    """

    canaries: int
    inserted: int
    guesses: int
    right: int
    delta: float
    epsilon_low: float
    auc: float
    low: float
    high: float
    roc: Curve


def epsilon_low(
    m: int, guesses: int, right: int, delta: float, confidence: float = CONFIDENCE
) -> float:
    """Return the largest ε that ``right`` of ``guesses`` refute; 0 when none is.

    A mechanism that is (ε, δ)-DP is so for every larger ε: refuting one refutes all below.

    Args:
        m: canaries, each inserted with probability 1/2, also those without a guess.
        guesses: r <= m. Which canaries they speak of may depend on the output.
        right: v <= r.
        delta: δ in [0, 1).
        confidence: in (0, 1).

    Raises:
        ConfigError: an argument is out of its range.
    """
    if not 0 <= right <= guesses <= m:
        raise ConfigError(
            "right guesses, guesses and canaries must satisfy 0 <= right <= guesses <= m. "
            f"Got {right}, {guesses}, {m}"
        )
    if not 0 <= delta < 1:
        raise ConfigError(f"delta must be in [0, 1). Got {delta}")
    if not 0 < confidence < 1:
        raise ConfigError(f"confidence must be in (0, 1). Got {confidence}")
    low, high = 0.0, HIGHEST
    if not _probability(low, m, guesses, right, delta) <= 1 - confidence:
        return 0.0
    while high - low > 1e-9:
        middle = (low + high) / 2
        if _probability(middle, m, guesses, right, delta) <= 1 - confidence:
            low = middle
        else:
            high = middle
    return low


def _probability(epsilon: float, m: int, r: int, v: int, delta: float) -> float:
    """Return p(ε) of the module's docstring: how often (ε, δ) allows v right guesses of r."""
    import numpy as np
    from scipy.special import bdtr

    # Wrong guesses are counted: a small share of them would be lost in 1 - share.
    share = math.exp(-epsilon) / (1 + math.exp(-epsilon))
    beta = float(bdtr(r - v, r, share))
    if delta == 0 or v == 0:
        return beta
    i = np.arange(1, v + 1)  # a larger i adds no probability
    return beta + 2 * m * delta * float(((bdtr(r - v + i, r, share) - beta) / i).max())


def judge(
    scores: Tensor, inserted: Tensor, delta: float, guesses: Sequence[int] | None = None
) -> OneRun:
    """Guess "in" for the highest scores, "out" for the lowest, and see what that refutes.

    Several numbers of guesses are tried and the best bound is kept, so each has to stand at a
    confidence of 1 - 5 % / (how many are tried), after Bonferroni.

    Args:
        scores: ``[m]``, higher means "in". Made without knowledge of ``inserted``.
        inserted: bool ``[m]``.
        delta: δ of the claim.
        guesses: how many canaries to guess, half of them "in", each in 2..m; odd ones are rounded
            down. Must be fixed before scores are seen. A tenth, a quarter, half and all when None.

    Raises:
        ConfigError: ``guesses`` or ``delta`` is out of its range.
        DataError: scores are not m finite numbers, or fewer than two canaries are in, or out.
    """
    m = len(inserted)
    if scores.shape != (m,) or inserted.dtype != torch.bool or not scores.isfinite().all():
        raise DataError(
            f"scores must be one finite number for each of {m} bools. Got {list(scores.shape)} "
            f"and {inserted.dtype}"
        )
    got = measure(scores[inserted], scores[~inserted])
    halves = _halves(m, guesses)
    # Ties are broken by the place of a canary, which says nothing of whether it was used.
    order = torch.sort(scores, descending=True, stable=True).indices
    used = inserted[order]
    level = 1 - (1 - CONFIDENCE) / len(halves)
    tried = []
    for half in halves:
        right = int(used[:half].sum()) + int((~used[m - half :]).sum())
        tried.append((epsilon_low(m, 2 * half, right, delta, level), right / half, half, right))
    bound, _, half, right = max(tried)
    counts = (m, int(inserted.sum()), 2 * half, right)
    return OneRun(*counts, delta, bound, got.auc, got.low, got.high, got.roc)


def _halves(m: int, guesses: Sequence[int] | None) -> list[int]:
    if guesses is None:
        return sorted({max(1, int(share * m) // 2) for share in SHARES})
    if not guesses or not all(2 <= k <= m for k in guesses):
        raise ConfigError(f"guesses must be numbers in 2..{m}. Got {list(guesses)}")
    return sorted({k // 2 for k in guesses})


def canaries(images: Images, m: int, rng: torch.Generator) -> Images:
    """Make m images that no record resembles: random mosaics of black and white tiles.

    Methods that distil match means over a class, in pixels or under random networks, so a canary
    moves the result by (its embedding - the mean) / n. It should lie far from the mean, in a
    direction that no other canary shares and along which ordinary images vary little. Mosaics of
    7x7 tiles (each channel on its own) do: coarse enough to survive the poolings of a network,
    which pixel noise does not, with 49 independent bits. Ordinary images under a wrong label all
    point from their class to the other, one like the next.

    Args:
        images: whose format and classes are taken; the content is not looked at.
        m: how many; classes take turns.
        rng: source of the tiles.

    Returns:
        uint8 ``[m, c, h, w]`` of 0 and 255. Where images name persons, every canary is one of its
        own.

    Raises:
        ConfigError: m < 1.
    """
    if m < 1:
        raise ConfigError(f"canaries must be at least 1. Got {m}")
    channels, *side = images.pixels.shape[1:]
    tiles = torch.randint(2, (m, channels, CELLS, CELLS), generator=rng, dtype=torch.uint8) * 255
    pixels = F.interpolate(tiles, tuple(side), mode="nearest")
    groups = None
    if images.groups is not None:
        groups = torch.arange(m) + (int(images.groups.max()) + 1 if len(images) else 0)
    return Images(pixels, torch.arange(m) % len(images.classes), images.classes, groups)


def with_canaries(images: Images, canaries: Images, rng: torch.Generator) -> tuple[Images, Tensor]:
    """Insert each canary with probability 1/2, and shuffle.

    Args:
        images: the ordinary ones; canaries take their dtype.
        canaries: m images of the same format and classes.
        rng: source of the coins, which neither the mechanism nor `canary_scores` may know.

    Returns:
        The images, in random order, and bool ``[m]``: which canaries are among them.
    """
    inserted = torch.rand(len(canaries), generator=rng) < 0.5
    chosen = canaries.take(inserted)
    pixels = chosen.pixels if images.pixels.dtype == torch.uint8 else chosen.floats()
    groups = None
    if images.groups is not None and chosen.groups is not None:
        groups = torch.cat([images.groups, chosen.groups])
    labels = torch.cat([images.labels, chosen.labels])
    every = Images(torch.cat([images.pixels, pixels]), labels, images.classes, groups)
    return every.take(torch.randperm(len(every), generator=rng)), inserted


def canary_scores(seen: Images, canaries: Images, known: Images, rng: torch.Generator) -> Tensor:
    """Score what distilled images say about each canary: float64 ``[m]``, higher means "used".

    The attacker embeds all images with random networks of its own. In each class it takes the mean
    of the distilled images, less that of the ordinary ones: differential privacy must hold against
    those who know all other records. What is left points to the canaries that were used. Their
    common direction is removed, since it tells how many, not which; the score of a canary is the
    inner product with its embedding less the mean of its class's canaries.

    The form was fixed by an experiment with distribution matching on Fashion-MNIST (100 ordinary
    images, 20 canaries and 10 distilled images per class; mean AUC of 3 runs): 0.79 as it is; 0.71
    with the common direction left in; 0.50 without ordinary images; 0.60 in pixels, 0.74 with both;
    0.53 by the closest distilled image. Whitening, the inverse of the canaries' Gram matrix and a
    bonus for copies gained nothing.

    Args:
        seen: what the client sent; any number of each class. A class without any tells nothing.
        canaries: all m, used or not.
        known: the client's other images. A class without any is compared with all of them.
        rng: source of the networks.
    """
    nets = RandomConv(int(torch.randint(2**31, (1,), generator=rng)), NETS, WIDTH)
    z, distilled, ordinary = (_embed(nets, images) for images in (canaries, seen, known))
    scores = torch.zeros(len(canaries), dtype=torch.float64)
    for c in sorted(set(canaries.labels.tolist()) & set(seen.labels.tolist())):
        rows, here = canaries.labels == c, known.labels == c
        middle = _mean(z[rows])
        base = _mean(ordinary[here] if bool(here.any()) else ordinary)
        moved, common = _mean(distilled[seen.labels == c]) - base, middle - base
        moved = moved - common * (moved @ common) / (common @ common).clamp(min=1e-12)
        scores[rows] = (z[rows] - middle) @ moved
    return scores


def _embed(nets: RandomConv, images: Images) -> Tensor:
    """Return float64 ``[n, dim]`` of norm 1."""
    parts = [nets.rows(x).flatten(1).to(torch.float64) for x, _ in images.batches()]
    return torch.cat([torch.empty(0, nets.dim, dtype=torch.float64), *parts])


def _mean(z: Tensor) -> Tensor:
    return z.sum(0) / max(1, len(z))


def audit_gists(
    gist_of: Callable[[Images], Tensors],
    images: Images,
    m: int,
    delta: float,
    rng: torch.Generator,
) -> OneRun:
    """Let a client distil its images with canaries among them, once, and judge what it sends.

    Args:
        gist_of: the client's half of one pool round, from images to the gist, as
            `fedgist.exchange.gist.answer` does it. It must draw from another generator than
            ``rng``, and take up to ``m`` images more than the client has (`Task.max_images`).
            Read are ``pixels`` (uint8 ``[n, c, h, w]``, of any size) and ``labels`` (int64
            ``[n]``); without labels, as many images of each class, in the order of classes.
        images: the client's own.
        m: how many canaries. A large share of the images makes the audit sharper, up to where
            canaries crowd each other out.
        delta: δ of the claim.
        rng: source of canaries, coins and the attacker's networks.

    Raises:
        ConfigError: m or delta is out of its range.
        DataError: the gist holds no images of known classes.
    """
    made = canaries(images, m, rng)
    every, inserted = with_canaries(images, made, rng)
    seen = _distilled(gist_of(every), images.classes)
    return judge(canary_scores(seen, made, images, rng), inserted, delta)


def _distilled(gist: Tensors, classes: tuple[str, ...]) -> Images:
    if "pixels" not in gist or ("labels" not in gist and len(gist["pixels"]) % len(classes)):
        got = {name: list(tensor.shape) for name, tensor in gist.items()}
        raise DataError(
            "a gist to audit must hold 'pixels', with 'labels' or as many of each of "
            f"{len(classes)} classes. Got {got}"
        )
    pixels = gist["pixels"]
    in_order = torch.arange(len(classes)).repeat_interleave(len(pixels) // len(classes))
    return Images(pixels, gist.get("labels", in_order), classes)


def row(result: OneRun, claim_epsilon: float, what: str) -> dict[str, Any]:
    """Return the figures as a row of plain JSON values, like those of `membership.table`.

    Args:
        result: of `judge`.
        claim_epsilon: ε that is claimed, inf when nothing is.
        what: what the attacker sees, as in "the distilled images of one client".
    """
    refuted = "; the claim is refuted" if result.epsilon_low > claim_epsilon else ""
    claim = f"{claim_epsilon:.4g}" if math.isfinite(claim_epsilon) else "none"
    empty = dict.fromkeys(f"{kind}tpr_at_{100 * a:g}pct" for kind in ("", "cap_") for a in FPRS)
    return {
        "attack": f"one-run audit, {result.canaries} canaries",
        "sees": what,
        "note": f"95 % lower bound on ε: {result.epsilon_low:.2f} (claim: {claim}){refuted}",
        "auc": result.auc,
        "low": result.low,
        "high": result.high,
        "epsilon": claim_epsilon,
        "epsilon_low": result.epsilon_low,
        "delta": result.delta,
        "guesses": result.guesses,
        "right": result.right,
        "inserted": result.inserted,
        "records": result.canaries,
        "roc": result.roc.record(),
        "cap": None,
        **empty,
    }
