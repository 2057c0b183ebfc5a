"""How far synthetic images are from real ones, in the features of a frozen public encoder.

- Fréchet distance of two Gaussians (Dowson and Landau, Journal of Multivariate Analysis 12(3),
  1982): the formula of FID (Heusel et al., NeurIPS 2017, https://arxiv.org/abs/1706.08500). The
  features are not Inception's, so it is no FID and compares with none.
- KID (Bińkowski et al., ICLR 2018, https://arxiv.org/abs/1801.01401, section 3): the unbiased
  estimate of the squared MMD with the kernel (x·y/d + 1)³.
- Density and coverage (Naeem et al., ICML 2020, https://arxiv.org/abs/2002.09797, equations 4, 5).

The Fréchet distance of samples is biased upwards, and the more so the fewer they are: it is taken
only of as many dimensions as there are tenths of images, and beside it, as beside all others,
stands its floor: what two disjoint halves of the real images show at the same number.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.encoders import Encoder
from fedgist.errors import DataError
from fedgist.types import Images

__all__ = ["Distances", "compare", "density_coverage", "frechet", "kid", "public_features", "room"]

NEIGHBOURS = 5
PER_DIMENSION = 10  # images behind every dimension of a covariance
FEWEST_DIMENSIONS = 5  # fewer say too little of an image to be called a distance
BLOCKS = 10  # of KID, more when they would hold more than
BLOCK = 1000  # images
SPLITS = 5  # random halvings that are averaged
MOST = 2000  # images of a side: neighbours need all pairs


@dataclass(frozen=True)
class Distances:
    """Distances of synthetic from real images, each with its floor.

    Attributes:
        n: images of either side behind Fréchet distance, density and coverage.
        dimensions: leading public directions behind the Fréchet distance; 0 where it is None.
        frechet: squared distance, in mean public variances of a direction, >= 0; None where there
            are too few images.
        frechet_floor: of two halves of the real images.
        kid: unbiased, so it may be negative; 0 for equal distributions. None below 20 images.
        kid_error: its standard error over blocks of images.
        kid_floor, kid_floor_error: of two halves of the real images.
        density: >= 0, 1 for equal distributions: how densely real images surround synthetic ones.
        coverage: share of the real images with a synthetic one in their neighbourhood.
        density_floor, coverage_floor: of two halves of the real images (the best to hope for).
    """

    n: int
    dimensions: int
    frechet: float | None
    frechet_floor: float | None
    kid: float | None
    kid_error: float | None
    kid_floor: float | None
    kid_floor_error: float | None
    density: float | None
    coverage: float | None
    density_floor: float | None
    coverage_floor: float | None


def public_features(encoder: Encoder, images: Images) -> Tensor:
    """Encode images: float64 ``[n, d]``, leading public directions first.

    Centred and scaled by public statistics alone (mean public variance of a direction: 1), so that
    neither side of a comparison sets the scale.
    """
    public = encoder.public
    order = public.values.argsort(descending=True, stable=True)
    turn = public.vectors[:, order] / public.values.mean().sqrt()
    with torch.no_grad():
        parts = [(encoder.encode_task(x) - public.mean) @ turn for x, _ in images.batches()]
    return torch.cat(parts) if parts else torch.empty(0, encoder.dim, dtype=torch.float64)


def room(real: int, synthetic: int, dimension: int) -> int:
    """Return how many dimensions a Fréchet distance may have (0: too few images).

    Args:
        real: number of real images, of which either side of the floor gets half.
        synthetic: number of synthetic images.
        dimension: of the features.
    """
    k = min(dimension, min(real // 2, synthetic, MOST) // PER_DIMENSION)
    return k if k >= min(FEWEST_DIMENSIONS, dimension) else 0


def compare(
    real: Tensor, synthetic: Tensor, rng: torch.Generator, dimensions: int | None = None
) -> Distances:
    """Measure all distances between two sets of features, and their floors.

    Args:
        real: float64 ``[n, d]``, leading directions first, as `public_features` gives them.
        synthetic: float64 ``[m, d]``.
        rng: source of the halves and of the images drawn.
        dimensions: of the Fréchet distance; None: all that `room` allows, which is the most.

    Raises:
        DataError: features that are not ``[n, d]`` and ``[m, d]``, or not finite.
    """
    _check(real, synthetic)
    n = min(len(real) // 2, len(synthetic), MOST)
    k = room(len(real), len(synthetic), real.shape[1])
    k = k if dimensions is None else min(k, dimensions)
    at, floor = _at_one_size(real, synthetic, n, k, rng)
    value, error = kid(real, synthetic, rng)
    shuffled, half = torch.randperm(len(real), generator=rng), (len(real) + 1) // 2
    least, least_error = kid(real[shuffled[:half]], real[shuffled[half:]], rng)
    return Distances(
        n=n,
        dimensions=k,
        frechet=at[0],
        frechet_floor=floor[0],
        kid=value,
        kid_error=error,
        kid_floor=least,
        kid_floor_error=least_error,
        density=at[1],
        coverage=at[2],
        density_floor=floor[1],
        coverage_floor=floor[2],
    )


def _at_one_size(
    real: Tensor, synthetic: Tensor, n: int, k: int, rng: torch.Generator
) -> list[list[float | None]]:
    """Return (Fréchet distance, density, coverage) of n synthetic and of n real images.

    Both are set against the same n real images; averaged over random halvings.
    """
    if n <= NEIGHBOURS:
        return [[None] * 3] * 2
    sums = torch.zeros(2, 3, dtype=torch.float64)
    for _ in range(SPLITS):
        shuffled = torch.randperm(len(real), generator=rng)
        half = real[shuffled[:n]]
        drawn = synthetic[torch.randperm(len(synthetic), generator=rng)[:n]]
        for row, side in zip(sums, (drawn, real[shuffled[n : 2 * n]]), strict=True):
            far = frechet(half[:, :k], side[:, :k]) if k else math.nan
            row += torch.tensor([far, *density_coverage(half, side)], dtype=torch.float64)
    means = (sums / SPLITS).tolist()
    return [[None if math.isnan(v) else v for v in row] for row in means]


def frechet(a: Tensor, b: Tensor) -> float:
    """Return ‖μ_a - μ_b‖² + tr(Σ_a + Σ_b - 2 (Σ_a^½ Σ_b Σ_a^½)^½) of two samples.

    Args:
        a: float64 ``[n, d]``, n >= 2; covariances have the divisor n - 1.
        b: float64 ``[m, d]``, m >= 2.

    Raises:
        DataError: other shapes, or features that are not finite.
    """
    _check(a, b)
    if min(len(a), len(b)) < 2:
        raise DataError(f"a covariance needs at least 2 images. Got {len(a)} and {len(b)}")
    one, other = (torch.cov(x.T).view(x.shape[1], -1) for x in (a, b))
    values, vectors = torch.linalg.eigh(one)
    root = (vectors * values.clamp(min=0).sqrt()) @ vectors.T
    cross = torch.linalg.eigvalsh(root @ other @ root).clamp(min=0).sqrt().sum()
    gap = (a.mean(0) - b.mean(0)).square().sum()
    return max(0.0, float(gap + one.trace() + other.trace() - 2 * cross))


def kid(a: Tensor, b: Tensor, rng: torch.Generator) -> tuple[float | None, float | None]:
    """Return the mean of unbiased squared MMDs of disjoint blocks, and its standard error.

    Blocks share no image, so their spread is an honest error. Of the larger set as many images are
    used as the smaller has. (None, None) where a block would hold fewer than two.

    Args:
        a: float64 ``[n, d]``.
        b: float64 ``[m, d]``.
        rng: source of the order.
    """
    n = min(len(a), len(b))
    blocks = max(BLOCKS, n // BLOCK)
    size = n // blocks
    if size < 2:
        return None, None
    x, y = (
        s[torch.randperm(len(s), generator=rng)[: blocks * size]].view(blocks, size, -1)
        for s in (a, b)
    )
    found = torch.stack([_mmd(p, q) for p, q in zip(x, y, strict=True)])
    return float(found.mean()), float(found.std() / math.sqrt(blocks))


def _mmd(x: Tensor, y: Tensor) -> Tensor:
    """Return the unbiased squared MMD: no image is compared with itself."""
    n = len(x)

    def kernel(p: Tensor, q: Tensor) -> Tensor:
        return (p @ q.T / p.shape[1] + 1) ** 3

    within = sum(k.sum() - k.diagonal().sum() for k in (kernel(x, x), kernel(y, y)))
    return within / (n * (n - 1)) - 2 * kernel(x, y).mean()


def density_coverage(real: Tensor, other: Tensor, k: int = NEIGHBOURS) -> tuple[float, float]:
    """Return density and coverage of ``other`` with respect to ``real``.

    The neighbourhood of a real image reaches to its k-th nearest other real image.

    Args:
        real: float64 ``[n, d]``, n > k.
        other: float64 ``[m, d]``.
        k: number of neighbours.

    Raises:
        DataError: other shapes, or too few real images.
    """
    _check(real, other)
    if len(real) <= k:
        raise DataError(f"neighbourhoods need more than {k} real images. Got {len(real)}")
    radius = torch.cdist(real, real).fill_diagonal_(-1).kthvalue(k + 1, dim=1).values
    inside = torch.cdist(real, other) <= radius[:, None]
    density = float(inside.sum()) / (k * len(other))
    return density, float(inside.any(1).double().mean())


def _check(a: Tensor, b: Tensor) -> None:
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or not min(len(a), len(b)):
        raise DataError(
            f"features must be [n, d] and [m, d], n and m > 0. Got {list(a.shape)} and "
            f"{list(b.shape)}"
        )
    if not bool(a.isfinite().all() and b.isfinite().all()):
        raise DataError("features must be finite. Got NaN or Inf")
