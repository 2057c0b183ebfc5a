"""Logistic regression in rounds: it improves on its start, and pays for every round."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from federation_tools import run_locally
from fedgist.errors import ConfigError
from fedgist.methods.logistic import LogisticRegression
from fedgist.privacy.accounting import plan_multiplier
from fedgist.privacy.claim import Privacy

SMALL = LogisticRegression(features="scattering:32", steps=4)


def fit(method, task, parts, epsilon=math.inf):
    outcome, exchange = run_locally(method, task, parts, Privacy(epsilon=epsilon))
    return outcome.classifiers["logistic"], exchange


def loss(classifier, images):
    return float(F.nll_loss(classifier.predict(images.floats()), images.labels))


def test_rounds_share_one_budget(task):
    for method in (SMALL, replace(SMALL, steps=1, moments=0.2)):
        assert plan_multiplier(method.plan(task), "add-remove") == pytest.approx(1.0)
        assert len(method.plan(task)) == 1 + method.steps


def test_more_rounds_lower_the_loss(task, images):
    labels = torch.where(torch.arange(60) % 4 == 0, (images.labels + 1) % 3, images.labels)
    images = replace(images, labels=labels)  # classes that overlap
    losses = [loss(fit(replace(SMALL, steps=s), task, [images])[0], images) for s in (1, 4, 12)]
    assert losses[0] > losses[1] > losses[2]


def test_the_split_changes_nothing_that_matters(task, images):
    parts = [images.take(torch.arange(60) % 3 == i) for i in range(3)]
    a, b = (fit(SMALL, task, p)[0].tensors() for p in ([images], parts))
    for k in a:
        assert torch.allclose(a[k], b[k], atol=1e-9), k


def test_images_are_encoded_once(task, images, monkeypatch):
    calls = []
    codes = type(SMALL.space).codes
    monkeypatch.setattr(
        type(SMALL.space), "codes", lambda self, x: (calls.append(len(x)), codes(self, x))[1]
    )
    _, exchange = fit(SMALL, task, [images])
    assert calls.count(60) == 1
    assert len(exchange.memory[0]) == 2  # the batch and the blank probe


def test_absent_classes_are_never_predicted(task, images):
    two = images.take(images.labels < 2)
    classifier, _ = fit(SMALL, task, [two], epsilon=10)
    assert int(classifier.predict(images.floats()).argmax(1).max()) <= 2
    exact, _ = fit(SMALL, task, [two])
    assert int(exact.predict(images.floats()).argmax(1).max()) == 1


@pytest.mark.parametrize("change", [{"steps": 0}, {"moments": 1.0}, {"clip": 0.0}])
def test_bad_options_are_one_clear_line(change):
    with pytest.raises(ConfigError, match="method\\."):
        replace(SMALL, **change)
