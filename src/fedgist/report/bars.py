"""Bar figures as SVG: how the privacy budget is divided, what audits of the noise have shown."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from fedgist.report.numbers import amount
from fedgist.report.plots import Plot, drawing, label

__all__ = ["bound_plot", "budget_plot", "even_rounds"]

MOST_ROUNDS = 12  # that are drawn one by one
ENOUGH = 0.85  # share of a claim that an audit of the noise must reach
FULL = 2.0  # a bar of more than that many claims is cut
STYLES = {"mean": 1, "second": 2, "pooled": 3, "count": 4}  # of blocks: classes of the style sheet
ROOM = 9.6  # units of width per letter, at the size that phones show


def budget_plot(budget: Sequence[Mapping[str, Any]], name: str) -> Plot | None:
    """Draw how the squared budget is divided: a bar for each view, or for each of a few rounds.

    Args:
        budget: of the report: ``round``, ``view``, ``block`` and ``share``.
        name: tells the figures of one page apart.

    Returns:
        None when there is nothing to compare.
    """
    rounds = {row["round"] for row in budget}
    by_round = 1 < len(rounds) <= MOST_ROUNDS
    bars: dict[str, dict[str, float]] = {}
    for row in budget:
        bar = f"round {row['round']}" if by_round else row["view"] or "all"
        blocks = bars.setdefault(bar, {})
        blocks[row["block"]] = blocks.get(row["block"], 0.0) + row["share"]
    if sum(map(len, bars.values())) < 2 or even_rounds(budget):
        return None
    longest = max(sum(blocks.values()) for blocks in bars.values())
    parts, table, used = [], [], {}
    for i, (bar, blocks) in enumerate(bars.items()):
        y, x = 8 + 56 * i, 2.0
        whole = sum(blocks.values())
        title = f"{bar}: {_share_text(whole)}" if len(bars) > 1 else "the whole budget"
        parts.append(label(2, y + 12, title, "axis"))
        for block, share in blocks.items():
            wide, style = 476 * share / longest, f"s{STYLES.get(block, 1)}"
            used[block] = style
            gap = max(wide - 1.5, 0.5)
            parts.append(
                f'<rect class="{style}" x="{x:.1f}" y="{y + 19}" width="{gap:.1f}" height="26"/>'
            )
            text = _share_text(share)
            for full in (f"{block} {text}", text):
                if wide > ROOM * len(full) + 8:
                    parts.append(label(x + 6, y + 37, full, "inside"))
                    break
            table.append((f"{bar}, {block}" if len(bars) > 1 else block, [_share_text(share)]))
            x += wide
    said = "; ".join(f"{block}: {values[0]}" for block, values in table)
    title = "Shares of the squared privacy budget"
    svg = drawing(8 + 56 * len(bars), parts, name, title, said)
    legend = [(f"box {style}", block) for block, style in used.items()]
    return Plot(svg, legend, ["Block", "Share of the budget"], table)


def even_rounds(budget: Sequence[Mapping[str, Any]]) -> int:
    """Return over how many rounds one block divides the budget evenly; 0 where it is not so."""
    shares = [round(row["share"], 9) for row in budget]
    alike = len({(row["view"], row["block"]) for row in budget}) == 1 == len(set(shares))
    return len(shares) if alike and len(shares) > 1 else 0


def bound_plot(rows: Sequence[Mapping[str, Any]], name: str) -> Plot | None:
    """Draw what audits of the noise have shown, as a share of what is claimed.

    Args:
        rows: of the audits; those without a bound, or without a claim, are left out.
        name: tells the figures of one page apart.
    """
    found = [(row, *_reached(row)) for row in rows if _reached(row) is not None]  # type: ignore[misc]
    if not found:
        return None
    most = max(1.2, min(FULL, 1.05 * max(share for _, share, _ in found)))
    left, right, height = 2.0, 478.0, 56 * len(found) + 34
    parts, table = [], []
    for i, (row, share, text) in enumerate(found):
        y, wide = 6 + 56 * i, (right - left) * min(share, most) / most
        title = row["audit"] if len(row["audit"]) <= 36 else row["audit"][:35] + "…"
        parts.append(label(left, y + 13, title, "axis"))
        if ROOM * (len(title) + len(text)) < right - left:
            parts.append(label(right, y + 13, text, "edge-note"))
        parts.append(
            f'<rect class="track" x="{left}" y="{y + 20}" width="{right - left}" height="24"/>'
        )
        parts.append(
            f'<rect class="bar {row["state"].replace(" ", "-")}" x="{left}" y="{y + 20}" '
            f'width="{wide:.1f}" height="24"/>'
        )
        parts.append(label(left + 8, y + 37, f"{100 * share:.0f} % · {row['state']}", "inside"))
        table.append((row["audit"], [f"{100 * share:.0f} %", text, row["state"]]))
        for mark, style in ((ENOUGH, "enough"), (1.0, "claimed")):
            x = round(left + (right - left) * mark / most, 1)
            parts.append(f'<line class="{style}" x1="{x}" x2="{x}" y1="{y + 19}" y2="{y + 48}"/>')
    base = 56 * len(found) + 2
    x = left + (right - left) * 0.925 / most
    parts.append(label(x - 20, base + 20, "85 %", "y-tick"))
    parts.append(label(x + 6, base + 20, "claim", "claim-text"))
    said = "; ".join(f"{audit}: {', '.join(values)}" for audit, values in table)
    svg = drawing(
        height, parts, name, "What audits of the noise have shown, of what is claimed", said
    )
    legend = [("enough", "85 % of the claim, enough for a pass"), ("claimed", "the claim")]
    return Plot(svg, legend, ["Audited", "Shown, of the claim", "Bound", "Result"], table)


def _reached(row: Mapping[str, Any]) -> tuple[float, str] | None:
    """Return what a bound reaches of its claim, by the distance μ or, without one, by ε."""
    limit, low = row.get("epsilon"), row.get("epsilon_low")
    if low is None or limit is None or not 0 < limit < math.inf:
        return None
    shares = [(low / limit, f"ε at least {amount(low)} of {amount(limit)}")]
    if row.get("mu_claimed"):
        text = f"μ at least {row['mu_low']:.3g} of {row['mu_claimed']:.3g}"
        shares.append((row["mu_low"] / row["mu_claimed"], text))
    return max(shares)


def _share_text(share: float) -> str:
    return f"{100 * share:.3g} %"
