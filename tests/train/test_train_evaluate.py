from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from fedgist.errors import DataError
from fedgist.train import evaluate
from fedgist.types import Images


@dataclass(frozen=True)
class Table:
    """Looks the scores up by the first pixel."""

    scores: torch.Tensor
    kind: str = "table"

    def predict(self, x):
        return self.scores[(x[:, 0, 0, 0] * 1000).round().long()]

    def tensors(self):
        return {}

    def meta(self):
        return {}


def numbered(labels, classes):
    pixels = torch.zeros(len(labels), 1, 2, 2)
    pixels[:, 0, 0, 0] = torch.arange(len(labels)) / 1000
    return Images(pixels, labels, classes)


def test_agrees_with_numpy(rng):
    n, classes = 600, ("a", "b", "c", "d")
    labels = torch.randint(0, 3, (n,), generator=rng(0))  # class d is never seen
    scores = torch.randn(n, 4, generator=rng(1)) * 3
    score = evaluate(Table(scores), numbered(labels, classes))

    y, s = labels.numpy(), scores.double().numpy()
    p = np.exp(s) / np.exp(s).sum(1, keepdims=True)
    guess, sure = p.argmax(1), p.max(1)
    confusion = np.zeros((4, 4), dtype=np.int64)
    np.add.at(confusion, (y, guess), 1)
    ece = 0.0
    for low in range(15):
        cell = (sure > low / 15) & (sure <= (low + 1) / 15)
        if cell.any():
            ece += cell.mean() * abs((guess == y)[cell].mean() - sure[cell].mean())

    assert score.n == n
    assert score.accuracy == pytest.approx((guess == y).mean())
    assert score.confusion.dtype == torch.int64
    assert np.array_equal(score.confusion.numpy(), confusion)
    assert score.per_class[3] is None
    for c in range(3):
        assert score.per_class[c] == pytest.approx((guess == y)[y == c].mean())
    assert score.nll == pytest.approx(-np.log(p[np.arange(n), y]).mean())
    assert score.ece == pytest.approx(ece)


def test_perfect_and_ruled_out(rng):
    labels = torch.tensor([0, 1, 1])
    sure = torch.where(torch.eye(2)[labels] > 0, 0.0, -torch.inf)
    right = evaluate(Table(sure), numbered(labels, ("a", "b")))
    assert (right.accuracy, right.nll, right.ece) == (1, 0, 0)
    wrong = evaluate(Table(sure), numbered(1 - labels, ("a", "b")))
    assert (wrong.accuracy, wrong.ece) == (0, 1)
    assert wrong.nll == pytest.approx(12 * np.log(10))


def test_transform_is_applied_to_what_the_classifier_sees(images, network):
    plain = evaluate(network, images)
    same = evaluate(network, images, lambda x: x)
    dark = evaluate(network, images, torch.zeros_like)
    assert torch.equal(plain.confusion, same.confusion)
    assert (dark.confusion.sum(0) > 0).sum() == 1


@pytest.mark.parametrize(
    ("scores", "labels", "message"),
    [
        (torch.zeros(0, 2), torch.zeros(0, dtype=torch.int64), "at least one image. Got 0"),
        (torch.zeros(2, 3), torch.tensor([0, 1]), r"scores of classifier 'table' must be \[2, 2\]"),
        (torch.tensor([[0.0, torch.nan]]), torch.tensor([0]), "without NaN. Got .* with 1 NaN"),
    ],
)
def test_bad_input(scores, labels, message):
    with pytest.raises(DataError, match=message):
        evaluate(Table(scores), numbered(labels, ("a", "b")))
