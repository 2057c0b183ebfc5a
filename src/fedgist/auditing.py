"""The audit of a finished simulation: its claims turned into evidence, each adversary named.

Read from the folder of a run: ``run.toml`` (the run is rebuilt from it), ``report.json`` (whose
claim is audited), classifiers and synthetic images. Written: ``audit.json``, and ``audit.html`` for
people.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from fedgist.audit.limits import Limit, limit_of
from fedgist.audit.mechanism import Verdict, audit_sums, measured_noise, trials_for
from fedgist.audit.sampled import audit_sampled
from fedgist.audit.shadow import check_shadows
from fedgist.audit.threshold import loss_threshold
from fedgist.config import load
from fedgist.errors import ConfigError
from fedgist.evaluation import attack_rows
from fedgist.exchange.gist import Duty
from fedgist.exposure import exposed
from fedgist.method import Exposing
from fedgist.privacy.accounting import is_sampled, sigma_gaussian
from fedgist.privacy.claim import Claim
from fedgist.progress import Progress
from fedgist.queries import MomentsQuery
from fedgist.report.audit_page import write_audit_page
from fedgist.report.export import classifier_extra, load_classifier
from fedgist.report.folder import Clock
from fedgist.report.formats import find_synthetic
from fedgist.report.record import read_json, versions, write_json
from fedgist.run import derive, drive, generator
from fedgist.setup import Prepared, Sites, open_exchange, open_sites, prepare_run, test_images
from fedgist.shadowing import attack_row, shadow_rows
from fedgist.types import Classifier, Images, Outcome

__all__ = ["audit_folder"]

SAMPLED_TRIALS = 20_000  # of each world that are counted, where records are sampled
FAR = 4.0  # deviations that an AUC must lie above its cap before a claim is called contradicted
MOST = 2000  # images on either side of the loss threshold


def audit_folder(
    folder: Path,
    *,
    trials: int | None = None,
    shadows: int = 64,
    heads: Sequence[str] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """Audit a folder that `fedgist.experiment.execute` wrote; write what is found into it.

    Args:
        folder: the run's.
        trials: releases of each world of the noise that are counted; None takes as many as the
            claim needs.
        shadows: shadow classifiers for LiRA and RMIA, at least 4; 0 leaves both out.
        heads: classifiers they attack; none given: the closed-form ones. A network is trained
            anew for every shadow.
        progress: told of stages.

    Returns:
        ``state`` (``contradicted``, ``inconclusive``, ``pass`` or ``no claim``), ``claim``,
        ``noise`` (rows of the audits of the noise), ``limit`` (what the claim lets attacks reach,
        or None), ``attacks`` (rows of membership attacks, each with its cap), ``similarity`` (rows
        of figures that are no evidence of privacy), ``exposure`` (of uploads, or None), ``notes``,
        ``seconds``, and what it takes to repeat it: ``command``, ``seed``, ``versions``.

    Raises:
        ConfigError: no finished simulation there, a head that it does not have, or too few shadows.
        DataError: its data are not there.
    """
    check_shadows(shadows)
    tell, clock = progress or Progress(), Clock()
    repeat = _command(folder, trials, shadows, heads)
    report, made = _opened(folder)
    sites, test = open_sites(made), test_images(made)
    clock.lap("load")
    claim = _claim_of(made, report)
    tell.stage("noise")
    noise = _noise_rows(made, claim, len(sites.names), trials)
    clock.lap("noise")
    tell.stage("records")
    outcome = _outcome(folder)
    rows = attack_rows(made, outcome, sites, test)
    similarity = [r for r in rows if r["attack"].startswith("closest")]
    attacks = [r for r in rows if r not in similarity]
    clock.lap("records")
    notes = []
    cap = limit_of(claim, made.plan.rounds)
    if test is not None:
        attacks += _losses(made, outcome, sites, test, cap)
        clock.lap("losses")
        tell.stage("shadows")
        found, note = shadow_rows(made, outcome, sites, test, shadows, heads, cap)
        attacks += found
        notes += [note] if note else []
        clock.lap("shadows")
    else:
        notes.append("there are no test images to stand for unused ones")
    exposure = _exposure(made, sites, test, tell)
    clock.lap("uploads")
    attacks = [row | {"state": _state(row, claim)} for row in attacks]
    record = {
        "state": _overall([r["state"] for r in noise], [r["state"] for r in attacks]),
        "title": report["title"],
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "claim": claim.record(),
        "noise": noise,
        "limit": cap.record() if cap else None,
        "attacks": attacks,
        "similarity": similarity,
        "exposure": exposure,
        "notes": notes,
        "seconds": clock.laps,
        "command": repeat,
        "seed": made.run.seed,
        "versions": versions(),
    }
    write_json(folder / "audit.json", record)
    write_audit_page(record, folder / "audit.html")
    return record


def _command(folder: Path, trials: int | None, shadows: int, heads: Sequence[str]) -> str:
    """Return what repeats an audit, without the path that led to the folder."""
    words = ["fedgist", "audit", folder.resolve().name or ".", "--shadows", str(shadows)]
    words += [] if trials is None else ["--trials", str(trials)]
    return shlex.join([*words, *(w for h in heads for w in ("--head", h))])


def _opened(folder: Path) -> tuple[dict[str, Any], Prepared]:
    """Read a run's report and rebuild the run."""
    if not (folder / "report.json").is_file():
        raise ConfigError(f"RUN must be a folder that `fedgist run` wrote. Got {folder}")
    report = read_json(folder / "report.json")
    if report.get("simulation") is not True:
        raise ConfigError(
            f"RUN must be a simulation: an audit needs the images. Got {folder}, which is of a "
            "federation whose images stayed where they are"
        )
    if not (folder / "run.toml").is_file():
        raise ConfigError(f"RUN must hold run.toml. Got {folder} without it")
    return report, prepare_run(load(folder / "run.toml"))


def _claim_of(made: Prepared, report: Mapping[str, Any]) -> Claim:
    """Return the claim that the report states, as far as it states one."""
    told = report.get("claim") or {}
    stated = {k: float(told[k]) for k in ("epsilon", "delta") if k in told}
    return replace(made.plan.claim, **stated)  # type: ignore[arg-type]


def _noise_rows(
    made: Prepared, claim: Claim, parties: int, trials: int | None
) -> list[dict[str, Any]]:
    """Audit the noise against the claim, and against a nominal ε that the claim does not hold."""
    plan, seed = made.plan, derive(made.run.seed, "audit")
    if plan.sigma <= 0:
        return []
    duty = Duty(made.method, made.task, made.run.privacy, plan.sigma, parties, seed)
    sees = _sees(duty)
    if is_sampled(plan.rounds):
        n = trials or SAMPLED_TRIALS
        found = audit_sampled(duty, plan.rounds, claim, trials=n, seed=seed)
        return [_noise_row("claim", found, "all that one client releases, unpooled")]
    claims = {"claim": claim} if math.isfinite(claim.epsilon) else {}
    queries = [q for r in plan.rounds for q in r.queries]
    if any(isinstance(q, MomentsQuery) and q.basic for q in queries):
        claims |= _published(claim)
    rows = []
    for name, stated in claims.items():
        n = trials or trials_for(stated.sensitivity / stated.sigma)
        found = audit_sums(duty, plan.rounds, stated, trials=n, seed=derive(seed, name))
        rows.append(_noise_row(name, found, sees))
    blocks = measured_noise(duty, plan.rounds, seed)
    small = [name for name, block in blocks.items() if block["small"]]
    whole = {
        "audit": "deviation of every block of a release of full size",
        "sees": "nobody: a check of the noise itself",
        "state": "contradicted" if small else "pass",
        "note": f"too small: {', '.join(small)}" if small else "measured over planned",
        "blocks": blocks,
    }
    return [*rows, whole] if blocks else rows


def _published(claim: Claim) -> dict[str, Claim]:
    """Return what the published mechanism says of itself: its nominal ε, counts public or not."""
    mu = 1 / sigma_gaussian(claim.nominal, claim.delta)
    stated = replace(claim, epsilon=claim.nominal, sensitivity=mu * claim.sigma)
    return {
        "nominal ε, counts sent exactly": stated,
        "nominal ε, counts and labels public": replace(stated, adjacency="replace-same-class"),
    }


def _sees(duty: Duty) -> str:
    if duty.privacy.trust == "distributed":
        missing = duty.privacy.missing
        known = f", and knows {missing} of the noise shares" if missing else ""
        return f"the sum over all clients, inside a secure sum{known}; all other images"
    what = "the noised sum" if duty.privacy.trust == "central" else "the gist of one client"
    return f"{what}; all other images"


def _noise_row(name: str, found: Verdict, sees: str) -> dict[str, Any]:
    return {"audit": name, "sees": sees} | asdict(found)


def _outcome(folder: Path) -> Outcome:
    """Read back what a run left."""
    classifiers: dict[str, Classifier] = {}
    for path in sorted(folder.glob("classifier*.safetensors")):
        classifiers[classifier_extra(path).get("head", path.stem)] = load_classifier(path)
    if not classifiers:
        raise ConfigError(f"RUN must hold classifier.safetensors. Got {folder}")
    return Outcome(find_synthetic(folder), classifiers)


def _losses(
    made: Prepared, outcome: Outcome, sites: Sites, test: Images, cap: Limit | None
) -> list[dict[str, Any]]:
    rng, used = generator(made.run.seed, "audit", "losses"), sites.together()
    if isinstance(made.method, Exposing):  # it may leave a share of them out: those are no members
        used = made.method.used(used)
    members, others = (
        images.take(torch.randperm(len(images), generator=rng)[:MOST]) for images in (used, test)
    )
    rows = []
    for name, classifier in outcome.classifiers.items():
        found = loss_threshold(classifier, members, others)
        rows.append(attack_row(f"loss threshold, {name}", "the final classifier", found, cap))
    return rows


def _exposure(
    made: Prepared, sites: Sites, test: Images | None, tell: Progress
) -> dict[str, Any] | None:
    """Run the exchange again and attack what single images are sent as."""
    if test is None or not isinstance(made.method, Exposing):
        return None
    tell.stage("uploads")
    exchange = open_exchange(made, sites, observe=False)
    outcome = drive(made.method, made.task, exchange, made.plan.rounds, made.run.seed)
    found = exposed(made, exchange, outcome, sites, test)
    return None if found is None else {k: v for k, v in found[0].items() if k != "membership"}


def _state(row: Mapping[str, Any], claim: Claim) -> str:
    """Say whether an attack did better than the claim allows any to."""
    if math.isinf(claim.epsilon):
        return "no claim"
    if claim.adjacency != "add-remove":  # that a record was there at all is not what is hidden
        return "outside the claim"
    if "epsilon_low" in row:
        return "contradicted" if row["epsilon_low"] > claim.epsilon else "within"
    cap, low = row.get("claim_cap"), row.get("low")
    if cap is None or low is None:
        return "within"
    surely = row["auc"] - (row["auc"] - low) * FAR / 1.959964
    return "contradicted" if surely > cap else "within"


def _overall(noise: Sequence[str], attacks: Sequence[str]) -> str:
    states = {*noise, *attacks}
    for state in ("contradicted", "inconclusive"):
        if state in states:
            return state
    return "pass" if "pass" in noise else "no claim"
