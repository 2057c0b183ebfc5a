"""How a network is trained, as data."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

from fedgist.errors import ConfigError, did_you_mean
from fedgist.train.augment import POLICIES
from fedgist.train.models import MODELS

__all__ = ["Recipe"]

Optimiser = Literal["adamw", "sgd"]
Schedule = Literal["cosine", "step", "constant"]
Choose = Literal["last", "holdout"]


@dataclass(frozen=True)
class Recipe:
    """How a network is trained. The defaults suit about 10,000 grey 28x28 images on two cores.

    Attributes:
        model: ``convnet3``, ``resnet18`` or ``mlp``.
        width: of the model, see `build_model`.
        steps: number of updates; 0 returns the start.
        batch: images per update; a smaller set is used whole.
        lr: highest learning rate.
        optimiser: ``adamw`` (decoupled weight decay) or ``sgd`` (Nesterov momentum).
        momentum: of ``sgd``.
        weight_decay: on all parameters.
        schedule: after the warm-up, ``cosine`` to 0, ``step`` (times 0.2 after 30, 60 and 90 % of
            the steps) or ``constant``.
        warmup: share of the steps in which the learning rate grows linearly.
        augment: policy, see `augment`.
        flip: whether images may be mirrored; False for digits and letters.
        label_smoothing: weight of the uniform distribution in the targets.
        choose: ``last`` trains on every image and keeps the last step. ``holdout`` trains without
            a stratified part of them and keeps, of ten checkpoints, the most accurate on it.
        holdout: share held out by ``holdout``. A set too small to spare one image spares none.
    """

    __pydantic_config__: ClassVar[Any] = {"extra": "forbid"}

    model: str = "convnet3"
    width: int = 32
    steps: int = 400
    batch: int = 64
    lr: float = 1e-2
    optimiser: Optimiser = "adamw"
    momentum: float = 0.9
    weight_decay: float = 1e-2
    schedule: Schedule = "cosine"
    warmup: float = 0.1
    augment: str = "none"
    flip: bool = True
    label_smoothing: float = 0.1
    choose: Choose = "last"
    holdout: float = 0.1

    def __post_init__(self) -> None:
        for name, known in (
            ("model", tuple(MODELS)),
            ("optimiser", get_args(Optimiser)),
            ("schedule", get_args(Schedule)),
            ("augment", tuple(POLICIES)),
            ("choose", get_args(Choose)),
        ):
            if (got := getattr(self, name)) not in known:
                hint = did_you_mean(str(got), known)
                raise ConfigError(f"{name} must be one of {', '.join(known)}. Got '{got}'.{hint}")
        for name, low, high in (
            ("width", 1, math.inf),
            ("steps", 0, math.inf),
            ("batch", 1, math.inf),
            ("lr", 0, math.inf),
            ("weight_decay", 0, math.inf),
            ("momentum", 0, 1),
            ("warmup", 0, 1),
            ("label_smoothing", 0, 1),
            ("holdout", 0, 1),
        ):
            got = getattr(self, name)
            if not low <= got < high:
                raise ConfigError(f"{name} must lie in [{low}, {high}). Got {got}")

    def rate(self, step: int) -> float:
        """Return the learning rate of the update number ``step``, counted from 0."""
        warm = self.warmup * self.steps
        if step < warm:
            return self.lr * min(1.0, (step + 1) / warm)
        done = (step - warm) / (self.steps - warm)
        if self.schedule == "cosine":
            return self.lr * (1 + math.cos(math.pi * done)) / 2
        return self.lr * 0.2 ** sum(done >= t for t in (0.3, 0.6, 0.9) if self.schedule == "step")
