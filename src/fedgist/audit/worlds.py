"""Neighbouring worlds for audits: a canary in or out, clipped and summed by the guard itself.

What is replaced: the encoder, by a table of codes, and the shape of a query, by the few numbers
that a canary of two coordinates touches. The law of a number depends on neither.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedgist.exchange.gist import Duty
from fedgist.privacy.claim import Claim
from fedgist.privacy.client import Client, open_sensitive
from fedgist.privacy.noise import SeededNoise, noise_scales
from fedgist.privacy.statistics import complete
from fedgist.queries import MomentsQuery, Query, SumQuery, prefixed
from fedgist.types import Images, Round, Tensors

__all__ = [
    "BEYOND",
    "Sums",
    "add_noise",
    "claimed_scales",
    "flat",
    "noise_shares",
    "released",
    "row_scale",
    "unrated",
    "worst_worlds",
]

Sums = list[Tensors]  # exact or noised, by round
World = list[tuple[int, int]]  # (1 for the canary, -1 for its worst other; label) of each record

BEYOND = 10.0  # clip radii: how far out the canary lies before the guard clips it
BACKGROUND = 3  # records that both worlds hold besides, where one image is the unit
# directions on which grids of radius 128, 256 and 1024 lose less than 0.3 % of a canary
TURNS = ((3.0, 4.0), (4.0, -3.0), (-3.0, 4.0), (4.0, 3.0))


def worst_worlds(
    duty: Duty, plan: Sequence[Round], claim: Claim
) -> tuple[list[Sums], list[Round], str]:
    """Return the exact sums of the two neighbouring worlds that are furthest apart.

    Args:
        duty: the exchange's.
        plan: rounds with queries.
        claim: its adjacency, unit and records say who is a neighbour.

    Returns:
        The sums without and with the canary; the rounds as they are asked here; the canary, in
        words.
    """
    whole = any(isinstance(q, SumQuery) and q.whole for r in plan for q in r.queries)
    n = 1 if whole else claim.records
    what = f"{n} record{'s' * (n > 1)} of one {claim.unit}"
    pairs: dict[str, tuple[World, World]]
    if claim.adjacency == "add-remove" and not (whole and claim.unit != "client"):
        pairs = {f"{what}, in or out": ([], [(1, 0)] * n)}
    else:
        pairs = {f"{what}, or the worst others of the class": ([(-1, 0)] * n, [(1, 0)] * n)}
        if claim.adjacency == "replace-one" and not whole:
            pairs[f"{what}, or the same of another class"] = ([(1, 1)] * n, [(1, 0)] * n)
    found: tuple[float, list[Sums], list[Round], str] | None = None
    for name, pair in pairs.items():
        classes = 1 + max(label for world in pair for _, label in world)
        asked = [_reduced(r, classes) for r in plan]
        sums = [[_exact(duty, rnd, i, world) for i, rnd in enumerate(asked)] for world in pair]
        gap = (flat(asked, sums[1]) - flat(asked, sums[0])) / claimed_scales(asked, duty.sigma)
        if found is None or float(gap.norm()) > found[0]:
            found = float(gap.norm()), sums, asked, name
    assert found is not None
    return found[1:]


def _exact(duty: Duty, rnd: Round, r: int, world: World) -> Tensors:
    """Let the guard sum one world's records for every query of round ``r``."""
    n, background = len(world), BACKGROUND if duty.privacy.unit == "image" else 0
    labels = torch.tensor([label for _, label in world] + [0] * background, dtype=torch.int64)
    groups = torch.tensor([0] * n + [1 + b for b in range(background)], dtype=torch.int64)
    pixels = torch.arange(n + background, dtype=torch.uint8)[:, None, None, None]
    classes = ("a", "b")[: _classes(rnd)]
    images = Images(pixels.expand(-1, 1, 4, 4).contiguous(), labels, classes, groups)
    client = Client(
        "audit",
        images,
        rnd,
        sigma=duty.sigma,
        noise=SeededNoise(0),  # of samples and releases: neither is asked of it
        contribution=duty.privacy.contribution,
        max_images=max(duty.task.max_images, len(images)),
    )
    out: Tensors = {}
    for j, query in enumerate(rnd.queries):
        codes = _lookup(_codes(query, r * len(rnd.queries) + j, world, background))
        if isinstance(query, MomentsQuery):
            sums = complete(query, open_sensitive(client.moments(codes, query)))
        elif query.whole:
            row = client.row(lambda im, of=codes: of(im.floats()).sum(0), query)  # type: ignore[misc]
            sums = open_sensitive(row)
        else:
            rows = client.sum(lambda x, y, of=codes: {"rows": of(x)}, query)  # type: ignore[misc]
            sums = open_sensitive(rows)
        out |= prefixed(query, sums)
    return out


def _classes(rnd: Round) -> int:
    """Return how many classes the reduced queries of a round speak of."""
    sizes = [
        q.classes if isinstance(q, MomentsQuery) else q.shape[0]
        for q in rnd.queries
        if isinstance(q, MomentsQuery) or q.per_class
    ]
    return max(sizes, default=2)


def _lookup(table: Tensor) -> Callable[[Tensor], Tensor]:
    """Return an encoder that reads an image's row of ``table`` from its first pixel."""
    return lambda x: table[(x[:, 0, 0, 0] * 255).round().long()]


def _codes(query: Query, place: int, world: World, background: int) -> Tensor:
    """Return one code for each record, ``[n, k]``: the canary's, then the common ones."""
    k = query.dim if isinstance(query, MomentsQuery) else query.row
    first = _direction(k, place)
    away = -first
    if isinstance(query, MomentsQuery) and k > 1:
        # the worst other record of the class is not opposite: see `accounting.sensitivity`
        across = torch.stack([-first[1], first[0]])
        square = query.second + query.pooled
        cosine = max(-1.0, -query.mean / (2 * square)) if square else -1.0
        away = cosine * first + math.sqrt(1 - cosine**2) * across
    rows = [first if kind > 0 else away for kind, _ in world]
    common = [0.3 / BEYOND * _direction(k, b + 1) for b in range(background)]
    table = torch.stack([*rows, *common]) if rows or common else torch.zeros(1, k).double()
    return table * query.clip * BEYOND


def _direction(k: int, place: int) -> Tensor:
    """Return a unit vector ``[k]``, another one for queries that stand side by side."""
    if k == 1:
        return torch.tensor([1.0 if place % 2 == 0 else -1.0], dtype=torch.float64)
    return torch.tensor(TURNS[place % 4], dtype=torch.float64) / 5


def _reduced(rnd: Round, classes: int) -> Round:
    """Return the round with queries of the few numbers that a canary touches."""

    def small(query: Query) -> Query:
        if isinstance(query, MomentsQuery):
            return replace(query, dim=min(2, query.dim), classes=classes)
        k = 1 if query.row == 1 else 2
        return replace(query, rates=(), shape=(classes, k) if query.per_class else (k,))

    queries = tuple(small(q) for q in rnd.queries)
    return replace(rnd, reduce="sum", raw=False, sends=(), queries=queries)


def unrated(query: Query) -> Query:
    """Return a query that asks for every record."""
    return replace(query, rates=()) if isinstance(query, SumQuery) else query


def released(duty: Duty, asked: Sequence[Round], sums: Sums, n: int) -> Sums:
    """Release one world's sums ``n`` times, trials along the first axis."""
    many = [{k: v.expand(n, *v.shape) for k, v in blocks.items()} for blocks in sums]
    return [add_noise(duty, rnd, r, x) for r, (rnd, x) in enumerate(zip(asked, many, strict=True))]


def add_noise(duty: Duty, rnd: Round, r: int, sums: Tensors) -> Tensors:
    """Add to exact sums the noise that the exchange adds under each trust in round ``r``."""
    if duty.privacy.trust == "central":
        return duty.noised(rnd, sums, duty.noise(r, "server"))
    shares = noise_shares(duty)
    if shares == 1 and duty.privacy.trust == "local":
        return duty.noised(rnd, sums, duty.noise(r, "client 0"))
    out, zeros = sums, {k: torch.zeros_like(v) for k, v in sums.items()}
    for i in range(shares):
        share = duty.noised(rnd, zeros, duty.noise(r, f"client {i}"), duty.parties)
        out = {k: v + share[k] for k, v in out.items()}
    return out


def noise_shares(duty: Duty) -> int:
    """Return how many noise shares the adversary does not know."""
    shared = duty.privacy.trust == "distributed" and duty.parties > 1
    return duty.parties - duty.privacy.missing if shared else 1


def claimed_scales(asked: Sequence[Round], sigma: float) -> Tensor:
    """Return the planned deviation of every number, ``[1, d]``, laid out as `flat`; or 1."""
    parts = []
    for rnd in asked:
        made: dict[str, Tensor] = {}
        for q in rnd.queries:
            scales = noise_scales(q, sigma)
            for name, shape in q.shapes(noised=True).items():
                row = row_scale(q, scales.get(name, (1.0, 1.0)), shape[-1])
                made |= prefixed(q, {name: row.expand(shape)})
        parts += [made[k].flatten() for k in sorted(made)]
    return torch.cat(parts)[None]


def row_scale(query: Query, scales: tuple[float, float], width: int) -> Tensor:
    """Return the deviations of the numbers of one row of a block, float64 ``[width]``."""
    out = torch.full((width,), scales[1], dtype=torch.float64)
    out[: query.dim if isinstance(query, MomentsQuery) else width] = scales[0]
    return out


def flat(asked: Sequence[Round], sums: Sums) -> Tensor:
    """Join the blocks of all rounds, with or without an axis of trials, to rows ``[n, d]``."""
    parts = []
    for rnd, blocks in zip(asked, sums, strict=True):
        shapes = {
            k: len(shape)
            for q in rnd.queries
            for k, shape in prefixed(q, q.shapes(noised=True)).items()
        }
        for k in sorted(shapes):
            x = blocks[k] if blocks[k].ndim > shapes[k] else blocks[k][None]
            parts.append(x.flatten(1).to(torch.float64))
    return torch.cat(parts, 1)
