"""DeepFixCX: pooled magnitudes of a wavelet packet (Gaudio et al., WIREs DMKD 2023).

A packet of J levels splits an image into 4^J sub-bands; each is divided into P x P patches, and of
a patch only the mean magnitude of its coefficients is kept: signs and places within a patch are
lost. Here filters are Haar's, and the pooled sub-bands are sent, and shown to the network, as the
tiles of one image: see `fedgist.compress.wavelet.pooled_packet`. The paper also maps them back to
the image's size through the inverse packet, which adds nothing to what is sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fedgist.compress.wavelet import grid_side
from fedgist.errors import ConfigError
from fedgist.methods._uploads import STUDENT, Transformed
from fedgist.train import Recipe
from fedgist.types import Task

__all__ = ["DeepFixCX"]

UNMIRRORED = replace(STUDENT, augment="none")


@dataclass(frozen=True)
class DeepFixCX(Transformed):
    """Pooled sub-bands and labels, once.

    Attributes:
        recipe: without mirroring by default: tiles mirrored as one image are not those of the
            mirrored image.
        levels: J.
        patches: P, in a row of a sub-band.
    """

    recipe: Recipe = UNMIRRORED
    levels: int = 2
    patches: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("levels", "patches"):
            if getattr(self, name) < 1:
                raise ConfigError(f"method.{name} must be at least 1. Got {getattr(self, name)}")

    @property
    def spec(self) -> str:
        """Pooled magnitudes of a Haar packet."""
        return f"wavelet:{self.levels}:{self.patches}"

    @property
    def statement(self) -> str:
        """None."""
        return (
            "DeepFixCX: signs and places of wavelet coefficients are dropped and no noise is "
            "added: nothing is promised about an image that is sent"
        )

    def small_side(self, task: Task) -> int:
        """Return 2^J P.

        Raises:
            ConfigError: larger than an image.
        """
        return grid_side(task.size, self.levels, self.patches)
