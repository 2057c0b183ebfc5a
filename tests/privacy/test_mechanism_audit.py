"""Monte-Carlo audit of the release against its own claim, and of broken mechanisms.

What is exercised: `Client.moments` (clip, grid, sums) on two neighbouring data sets, `calibrate`,
`claim_of`, `complete` and `noise_tensors` for every block, as `Client.release` and the exchanges
call them. The many repetitions take `SeededNoise`; one audit runs `Client.release` with the
operating system's noise. Dimension 3 and two classes keep it fast; the law of each number does
not depend on how many there are.

The adversary knows everything but one record. Per block, and jointly, the statistic is the inner
product of the release with the record's own footprint, scaled by the claimed noise; the threshold
(half the claimed distance) is fixed before any draw; error rates are bounded by Clopper-Pearson.
The bound is read as a Gaussian-DP distance μ and compared with the multiplier that the claim
states, because the zCDP conversion leaves about 8 % of slack in ε, which would hide a noise error
of 8 %. The ε that follows must not exceed the claim either.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor

from fedgist.privacy.accounting import epsilon_gaussian
from fedgist.privacy.claim import Claim, Privacy, calibrate, claim_of
from fedgist.privacy.client import Client, open_sensitive
from fedgist.privacy.noise import Noise, SeededNoise, SystemNoise, noise_scales, noise_tensors
from fedgist.privacy.statistics import MomentSums, complete
from fedgist.queries import MomentsQuery
from fedgist.types import Images, Round, Tensors

QUERY = MomentsQuery(1.5, 3, 2, levels=126)  # (2, 3, 6)/7 of the radius is on this grid
CONFIDENCE = 1e-4  # chance of a wrong flag, split over statistics and error rates
CHUNK = 25_000


def data(canary: tuple[float, ...] | None, label: int = 0) -> tuple[Images, Tensor]:
    """Twelve fixed records, and a last one if asked for; codes are looked up by pixel value."""
    rng = torch.Generator().manual_seed(3)
    codes = torch.randn(13, 3, generator=rng, dtype=torch.float64)
    labels = torch.randint(0, 2, (13,), generator=rng)
    n = 12 if canary is None else 13
    if canary is not None:
        codes[12] = torch.tensor(canary, dtype=torch.float64)
        labels[12] = label
    pixels = torch.arange(13, dtype=torch.uint8)[:n, None, None, None].expand(-1, 1, 4, 4)
    return Images(pixels.contiguous(), labels[:n], ("a", "b")), codes


def client_of(world: tuple[Images, Tensor], sigma: float, noise: Noise) -> Client:
    return Client("c", world[0], Round("sum", (QUERY,)), sigma=sigma, noise=noise, max_images=100)


def encoder(codes: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: codes[(x[:, 0, 0, 0] * 255).round().to(torch.int64)]


def exact(world: tuple[Images, Tensor]) -> Tensors:
    client = client_of(world, 1.0, SeededNoise(0))
    return complete(QUERY, open_sensitive(client.moments(encoder(world[1]), QUERY)))


def unclipped(world: tuple[Images, Tensor]) -> Tensors:
    """The same sums of records on the grid whose norm nobody bounded."""
    images, codes = world
    order = torch.argsort(images.labels, stable=True)
    sums = MomentSums(QUERY)
    sums.add((codes[order] * (QUERY.levels / QUERY.clip)).round(), images.labels[order])
    return complete(QUERY, sums.tensors())


@dataclass(frozen=True)
class Mechanism:
    """How sums become a release; the defaults are the real thing, every change is a mutant."""

    sums: Callable[[tuple[Images, Tensor]], Tensors] = exact
    weak: float = 1.0
    releases: int = 1
    noiseless: str = ""
    late_clip: float = math.inf

    def draws(
        self, world: tuple[Images, Tensor], sigma: float, seed: int, n: int
    ) -> Iterator[Tensor]:
        """Yield mean releases as rows, float64 ``[chunk, numbers]``, ``n`` in all."""
        sums, noise = self.sums(world), SeededNoise(seed)
        for start in range(0, n, CHUNK):
            size = min(CHUNK, n - start)
            like = {k: v.expand(size, *v.shape) for k, v in sums.items()}
            total = {k: torch.zeros(v.shape, dtype=torch.float64) for k, v in like.items()}
            for _ in range(self.releases):
                drawn = noise_tensors(QUERY, sigma * self.weak, noise, like)
                for k, v in like.items():
                    noisy = (v if k == self.noiseless else v + drawn[k]).to(torch.float64)
                    total[k] += noisy.clamp(-self.late_clip, self.late_clip) / self.releases
            yield flat(total)


def flat(blocks: Tensors) -> Tensor:
    """Join blocks ``[n, ...]`` to rows ``[n, numbers]``."""
    return torch.cat([blocks[k].flatten(1).to(torch.float64) for k in sorted(blocks)], dim=1)


def looks(claim: Claim, with_it: Tensors, without: Tensors) -> dict[str, Tensor]:
    """Per statistic, its weights ``[numbers]``: the record's effect over the claimed scale²."""
    one = {}
    for block, (plain, off) in noise_scales(QUERY, claim.sigma).items():
        scale = torch.full(with_it[block].shape[-1:], off, dtype=torch.float64)
        scale[: QUERY.dim] = plain
        gap = (with_it[block] - without[block]) / scale
        one[block] = torch.stack([gap / scale, gap * gap])  # weights, and their share of μ²
    out = {}
    for look in (*one, "joint"):
        kept = {b: v if look in (b, "joint") else torch.zeros_like(v) for b, v in one.items()}
        weights, shares = flat(kept)
        if float(shares.sum()) > 0:
            out[look] = weights / shares.sum().sqrt()
    return out


def audit(
    mechanism: Mechanism,
    claim: Claim,
    member: tuple[Images, Tensor],
    other: tuple[Images, Tensor],
    n: int,
) -> float:
    """Return a lower bound on the Gaussian-DP distance μ of releases on the two data sets."""
    with_it, without = exact(member), exact(other)
    named = looks(claim, with_it, without)
    weights = torch.stack(list(named.values()), dim=1)
    base = flat({k: v[None] for k, v in without.items()})
    gap = flat({k: v[None] for k, v in with_it.items()}) - base
    threshold = (gap @ weights).clamp(max=claim.sensitivity / claim.sigma) / 2
    alpha = CONFIDENCE / (2 * len(named))
    errors = torch.zeros(2, len(named), dtype=torch.int64)
    for side, (world, seed) in enumerate(((other, 11), (member, 12))):
        for rows in mechanism.draws(world, claim.sigma, seed, n):
            said = (rows - base) @ weights > threshold
            errors[side] += (said if side == 0 else ~said).sum(0)
    k = errors.double().numpy().clip(max=n - 1)
    fpr, fnr = stats.beta.ppf(1 - alpha, k + 1, n - k)
    return float((stats.norm.isf(fpr) - stats.norm.ppf(fnr)).max())


R = QUERY.clip
ON_THE_BOUND = (R * 2 / 7, R * 3 / 7, R * 6 / 7)
BEYOND = (R * 20 / 7, R * 30 / 7, R * 60 / 7)


def claimed(epsilon: float, adjacency: str = "add-remove") -> Claim:
    plan = [Round("sum", (QUERY,))]
    privacy = Privacy(epsilon=epsilon, adjacency=adjacency)  # type: ignore[arg-type]
    return claim_of(plan, privacy, calibrate(plan, privacy), track="audit")


def draws_for(epsilon: float) -> int:
    return 400_000 if epsilon == 1 else 30_000  # a 10 % error at ε = 1 moves rates by 1 %


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1, 10])
@pytest.mark.parametrize("canary", [ON_THE_BOUND, BEYOND], ids=["on the bound", "beyond it"])
def test_the_release_keeps_its_claim_and_wastes_little(
    epsilon: float, canary: tuple[float, ...]
) -> None:
    claim = claimed(epsilon)
    bound = audit(Mechanism(), claim, data(canary), data(None), draws_for(epsilon))
    mu = claim.sensitivity / claim.sigma
    assert bound <= mu
    assert bound >= 0.85 * mu
    found = epsilon_gaussian(1 / bound, claim.delta)
    assert 0.75 * claim.epsilon <= found <= claim.epsilon  # a conversion that is not tight included


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1, 10])
def test_replacement_keeps_its_claim(epsilon: float) -> None:
    claim = claimed(epsilon, "replace-one")
    cosine = -QUERY.mean / (2 * (QUERY.second + QUERY.pooled))  # of the worst pair of one class
    sine = math.sqrt(1 - cosine**2)
    along, across = ON_THE_BOUND, (R * 3 / 7, -R * 6 / 7, R * 2 / 7)
    worst = tuple(cosine * a + sine * b for a, b in zip(along, across, strict=True))
    bounds = {
        name: audit(Mechanism(), claim, data(ON_THE_BOUND), neighbour, draws_for(epsilon))
        for name, neighbour in (
            ("other class", data(ON_THE_BOUND, 1)),
            ("same class", data(worst)),
        )
    }
    mu = claim.sensitivity / claim.sigma
    assert all(b <= mu for b in bounds.values())
    assert max(bounds, key=bounds.__getitem__) == "same class"
    assert bounds["same class"] >= 0.85 * mu


MUTANTS = {
    "noise 10 % too small": Mechanism(weak=0.9),
    "two releases, each at the full budget": Mechanism(releases=2),
    "counts without noise": Mechanism(noiseless="count"),
    "noise before the clip": Mechanism(sums=unclipped, late_clip=2**22),
}


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1, 10])
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_flagged(name: str, epsilon: float) -> None:
    claim = claimed(epsilon)
    canary = BEYOND if MUTANTS[name].sums is unclipped else ON_THE_BOUND
    n = draws_for(epsilon) if "10 %" in name else 80_000
    bound = audit(MUTANTS[name], claim, data(canary), data(None), n)
    assert bound > claim.sensitivity / claim.sigma, name


@pytest.mark.slow
@pytest.mark.parametrize("epsilon", [1, 10])
def test_a_forgotten_root_two_under_replacement_is_flagged(epsilon: float) -> None:
    """Noise for one record more or less, sold as protection against a changed record."""
    claim = replace(claimed(epsilon), adjacency="replace-one")
    worlds = data(ON_THE_BOUND, 0), data(ON_THE_BOUND, 1)
    assert audit(Mechanism(), claim, *worlds, 80_000) > claim.sensitivity / claim.sigma


@pytest.mark.slow
def test_client_release_with_system_noise_keeps_its_claim() -> None:
    claim, n = claimed(10), 700
    member, other = data(ON_THE_BOUND), data(None)
    without = {k: v[None] for k, v in exact(other).items()}
    weights = looks(claim, exact(member), exact(other))["joint"]
    mu = claim.sensitivity / claim.sigma
    errors = []
    for side, world in enumerate((other, member)):
        clients = (client_of(world, claim.sigma, SystemNoise()) for _ in range(n))
        outs = [c.release(c.moments(encoder(world[1]), QUERY)) for c in clients]
        rows = flat({k: torch.stack([out[k] for out in outs]) for k in without})
        said = (rows - flat(without)) @ weights > mu / 2
        errors.append(int((said if side == 0 else ~said).sum()))
    k = np.array(errors)
    fpr, fnr = stats.beta.ppf(1 - CONFIDENCE / 2, k + 1, n - k)
    assert 0.6 * mu <= stats.norm.isf(fpr) - stats.norm.ppf(fnr) <= mu


def test_the_audit_itself_on_a_few_draws() -> None:
    """The quick form, in every run: the real release passes, a leak of counts does not."""
    claim = claimed(10)
    mu = claim.sensitivity / claim.sigma
    assert 0.7 * mu < audit(Mechanism(), claim, data(ON_THE_BOUND), data(None), 3_000) < mu
    leak = audit(Mechanism(noiseless="count"), claim, data(ON_THE_BOUND), data(None), 3_000)
    assert leak > 2 * mu
