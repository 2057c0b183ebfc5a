"""Promises that every method keeps. The folder is enumerated: an untested method cannot exist."""

from __future__ import annotations

import math
from dataclasses import replace
from threading import Thread

import pytest
import torch

from federation_tools import federation, outcome_bytes, run_locally
from fedgist.config import load, make_method
from fedgist.errors import PrivacyError, UnplannedQuery
from fedgist.exchange.local import LocalExchange
from fedgist.exchange.mailbox import MailboxTransport, join
from fedgist.method import method_names
from fedgist.privacy.claim import Privacy
from fedgist.privacy.client import Client, Sensitive, open_sensitive
from fedgist.privacy.noise import SeededNoise
from fedgist.run import drive, generator, plan_of
from fedgist.types import Images, Round, Task
from quick_methods import QUICK

pytestmark = pytest.mark.parametrize("name", method_names())


def build(name):
    return make_method(load(None, [f"method.name={name}", *QUICK.get(name, [])]))


def thirds(images):
    return [images.take(torch.arange(len(images)) % 3 == i) for i in range(3)]


def broadcasts(method, task, images):
    """Return (round, what the server broadcasts for it), as a run goes through them."""
    privacy = terms(method, task, 5)
    plan = plan_of(method, task, privacy)
    local = LocalExchange(method, task, privacy, plan.sigma, [lambda: images], ["client 0"], seed=1)
    seen = []

    class Recording:
        def round(self, r, rnd, shared):
            seen.append((rnd, shared))
            return local.round(r, rnd, shared)

    drive(method, task, Recording(), plan.rounds, 1)
    return seen


def terms(method, task, epsilon, **more):
    """Return privacy terms; a plan that reads images without noise has no finite ε."""
    raw = any(r.raw for r in method.plan(task))
    return Privacy(epsilon=math.inf if raw else epsilon, **more)


def client(method, task, images, rnd, name="client 0", memory=None):
    return Client(
        name,
        images,
        rnd,
        sigma=1.0,
        noise=SeededNoise(0),
        max_images=task.max_images,
        memory=memory,
    )


def test_same_seed_same_bytes_and_global_rng_untouched(name, task, images):
    before = torch.get_rng_state()
    method = build(name)
    privacy = terms(method, task, 5)
    a, _ = run_locally(method, task, thirds(images), privacy, seed=1)
    b, _ = run_locally(method, task, thirds(images), privacy, seed=1)
    c, _ = run_locally(method, task, thirds(images), privacy, seed=2)
    assert outcome_bytes(a) == outcome_bytes(b)
    assert outcome_bytes(a) != outcome_bytes(c)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("trust", ["local", "distributed"])
def test_letters_and_a_shared_folder_give_what_one_process_does(
    name, trust, task, images, tmp_path
):
    if trust != "local" and not any(r.noised for r in build(name).plan(task)):
        pytest.skip("who adds noise matters to sums only")
    base = [f"method.name={name}", *QUICK.get(name, []), "privacy.noise=seeded"]
    options = {"sets": [f"privacy.trust={trust}"], "base": base}
    fed = federation(tmp_path / "letters", task, thirds(images), **options)
    outcome, _ = fed.run()
    expected = outcome_bytes(fed.local(thirds(images)))
    assert outcome_bytes(outcome) == expected
    share = tmp_path / "share"
    share.mkdir()
    fed = federation(tmp_path / "folder", task, thirds(images), **options)
    sites = [
        Thread(target=join, args=(s, share), kwargs={"say": str, "poll": 0.01}, daemon=True)
        for s in fed.sites.values()
    ]
    for site in sites:
        site.start()
    outcome, _ = fed.run(MailboxTransport(share, fed.agreement, tmp_path / "asked", 0.01))
    assert outcome_bytes(outcome) == expected
    for site in sites:
        site.join(10)


def test_inputs_are_untouched(name, task, images):
    pixels, labels = images.pixels.clone(), images.labels.clone()
    method = build(name)
    run_locally(method, task, [images], terms(method, task, 5))
    assert torch.equal(pixels, images.pixels)
    assert torch.equal(labels, images.labels)


def test_plan_depends_on_nothing_private_and_is_spent_exactly(name, task, images):
    method = build(name)
    rounds = tuple(method.plan(task))
    assert rounds == tuple(build(name).plan(task))
    memory = {}
    for r, (rnd, shared) in enumerate(broadcasts(method, task, images)):
        guard = client(method, task, images, rnd, memory=memory)
        method.summarize(r, task, shared, guard, generator(0))
        assert all(left == 0 for left in guard._left.values()), "a planned query was not asked"
        if rnd.queries:
            with pytest.raises(UnplannedQuery):
                method.summarize(r, task, shared, guard, generator(0))


def test_a_round_without_the_query_in_its_plan_is_refused(name, task, images):
    method = build(name)
    memory = {}
    for r, (rnd, shared) in enumerate(broadcasts(method, task, images)):
        if rnd.queries:
            whole, bare = (
                client(method, task, images, part, memory=memory)
                for part in (rnd, Round(rnd.reduce))
            )
            method.summarize(r, task, shared, whole, generator(0))
            with pytest.raises(UnplannedQuery, match="client 0"):
                method.summarize(r, task, shared, bare, generator(0))


@pytest.mark.parametrize("kind", ["empty", "one image", "one class", "all"])
def test_gist_shape_is_the_same_for_every_client(name, task, images, kind):
    rows = {
        "empty": torch.zeros(0, dtype=torch.int64),
        "one image": torch.tensor([4]),
        "one class": (images.labels == 1).nonzero().flatten(),
        "all": torch.arange(len(images)),
    }[kind]
    method = build(name)
    for r, (rnd, shared) in enumerate(broadcasts(method, task, images)):
        if rnd.raw or rnd.reduce != "sum":
            continue
        sent = method.summarize(
            r, task, shared, client(method, task, images.take(rows), rnd), generator(0)
        )
        answers = (sent,) if isinstance(sent, Sensitive) else sent
        assert [a.query for a in answers] == list(rnd.queries)
        for query, answer in zip(rnd.queries, answers, strict=True):
            tensors = open_sensitive(answer)
            assert {k: tuple(v.shape) for k, v in tensors.items()} == query.shapes(noised=False)
            assert all(v.dtype == torch.int64 for v in tensors.values())


@pytest.mark.parametrize("trust", ["central", "local", "distributed"])
def test_every_trust_model_runs_to_a_finite_outcome(name, task, images, trust):
    method = build(name)
    if trust != "local" and not any(r.noised for r in method.plan(task)):
        pytest.skip("who adds noise matters to sums only")
    if trust == "distributed" and hasattr(method, "count_weight"):
        method = replace(method, count_weight=16)
    outcome, _ = run_locally(method, task, thirds(images), terms(method, task, 3, trust=trust))
    for classifier in outcome.classifiers.values():
        scores = classifier.predict(images.floats())
        assert scores.shape == (60, 3)
        assert not bool(torch.isnan(scores).any())


def test_hard_clients_still_give_a_finite_outcome(name, task, images):
    nobody = images.take(torch.zeros(0, dtype=torch.int64))
    flat = Images(
        torch.zeros(5, 1, 8, 8, dtype=torch.uint8), torch.zeros(5, dtype=torch.int64), task.classes
    )
    white = Images(
        torch.full((4, 1, 8, 8), 255, dtype=torch.uint8),
        torch.ones(4, dtype=torch.int64),
        task.classes,
    )
    one = images.take(torch.tensor([2]))
    for parts in ([nobody], [one], [flat, white], [nobody, one, images]):
        for epsilon in (math.inf, 1.0):
            method = build(name)
            outcome, _ = run_locally(method, task, parts, terms(method, task, epsilon))
            for classifier in outcome.classifiers.values():
                assert not bool(torch.isnan(classifier.predict(images.floats()[:4])).any())


def test_split_of_the_data_changes_no_bit_of_a_summed_release(name, task, images):
    method = build(name)
    if any(
        r.reduce != "sum" or r.raw or any(getattr(q, "whole", False) for q in r.queries)
        for r in method.plan(task)
    ):
        pytest.skip("gists are pooled, or depend on what a client holds as a whole")
    outcomes = [
        outcome_bytes(run_locally(method, task, parts, terms(method, task, 5))[0])
        for parts in ([images], thirds(images), [images.take(torch.tensor([i])) for i in range(60)])
    ]
    assert outcomes[0] == outcomes[1] == outcomes[2]


def test_a_client_over_the_public_bound_is_refused(name, task, images):
    small = Task(task.name, task.classes, task.channels, task.size, max_images=59)
    with pytest.raises(Exception, match="client 0 must hold at most 59 images"):
        method = build(name)
        run_locally(method, small, [images], terms(method, small, 5))


def test_infinite_epsilon_is_never_claimed_finite(name, task, images):
    plan = plan_of(build(name), task, Privacy(epsilon=math.inf))
    assert math.isinf(plan.claim.epsilon)
    assert plan.claim.noise_by == "nobody"


def test_a_method_that_is_unfit_for_real_data_says_so_and_is_refused(name, task, images):
    method = build(name)
    raw = any(r.raw for r in method.plan(task))
    assert bool(method.unfit) <= raw
    if method.unfit:
        with pytest.raises(PrivacyError, match="fit"):
            plan_of(method, task, Privacy(epsilon=math.inf, noise="system"))


def test_a_release_needs_noise(name, task, images):
    method = build(name)
    for r, (rnd, shared) in enumerate(broadcasts(method, task, images)):
        guard = Client("c", images, rnd, sigma=0.0, noise=SeededNoise(0), max_images=500)
        if rnd.reduce == "pool" and rnd.queries:  # it releases to itself
            with pytest.raises(PrivacyError, match="noise"):
                method.summarize(r, task, shared, guard, generator(0))
            return
        sent = method.summarize(r, task, shared, guard, generator(0))
        for answer in (sent,) if isinstance(sent, Sensitive) else sent:
            if isinstance(answer, Sensitive):
                with pytest.raises(PrivacyError, match="noise"):
                    guard.release(answer)
