"""What a simulation can measure that a real federation cannot: accuracies, ceilings, attacks."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedgist.audit.membership import claimed, closest_record, likelihood_ratio, play, table
from fedgist.data import open_source
from fedgist.errors import ConfigError, DataError
from fedgist.exchange.local import LocalExchange
from fedgist.heads.decode import through_codec
from fedgist.heads.linear import CodeSpace
from fedgist.privacy.claim import summed_sigma
from fedgist.privacy.noise import SeededNoise
from fedgist.privacy.statistics import clip_to_grid
from fedgist.report.export import classifier_extra, load_classifier
from fedgist.run import derive, generator
from fedgist.setup import Prepared, Sites
from fedgist.train import Network, Recipe, evaluate, personalise, train
from fedgist.types import Images, Merged, MomentsQuery, Outcome, Task

__all__ = ["attack_rows", "evaluate_folder", "exact_outcome", "score_heads"]


def exact_outcome(made: Prepared, exchange: LocalExchange) -> Outcome | None:
    """Build the closed-form heads from the exact sums that a simulation has kept."""
    closed = tuple(h for h in getattr(made.method, "heads", ()) if h != "decode")
    if not closed or not exchange.exact:
        return None
    method = replace(made.method, heads=closed)  # type: ignore[type-var]
    rng = generator(made.run.seed, "ceiling")
    merged = Merged(exchange.exact, 0.0, len(exchange.names))
    state = method.update(0, made.task, method.start(made.task, rng), merged, rng)
    return method.finish(made.task, state, rng)


def score_heads(
    made: Prepared, outcome: Outcome, exact: Outcome | None, sites: Sites, test: Images | None
) -> dict[str, dict[str, Any]]:
    """Measure every head on real test images, next to what it would reach without privacy."""
    heads: dict[str, dict[str, Any]] = {name: {} for name in outcome.classifiers}
    if test is None or len(test) == 0:
        return heads
    options = made.run.evaluation
    for name, classifier in outcome.classifiers.items():
        score = evaluate(classifier, test)
        heads[name] = {"accuracy": score.accuracy, "per_class": score.per_class}
        space = getattr(made.method, "space", None)
        wanted = options.codec_consistent and isinstance(classifier, Network)
        if wanted and isinstance(space, CodeSpace) and space.encoder.decodes:
            through = partial(through_codec, space=space, task=made.task)
            heads[name]["codec_consistent"] = evaluate(classifier, test, through).accuracy
    if options.ceiling:
        for name, classifier in exact.classifiers.items() if exact else ():
            heads[name]["ceiling"] = evaluate(classifier, test).accuracy
        if (real := _real_network(made, sites, test)) is not None:
            heads["decode"]["ceiling"] = real
    if options.personalise:
        for name, classifier in outcome.classifiers.items():
            if isinstance(classifier, Network):
                heads[name]["personalised"] = _personalise(made, classifier, sites)
    return heads


def attack_rows(
    made: Prepared, outcome: Outcome, sites: Sites, test: Images | None, most: int = 2000
) -> list[dict[str, Any]]:
    """Attack single records: the exact likelihood ratio, the closest synthetic image.

    Up to ``most`` images that were used stand against as many test images. Empty for methods
    whose release is not one of class moments.
    """
    queries = made.plan.rounds[0].queries
    query, space = queries[0] if queries else None, getattr(made.method, "space", None)
    if not isinstance(query, MomentsQuery) or not isinstance(space, CodeSpace) or test is None:
        return []
    rng = generator(made.run.seed, "attack")
    members, others = (
        images.take(torch.randperm(len(images), generator=rng)[:most])
        for images in (sites.together(), test)
    )
    sigma = summed_sigma(made.run.privacy, made.plan.sigma, len(sites.names))
    records, unused = (
        torch.cat([clip_to_grid(space.codes(x), query.clip, query.levels) for x, _ in s.batches()])
        for s in (members, others)
    )
    noise = SeededNoise(derive(made.run.seed, "attack noise"))
    played = play(records[:500], unused[:500], query, sigma, noise)
    distance = None
    if outcome.synthetic is not None:
        distance = closest_record(members, others, outcome.synthetic, space.clipped)
    claim = made.plan.claim
    cap = claimed(claim.epsilon, claim.delta, claim.law) if claim.epsilon < math.inf else None
    return table(likelihood_ratio(records, query, sigma), distance, played=played, claim=cap)


def evaluate_folder(folder: Path, test: str, split: str) -> dict[str, Any]:
    """Score every classifier that a run wrote to ``folder`` on other real images.

    Raises:
        ConfigError: no classifier there.
        DataError: a file cannot be used, or the classes are not the task's.
    """
    files = sorted(folder.glob("classifier*.safetensors"))
    if not files:
        raise ConfigError(f"the folder must hold classifier.safetensors. Got {folder}")
    scores, images = [], 0
    for path in files:
        meta = classifier_extra(path)
        task = _task(meta, path)
        source = open_source(test)
        if split not in source.splits:
            raise DataError(f"--split must be one of {list(source.splits)}. Got '{split}'")
        data = source.images(split, task)
        images = len(data)
        score = evaluate(load_classifier(path), data)
        scores.append({"head": meta.get("head", path.stem), "file": path.name} | asdict(score))
    for row in scores:
        row["confusion"] = row["confusion"].tolist()
    return {"folder": str(folder), "test": test, "images": images, "scores": scores}


def _task(meta: Mapping[str, str], path: Path) -> Task:
    try:
        fields = json.loads(meta["task"])
        return Task(**(fields | {"classes": tuple(fields["classes"])}))
    except (KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path} must carry the task it was made for. Got none that reads") from e


def _real_network(made: Prepared, sites: Sites, test: Images) -> float | None:
    """Return the accuracy of the same network trained on the real images themselves."""
    recipe = getattr(made.method, "recipe", None)
    if "decode" not in getattr(made.method, "heads", ()) or not isinstance(recipe, Recipe):
        return None
    network = train(sites.together(), recipe, generator(made.run.seed, "ceiling"))
    return evaluate(network, test).accuracy


def _personalise(made: Prepared, network: Network, sites: Sites) -> dict[str, Any]:
    recipe: Recipe = made.method.recipe  # type: ignore[attr-defined]
    rows = personalise(network, [load() for load in sites.loaders], recipe, made.run.seed)
    return {"clients": [asdict(r) for r in rows]}
