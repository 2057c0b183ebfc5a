"""Tables and figures of a benchmark, from its lines alone."""

from __future__ import annotations

import io
import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from fedgist.bench.file import shown
from fedgist.bench.suite import by_case

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["STYLE", "TEXT", "axes_of", "cell", "figure", "markdown", "records", "table"]

Row = Mapping[str, Any]

# Mid-tones on no ground: at least 3.3 to 1 on white and on GitHub's near-black, #0d1117.
TEXT = "#7a828c"
COLOURS = ("#2a86d0", "#d9702a", "#7d5bbe", "#2d9d78", "#c24b7a", "#94802a")
STYLE: dict[str, Any] = {
    "svg.fonttype": "path",
    "svg.hashsalt": "fedgist",
    "font.size": 9,
    "axes.spines.top": False,
    "axes.spines.right": False,
    **{
        f"{part}color": TEXT
        for part in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.", "axes.title")
    },
}


def records(lines: Iterable[Row]) -> list[dict[str, Any]]:
    """Return one plain record a case: accuracies in [0, 1], cost, claim.

    ``mean`` and ``std`` are over ``seeds``; ``bytes_up`` and ``bytes_down`` of a client;
    ``client_seconds`` of all clients, ``server_seconds`` of all stages, means over seeds; None
    where not measured.
    """
    return [_record(row) for row in by_case(dict(line) for line in lines)]


def _record(row: Row) -> dict[str, Any]:
    runs = row["runs"]
    last = runs[-1]
    return {
        "case": row["name"],
        "stem": last["stem"],
        "sweep": last["sweep"],
        "seeds": [r["seed"] for r in runs],
        "mean": row["mean"],
        "std": row["std"],
        "epsilon": last["claim"]["epsilon"],
        "claim": last["claim"]["line"],
        "bytes_up": _mean(r["bytes_up"] for r in runs),
        "bytes_down": _mean(r["bytes_down"] for r in runs),
        "client_seconds": _mean(r["client_seconds"] for r in runs),
        "server_seconds": _mean(sum(r["server_seconds"].values()) for r in runs),
        "peak_memory_mib": max(r["peak_memory_mib"] for r in runs),
    }


def markdown(title: str, lines: Sequence[Row], picture: str | None = None) -> str:
    """Return a page: accuracies and cost, claims, where it was measured, what failed.

    Args:
        title: its heading.
        lines: of `read_lines`.
        picture: file name of the figure.
    """
    rows = records(lines)
    parts = [f"# {title}"]
    if rows:
        parts.append("Accuracy on real test images in %, mean ± standard deviation over seeds; "
                     "the best of a column in bold. Bytes are of one client, seconds of all "
                     "clients together.")  # fmt: skip
        parts += [_results(rows), _claims(rows)]
    parts += [f"![{title}]({picture})"] * (picture is not None)
    good = {(r["case"], r["seed"]) for r in lines if "error" not in r}
    failed = {
        f"- {r['case']}, seed {r['seed']}: {r['error']}": None
        for r in lines
        if "error" in r and (r["case"], r["seed"]) not in good
    }
    if failed:
        parts += ["Runs that failed:", "\n".join(failed)]
    return "\n\n".join([*parts, _made(lines)]) + "\n"


def _results(rows: Sequence[Row]) -> str:
    keys = {k: _title(k) for r in rows for k in r["mean"] if not k.endswith("_ceiling")}
    best = {k: max(_percent(r, k) for r in rows if k in r["mean"]) for k in keys}
    claims = _numbers(rows)
    body: list[tuple[Any, ...]] = []
    for r in rows:
        cells = []
        for k in keys:
            text = cell(r, k)
            top = len(rows) > 1 and k in r["mean"] and _percent(r, k) == best[k]
            cells.append(f"**{text}**" if top else text)
        bytes_ = f"{_size(r['bytes_up'])} / {_size(r['bytes_down'])}"
        body.append(
            (
                r["case"].replace("|", "\\|"),
                *cells,
                "∞" if math.isinf(r["epsilon"]) else f"{r['epsilon']:.4g}",
                f"[{claims[r['claim']]}]",
                bytes_,
                "–" if r["client_seconds"] is None else f"{r['client_seconds']:.1f}",
            )
        )
    head = ("case", *keys.values(), "ε", "claim", "bytes up / down", "client seconds")
    return table(head, body + _ceilings(rows, list(keys)))


def _ceilings(rows: Sequence[Row], keys: Sequence[str]) -> list[tuple[Any, ...]]:
    """Return one row for each set of ceilings: those of cases over the same sums are the same."""
    found: dict[tuple[str, ...], str] = {}
    for r in rows:
        cells = tuple(cell(r, f"{k}_ceiling") for k in keys)
        if any(c != "–" for c in cells):
            found.setdefault(cells, r["case"])
    one = len(found) == 1
    return [
        ("*no privacy*" if one else f"*no privacy: {name}*", *cells, "", "", "", "")
        for cells, name in found.items()
    ]


def _claims(rows: Sequence[Row]) -> str:
    return "\n".join(f"- [{i}] {claim}" for claim, i in _numbers(rows).items())


def _numbers(rows: Sequence[Row]) -> dict[str, int]:
    return {c: i for i, c in enumerate(dict.fromkeys(r["claim"] for r in rows), 1)}


def _made(lines: Sequence[Row]) -> str:
    """Say with what code, when and on what; all values that occur."""

    def all_of(values: Iterable[Any]) -> str:
        return ", ".join(map(str, dict.fromkeys(v for v in values if v is not None)))

    days = sorted(r["created"][:10] for r in lines)
    when = " to ".join(dict.fromkeys((days[0], days[-1]))) if days else "never"
    return (
        f"Measured {when} at commit {all_of(r['commit'] for r in lines)}; "
        f"{all_of(r['device'] for r in lines)}, {all_of(r['threads'] for r in lines)} threads, "
        f"torch {all_of(r['versions'].get('torch') for r in lines)}; "
        f"seeds {all_of(sorted({r['seed'] for r in lines}))}."
    )


def table(head: Sequence[Any], rows: Iterable[Sequence[Any]]) -> str:
    """Return a Markdown table; booleans become yes and no."""
    lines = ["| " + " | ".join(map(str, head)) + " |", "|" + "---|" * len(head)]
    words = {True: "yes", False: "no"}
    for row in rows:
        cells = (words[v] if isinstance(v, bool) else str(v) for v in row)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(row: Row | None, key: str) -> str:
    """Return ``mean ± std`` in percent, the mean alone of one seed, or a dash.

    Args:
        row: with ``mean``, ``std`` and ``seeds`` or ``runs``; None for a case that was not run.
        key: of ``mean``.
    """
    if row is None or key not in row["mean"]:
        return "–"
    mean = f"{100 * row['mean'][key]:.1f}"
    seeds = row.get("seeds") or row["runs"]
    return mean if len(seeds) < 2 else f"{mean} ± {100 * row['std'][key]:.1f}"


def _title(key: str) -> str:
    head = key.removesuffix("_codec_consistent")
    return head if head == key else f"{head}, images through the codec"


def _percent(row: Row, key: str) -> float:
    """Return what is printed, so that what reads the same is the same."""
    return round(100 * float(row["mean"][key]), 1)


def _mean(values: Iterable[float | None]) -> float | None:
    found = list(values)
    return None if None in found else statistics.fmean(v for v in found if v is not None)


def _size(count: float | None) -> str:
    if count is None:
        return "–"
    return f"{count / 2**20:.2f} MiB" if count >= 2**20 else f"{count / 1024:.1f} KiB"


@dataclass(frozen=True)
class Curve:
    """One line of a panel: accuracies in percent by rising x, with deviation over seeds."""

    label: str
    x: Sequence[float]
    mean: Sequence[float]
    std: Sequence[float]
    ceiling: bool


def axes_of(rows: Sequence[Row]) -> list[str]:
    """Return labels of sweeps over two finite numbers or more: each gets a panel."""
    labels = dict.fromkeys(label for r in rows for label in r["sweep"])
    values = {k: {x for r in rows if (x := _number(r, k)) is not None} for k in labels}
    return [k for k, v in values.items() if len(v) > 1]


def _number(row: Row, label: str) -> float | None:
    value = row["sweep"].get(label)
    wanted = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if wanted and math.isfinite(value) else None


def curves(rows: Sequence[Row], label: str) -> list[Curve]:
    """Return the lines of one panel: a head of a case, all other values of the sweep fixed."""
    points: dict[tuple[str, bool], list[tuple[float, float, float]]] = {}
    for r in rows:
        if (x := _number(r, label)) is None:
            continue
        fixed = [f"{k} = {shown(v)}" for k, v in r["sweep"].items() if k != label]
        for key, mean in r["mean"].items():
            head = key.removesuffix("_ceiling")
            words = dict.fromkeys(filter(None, [r["stem"], _title(head), *fixed]))
            name = ", ".join(words)
            point = (x, 100 * mean, 100 * r["std"][key])
            points.setdefault((name, head != key), []).append(point)
    out = []
    for (name, ceiling), line in points.items():
        at, mean, std = zip(*sorted(line), strict=True)
        out.append(Curve(name, at, mean, std, ceiling))
    return out


def figure(lines: Iterable[Row]) -> bytes | None:
    """Draw a panel for each sweep over numbers as SVG, or None where there is none.

    The same results give the same bytes. Bands are one standard deviation over seeds; dashed: no
    privacy.
    """
    rows = records(lines)
    labels = axes_of(rows)
    if not labels:
        return None
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(STYLE):
        size = (6.4, 3.6 * len(labels))
        drawn, axes = plt.subplots(len(labels), squeeze=False, figsize=size, layout="constrained")
        for ax, label in zip(axes[:, 0], labels, strict=True):
            _draw(ax, curves(rows, label), label)
        out = io.BytesIO()
        drawn.savefig(out, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
        plt.close(drawn)
    return out.getvalue()


def _draw(ax: Axes, lines: Sequence[Curve], label: str) -> None:
    names = list(dict.fromkeys(c.label for c in lines))
    for c in lines:
        i = names.index(c.label)
        colour, mark = COLOURS[i % len(COLOURS)], "osD^vP"[i // len(COLOURS) % 6]
        low, high = ([m + s * d for m, d in zip(c.mean, c.std, strict=True)] for s in (-1, 1))
        look: dict[str, Any] = {"ls": "--", "lw": 1.1} if c.ceiling else {"marker": mark, "ms": 3.5}
        ax.fill_between(c.x, low, high, color=colour, alpha=0.1 if c.ceiling else 0.25, lw=0)
        ax.plot(c.x, c.mean, color=colour, label=None if c.ceiling else c.label, **look)
    if any(c.ceiling for c in lines):
        ax.plot([], [], color=TEXT, ls="--", lw=1.1, label="dashed: no privacy")
    values = sorted({x for c in lines for x in c.x})
    if values[0] > 0 and values[-1] >= 10 * values[0]:
        ax.set_xscale("log")
        ax.minorticks_off()
    ax.set_xticks(values, [f"{x:g}" for x in values])
    ax.set_xlabel(label)
    ax.set_ylabel("test accuracy, %")
    ax.grid(axis="y", color=TEXT, alpha=0.25, lw=0.6)
    ax.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False, fontsize=8)
