"""Membership inference by the loss threshold, on the classifier that a run ends with.

Yeom, Giacomelli, Fredrikson and Jha, "Privacy Risk in Machine Learning: Analyzing the Connection
to Overfitting", CSF 2018: an image is guessed "used" when the model's loss on it is low. It needs
the model and the label only. It is a weak attack, a lower bound on what leaks: attacks with shadow
models (LiRA, Carlini et al. 2022) find more, most of all at low false-positive rates.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fedgist.audit.membership import Measured, measure
from fedgist.errors import DataError
from fedgist.types import Classifier, Images

__all__ = ["loss_threshold"]


def loss_threshold(classifier: Classifier, members: Images, others: Images) -> Measured:
    """Guess membership from the log-probability of the true class.

    Args:
        classifier: what the attacker holds.
        members: images that it was trained on, two or more.
        others: images of the same distribution that it was not trained on, two or more.

    Raises:
        DataError: too few images, other classes, or scores that are not numbers.
    """
    if members.classes != others.classes:
        raise DataError(
            f"used and unused images must have the same classes. Got {list(members.classes)} and "
            f"{list(others.classes)}"
        )
    return measure(_scores(classifier, members), _scores(classifier, others))


def _scores(classifier: Classifier, images: Images) -> Tensor:
    """Return the negated cross-entropy losses, float64 ``[n]``."""
    parts = [torch.empty(0, dtype=torch.float64)]
    for x, y in images.batches():
        # in float64, where a loss near 0 still has an order
        log_p = classifier.predict(x).to(torch.float64).log_softmax(1)
        parts.append(log_p.gather(1, y[:, None])[:, 0])
    scores = torch.cat(parts)
    if bool(scores.isnan().any()):
        raise DataError(
            "scores of the classifier must be numbers. Got NaN: train it with a smaller lr"
        )
    return scores
