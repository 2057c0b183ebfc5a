"""Several networks as one classifier: the weighted mean of what they say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, cast, get_args

import torch
from torch import Tensor

from fedgist.errors import DataError
from fedgist.train.network import Network
from fedgist.types import BATCH, Tensors

__all__ = ["Ensemble", "Mix", "mixed"]

Mix = Literal["probabilities", "logits"]


def mixed(each: Tensor, shares: Tensor, mix: Mix) -> Tensor:
    """Return scores of the mixture, float32 ``[b, classes]``, differentiable in both.

    Args:
        each: float32 ``[k, b, classes]``, the logits of every network.
        shares: float32 ``[k]``, >= 0, of sum 1.
        mix: ``logits``: Σ w_k f_k. ``probabilities``: log Σ w_k softmax(f_k).
    """
    if mix == "logits":
        return torch.einsum("k,kbc->bc", shares, each)
    # The greatest that counts is taken out: no probability becomes log 0, and the gradient of a
    # share is finite where the share is 0.
    logs = each.log_softmax(2)
    most = logs.masked_fill((shares == 0)[:, None, None], -torch.inf).amax(0).detach()
    return most + torch.einsum("k,kbc->bc", shares, (logs - most).clamp(max=80).exp()).log()


@dataclass(frozen=True, eq=False)
class Ensemble:
    """Networks of one model for one task, and how much each counts; a `Classifier`.

    Attributes:
        members: one or more.
        shares: float32 ``[k]``, >= 0, of sum 1.
        mix: what is averaged, see `mixed`.

    Raises:
        DataError: no member, members that differ, or shares of another form.
    """

    members: tuple[Network, ...]
    shares: Tensor
    mix: Mix = "probabilities"

    def __post_init__(self) -> None:
        if not self.members or any(m.meta() != self.members[0].meta() for m in self.members):
            raise DataError("members of an ensemble must be networks of one model for one task")
        if self.mix not in get_args(Mix):
            raise DataError(f"mix must be one of {', '.join(get_args(Mix))}. Got '{self.mix}'")
        s = self.shares
        if s.dtype != torch.float32 or s.shape != (len(self.members),):
            raise DataError(
                f"shares must be float32 [{len(self.members)}]. Got {s.dtype} {list(s.shape)}"
            )
        if not (bool((s >= 0).all()) and abs(float(s.sum()) - 1) < 1e-3):
            raise DataError(f"shares must be >= 0 and sum to 1. Got {s.tolist()}")

    @property
    def kind(self) -> str:
        """Name of this class of model in a file."""
        return "ensemble"

    def each(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, h, w]`` in [0, 1] to every member's logits ``[k, b, classes]``."""
        return torch.stack([m.logits(x) for m in self.members])

    def logits(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, h, w]`` in [0, 1] to scores ``[b, classes]``; differentiable."""
        return mixed(self.each(x), self.shares, self.mix)

    def predict(self, x: Tensor) -> Tensor:
        """Map float32 ``[b, c, h, w]`` in [0, 1] to float32 log-probabilities ``[b, classes]``."""
        with torch.no_grad():
            return torch.cat([self.logits(part).log_softmax(1) for part in torch.split(x, BATCH)])

    def tensors(self) -> Tensors:
        """Return copies of the parameters of all members, and the shares."""
        out = {f"{i}.{k}": v for i, m in enumerate(self.members) for k, v in m.tensors().items()}
        return out | {"shares": self.shares.clone()}

    def meta(self) -> dict[str, str]:
        """Return what `load` needs beside the tensors."""
        return self.members[0].meta() | {"mix": self.mix}

    @staticmethod
    def load(tensors: Mapping[str, Tensor], meta: Mapping[str, str]) -> Ensemble:
        """Rebuild the ensemble that gave these `tensors` and this `meta`, bit for bit.

        Raises:
            DataError: a tensor or an entry is missing, superfluous or of the wrong form.
            ConfigError: the model is not in the zoo.
        """
        own = dict(tensors)
        shares = own.pop("shares")
        parts: list[Tensors] = [{} for _ in shares]
        for key, value in own.items():
            number, _, name = key.partition(".")
            if not number.isdecimal() or int(number) >= len(parts):
                raise DataError(f"tensors must be of members 0..{len(parts) - 1}. Got '{key}'")
            parts[int(number)][name] = value
        members = tuple(Network.load(part, meta) for part in parts)
        return Ensemble(members, shares.clone(), cast(Mix, meta["mix"]))
