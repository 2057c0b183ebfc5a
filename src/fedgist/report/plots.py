"""Line figures as SVG: ROC curves, and accuracy against ε.

Each comes as a `Plot`: the drawing, its legend, and the same numbers as a table. Colours and dashes
come from the style sheet by class, so that figures follow light and dark mode and never tell two
things apart by colour alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup, escape

from fedgist.report.numbers import epsilon, percent

__all__ = ["Plot", "accuracy_plot", "drawing", "label", "roc_plot"]

STYLES = 5  # classes s1 to s5 of the style sheet
LEAST = 1e-4  # the lowest rate on a ROC figure
RATES = (1e-4, 1e-3, 1e-2, 1e-1)  # false alarms in its table


@dataclass(frozen=True)
class Plot:
    """A figure and what it says in other ways.

    Attributes:
        svg: the drawing, with a title and a description.
        legend: (class, text) for each mark.
        head: titles of the table's columns, the first for its rows.
        rows: (title, values) of the table.
    """

    svg: Markup
    legend: list[tuple[str, str]]
    head: list[str]
    rows: list[tuple[str, list[str]]]


@dataclass(frozen=True)
class _Box:
    """Axes in a box of 480 units; ``x`` and ``y`` are (low, high), logarithmic where ``log_*``."""

    x: tuple[float, float]
    y: tuple[float, float]
    log_x: bool = True
    log_y: bool = False
    left: float = 66
    right: float = 450
    top: float = 30
    bottom: float = 268
    height: int = 312

    def at(self, x: float, y: float) -> str:
        """Place a point: ``"x,y"``."""
        return f"{self.across(x)},{self.up(y)}"

    def across(self, x: float) -> float:
        """Place a value of the horizontal axis."""
        return round(self.left + (self.right - self.left) * _share(x, self.x, self.log_x), 1)

    def up(self, y: float) -> float:
        """Place a value of the vertical axis."""
        return round(self.bottom - (self.bottom - self.top) * _share(y, self.y, self.log_y), 1)

    def grid(
        self, xs: Mapping[float, str], ys: Mapping[float, str], below: str, above: str
    ) -> list[str]:
        """Draw lines with their labels, and both titles."""
        out = []
        for y, text in ys.items():
            h = self.up(y)
            out.append(f'<line class="grid" x1="{self.left}" x2="{self.right}" y1="{h}" y2="{h}"/>')
            out.append(label(self.left - 6, h + 4, text, "y-tick"))
        for x, text in xs.items():
            w = self.across(x)
            out.append(f'<line class="grid" x1="{w}" x2="{w}" y1="{self.top}" y2="{self.bottom}"/>')
            out.append(label(w, self.bottom + 18, text, "x-tick"))
        out.append(label(2, 14, above, "axis"))
        out.append(label((self.left + self.right) / 2, self.height - 8, below, "x-tick"))
        return out

    def line(self, points: Iterable[tuple[float, float]], style: str) -> str:
        """Join points that lie on the axes."""
        (x0, x1), (y0, y1) = self.x, self.y
        inside = [(x, y) for x, y in points if x0 <= x <= x1 and y0 <= y <= y1]
        path = " ".join(self.at(x, y) for x, y in inside)
        return f'<polyline class="{style}" points="{path}"/>'


def roc_plot(
    rows: Sequence[Mapping[str, Any]], limit: Mapping[str, Any] | None, name: str
) -> Plot | None:
    """Draw attacks' ROC curves on logarithmic axes, the claim's limit and guessing beside them.

    Args:
        rows: of the table of attacks; those without ``roc`` are left out.
        limit: of the claim, or None where there is none.
        name: tells the figures of one page apart.

    Returns:
        None when no row has a curve. Attacks of one kind on several classifiers share a style.
    """
    curves = [(row["attack"], row["roc"]) for row in rows if row.get("roc")]
    if not curves:
        return None
    box = _Box((LEAST, 1.0), (LEAST, 1.0), log_y=True)
    ticks = {v: _rate(v) for v in (*RATES, 1.0)}
    parts = box.grid(ticks, ticks, "false alarms among unused images", "used images found")
    parts.append(box.line([(LEAST, LEAST), (1, 1)], "chance"))
    legend, table = [], []
    if limit:
        points = list(zip(limit["roc"]["fpr"], limit["roc"]["tpr"], strict=True))
        drawn = [(x, max(y, LEAST)) for x, y in points]
        corners = " ".join([*(box.at(x, y) for x, y in drawn), box.at(LEAST, 1)])
        parts.append(f'<polygon class="beyond" points="{corners}"/>')
        parts.append(box.line(drawn, "limit"))
        if max(y for x, y in points if x <= 0.002) < 0.4:
            parts.append(label(box.left + 8, box.top + 18, "ruled out by the claim", "beyond-text"))
        legend.append(("limit", "limit of the claim"))
        table.append(("limit of the claim", _read(limit["roc"])))
    kinds = list(dict.fromkeys(attack.split(",")[0] for attack, _ in curves))
    for attack, roc in curves:
        style = f"s{kinds.index(attack.split(',')[0]) % STYLES + 1}"
        parts.append(box.line(zip(roc["fpr"], roc["tpr"], strict=True), style))
        table.append((attack, _read(roc)))
    for i, kind in enumerate(kinds):
        k = sum(attack.split(",")[0] == kind for attack, _ in curves)
        legend.append((f"s{i % STYLES + 1}", kind + (f", {k} classifiers" if k > 1 else "")))
    legend.append(("chance", "guessing"))
    table.append(("guessing", [_rate(a) for a in RATES]))
    head = ["Used images found at", *(f"{_rate(a)} false alarms" for a in RATES)]
    said = "; ".join(f"{attack}: {values[2]} at {_rate(RATES[2])}" for attack, values in table)
    title = "Used images found, by false alarms; both axes are logarithmic"
    return Plot(drawing(box.height, parts, name, title, said), legend, head, table)


def accuracy_plot(
    curve: Mapping[str, Any], heads: Mapping[str, Mapping[str, Any]], classes: int, name: str
) -> Plot | None:
    """Draw the accuracy of closed-form heads against ε, with what it is to be compared with.

    Args:
        curve: of the report: ``rows`` and ``without``.
        heads: of the report: networks are set beside it at the run's own ε.
        classes: how many there are: guessing names one in so many right.
        name: tells the figures of one page apart.
    """
    rows = curve["rows"]
    names = list(rows[0]["heads"]) if rows else []
    if not names:
        return None
    low, high = rows[0]["epsilon"], rows[-1]["epsilon"]
    box = _Box((low / 1.25, high * 1.25), (0.0, 1.0))
    own = next((row["epsilon"] for row in rows if row["own"]), None)
    ys = {v / 5: f"{20 * v} %" for v in range(6)}
    parts = box.grid(_apart(rows, own), ys, "ε (smaller is more private)", "test images right")
    parts.append(box.line([(box.x[0], 1 / classes), (box.x[1], 1 / classes)], "chance"))
    if own is not None:
        w = box.across(own)
        parts.append(f'<line class="own" x1="{w}" x2="{w}" y1="{box.top}" y2="{box.bottom}"/>')
        side = "own-text" + (" before" if w > (box.left + box.right) / 2 else "")
        at = w - 6 if "before" in side else w + 6
        parts.append(label(at, box.bottom - 10, f"this run, ε = {epsilon(own)}", side))
    legend, networks = [], _networks(heads, names)
    for i, head in enumerate(names):
        style, full = f"s{i % STYLES + 1}", curve["without"].get(head)
        points = [(row["epsilon"], row["heads"][head]) for row in rows if head in row["heads"]]
        parts.append(box.line(points, style))
        parts += [_mark(box.across(x), box.up(y), i) for x, y in points]
        legend.append((style, head))
        if full is not None:
            parts.append(box.line([(box.x[0], full), (box.x[1], full)], f"{style} without"))
    real = next((h["ceiling"] for h in networks.values() if h.get("ceiling") is not None), None)
    if real is not None:
        parts.append(box.line([(box.x[0], real), (box.x[1], real)], "real"))
    for i, head in enumerate(networks if own is not None else ()):
        y = networks[head]["accuracy"]
        parts.append(_mark(box.across(own or 1), box.up(y), len(names) + i, "hollow"))
        legend.append((f"dot s{(len(names) + i) % STYLES + 1}", f"{head}, this run only"))
    if curve["without"]:
        legend.append(("without", "the same without privacy"))
    if real is not None:
        legend.append(("real", "network trained on real images, without privacy"))
    legend.append(("chance", "guessing"))
    table = _accuracies(curve, names, networks, real, 1 / classes)
    said = "; ".join(f"{row}: {', '.join(values)}" for row, values in table)
    title = f"Accuracy of {', '.join(names)} against ε, on a logarithmic axis"
    svg = drawing(box.height, parts, name, title, said)
    return Plot(svg, legend, ["ε", *names, *networks], table)


def _networks(
    heads: Mapping[str, Mapping[str, Any]], names: Sequence[str]
) -> dict[str, Mapping[str, Any]]:
    return {k: h for k, h in heads.items() if k not in names and h.get("accuracy") is not None}


def _accuracies(
    curve: Mapping[str, Any],
    names: Sequence[str],
    networks: Mapping[str, Mapping[str, Any]],
    real: float | None,
    guessing: float,
) -> list[tuple[str, list[str]]]:
    table = []
    for row in curve["rows"]:
        shown = [row["heads"].get(k) for k in names]
        shown += [h["accuracy"] if row["own"] else None for h in networks.values()]
        title = epsilon(row["epsilon"]) + (" (this run)" if row["own"] else "")
        table.append((title, [percent(v) for v in shown]))
    last = [curve["without"].get(k) for k in names] + [real] * len(networks)
    table.append(("without privacy", [percent(v) for v in last]))
    table.append(("guessing", [percent(guessing)] * len(last)))
    return table


def _apart(rows: Sequence[Mapping[str, Any]], own: float | None) -> dict[float, str]:
    """Label every ε; the run's own, which has a label of its own, only where there is room."""
    values = [row["epsilon"] for row in rows]
    near = own is not None and any(v != own and 1 / 1.5 < v / own < 1.5 for v in values)
    return {v: epsilon(v) for v in values if not (near and v == own)}


def _mark(x: float, y: float, i: int, more: str = "") -> str:
    """Draw a mark whose shape tells series apart as its colour does."""
    style, r = f"mark s{i % STYLES + 1} {more}".strip(), 4.2
    if i % 3 == 0:
        return f'<circle class="{style}" cx="{x}" cy="{y}" r="{r}"/>'
    if i % 3 == 1:
        at = f'x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}"'
        return f'<rect class="{style}" {at}/>'
    corners = f"{x},{y - 5.5:.1f} {x + 5.5:.1f},{y} {x},{y + 5.5:.1f} {x - 5.5:.1f},{y}"
    return f'<polygon class="{style}" points="{corners}"/>'


def _read(roc: Mapping[str, Sequence[float]]) -> list[str]:
    """Return the rates of the table; a dash where a curve does not reach so far down."""
    known = dict(zip(roc["fpr"], roc["tpr"], strict=True))
    return [percent(known.get(a)) for a in RATES]


def _rate(value: float) -> str:
    return f"{100 * value:g} %"


def _share(value: float, ends: tuple[float, float], log: bool) -> float:
    low, high = ends
    if log:
        return math.log(value / low) / math.log(high / low)
    return (value - low) / (high - low)


def label(x: float, y: float, text: str, style: str) -> str:
    """Write a text of any content."""
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(text)}</text>'


def drawing(height: int, parts: Sequence[str], name: str, title: str, said: str) -> Markup:
    """Return parts as an SVG of 480 x ``height`` units that screen readers can name and describe.

    Args:
        height: in units.
        parts: elements; texts in them are escaped.
        name: tells the figures of one page apart.
        title: what it is.
        said: what it shows, in words.
    """
    # Markup is safe here: texts went through `escape`, everything else is numbers and our own words
    return Markup(
        f'<svg class="plot" viewBox="0 0 480 {height}" role="img" '
        f'aria-labelledby="{name}-title {name}-desc"><title id="{name}-title">{escape(title)}'
        f'</title><desc id="{name}-desc">{escape(said)}</desc>{"".join(parts)}</svg>'
    )
