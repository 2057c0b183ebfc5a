"""How numbers read in the report. A missing number is a dash, never a zero."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

__all__ = [
    "NONE",
    "alike_rounds",
    "amount",
    "epsilon",
    "middle",
    "odds",
    "percent",
    "points",
    "power",
    "seconds",
    "size",
]

NONE = "–"
SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def percent(share: float | None) -> str:
    """Return a share in [0, 1] as ``81.0 %`` (with a space that does not break)."""
    return NONE if _absent(share) else f"{100 * float(share or 0):.1f}\u00a0%"


def points(gap: float | None) -> str:
    """Return a difference of two shares in percentage points, with its sign."""
    return NONE if _absent(gap) else f"{100 * float(gap or 0):+.1f}".replace("-", "−")


def rate(value: float | None) -> str:
    """Return an area under a curve to three decimals."""
    return NONE if _absent(value) else f"{value:.3f}"


def amount(value: float | None) -> str:
    """Return a number with thousands separators and about four significant digits."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return NONE
    if math.isinf(value):
        return "∞" if value > 0 else "−∞"
    if value == int(value) and abs(value) < 1e15:
        return f"{int(value):,}".replace("-", "−")
    if not 1e-3 <= abs(value) < 1e9:
        return power(value)
    text = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:,.4g}"
    return text.replace("-", "−")


def size(count: float | None) -> str:
    """Return bytes as B, KiB, MiB or GiB."""
    if count is None:
        return NONE
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024 or unit == "GiB":
            break
        value /= 1024
    digits = 0 if unit == "B" or value >= 100 else 1
    return f"{value:,.{digits}f}\u00a0{unit}"


def seconds(value: float | None) -> str:
    """Return a duration as ms, s, min or h."""
    if _absent(value):
        return NONE
    t = float(value or 0)
    if t < 0.1:
        return f"{1000 * t:.1f}\u00a0ms"
    if t < 90:
        return f"{t:.2f}\u00a0s" if t < 10 else f"{t:.1f}\u00a0s"
    return f"{t / 60:.1f}\u00a0min" if t < 5400 else f"{t / 3600:.1f}\u00a0h"


def epsilon(value: float) -> str:
    """Return ε to four significant digits."""
    return "∞" if math.isinf(value) else f"{value:.4g}"


def odds(eps: float) -> str:
    """Return the worst-case odds that ε allows, starting from even ones: ``22,000 : 1``."""
    if math.isinf(eps):
        return "no bound"
    if eps > 30:
        return f"more than 10{str(int(eps / math.log(10))).translate(SUPERSCRIPTS)}\u00a0:\u00a01"
    factor = math.exp(eps)
    if factor < 1000:
        return f"{factor:.3g}\u00a0:\u00a01"
    return f"{round(factor, 1 - int(math.log10(factor))):,.0f}\u00a0:\u00a01"


def power(value: float) -> str:
    """Return a number as ``10⁻⁵`` or ``2.5 × 10⁻⁵``."""
    if value == 0 or not math.isfinite(value):
        return amount(value) if value == 0 else str(value)
    mantissa, _, exponent = f"{value:.2e}".partition("e")
    raised = f"10{str(int(exponent)).translate(SUPERSCRIPTS)}"
    short = mantissa.rstrip("0").rstrip(".")
    return raised if short == "1" else f"{short.replace('-', '−')} × {raised}"


def alike_rounds(left: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Join rounds in which the same blocks leave: each block once, its rounds as text.

    Args:
        left: one row a block and round, with ``round`` from 1.

    Returns:
        The rows of the first such round, with ``rounds``: ``3``, ``1 to 5`` or ``1, 3 … 299``.
    """
    rounds: dict[int, list[Mapping[str, Any]]] = {}
    for b in left:
        rounds.setdefault(b["round"], []).append(b)
    groups: dict[str, list[int]] = {}
    for r, rows in rounds.items():
        key = repr([{k: v for k, v in b.items() if k != "round"} for b in rows])
        groups.setdefault(key, []).append(r)
    return [{**b, "rounds": _listed(same)} for same in groups.values() for b in rounds[same[0]]]


def _listed(rounds: Sequence[int]) -> str:
    first, last = rounds[0], rounds[-1]
    if len(rounds) == 1:
        return str(first)
    if last - first == len(rounds) - 1:
        return f"{first} to {last}"
    if len(rounds) <= 3:
        return ", ".join(map(str, rounds))
    return f"{first}, {rounds[1]} … {last}"


def middle(values: Sequence[float]) -> float | None:
    """Return the median, or None of nothing."""
    ordered = sorted(values)
    n = len(ordered)
    return None if not n else (ordered[(n - 1) // 2] + ordered[n // 2]) / 2


def _absent(value: Any) -> bool:
    return value is None or not math.isfinite(value)
