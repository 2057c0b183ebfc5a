"""Bicubic down-sampling: the fixed compressor that FedSumUp's learned one is compared with.

"Direct downsampling" of the ablation of the FedSumUp paper. The transform hides nothing but detail:
uploads are thumbnails. Not private: the claim is ε = inf.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedgist.errors import ConfigError
from fedgist.methods._uploads import Transformed
from fedgist.types import Task

__all__ = ["Downsample"]


@dataclass(frozen=True)
class Downsample(Transformed):
    """Thumbnails and labels, once.

    Attributes:
        side: of a thumbnail, in pixels.
    """

    side: int = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.side < 2:
            raise ConfigError(f"method.side must be at least 2. Got {self.side}")

    @property
    def spec(self) -> str:
        """Bicubic down-sampling."""
        return f"bicubic:{self.side}"

    def small_side(self, task: Task) -> int:
        """Return ``side``."""
        return self.side
