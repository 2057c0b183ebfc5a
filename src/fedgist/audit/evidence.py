"""What a holder can find out about its own gist, with its own images at hand, before it leaves.

1. The noise that is really in it: the gist less the exact sums of the same images, over the planned
   deviation. Less than planned is a broken mechanism; more means other images.
2. How many images the clip has cut: what is learned from a site whose images are mostly cut is
   bent, and the noise was chosen for a length that few have.
3. How exposed single images are: the likelihood-ratio attack on each (`audit.membership`), whose
   strength does not depend on the other images. The most exposed ones are named.
4. Which classes are so small that the noise drowns them, and would gain nothing from being sent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import torch
from scipy import stats
from torch import Tensor

from fedgist.audit.mechanism import ALPHA, squares
from fedgist.audit.membership import Risk, likelihood_ratio
from fedgist.exchange.gist import Duty
from fedgist.privacy.noise import SeededNoise
from fedgist.privacy.statistics import clip_to_grid, complete
from fedgist.queries import MomentsQuery, Query, blocks_of, prefixed
from fedgist.types import Images, Round, Tensors

__all__ = [
    "clip_and_exposure",
    "faint_classes",
    "level_of",
    "noise_in",
    "share_of",
    "without_noise",
]

LOOKED = 2_000  # images of which codes are looked at, at most
NAMED = 5  # of the most exposed images
Records = list[tuple[Query, Callable[[Tensor], Tensor]]]


def share_of(duty: Duty) -> float:
    """Return the multiplier of the noise in one site's gist by itself; 0 where it has none."""
    privacy = duty.privacy
    if privacy.trust == "central":
        return 0.0
    if privacy.trust == "distributed" and duty.parties > 1:
        return duty.sigma / math.sqrt(duty.parties - privacy.missing)
    return duty.sigma


def without_noise(duty: Duty, rnd: Round, exact: Tensors) -> Tensors:
    """Return exact sums in the form that noised ones have: every block is there."""
    out: Tensors = {}
    for q in rnd.queries:
        blocks = blocks_of(q, exact)
        blocks = complete(q, blocks) if isinstance(q, MomentsQuery) else blocks
        out |= prefixed(q, blocks)
    return out


def noise_in(duty: Duty, rnd: Round, sums: Tensors, exact: Tensors) -> dict[str, dict[str, Any]]:
    """Measure the noise in a site's own sums against the plan.

    Args:
        duty: as planned.
        rnd: the round's declaration.
        sums: int64, as they would leave, before any mask.
        exact: of the same images, without noise.

    Returns:
        Block -> ``numbers``, ``ratio`` (measured over planned deviation) and ``state``: ``small``
        (less than chance allows, wrongly so with probability 0.001 over all blocks), ``as
        planned``, or ``other images`` (more). Empty where the gist should carry none.
    """
    sigma = share_of(duty)
    found: dict[str, tuple[float, int]] = {}
    whole = without_noise(duty, rnd, exact)
    for q in rnd.queries if sigma > 0 else ():
        mine = blocks_of(q, whole)
        found |= squares(q, sigma, {k: v - mine[k] for k, v in blocks_of(q, sums).items()})
    alpha = ALPHA / max(1, len(found))
    out = {}
    for name, (square, n) in found.items():
        low, high = stats.chi2.ppf([alpha, 1 - alpha], n)
        state = "small" if square < low else "other images" if square > high else "as planned"
        out[name] = {"numbers": n, "ratio": math.sqrt(square / n), "state": state}
    return out


def clip_and_exposure(records: Records, sigma: float, images: Images, seed: int) -> dict[str, Any]:
    """Look at the codes of up to 2,000 images: what the clip cuts, and how exposed each is.

    Args:
        records: each query with what it makes of images (``Method.records``).
        sigma: the multiplier of the noise in what the outcome is made from.
        images: the site's own.
        seed: chooses the images, where there are more.

    Returns:
        ``images`` (looked at), ``clip``: a list of ``view``, ``radius`` and ``cut`` (share of
        images), and ``exposure``: None without noise, else AUCs of the best attack on the image of
        ``median`` and of ``worst`` exposure, ``cap`` for any image, and ``named``: numbers (from 1)
        and AUC of the most exposed ones.
    """
    few = torch.arange(len(images))
    if len(images) > LOOKED:
        few = SeededNoise(seed).chosen(torch.full((len(images),), LOOKED / len(images))).nonzero()
        few = few.flatten()[:LOOKED]
    clips, released = [], []
    for query, of in records:
        parts, cut = [], 0
        for x, _ in images.take(few).batches():
            z = of(x)
            cut += int((z.norm(dim=1) > query.clip).sum())
            parts.append(clip_to_grid(z, query.clip, query.levels))
        clips.append({"view": query.name, "radius": query.clip, "cut": cut / max(1, len(few))})
        released.append((query, torch.cat(parts)))
    out: dict[str, Any] = {"images": len(few), "clip": clips, "exposure": None}
    if sigma > 0 and len(few):
        ratio = likelihood_ratio(released, sigma)
        top = ratio.mu.argsort(descending=True)[:NAMED]
        named = [
            {"number": int(few[i]) + 1, "auc": float(torch.special.ndtr(ratio.mu[i] / 2**0.5))}
            for i in top
        ]
        figures: dict[str, Risk] = {"median": ratio.median, "worst": ratio.worst, "cap": ratio.cap}
        out["exposure"] = {k: asdict(v) for k, v in figures.items()} | {"named": named}
    return out


def level_of(query: MomentsQuery, sigma: float) -> float:
    """Return from how many images on the sum of a class's codes is longer than its noise."""
    return sigma * query.scale * math.sqrt(query.dim / query.mean)


def faint_classes(rnd: Round, sigma: float, images: Images, kept: Images) -> list[dict[str, Any]]:
    """Return for each class how many images the site has and whether the noise drowns them.

    Args:
        rnd: the round's declaration.
        sigma: the multiplier of the noise in the sum over all sites.
        images: all of the site's.
        kept: those that are used.

    Returns:
        ``name``, ``held``, ``used``, ``level`` (images from which on a class's mean rises above
        the noise, None where that is not known) and ``faint``.
    """
    levels = [level_of(q, sigma) for q in rnd.queries if isinstance(q, MomentsQuery)]
    level = min(levels) if levels and sigma > 0 else None
    return [
        {
            "name": name,
            "held": held,
            "used": used,
            "level": level,
            "faint": level is not None and 0 < used < level,
        }
        for name, held, used in zip(
            images.classes, images.counts().tolist(), kept.counts().tolist(), strict=True
        )
    ]
