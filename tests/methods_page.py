"""The table of docs/methods.md, worked out from each method's plan.

``python tests/methods_page.py --write`` rewrites it in the page.
"""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from fedgist.method import Method, method_class, method_names
from fedgist.privacy.claim import Claim, Privacy
from fedgist.queries import MomentsQuery, Query
from fedgist.run import Plan, plan_of
from fedgist.types import Round, Task

PAGE = Path(__file__).parents[1] / "docs" / "methods.md"
BLOCK = re.compile(r"(<!-- computed: methods -->\n).*?(<!-- end -->)", re.DOTALL)
TASK = Task("Fashion-MNIST", tuple("abcdefghij"), 1, 28)
EPSILON = 10.0


def planned(method: Method) -> Plan:
    """Plan for ε = 10, or without noise where no ε holds."""
    raw = any(r.raw for r in method.plan(TASK))
    return plan_of(method, TASK, Privacy(math.inf if raw else EPSILON))


def row(name: str) -> Sequence[str]:
    plan = planned(method_class(name)())
    rounds = plan.rounds
    sent = "; then ".join(dict.fromkeys(map(told, rounds)))
    said = promise(plan.claim, rounds)
    return [f"[`{name}`](#{name})", f"{len(rounds)}", sent, size(plan), *said]


def told(rnd: Round) -> str:
    if rnd.sends:
        pieces = [f"{p.name} {shape(p.shape)}".strip() for p in rnd.sends]
        return ", ".join(pieces)
    return ", ".join(asked(q) for q in rnd.queries) or "not stated in advance"


def asked(query: Query) -> str:
    if isinstance(query, MomentsQuery):
        blocks = query.shapes(noised=True)
        return f"noised {', '.join(blocks)} of {query.dim} numbers" + (
            f" ({query.name})" if query.name else ""
        )
    return f"noised sums {shape(query.shape)}" + (f" ({query.name})" if query.name else "")


def shape(sizes: Sequence[int]) -> str:
    if sizes[:1] == (-1,):
        return "of every image " + shape(sizes[1:]) if sizes[1:] else "of every image"
    return " x ".join(map(str, sizes))


def size(plan: Plan) -> str:
    if plan.bytes_up is not None:
        return f"{plan.bytes_up:,}"
    each = sum(math.prod(p.shape[1:]) * p.bits // 8 for p in plan.rounds[0].sends if p.by_image)
    return f"{each:,} an image" if each else "depends"


def promise(claim: Claim, rounds: Sequence[Round]) -> Sequence[str]:
    if math.isinf(claim.epsilon):
        return ["∞", "nobody"]
    if all(r.reduce == "pool" for r in rounds):
        return ["any", "each client, in full"]
    return ["any", "server, shares, or each client"]


def table() -> str:
    head = ["method", "rounds", "a client sends", "bytes", "ε", "noise by"]
    lines = [head, ["---"] * len(head), *(row(name) for name in method_names())]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def current(text: str) -> str:
    """Return the page's text with the table as it should be."""
    return BLOCK.sub(lambda m: f"{m[1]}\n{table()}\n\n{m[2]}", text)


if __name__ == "__main__":
    if sys.argv[1:] != ["--write"]:
        raise SystemExit(f"usage: python {sys.argv[0]} --write")
    PAGE.write_text(current(PAGE.read_text("utf-8")), "utf-8")
