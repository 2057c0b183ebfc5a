from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from fedgist.audit.threshold import loss_threshold
from fedgist.errors import DataError
from fedgist.types import Images, Tensors

CLASSES = ("a", "b", "c")


@dataclass
class Fixed:
    """Scores that stand in the image itself: pixel k of row 0 is 10 times the score of class k."""

    shift: float = 0.0
    kind: str = "fixed"

    def predict(self, x: Tensor) -> Tensor:
        return 10 * x[:, 0, 0, :3] + self.shift

    def tensors(self) -> Tensors:
        return {}

    def meta(self) -> Mapping[str, str]:
        return {}


def some(n: int, margin: float, seed: int) -> Images:
    """Images whose true class stands out by 10 * margin."""
    g = torch.Generator().manual_seed(seed)
    pixels = 0.5 * torch.rand(n, 1, 4, 4, generator=g)
    labels = torch.randint(3, (n,), generator=g)
    pixels[torch.arange(n), 0, 0, labels] += margin
    return Images(pixels, labels, CLASSES)


def test_a_model_that_remembers_is_found_out():
    got = loss_threshold(Fixed(), some(400, 0.5, 0), some(600, 0.0, 1))
    assert got.auc > 0.9 and (got.members, got.others) == (400, 600)


def test_a_model_that_treats_all_alike_tells_nothing():
    got = loss_threshold(Fixed(), some(400, 0.3, 2), some(400, 0.3, 3))
    assert got.low < 0.5 < got.high


def test_scores_are_log_probabilities_of_the_true_class():
    # the same logits shifted, image by image, are the same probabilities
    members, others = some(50, 0.2, 4), some(50, 0.0, 5)
    base = loss_threshold(Fixed(), members, others)
    assert loss_threshold(Fixed(3.0), members, others).auc == pytest.approx(base.auc)
    lifted = members.pixels.clone()
    lifted[:25] += 0.2  # every class alike: raw scores rise, probabilities do not
    moved = loss_threshold(Fixed(), Images(lifted, members.labels, CLASSES), others)
    assert moved.auc == pytest.approx(base.auc, abs=1e-3)
    # the wrong class's log-probability would read otherwise
    wrong = Images(members.pixels, (members.labels + 1) % 3, CLASSES)
    assert loss_threshold(Fixed(), wrong, others).auc < base.auc - 0.1


def test_what_cannot_be_compared_is_refused():
    members = some(5, 0.1, 0)
    other = Images(members.pixels, members.labels, ("a", "b", "d"))
    with pytest.raises(DataError, match="same classes"):
        loss_threshold(Fixed(), members, other)
    with pytest.raises(DataError, match="two or more"):
        loss_threshold(Fixed(), members, some(1, 0.1, 0))
    with pytest.raises(DataError, match="NaN"):
        loss_threshold(Fixed(float("nan")), members, members)
