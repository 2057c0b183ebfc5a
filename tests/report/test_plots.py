"""Figures: where marks lie, what is drawn at all, and that the table says the same."""

from __future__ import annotations

import itertools
import math
import re
from xml.etree import ElementTree

import pytest
import sample_report as s

from fedgist.audit.roc import approximate_dp, closed_form
from fedgist.report.bars import bound_plot, budget_plot, even_rounds
from fedgist.report.plots import accuracy_plot, roc_plot

EVIL = "<script>alert(1)</script>"


def parsed(plot):
    """The drawing as XML: it must be well formed, named and described."""
    root = ElementTree.fromstring(str(plot.svg))
    ids = [e.get("id") for e in root.iter() if e.get("id")]
    assert root.get("role") == "img" and root.get("aria-labelledby").split() == ids
    assert [e.tag for e in root][:2] == ["title", "desc"] and all(e.text for e in root[:2])
    width, height = map(float, root.get("viewBox").split()[2:])
    for points in (e.get("points") for e in root.iter() if e.get("points")):
        for x, y in (map(float, p.split(",")) for p in points.split()):
            assert 0 <= x <= width and 0 <= y <= height
    assert all(0 <= float(e.get("y")) <= height for e in root.iter("text"))
    return root


def by_class(root, name):
    return [e for e in root.iter() if e.get("class") == name]


def points_of(element):
    return [tuple(map(float, p.split(","))) for p in element.get("points").split()]


def limit(mu=1.9):
    return {"bound": "gaussian", "mu": mu, "epsilon": 10.0, "roc": closed_form(mu).record()}


def test_roc_curves_lie_on_logarithmic_axes():
    rows = [
        {"attack": "likelihood ratio", "roc": closed_form(1.5).record()},
        {"attack": "loss threshold, lda", "roc": closed_form(0.0).record()},
        {"attack": "loss threshold, qda", "roc": closed_form(0.0).record()},
        {"attack": "without a curve"},
    ]
    plot = roc_plot(rows, limit(), "roc")
    root = parsed(plot)
    (guess,) = by_class(root, "chance")
    (low, high) = points_of(guess)
    (first,) = by_class(root, "s1")
    a = points_of(first)
    assert len(a) == 41 and a[-1] == high
    # ten rates a decade, four decades: steps of equal width
    steps = [y[0] - x[0] for x, y in itertools.pairwise(a)]
    assert max(steps) - min(steps) < 0.3
    share = (low[1] - a[20][1]) / (low[1] - high[1])
    assert share == pytest.approx(1 + math.log10(closed_form(1.5).tpr[20]) / 4, abs=2e-3)
    # an attack without any success lies on the line of guessing
    same = by_class(root, "s2")
    assert len(same) == 2
    for x, y in points_of(same[0]):
        on = low[1] + (x - low[0]) / (high[0] - low[0]) * (high[1] - low[1])
        assert abs(y - on) < 0.3
    # and the limit above all of them
    (cap,) = by_class(root, "limit")
    assert all(c[1] <= p[1] for c, p in zip(points_of(cap), a, strict=True))
    assert ("s2", "loss threshold, 2 classifiers") in plot.legend
    assert [title for title, _ in plot.rows] == [
        "limit of the claim",
        *(row["attack"] for row in rows[:3]),
        "guessing",
    ]
    assert plot.rows[1][1][2] == f"{100 * closed_form(1.5).tpr[20]:.1f}\u00a0%"


def test_roc_without_limit_or_curves():
    assert roc_plot([{"attack": "a"}], limit(), "roc") is None
    few = {"fpr": [0.1, 1.0], "tpr": [0.0, 1.0]}  # nothing is found at 10 %
    plot = roc_plot([{"attack": EVIL, "roc": few}], None, "roc")
    root = parsed(plot)
    assert not by_class(root, "limit") and len(points_of(by_class(root, "s1")[0])) == 1
    assert "<script" not in str(plot.svg)
    assert plot.rows[0] == (EVIL, ["–", "–", "–", "0.0\u00a0%"])
    wide = {"bound": "approximate", "roc": approximate_dp(10.0, 1e-5).record()}
    assert not by_class(parsed(roc_plot([{"attack": "a", "roc": few}], wide, "r")), "beyond-text")


def test_accuracy_is_drawn_where_it_is():
    plot = accuracy_plot(s.curve(), s.report()["heads"], 10, "curve")
    root = parsed(plot)
    lines = points_of(by_class(root, "s1")[0])
    assert len(lines) == 5
    top = next(e for e in root.iter("line") if e.get("class") == "grid")  # the 0 % line
    zero, full = float(top.get("y1")), 30.0
    for (_, y), row in zip(lines, s.curve()["rows"], strict=True):
        assert (zero - y) / (zero - full) == pytest.approx(row["heads"]["qda"], abs=1e-3)
    (own,) = by_class(root, "own")
    assert float(own.get("x1")) == lines[3][0]  # ε = 10
    gaps = [b[0] - a[0] for a, b in itertools.pairwise(lines)]
    ratios = [math.log(10 / 3), math.log(3), math.log(10 / 3), math.log(3)]
    assert gaps == pytest.approx([g * sum(gaps) / sum(ratios) for g in ratios], abs=0.2)
    assert len(by_class(root, "s1 without")) == 1 and len(by_class(root, "real")) == 1
    assert len([e for e in root.iter() if "hollow" in (e.get("class") or "")]) == 1  # decode
    assert plot.head == ["ε", "qda", "lda", "ridge", "decode"]
    assert [title for title, _ in plot.rows] == [
        "0.3",
        "1",
        "3",
        "10 (this run)",
        "30",
        "without privacy",
        "guessing",
    ]
    assert plot.rows[3][1][3] == "75.4\u00a0%" and plot.rows[2][1][3] == "–"
    assert plot.rows[-1][1] == ["10.0\u00a0%"] * 4


def test_an_epsilon_close_to_another_has_one_label_less():
    curve = s.curve()
    own = {"epsilon": 8.0, "sigma": 0.6, "own": True, "heads": curve["rows"][3]["heads"]}
    curve["rows"][3]["own"] = False
    curve["rows"].insert(3, own)
    root = parsed(accuracy_plot(curve, {}, 10, "curve"))
    ticks = [e.text for e in by_class(root, "x-tick")]
    assert ticks == ["0.3", "1", "3", "10", "30", "ε (smaller is more private)"]
    assert "this run, ε = 8" in [e.text for e in root.iter("text")]


def test_accuracy_needs_something_to_draw():
    assert accuracy_plot({"rows": [], "without": {}}, {}, 10, "c") is None
    rows = [{"epsilon": 1.0, "own": True, "heads": {}}]
    assert accuracy_plot({"rows": rows, "without": {}}, {}, 10, "c") is None
    one = {"rows": [{"epsilon": 1.0, "own": True, "heads": {"lda": 0.5}}], "without": {}}
    parsed(accuracy_plot(one, {}, 10, "c"))


def test_budget_bars_are_as_long_as_their_shares():
    plot = budget_plot(s.budget(), "budget")
    root = parsed(plot)
    bars = [e for e in root.iter("rect")]
    widths = [float(e.get("width")) + 1.5 for e in bars]
    shares = [row["share"] for row in s.budget()]
    scale = widths[0] / shares[0]
    assert widths == pytest.approx([scale * share for share in shares], abs=0.2)
    assert sum(widths[:4]) == pytest.approx(476, abs=1)  # the longest bar fills the figure
    assert len({e.get("y") for e in bars}) == 2
    assert plot.rows[0] == ("codes, mean", ["30 %"]) and len(plot.rows) == len(shares)
    assert len(plot.legend) == 4


def test_budget_by_rounds():
    def rounds(n, shares):
        return [
            {"round": r + 1, "view": "", "block": b, "share": v / n}
            for r in range(n)
            for b, v in shares.items()
        ]

    both = {"mean": 0.6, "second": 0.4}
    few = budget_plot(rounds(3, both), "b")
    assert [title for title, _ in few.rows][:2] == ["round 1, mean", "round 1, second"]
    many = budget_plot(rounds(50, both), "b")  # summed over rounds
    assert many.rows == [("mean", ["60 %"]), ("second", ["40 %"])]
    assert budget_plot(rounds(50, {"rows": 1.0}), "b") is None
    assert even_rounds(rounds(50, {"rows": 1.0})) == 50
    assert even_rounds(rounds(50, both)) == even_rounds(rounds(1, {"rows": 1.0})) == 0
    uneven = rounds(2, {"rows": 1.0})
    uneven[0]["share"], uneven[1]["share"] = 0.2, 0.8
    assert even_rounds(uneven) == 0 and len(budget_plot(uneven, "b").rows) == 2
    assert budget_plot([], "b") is None


def test_bounds_are_drawn_as_shares_of_their_claims():
    def row(audit, state, mu_low, low, mu=2.0):
        return {
            "audit": audit,
            "state": state,
            "mu_low": mu_low,
            "mu_claimed": mu,
            "epsilon_low": low,
            "epsilon": 10.0,
        }

    rows = [
        row("the claim", "pass", 1.8, 8.0),
        row(EVIL, "contradicted", 9.0, 60.0),
        row("sampled", "inconclusive", 1.0, 5.0, None),
        {"audit": "deviation", "state": "pass", "blocks": {}},
        row("nothing claimed", "no claim", 1.0, 5.0) | {"epsilon": math.inf},
    ]
    plot = bound_plot(rows, "bounds")
    root = parsed(plot)
    assert [r[1][0] for r in plot.rows] == ["90 %", "600 %", "50 %"]
    bars = [e for e in root.iter("rect") if e.get("class").startswith("bar")]
    widths = [float(e.get("width")) for e in bars]
    assert widths[1] == 476  # cut at the edge
    assert widths[0] / widths[2] == pytest.approx(0.9 / 0.5, rel=1e-3)
    enough, claimed = (float(by_class(root, k)[0].get("x1")) for k in ("enough", "claimed"))
    assert (enough - 2) / (claimed - 2) == pytest.approx(0.85, abs=1e-3)
    assert 2 + widths[0] > enough > 2 + widths[2]
    assert [e.get("class") for e in bars] == ["bar pass", "bar contradicted", "bar inconclusive"]
    assert bound_plot(rows[3:], "bounds") is None


def test_colours_come_from_the_style_sheet():
    plots = [
        roc_plot([{"attack": "a", "roc": closed_form(1.0).record()}], limit(), "a"),
        accuracy_plot(s.curve(), s.report()["heads"], 10, "b"),
        budget_plot(s.budget(), "c"),
    ]
    for plot in plots:
        assert not re.search(r"#[0-9a-f]{3,6}\b|style=|fill=|stroke=", str(plot.svg))
