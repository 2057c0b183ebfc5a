"""The section of docs/results.md on seconds, bytes, memory and growth, from performance.json."""

from __future__ import annotations

from typing import Any

from sweeps import table

__all__ = ["performance_table"]

GROWS = {
    "client": "client",
    "server": "server",
    "bytes_up": "bytes of one client",
    "bytes_up_all": "bytes of all",
    "memory": "memory",
}


def performance_table(r: dict[str, Any]) -> str:
    """Return text and tables of a run of ``benchmarks/performance.py``: costs, then exponents."""
    good = [c for c in r["cases"] if "error" not in c]
    curves = {f"{g['stem']}, {g['axis']} = {v}" for g in r["growth"] for v in g["values"]}
    costs = [c for c in good if c["name"] not in curves]
    parts = [
        f"CPU seconds of one core (`benchmarks/performance.py`, {r['commit']}), medians of "
        f"{r['repeats']} runs without evaluation; each case in a process of its own. *Bare*: the "
        "same images through the encoders alone, or through the network that is trained where a "
        "method has none. *Bytes / code*: what one client sends over what its numbers need: the "
        "noise's entropy where sums leave with noise, else that of the values "
        "(`benchmarks/code_length.py`). *Memory*: the peak beyond an idle process with the images.",
        table(
            ("case", "images", "client, ms an image", "client / bare", "server, s", "KiB up",
             "bytes / code", "memory, MiB"),
            [cost_row(c) for c in costs],
        ),
    ]  # fmt: skip
    if r["growth"]:
        parts += [
            "How they grow: exponents of a power law over all points, in brackets between the "
            "last two, where constant parts weigh least. With clients the images stay the same.",
            table(
                ("case", "along", *GROWS.values()),
                [growth_row(g) for g in r["growth"]],
            ),
        ]
    if left := [c["name"] for c in r["cases"] if "error" in c]:
        parts.append(f"Not measured: {', '.join(left)}.")
    return "\n\n".join(parts)


def cost_row(c: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one case."""
    over = c["bytes_over_code"]
    return (
        c["name"],
        f"{c['images']:,}",
        f"{1000 * c['client_by_image']:.2f}",
        f"{c['over_bare']:.2f}",
        f"{c['server']:.2f}",
        f"{c['bytes_up'] / 1024:,.0f}",
        "–" if over is None else f"{over:.2f}",
        f"{c['memory']:,.0f}",
    )


def growth_row(g: dict[str, Any]) -> tuple[str, ...]:
    """Return the cells of one growth curve."""
    found = (g["exponents"][k] for k in GROWS)
    # + 0 takes the sign off a zero
    cells = (f"{round(e['all'], 1) + 0:.1f} ({round(e['last'], 1) + 0:.1f})" for e in found)
    return (g["stem"], f"{g['axis']}: {', '.join(map(str, g['values']))}", *cells)
