"""One run of a benchmark: what is kept of it, where it was made, and sums shared by cases."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

import fedgist
from fedgist.config import Run
from fedgist.errors import ConfigError
from fedgist.evaluation import exact_outcome, score_heads
from fedgist.exchange.local import LocalExchange
from fedgist.methods._oneshot import OneShot
from fedgist.progress import Visit
from fedgist.report.record import versions
from fedgist.run import Exchange, drive
from fedgist.setup import Prepared, Sites, open_exchange, open_sites, prepare_run, test_images
from fedgist.types import Merged, Round, Tensors

__all__ = ["PICKED", "Kept", "Sums", "Uploads", "fresh_peak", "peak_memory", "pick", "provenance"]

PICKED = (
    *("heads", "claim", "membership", "timings", "server_seconds", "bytes_up", "bytes_down"),
    *("client_seconds", "rounds", "exposure"),
)


def pick(report: Mapping[str, Any]) -> dict[str, Any]:
    """Keep what tables need of one report, under the names of ``PICKED``.

    Bytes are of the client that sends or receives most; ``client_seconds`` are of all clients
    together. Both are None where no client was visited, as with kept sums. ``server_seconds`` is
    by stage.
    """
    details, clients = report["details"], report.get("clients")
    return {
        "heads": report["heads"],
        "claim": report["claim"],
        "membership": report["membership"],
        "timings": report["timings"],
        "server_seconds": details.get("seconds", {}),
        "bytes_up": report["bytes_up"],
        "bytes_down": report.get("bytes_down"),
        "client_seconds": None if clients is None else sum(c["seconds"] or 0 for c in clients),
        "rounds": details.get("rounds"),
        "exposure": report.get("exposure"),
    }


SERVER = {"heads", "recipe", "matching", "matched", "teacher", "temper", "synthetic_size"}
SERVER |= {"canvas", "server"}


class Sums:
    """Exact sums, kept from case to case: over the same images they are the same for every ε.

    The noise is drawn as the exchange draws it, so that a run gives what `execute` would give,
    without encoding the images again. For methods of one sum round under trust ``central``.
    """

    def __init__(self) -> None:
        self._kept: dict[str, Tensors] = {}

    def report(self, run: Run) -> dict[str, Any]:
        """Run one case from kept sums; return the parts of a report that `pick` wants.

        Raises:
            ConfigError: the method has more rounds than one, or clients noise what they send.
        """
        made = prepare_run(run)
        if len(made.plan.rounds) != 1 or run.privacy.trust != "central":
            raise ConfigError(
                "sums_once must go with one round under privacy.trust = central. "
                f"Got {len(made.plan.rounds)} rounds, {run.privacy.trust}"
            )
        sites = open_sites(made)
        local = open_exchange(made, sites, observe=True)
        self._fill(made, local)
        return _report(made, sites, local, Kept(local)) | {"bytes_up": made.plan.bytes_up}

    def _fill(self, made: Prepared, local: LocalExchange) -> None:
        """Give the exchange its exact sums, from before or by visiting every client."""
        run, (rnd,) = made.run, made.plan.rounds
        # What the sums depend on besides the queries: the encoders, how codes are prepared, the
        # data, and the seed where it chooses images.
        sources = [run.data, run.task, {k: v for k, v in run.method.items() if k not in SERVER}]
        if run.data.limit is not None or run.data.participation < 1:
            sources.append(run.seed)
        key = repr(([replace(q, scale=1.0) for q in rnd.queries], sources))
        if key not in self._kept:
            local.round(0, rnd, {})
            self._kept[key] = local.exact
        local.exact = self._kept[key]


class Kept:
    """An exchange that adds noise to exact sums seen before, and visits nobody."""

    def __init__(self, local: LocalExchange) -> None:
        self._local = local

    def round(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Return the noised sums."""
        local = self._local
        return Merged(local.noised(r, rnd, local.exact), local.sigma, len(local.sites))


class Uploads:
    """Networks that clients have trained once, kept from case to case.

    Where methods differ only in what the server makes of the networks, each client trains as
    before; it does so once, and every case gets what `execute` would give it. Seconds of clients
    are those of the first time.
    """

    def __init__(self) -> None:
        self._kept: dict[str, tuple[Merged, list[Visit]]] = {}

    def report(self, run: Run) -> dict[str, Any]:
        """Run one case on networks that may be there; return the parts that `pick` wants.

        Raises:
            ConfigError: the method's clients do not train once and send their network.
        """
        made = prepare_run(run)
        if not isinstance(made.method, OneShot):
            raise ConfigError(
                "uploads_once must go with a method whose clients send one trained network. "
                f"Got {run.method['name']}"
            )
        sites = open_sites(made)
        local = open_exchange(made, sites, observe=False)
        alike = [run.data, run.task, run.seed, made.method.recipe, made.method.epochs]
        found = _report(made, sites, local, _Trained(local, self._kept, repr(alike)))
        up, down = (max(getattr(v, k) for v in local.visits) for k in ("bytes_up", "bytes_down"))
        clients = [{"seconds": v.seconds} for v in local.visits]
        return found | {"bytes_up": up, "bytes_down": down, "clients": clients}


@dataclass
class _Trained:
    """An exchange that visits clients only where nobody has trained alike before."""

    local: LocalExchange
    kept: dict[str, tuple[Merged, list[Visit]]]
    key: str

    def round(self, r: int, rnd: Round, shared: Tensors) -> Merged:
        """Return the clients' networks."""
        if self.key not in self.kept:
            self.kept[self.key] = self.local.round(r, rnd, shared), self.local.visits
        merged, self.local.visits = self.kept[self.key]
        return merged


def _report(
    made: Prepared, sites: Sites, local: LocalExchange, exchange: Exchange
) -> dict[str, Any]:
    """Run the protocol over another exchange; return what `pick` wants of both kinds of cases."""
    started = time.perf_counter()
    outcome = drive(made.method, made.task, exchange, made.plan.rounds, made.run.seed)
    server = time.perf_counter() - started
    bare = exact_outcome(made, local) if made.run.evaluation.ceiling else None
    return {
        "heads": score_heads(made, outcome, bare, sites, test_images(made)),
        "claim": made.plan.claim.record(),
        "membership": None,
        "timings": {"server": server},
        "details": outcome.details,
    }


def provenance() -> dict[str, Any]:
    """Say what code ran, with what, on what, and when."""
    return {
        "commit": _commit(),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "device": f"cpu, {os.cpu_count()} cores, {platform.machine()}",
        "threads": torch.get_num_threads(),
    }


def _commit() -> str:
    """Return the commit that this code is of, ``-dirty`` with changes; else its version."""
    here = Path(fedgist.__file__)

    def git(*words: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(here.parent), *words], capture_output=True, text=True
            )
        except OSError:
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed copy may lie inside the repository of something else
    ours = git("ls-files", "--error-unmatch", here.name)
    return (ours and git("describe", "--always", "--dirty")) or f"v{fedgist.__version__}"


def fresh_peak() -> None:
    """Let `peak_memory` count from here, where the system can (Linux)."""
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return


def peak_memory() -> float:
    """Return the most resident memory, in MiB, since `fresh_peak` or since the process began."""
    try:
        status = Path("/proc/self/status").read_text()
        (line,) = (r for r in status.splitlines() if r.startswith("VmHWM:"))
        return int(line.split()[1]) / 1024
    except (OSError, ValueError):
        import resource

        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)
