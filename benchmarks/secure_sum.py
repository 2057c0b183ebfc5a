"""Measure the secure sum: seconds, bytes and memory by stage, for 3 to 1000 simulated sites.

Usage: python benchmarks/secure_sum.py [--sites 3 10 50 200 1000] [--out RESULTS.json]

All parties run in one process, one after the other; seconds are processor time. Up to 50 sites
the vector has 83,000 numbers of 30 bits, about FedKT-CSD's gist for ten classes. For 200 and 1000
it has 1,000: a longer one adds, per number and mask, ``seconds_per_mask_and_number`` at a member
(one mask per neighbour and one of its own) and at the server (one per survivor, one per neighbour
of a lost site), ``ring_bits / 8`` bytes up, and 8 bytes of server memory, once.

200 sites and fewer join all pairs, with a threshold of two thirds. 1000 sites have the degree that
`choose_graph` finds for 5 % drop-outs, 5 % colluders and a failure in 2^30; its union bound is
derived there. 5 % of the sites fall silent before their upload.
"""

from __future__ import annotations

import argparse
import hashlib
import math
import time
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedgist.privacy.secure_sum import STAGES, Block, Collector, Member, Terms
from fedgist.privacy.secure_sum.graph import COMPLETE, choose_graph
from fedgist.privacy.secure_sum.masks import add_stream
from fedgist.report.record import versions, write_json

BITS = 30
FAILURE = 2.0**-30
Replies = dict[int, bytes]


def main() -> int:
    """Measure each number of sites and write one file."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sites", type=int, nargs="+", default=[3, 10, 50, 200, 1000])
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).parent / "results/secure_sum.json"
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    runs = []
    for n in args.sites:
        runs.append(measure(n, 83_000 if n <= 50 else 1_000))
        print(line(runs[-1]), flush=True)
    result = {
        "benchmark": "secure_sum",
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": versions(),
        "seconds_per_mask_and_number": seconds_per_number(),
        "runs": runs,
    }
    write_json(args.out, result)
    return 0


def measure(n: int, numbers: int) -> dict[str, Any]:
    """Run one sum with 5 % of the sites lost before their upload; check that it is exact."""
    signers = [
        Ed25519PrivateKey.from_private_bytes(hashlib.sha256(b"%d" % i).digest()) for i in range(n)
    ]
    terms = terms_of(signers, numbers)
    members = [Member(terms, i, key) for i, key in enumerate(signers)]
    lost = {(20 * k + 7) % n for k in range(n // 20)}
    rng = torch.Generator().manual_seed(n)
    values = {i: torch.randint(-(2**29), 2**29, (numbers,), generator=rng) for i in range(n)}
    server, by_stage, log = Collector(terms), {}, []
    requests = server.open()
    for stage in STAGES:
        asked = {i: r for i, r in requests.items() if stage != "upload" or i not in lost}
        given = {i: {"x": values[i]} if stage == "upload" else None for i in asked}
        started = time.process_time()
        replies = {i: members[i].answer(stage, r, given[i]) for i, r in asked.items()}
        answered = time.process_time()
        requests = server.advance(replies)
        by_stage[stage] = {
            "member_seconds": (answered - started) / len(replies),
            "server_seconds": time.process_time() - answered,
            "bytes_down": mean_bytes(asked),
            "bytes_up": mean_bytes(replies),
        }
        log.append(replies)
    expected = sum(values[i] for i in server.survivors)
    if not torch.equal(server.result()["x"], torch.as_tensor(expected)):
        raise SystemExit(f"the sum of {n} sites must be exact. Got another")
    return {
        "sites": n,
        "neighbours": terms.group - 1,
        "threshold": terms.threshold,
        "colluders": terms.colluders,
        "lost_before_upload": len(lost),
        "numbers": numbers,
        "ring_bits": terms.width(terms.blocks[0]),
        "stages": by_stage,
        "member_seconds": sum(s["member_seconds"] for s in by_stage.values()),
        "server_seconds": sum(s["server_seconds"] for s in by_stage.values()),
        "bytes_up": sum(s["bytes_up"] for s in by_stage.values()),
        "bytes_down": sum(s["bytes_down"] for s in by_stage.values()),
        "vector_bytes_in_server": 8 * terms.length,
        "server_peak_bytes": peaks(terms, log),
    }


def terms_of(signers: list[Ed25519PrivateKey], numbers: int) -> Terms:
    """Return the terms of a simulated sum."""
    n = len(signers)
    degree, threshold = None, 2 * n // 3 + 1 if n > 3 else 2
    if n > COMPLETE:
        degree, threshold = choose_graph(n, n // 20, n // 20, FAILURE)
    roster = tuple(k.public_key().public_bytes_raw() for k in signers)
    return Terms(bytes(32), roster, threshold, (Block("x", (numbers,), BITS),), degree)


def peaks(terms: Terms, log: list[Replies]) -> dict[str, int]:
    """Replay the replies to a new server and return the most bytes that it held in each stage.

    The replies themselves are not counted: each is received and can be forgotten. The requests are.
    """
    tracemalloc.start()
    server = Collector(terms)
    requests = server.open()
    found = {}
    for stage, replies in zip(STAGES, log, strict=True):
        tracemalloc.reset_peak()
        requests = server.advance(replies)
        found[stage] = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    del requests
    return found


def seconds_per_number(numbers: int = 1_000_000) -> float:
    """Return the processor seconds of one number of one mask."""
    words = np.zeros(numbers, np.uint64)
    best = math.inf
    for _ in range(5):
        started = time.process_time()
        add_stream(words, bytes(32))
        best = min(best, time.process_time() - started)
    return best / numbers


def mean_bytes(messages: Replies) -> float:
    """Return the mean length of a message."""
    return sum(len(m) for m in messages.values()) / max(1, len(messages))


def line(r: dict[str, Any]) -> str:
    """Return one run on one line."""
    return (
        f"{r['sites']} sites, {r['neighbours']} neighbours, {r['numbers']} numbers: "
        f"member {r['member_seconds']:.3f} s, {r['bytes_up'] / 1e3:.1f} kB up, "
        f"{r['bytes_down'] / 1e3:.1f} kB down; server {r['server_seconds']:.2f} s, "
        f"peak {max(r['server_peak_bytes'].values()) / 1e6:.1f} MB"
    )


if __name__ == "__main__":
    raise SystemExit(main())
