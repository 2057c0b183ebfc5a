"""Which views FedKT-CSD sends, how they share the budget, and what the server makes of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch

from federation_tools import run_locally
from fedgist.encoders import load_encoder
from fedgist.errors import ConfigError, EncoderError
from fedgist.exchange.local import LocalExchange
from fedgist.experiment import expected_signal
from fedgist.heads.linear import CodeClassifier, CodeSpace
from fedgist.heads.match import Matching
from fedgist.methods._fedkt_heads import _ranked
from fedgist.methods.fedkt_csd import FedKTCSD
from fedgist.privacy.accounting import plan_multiplier
from fedgist.privacy.claim import Privacy
from fedgist.queries import MomentsQuery, SumQuery
from fedgist.run import plan_of
from fedgist.train import Recipe

SMALL = FedKTCSD(
    features="scattering:32",
    heads=("lda", "qda", "decode", "match"),
    nets=2,
    net_width=4,
    synthetic_size=30,
    matched=3,
    matching=Matching(steps=2),
    recipe=Recipe(model="mlp", width=8, steps=3, batch=8),
)


def outcome_of(method, task, images, epsilon=math.inf):
    return run_locally(method, task, [images], Privacy(epsilon=epsilon))[0]


@pytest.mark.parametrize(
    ("heads", "views"),
    [
        (("lda",), ("features",)),
        (("ridge", "lda"), ("features",)),
        (("qda",), ("codes",)),
        (("decode",), ("codes",)),
        (("match",), ("codes", "match")),
        (("lda", "decode"), ("codes", "features")),
        (("decode", "match", "lda"), ("codes", "features", "match")),
    ],
)
def test_only_what_the_heads_need_is_sent(heads, views):
    assert replace(SMALL, heads=heads).views == views


def test_without_features_every_head_reads_the_codec():
    for method in (replace(SMALL, features=""), replace(SMALL, parity="paper", heads=("lda",))):
        assert "features" not in method.views
    assert replace(SMALL, features="", heads=("lda",)).views == ("codes",)


def test_a_teacher_needs_the_features():
    assert replace(SMALL, heads=("decode",), teacher="soft").views == ("codes", "features")


def test_views_share_one_budget(task):
    for heads in (("lda",), ("lda", "decode"), ("lda", "decode", "match")):
        for budget in ((0.5, 0.5, 0.5), (1.0, 2.0, 5.0)):
            method = replace(SMALL, heads=heads, budget=budget)
            plan = method.plan(task)
            assert plan_multiplier(plan, "add-remove") == pytest.approx(1.0)
            shares = [1 / q.scale**2 for q in plan[0].queries]
            asked = [budget[("codes", "features", "match").index(v)] for v in method.views]
            for share, want in zip(shares, asked, strict=True):
                assert share == pytest.approx(want / sum(asked))


def test_a_single_view_keeps_plain_block_names(task):
    (query,) = replace(SMALL, heads=("lda",)).plan(task)[0].queries
    assert (query.name, query.scale) == ("", 1.0)
    names = [q.name for q in SMALL.plan(task)[0].queries]
    assert names == ["codes", "features", "match"]


def test_the_bytes_are_known_in_advance(task):
    privacy = Privacy(epsilon=3)
    several = plan_of(SMALL, task, privacy).bytes_up
    single = plan_of(replace(SMALL, heads=("lda",)), task, privacy).bytes_up
    assert several is not None and single is not None and several > single > 0


def test_records_are_within_the_queries_norms(task, images):
    x = images.floats()
    for query, rows in SMALL.records(task):
        z = rows(x)
        assert z.dtype == torch.float64 and len(z) == len(x)
        if isinstance(query, SumQuery):
            assert z.shape[1] == math.prod(query.shape[1:])
        else:
            assert isinstance(query, MomentsQuery) and z.shape[1] == query.dim
        if query.name != "codes":  # codes are clipped, the others have norm 1 by construction
            assert torch.allclose(z.norm(dim=1), torch.ones(len(z), dtype=z.dtype), atol=1e-5)


def test_all_heads_learn_the_toy_task(task, images):
    outcome = outcome_of(SMALL, task, images)
    assert set(outcome.classifiers) == {"lda", "qda", "decode", "match"}
    for head in ("lda", "qda"):
        right = outcome.classifiers[head].predict(images.floats()).argmax(1) == images.labels
        assert right.float().mean() > 0.9, head
    assert outcome.synthetic is not None
    assert outcome.synthetic.counts().tolist() == [6, 6, 6]
    assert outcome.details["match"]["history"]


def test_soft_labels_change_the_student_only(task, images):
    own = outcome_of(replace(SMALL, heads=("decode",)), task, images)
    unsure = replace(SMALL, heads=("decode",), teacher="soft", temper=1e-3)
    soft = outcome_of(unsure, task, images)
    assert torch.equal(own.synthetic.pixels, soft.synthetic.pixels)
    a, b = (o.classifiers["decode"].tensors() for o in (own, soft))
    assert any(not torch.equal(a[k], b[k]) for k in a)


def test_the_ceiling_has_the_closed_heads_only(task, images):
    plan = plan_of(SMALL, task, Privacy(epsilon=1))
    exchange = LocalExchange(
        SMALL, task, Privacy(epsilon=1), plan.sigma, [lambda: images], ["a"], observe=True
    )
    merged = exchange.round(0, plan.rounds[0], {})
    bare = SMALL.ceiling(
        task, replace(merged, tensors=exchange.exact, sigma=0.0), torch.Generator()
    )
    assert bare is not None and set(bare.classifiers) == {"lda", "qda"}
    without = replace(SMALL, heads=("decode",))
    assert without.ceiling(task, merged, torch.Generator()) is None


def test_normalised_codes_come_back_from_a_file():
    space = CodeSpace(load_encoder("scattering:32"), 0.5, 1.0, True)
    x = torch.rand(5, 1, 28, 28, generator=torch.Generator().manual_seed(0))
    z = space.clipped(x)
    assert torch.allclose(z.norm(dim=1), torch.ones(5, dtype=z.dtype))
    head = CodeClassifier("lda", space, torch.zeros(3).double(), torch.rand(3, 32).double())
    back = CodeClassifier.load("lda", head.tensors(), head.meta())
    assert back.space.normalise and torch.equal(back.predict(x), head.predict(x))


def test_rows_by_rank_within_the_class():
    labels = torch.tensor([0, 1, 0, 0, 1, 2])
    assert _ranked(labels, 0, 1).tolist() == [0, 1, 5]
    assert _ranked(labels, 1, 3).tolist() == [2, 3, 4]


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budget": (0.0, 1.0, 1.0)}, ConfigError, "budget must be three positive"),
        ({"temper": 0.0}, ConfigError, "temper must be positive"),
        ({"matched": 0}, ConfigError, "matched must be at least 1"),
        ({"features": "no-such"}, EncoderError, "encoder must be one of"),
        ({"features_sha256": "00"}, EncoderError, "must be the task's, 00"),
        ({"encoder": "scattering:32"}, ConfigError, "must not hold 'decode' or 'match'"),
    ],
)
def test_bad_options_are_one_clear_line(task, change, error, message):
    with pytest.raises(error, match=message):
        replace(SMALL, **change).plan(task)


def test_the_track_is_the_widest(task):
    assert replace(SMALL, heads=("lda",), features="random-conv:0").track == "no public data"
    assert replace(SMALL, features="random-conv:0").track == "public images"


def test_the_expected_signal_counts_the_views_share():
    whole, half = (MomentsQuery(1.0, 16, 2, scale=s) for s in (1.0, 2**0.5))
    assert "class means from 6 images" in expected_signal(whole, 1.0)
    assert "class means from 8 images" in expected_signal(half, 1.0)
