"""What a simulation can measure that a real federation cannot: accuracies, ceilings, attacks."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedgist.audit.limits import limit_of
from fedgist.audit.membership import closest_record, likelihood_ratio, play, table
from fedgist.audit.one_run import audit_gists
from fedgist.audit.one_run import row as canary_row
from fedgist.data import open_source
from fedgist.errors import ConfigError, DataError
from fedgist.exchange.gist import Duty, answer
from fedgist.exchange.local import LocalExchange
from fedgist.heads.decode import through_codec
from fedgist.heads.linear import KINDS, Coded, CodeSpace
from fedgist.privacy.claim import calibrate, summed_sigma
from fedgist.privacy.noise import SeededNoise
from fedgist.privacy.statistics import clip_to_grid
from fedgist.queries import Query
from fedgist.report.export import classifier_extra, load_classifier
from fedgist.run import derive, generator
from fedgist.setup import Prepared, Sites
from fedgist.train import Network, Recipe, evaluate, personalise, train
from fedgist.types import Images, Merged, Outcome, Task, Tensors

__all__ = [
    "attack_rows",
    "epsilon_curve",
    "evaluate_folder",
    "exact_outcome",
    "score_heads",
    "task_of",
]

EPSILONS = (0.3, 1.0, 3.0, 10.0, 30.0)
JUDGED = 2000  # test images that the curve over ε is measured on, at most


def exact_outcome(made: Prepared, exchange: LocalExchange) -> Outcome | None:
    """Build the closed-form heads from the exact sums that a simulation has kept."""
    build = getattr(made.method, "ceiling", None)
    if build is None or not exchange.exact:
        return None
    exact = Merged(exchange.exact, 0.0, len(exchange.names))
    outcome: Outcome | None = build(made.task, exact, generator(made.run.seed, "ceiling"))
    return outcome


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
        made_of_images = heads.keys() & {"decode", "match", "distilled"}
        if made_of_images and (real := _real_network(made, sites, test)) is not None:
            for name in made_of_images:
                heads[name]["ceiling"] = real
    if options.personalise:
        for name, classifier in outcome.classifiers.items():
            if isinstance(classifier, Network):
                heads[name]["personalised"] = _personalise(made, classifier, sites)
    return heads


def epsilon_curve(
    made: Prepared,
    exchange: LocalExchange,
    outcome: Outcome,
    exact: Outcome | None,
    test: Images | None,
) -> dict[str, Any] | None:
    """Score the closed-form heads at other ε: the same exact sums, each with noise of its own.

    Every ε has one draw of noise, calibrated to it under the run's other terms; at the run's own ε
    it is the run's. Made of exact sums, so that no claim covers it.

    Args:
        made: the run.
        exchange: what it went through; ``exact`` sums must be there.
        outcome: what it left.
        exact: its closed-form heads without noise (`exact_outcome`).
        test: real images; the first 2,000 of a shuffle are used.

    Returns:
        ``images`` (how many judged), ``of`` (how many there are), ``rows``: for each ε in rising
        order ``epsilon``, ``sigma``, ``own`` and ``heads`` (name -> accuracy), and ``without``: the
        same heads without noise. None where there is no such curve: no exact sums, no noise to
        vary, a claim that holds for no ε, or more than one round.
    """
    own, rounds = made.run.privacy.epsilon, made.plan.rounds
    one = len(rounds) == 1 and rounds[0].noised and made.plan.claim.epsilon < math.inf
    if exact is None or test is None or not len(test) or not one or not exchange.exact:
        return None
    rng = generator(made.run.seed, "curve")
    coded = Coded(test.take(torch.randperm(len(test), generator=rng)[:JUDGED]))
    rows = []
    for epsilon in sorted({*EPSILONS, own}):
        sigma, built = calibrate(rounds, replace(made.run.privacy, epsilon=epsilon)), outcome
        if epsilon != own:
            built = _renoised(made, exchange, sigma, epsilon)
        heads = {k: coded.accuracy(c) for k, c in built.classifiers.items() if c.kind in KINDS}
        rows.append({"epsilon": epsilon, "sigma": sigma, "own": epsilon == own, "heads": heads})
    without = {k: coded.accuracy(c) for k, c in exact.classifiers.items()}
    return {"images": len(coded.images), "of": len(test), "rows": rows, "without": without}


def _renoised(made: Prepared, exchange: LocalExchange, sigma: float, epsilon: float) -> Outcome:
    """Build the closed-form heads from the exact sums under other noise."""
    privacy, clients = replace(made.run.privacy, epsilon=epsilon), len(exchange.names)
    total = summed_sigma(privacy, sigma, clients)
    noise = SeededNoise(derive(made.run.seed, "curve noise", f"{epsilon:g}"))
    duty = Duty(made.method, made.task, privacy, total, clients)
    merged = Merged(duty.noised(made.plan.rounds[0], exchange.exact, noise), total, clients)
    rng = generator(made.run.seed, "curve build")
    built: Outcome = made.method.ceiling(made.task, merged, rng)  # type: ignore[attr-defined]
    return built


def attack_rows(
    made: Prepared, outcome: Outcome, sites: Sites, test: Images | None, most: int = 2000
) -> list[dict[str, Any]]:
    """Attack single records: the exact likelihood ratio, the closest synthetic image.

    Up to ``most`` images that were used stand against as many test images. A method whose clients
    pool images is audited by canaries instead. Empty for methods that do neither.
    """
    records_of = getattr(made.method, "records", None)
    space = getattr(made.method, "space", None)
    if any(p.name == "pixels" and not p.by_image for p in made.plan.rounds[0].sends):
        return _canaries(made, sites)
    if records_of is None or test is None:
        return []
    rng = generator(made.run.seed, "attack")
    members, others = (
        images.take(torch.randperm(len(images), generator=rng)[:most])
        for images in (sites.together(), test)
    )
    sigma = summed_sigma(made.run.privacy, made.plan.sigma, len(sites.names))
    used, unused = (_released(records_of(made.task), side) for side in (members, others))
    noise = SeededNoise(derive(made.run.seed, "attack noise"))
    few = max(50, min(500, 20_000_000 // sum(u.shape[1] ** 2 for _, u in used)))
    first, second = ([(q, u[:few]) for q, u in side] for side in (used, unused))
    played = play(first, second, sigma, noise)
    distance = None
    if outcome.synthetic is not None and isinstance(space, CodeSpace):
        distance = closest_record(members, others, outcome.synthetic, space.clipped)
    cap = limit_of(made.plan.claim, made.plan.rounds)
    claim = cap.risk if cap else None
    return table(likelihood_ratio(used, sigma), distance, played=played, claim=claim)


def _canaries(made: Prepared, sites: Sites, most: int = 200) -> list[dict[str, Any]]:
    """Audit the client with the most images: canaries among them, what it sends judged.

    Canaries are single records, in or out: the bound speaks of one image added or removed.
    """
    privacy, seed = made.run.privacy, made.run.seed
    if (privacy.unit, privacy.adjacency) != ("image", "add-remove"):
        return []
    held = [len(load()) for load in sites.loaders]
    i = held.index(max(held))
    m = min(most, held[i] // 5)
    if m < 4 * len(made.task.classes):
        return []
    task = replace(made.task, max_images=made.task.max_images + m)
    duty = Duty(made.method, task, privacy, made.plan.sigma, len(held), derive(seed, "audit"))
    shared = made.method.start(task, generator(seed, "start")).shared
    name, rnd = sites.names[i], made.plan.rounds[0]

    def gist_of(images: Images) -> Tensors:
        return answer(duty, i, name, lambda: images, 0, rnd, shared, {}).gist

    result = audit_gists(gist_of, sites.loaders[i](), m, privacy.delta, generator(seed, "canary"))
    what = "the distilled images of one client, all its other images"
    return [canary_row(result, made.plan.claim.epsilon, what)]


def _released(
    records: Sequence[tuple[Query, Callable[[Tensor], Tensor]]], images: Images
) -> list[tuple[Query, Tensor]]:
    """Return what every query takes of each image: integers within its norm."""
    return [
        (q, torch.cat([clip_to_grid(of(x), q.clip, q.levels) for x, _ in images.batches()]))
        for q, of in records
    ]


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
        task = task_of(meta, path)
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


def task_of(meta: Mapping[str, str], path: Path) -> Task:
    """Return the task that a classifier file says it was made for.

    Raises:
        DataError: it says none that reads.
    """
    try:
        fields = json.loads(meta["task"])
        return Task(**(fields | {"classes": tuple(fields["classes"])}))
    except (KeyError, TypeError, ValueError) as e:
        raise DataError(f"{path} must carry the task it was made for. Got none that reads") from e


def _real_network(made: Prepared, sites: Sites, test: Images) -> float | None:
    """Return the accuracy of the same network trained on the real images themselves."""
    recipe = getattr(getattr(made.method, "server", made.method), "recipe", None)
    if not isinstance(recipe, Recipe):
        return None
    network = train(sites.together(), recipe, generator(made.run.seed, "ceiling"))
    return evaluate(network, test).accuracy


def _personalise(made: Prepared, network: Network, sites: Sites) -> dict[str, Any]:
    recipe: Recipe = made.method.recipe  # type: ignore[attr-defined]
    rows = personalise(network, [load() for load in sites.loaders], recipe, made.run.seed)
    return {"clients": [asdict(r) for r in rows]}
