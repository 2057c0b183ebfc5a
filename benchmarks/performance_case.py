"""Measure cases, each in a process of its own, one repeat at a time, for `performance.py`.

Reads a line of JSON from standard input for each thing to do and answers with one. So that the same
measurement runs over the `fedgist` of another commit (put first on PYTHONPATH), it uses little of
the package: the config, the plan, the sites, the local exchange.
"""

from __future__ import annotations

import ctypes
import gc
import json
import os
import resource
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TextIO

import torch
from code_length import noise_bits, value_bits
from torch import Tensor

import fedgist.exchange.local as local
from fedgist.config import load
from fedgist.encoders import load_encoder
from fedgist.privacy.noise import noise_scales, share_scale
from fedgist.progress import Progress
from fedgist.queries import MomentsQuery, prefixed
from fedgist.run import drive
from fedgist.setup import Prepared, open_exchange, open_sites, prepare_run
from fedgist.train.models import build_model
from fedgist.types import Images, Round, Tensors

Pass = Callable[[Tensor], Tensor]
Gists = list[tuple[int, Tensors]]

SAID = 3  # exit status of a case that has told its error
# Loads the packages that are imported when first needed: partitions, accounting, encoders.
WARM = (
    *("data.source=fashion-mini", "data.limit=20", "data.clients=2", "data.partition=iid"),
    *("method.heads=['lda']", "method.features=scattering:32"),
)


def main() -> int:
    """Fork a process for each case that is asked for, until the input ends.

    Forked from one that has imported all that any case needs, so that a case does not pay for it
    in time or memory.
    """
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever a library prints is no answer
    torch.set_num_threads(1)
    Case(WARM, False)
    while line := sys.stdin.readline():
        if (forked := os.fork()) == 0:
            os._exit(served(line, answers))
        status = os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1])
        if status not in (0, SAID):
            tell(answers, {"error": f"the process ended with status {status}"})
    return 0


def served(line: str, answers: TextIO) -> int:
    """Do what is asked of one case, up to its last answer; return the exit status."""
    case: Case | None = None
    try:
        while line:
            asked = json.loads(line)
            if asked["do"] == "prepare":
                case = Case(asked["set"], asked["quick"])
                tell(answers, {})
            else:
                assert case is not None
                tell(answers, getattr(case, asked["do"])())
            if asked["do"] == "finish":
                return 0
            line = sys.stdin.readline()
    except Exception as e:  # of any version of the package; it is told and the next case goes on
        tell(answers, {"error": f"{type(e).__name__}: {e}"})
        return SAID
    return 0


def tell(answers: TextIO, found: dict[str, Any]) -> None:
    """Answer with one line."""
    print(json.dumps(found), file=answers, flush=True)


class Case:
    """One case, warm: it has run once, which gave the peak of memory."""

    def __init__(self, options: Sequence[str], quick: bool) -> None:
        run = load(None, options)
        if quick:
            from fedgist.bench import quicken

            run = quicken(run)
        self.made = prepare_run(run)
        self.sites = open_sites(self.made)
        self.idle = fresh_peak()
        self.run()
        self.peak = _memory("VmHWM")
        self.images = self.sites.together()
        self.bare, self.passes = bare_passes(self.made)
        self.pass_bare()

    def pass_bare(self) -> float:
        """Pass all images through the bare encoders or network; return CPU seconds."""
        started = time.process_time()
        with torch.no_grad():
            for x, _ in self.images.batches():
                for run in self.passes:
                    run(x)
        return time.process_time() - started

    def run(self) -> dict[str, float]:
        """Run the protocol, without evaluation; return CPU seconds of client and server."""
        gc.collect()
        watch = Stopwatch()
        sites = replace(self.sites, loaders=[watch.around(load) for load in self.sites.loaders])
        self.exchange = open_exchange(self.made, sites, observe=False, progress=watch)
        with recorded() as self.gists:
            started = time.process_time()
            run = self.made
            drive(run.method, run.task, self.exchange, run.plan.rounds, run.run.seed)
            total = time.process_time() - started
        return {"client": watch.seconds, "server": total - watch.seconds}

    def repeat(self) -> dict[str, float]:
        """Measure once: the bare pass, then the protocol."""
        return {"bare": self.pass_bare()} | self.run()

    def finish(self) -> dict[str, Any]:
        """Return what does not vary from repeat to repeat."""
        visits, first = self.exchange.visits, self.exchange.visits[0].client
        mine = [v for v in visits if v.client == first]
        clients = len({v.client for v in visits})
        return {
            "images": sum(v.images or 0 for v in visits) // len(mine),
            "clients": clients,
            "rounds": len(mine),
            "bare": self.bare,
            "bytes_up": sum(v.bytes_up for v in mine),
            "bytes_down": sum(v.bytes_down for v in mine),
            "bytes_up_all": sum(v.bytes_up for v in visits),
            "code_bytes": code_bytes(self.made, self.gists, clients),
            "idle_mib": self.idle,
            "peak_mib": self.peak,
        }


@dataclass
class Stopwatch(Progress):
    """Adds up the CPU seconds of visits, from the loading of images to the answer."""

    seconds: float = 0.0
    started: float = 0.0

    def around(self, load: Callable[[], Images]) -> Callable[[], Images]:
        """Return a loader that starts the watch."""

        def start() -> Images:
            self.started = time.process_time()
            return load()

        return start

    def client(self, done: int, total: int, visit: object) -> None:
        """A client has answered."""
        self.seconds += time.process_time() - self.started


class recorded:
    """Keep the gists that the first client sends, by round, for as long as the block lasts."""

    def __enter__(self) -> Gists:
        self.answer, gists = local.answer, []

        def answer(duty: Any, i: int, name: str, load: Any, r: int, *rest: Any) -> Any:
            made = self.answer(duty, i, name, load, r, *rest)
            if i == 0:
                gists.append((r, made.gist))
            return made

        local.answer = answer
        return gists

    def __exit__(self, *error: object) -> None:
        local.answer = self.answer


def bare_passes(made: Prepared) -> tuple[str, list[Pass]]:
    """Return what the client's work is compared with: its name, and passes over a batch.

    The encoders that its views need; for a method without encoders, a forward pass of the network
    that is trained in the end (its ``recipe``, or the server's).
    """
    method, task = made.method, made.task
    names = list(method.encoders())
    passes: list[Pass] = [load_encoder(name).encode_task for name in names]
    if "match" in getattr(method, "views", ()):
        names.append("random networks")
        passes.append(method.networks.rows)
    if passes:
        return " + ".join(names), passes
    recipe = getattr(method, "recipe", None) or method.server.recipe
    rng, classes = torch.Generator().manual_seed(0), len(task.classes)
    network = build_model(recipe.model, task.channels, task.size, classes, recipe.width, rng)
    return f"{recipe.model} of width {recipe.width}", [network]


def code_bytes(made: Prepared, gists: Gists, parties: int) -> float | None:
    """Return how few bytes the gists of one client could take, see `code_length`."""
    bits = 0.0
    for r, gist in gists:
        noise = dict(wire_noise(made, made.plan.rounds[r], parties))
        for name, values in gist.items():
            bits += noise[name](values.shape) if name in noise else value_bits(values)
    return bits / 8 or None


def wire_noise(
    made: Prepared, rnd: Round, parties: int
) -> Iterator[tuple[str, Callable[[torch.Size], float]]]:
    """Yield each block that a client noises itself, with the bits of noise for a shape."""
    privacy, sigma = made.run.privacy, made.plan.sigma
    if rnd.reduce != "sum" or rnd.raw or privacy.trust == "central" or not sigma > 0:
        return
    for query in rnd.queries:
        for name, scales in prefixed(query, noise_scales(query, sigma)).items():
            if privacy.trust == "distributed":
                scales = tuple(share_scale(s, parties, privacy.missing) for s in scales)
            plain, off = (noise_bits(s) for s in scales)
            dim = query.dim if isinstance(query, MomentsQuery) else 0

            def bits(shape: torch.Size, p: float = plain, o: float = off, dim: int = dim) -> float:
                if p == o:
                    return shape.numel() * p
                rows = shape.numel() // shape[-1]
                return rows * (dim * p + (shape[-1] - dim) * o)  # the triangle: diagonal first

            yield name, bits


def map_files() -> None:
    """Map all of the libraries' pages that this process may read, where the system can (Linux).

    A forked process begins without them and would take up to 100 MiB for its own as it goes on.
    """
    maps, populate = Path("/proc/self/maps"), 22  # MADV_POPULATE_READ, Linux 5.14
    if not maps.exists():
        return
    libc = ctypes.CDLL(None)
    for row in maps.read_text().splitlines():
        span, rights, *_, where = row.split(maxsplit=5)
        if rights.startswith("r") and where.startswith("/"):
            start, end = (int(v, 16) for v in span.split("-"))
            libc.madvise(ctypes.c_void_p(start), ctypes.c_size_t(end - start), populate)


def fresh_peak() -> float:
    """Let the peak of memory begin here, where the system can (Linux); return MiB in use."""
    gc.collect()
    map_files()
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return _memory("VmRSS")


def _memory(field: str) -> float:
    """Return ``VmRSS`` (now) or ``VmHWM`` (the most so far) of this process in MiB.

    Where there is no /proc both are the most so far.
    """
    try:
        rows = Path("/proc/self/status").read_text().splitlines()
        return int(next(r for r in rows if r.startswith(f"{field}:")).split()[1]) / 1024
    except (OSError, StopIteration):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak / (2**20 if sys.platform == "darwin" else 1024)


if __name__ == "__main__":
    sys.exit(main())
