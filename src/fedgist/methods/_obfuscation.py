"""What comparisons share that disturb each image by itself, with an ε of their own.

Their random numbers come from the run's torch generator (a Mersenne Twister seeded with at most 63
bits): the probabilities below are those of an ideal generator, and notes say so.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedgist.errors import ConfigError
from fedgist.methods._uploads import Transformed
from fedgist.types import Images

__all__ = ["Obfuscated", "discrete_laplace", "happens"]

BITS = 62  # of a random integer; a probability is a multiple of 2^-62
LARGEST_EPSILON = 1e3  # beyond it the noise of a single byte nears 2^-62
SIMULATED = "noise comes from a statistical generator: that ε is a simulation's, not a release's"


def happens(probability: float, shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """Return independent events, bool of ``shape``; the probability is rounded up to k / 2^62.

    Integers are compared, not floats, and k is at least 1: what is rare stays possible.
    """
    below = min(max(math.ceil(math.ldexp(probability, BITS)), 1), 2**BITS)
    drawn = torch.empty(tuple(shape), dtype=torch.int64).random_(0, 2**BITS, generator=rng)
    return torch.lt(drawn, below)


def discrete_laplace(scale: float, shape: Sequence[int], rng: torch.Generator) -> Tensor:
    """Return int64 noise with P(k) proportional to exp(-|k| / scale).

    It is the difference of two geometric numbers with ratio q = exp(-1 / scale). The binary digits
    of such a number are independent, since q^g is the product of q^(2^j) over the digits j that are
    1: digit j is 1 with probability q^(2^j) / (1 + q^(2^j)). Digits less likely than 2^-62 are 0.
    """
    out = torch.zeros(tuple(shape), dtype=torch.int64)
    for sign in (1, -1):
        j = 0
        while (exponent := 2**j / scale) < BITS * math.log(2):
            odds = math.exp(-exponent)
            out += sign * happens(odds / (1 + odds), shape, rng).to(torch.int64) * 2**j
            j += 1
    return out


@dataclass(frozen=True)
class Obfuscated(Transformed):
    """Each image disturbed by itself.

    Attributes:
        epsilon: of the disturbance; what it holds for is in ``notes``. It is not the claim's: that
            is of whole images and their labels.
    """

    epsilon: float = 10.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.epsilon <= LARGEST_EPSILON:
            raise ConfigError(
                f"method.epsilon must lie in (0, {LARGEST_EPSILON:g}]. Got {self.epsilon}"
            )

    @property
    def notes(self) -> tuple[str, ...]:
        """Whose ε it is, and that its noise is a simulation's."""
        return (*super().notes, SIMULATED)

    @property
    def random(self) -> bool:
        """Its noise is drawn anew whenever an image is sent."""
        return True

    def used(self, images: Images) -> Images:
        """Any image may be among those sent."""
        return images

    def picked(self, images: Images, rng: torch.Generator) -> Images:
        """Return each image with probability ``share``, whatever it shows.

        A choice by pixels would tell something about them that no noise covers.
        """
        if self.share >= 1:
            return images
        return images.take(happens(self.share, (len(images),), rng))
