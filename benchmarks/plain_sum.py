"""Measure the coordinator's plain sum of many sites' gists: seconds and memory as sites grow.

    python benchmarks/plain_sum.py

Each simulated site sends one signed letter with FedKT-CSD's default gist for ten classes; the
coordinator checks signature, hash, names and shapes, unpacks it and adds it up, as in a real run.
Writes ``benchmarks/results/plain_sum.json``.
"""

from __future__ import annotations

import resource
import tempfile
import time
from datetime import UTC, datetime
from pathlib import Path

import torch

from fedgist.agreement import agree
from fedgist.config import load
from fedgist.exchange.letter import write_letter
from fedgist.exchange.remote import RemoteExchange
from fedgist.exchange.wire import duty_of, promise, to_wire, wire_blocks
from fedgist.privacy.identity import Identity
from fedgist.report.record import versions, write_json
from fedgist.types import Task

SITES = (10, 100, 1000)
SETS = ["method.heads=['qda']", "privacy.trust=local", "privacy.noise=system"]


class Letters:
    """Answers every request with a letter made on the spot, and drops it."""

    def __init__(self, members, agreement, gist):
        self.members, self.agreement, self.gist, self.making = members, agreement, gist, 0.0

    def ask(self, step, requests, take):
        """See `Transport.ask`."""
        for member in self.members:
            started = time.process_time()
            letter = write_letter(
                member, self.agreement.digest, step, "leader", "reply", self.gist,
                asked="", **promise(self.agreement),
            )  # fmt: skip
            self.making += time.process_time() - started
            assert take(member.name, letter)
        return {}

    def end(self, letters):
        """Nobody waits."""


def measure(sites: int) -> dict[str, float]:
    """Return the cost of one round with so many sites."""
    task = Task("scale", tuple("abcdefghij"), channels=1, size=28)
    leader, members = Identity.new("leader"), [Identity.new(f"s{i}") for i in range(sites)]
    agreement = agree(load(None, SETS), task, leader.public, [m.public for m in members], {})
    rnd = agreement.plan.rounds[0]
    blocks = wire_blocks(duty_of(agreement), rnd)
    sums = {k: torch.full(b.shape, -2, dtype=torch.int64) for k, b in blocks.items()}
    with tempfile.TemporaryDirectory() as folder:
        transport = Letters(members, agreement, to_wire(sums, blocks))
        exchange = RemoteExchange(agreement, leader, transport, Path(folder))
        started = time.process_time()
        merged = exchange.round(0, rnd, {})
        seconds = time.process_time() - started - transport.making
        exchange.close()
    assert all(bool((v == -2 * sites).all()) for v in merged.tensors.values())
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "sites": sites,
        "numbers": sum(v.numel() for v in sums.values()),
        "server_seconds": round(seconds, 3),
        "server_ms_per_site": round(1000 * seconds / sites, 2),
        "bytes_per_site": exchange.visits[0].bytes_up,
        "peak_mib": round(peak, 1),
    }


def main() -> None:
    """Measure, few sites first: the peak of memory never falls."""
    torch.set_num_threads(1)
    runs = []
    for sites in SITES:
        runs.append(measure(sites))
        print(runs[-1], flush=True)
    created = datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
    record = {"benchmark": "plain_sum", "created": created, "versions": versions(), "runs": runs}
    write_json(Path(__file__).parent / "results" / "plain_sum.json", record)


if __name__ == "__main__":
    main()
