"""One run from a config to a folder: plan, protocol, evaluation, report."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import fedgist
from fedgist.audit.limits import limit_of
from fedgist.config import Run, dumps
from fedgist.encoders import load_encoder
from fedgist.evaluation import attack_rows, epsilon_curve, exact_outcome, score_heads
from fedgist.exchange.local import LocalExchange
from fedgist.exposure import exposed
from fedgist.progress import Progress, by_client
from fedgist.queries import MomentsQuery
from fedgist.report.figures import exposure_png
from fedgist.report.folder import Clock, claim_folder, file_row, write_outcome, write_report
from fedgist.report.record import versions
from fedgist.run import budget, drive
from fedgist.setup import (
    Prepared,
    Sites,
    blocks,
    open_exchange,
    open_sites,
    prepare_run,
    test_images,
)
from fedgist.types import Outcome, Tensors
from fedgist.whole import write_whole

__all__ = ["Result", "execute", "plan_record"]


@dataclass(frozen=True)
class Result:
    """A finished run: the report as plain data, and the outcome."""

    report: dict[str, Any]
    outcome: Outcome


def execute(run: Run, folder: Path | None = None, progress: Progress | None = None) -> Result:
    """Run a simulation end to end; write everything to ``folder`` when one is given.

    Raises:
        FedGistError: with one line that names what is wrong. What was written stays readable.
    """
    tell, config = progress or Progress(), "run.toml"
    clock = Clock()
    made = prepare_run(run)
    if folder is not None:
        claim_folder(folder)
        write_whole(folder / config, dumps(run).encode())
    tell.stage("load")
    sites, test = open_sites(made), test_images(made)
    clock.lap("load")
    observe = run.evaluation.ceiling and run.privacy.noise == "seeded"
    exchange = open_exchange(made, sites, observe=observe, progress=tell)
    outcome = drive(made.method, made.task, exchange, made.plan.rounds, run.seed, tell)
    clock.lap("protocol")
    files = (
        []
        if folder is None
        else write_outcome(outcome, folder, made.task, made.plan.claim, made.title)
    )
    if folder is not None and sites.split is not None:
        sites.split.save(folder / "partition.npz")
        files.append(file_row(folder / "partition.npz", "which image went to which client"))
    clock.lap("write")
    tell.stage("evaluate")
    exact = exact_outcome(made, exchange)
    heads = score_heads(made, outcome, exact, sites, test)
    clock.lap("evaluate")
    curve = epsilon_curve(made, exchange, outcome, exact, test) if run.evaluation.curve else None
    if curve is not None:
        clock.lap("curve")
    membership = attack_rows(made, outcome, sites, test) if run.evaluation.membership else None
    shown = exposed(made, exchange, outcome, sites, test) if run.evaluation.inversion else None
    clock.lap("audit")
    report = _report(made, outcome, exchange, sites)
    if exact is not None:
        _add_exact_spectrum(report["details"], exact)
    report |= {"heads": heads, "curve": curve, "membership": membership}
    report |= {"timings": clock.laps, "files": files}
    if shown is not None:
        _add_exposure(report, *shown, folder)
    if folder is not None:
        tell.stage("report")
        write_report(report, outcome, folder, config)
    return Result(report, outcome)


def plan_record(run: Run) -> dict[str, Any]:
    """Return what is known before any image is read, as plain data."""
    made = prepare_run(run)
    queries = [q for r in made.plan.rounds for q in r.queries]
    moments = [q for q in queries if isinstance(q, MomentsQuery)]
    size = getattr(made.method, "class_size", None)
    signals = dict.fromkeys(  # a query that is asked again says the same
        (f"{q.name}: " if q.name else "") + expected_signal(q, made.plan.sigma, size)
        for q in moments
    )
    return {
        "title": made.title,
        "config": run.model_dump(),
        "task": asdict(made.task),
        "rounds": len(made.plan.rounds),
        "left": blocks(made.plan, made.task, made.run.privacy),
        "claim": made.plan.claim.record(),
        "bytes_up": made.plan.bytes_up,
        "radius": moments[0].clip if moments else None,
        "track": made.plan.claim.track,
        "signal": "\n".join(signals) or "not known for this method",
    }


def expected_signal(query: MomentsQuery, sigma: float, class_size: int | None = None) -> str:
    """Say from how many images on each block rises above its noise, and how far at ``class_size``.

    A record's code has norm at most R, so n of them hold a signal of n R against noise of norm
    σ R √d / √share for a mean, and n R² against σ R² d / √share for a second moment, whose spectrum
    it reaches from n = σ d^1.5 / √share on.
    """
    if sigma <= 0:
        return "no noise"
    d, parts = query.dim, []
    for name, share, power, whole in (
        ("class means", query.mean, 0.5, False),
        ("class covariances", query.second, 1.5, False),
        ("pooled covariance", query.pooled, 1.5, True),
    ):
        if share:
            level = sigma * query.scale * d**power / share**0.5
            text = f"{name} from {level:,.0f} images {'in all' if whole else 'a class'}"
            if class_size:
                n = class_size * (query.classes if whole else 1)
                text += f" (here {n / level:.3g} to 1)"
            parts.append(text)
    return "; ".join(parts)


def _report(
    made: Prepared, outcome: Outcome, exchange: LocalExchange, sites: Sites
) -> dict[str, Any]:
    split, visits = sites.split, by_client(exchange.visits)
    limit = limit_of(made.plan.claim, made.plan.rounds)
    return {
        "fedgist": fedgist.__version__,
        "created": datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z"),
        "title": made.title,
        "simulation": True,
        "seed": made.run.seed,
        "config": made.run.model_dump(),
        "task": asdict(made.task),
        "encoders": {name: load_encoder(name).digest for name in made.method.encoders()},
        "claim": made.plan.claim.record(),
        "left": blocks(made.plan, made.task, made.run.privacy),
        "budget": budget(made.plan.rounds),
        "limit": limit.record() if limit else None,
        "bytes_up": max((v.bytes_up for v in visits), default=0),
        "bytes_down": max((v.bytes_down for v in visits), default=0),
        "clients": [asdict(v) for v in visits],
        "partition": None
        if split is None
        else {"spec": split.spec, "seed": split.seed, "table": sites.table},
        "chosen": next(iter(outcome.classifiers), None),
        "details": dict(outcome.details),
        "versions": versions(),
        "device": "cpu",
    }


def _add_exposure(
    report: dict[str, Any], found: dict[str, Any], pictures: Tensors, folder: Path | None
) -> None:
    """Put what attacks on uploads have found into the report, and their picture beside it."""
    report["membership"] = [*(report["membership"] or []), found.pop("membership")]
    report["exposure"] = found
    if folder is not None:
        path = folder / "exposure.png"
        exposure_png(pictures, path)
        report["files"].append(file_row(path, "what a server can rebuild of uploads"))
        found["picture"] = path.name


def _add_exact_spectrum(details: dict[str, Any], exact: Outcome) -> None:
    """Set the spectrum without noise beside the released one, when both are of one class."""
    seen, true = details.get("spectra"), exact.details.get("spectra")
    if seen and true and seen["class"] == true["class"]:
        details["spectra"] = seen | {"exact": true["released"]}
