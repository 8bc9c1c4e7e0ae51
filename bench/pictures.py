"""Pictures of tables, readable on a light and on a dark page."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bench.figures import LIMIT, OURS, Row, Table

# Of one lightness in the middle, so that each stands out from white and from black.
_COLOURS = {LIMIT: "#8a8f98", OURS: "#2f8f5b"}
_PEER = "#b0793a"
_INK = "#7d828a"


def draw(table: Table, path: Path, *, as_line: bool) -> None:
    import matplotlib as mpl

    mpl.use("svg")
    mpl.rcParams.update(
        {
            "svg.fonttype": "none",  # text stays text
            "svg.hashsalt": "holdfast",  # the same figures make the same file
            "font.family": "sans-serif",
            "text.color": _INK,
            "axes.labelcolor": _INK,
            "axes.edgecolor": _INK,
            "xtick.color": _INK,
            "ytick.color": _INK,
        }
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [row for row in table.rows if row.values]
    figure = _lines(table, rows) if as_line else _bars(table, rows)
    figure.savefig(path, transparent=True, bbox_inches="tight", metadata={"Date": None})


def _scaled(table: Table, value: float) -> float:
    """As it is printed; a picture of bytes is in MB."""
    factors = {"s": 1.0, "ms": 1e3, "µs": 1e6, "%": 1e2, "bytes": 1e-6}
    return value * factors.get(table.unit, 1.0)


def _unit(table: Table) -> str:
    return {"bytes": "MB", "": table.compared}.get(table.unit, table.unit)


def _bars(table: Table, rows: list[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 0.6 + 0.34 * len(rows)))
    axes = figure.subplots()
    middles = [_scaled(table, row.median) for row in rows]
    reach = [
        [m - _scaled(table, min(row.values)) for m, row in zip(middles, rows, strict=True)],
        [_scaled(table, max(row.values)) - m for m, row in zip(middles, rows, strict=True)],
    ]
    colours = [_COLOURS.get(row.kind, _PEER) for row in rows]
    places = range(len(rows))
    axes.barh(places, middles, color=colours, xerr=reach, ecolor=_INK, height=0.62)
    axes.set_yticks(list(places), [row.name for row in rows])
    axes.invert_yaxis()
    widest = max(_scaled(table, max(row.values)) for row in rows)
    for place, row in zip(places, rows, strict=True):
        ratio = table.ratio(row)
        told = table.written(row.median) + (f"  ({ratio:.2g} ×)" if ratio is not None else "")
        end = _scaled(table, max(row.values)) + 0.015 * widest
        axes.text(max(end, 0.0), place, told, va="center", fontsize=8)
    axes.set_xlim(right=1.3 * widest)
    _finish(table, axes)
    axes.set_xlabel(f"{_unit(table)}, median; the thin line is lowest to highest")
    return figure


def _lines(table: Table, rows: list[Row]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 3))
    axes = figure.subplots()
    for kind in (LIMIT, OURS):
        own = [row for row in rows if row.kind == kind]
        if not own:
            continue
        at = [_number(row.name) for row in own]
        axes.plot(
            at,
            [_scaled(table, row.median) for row in own],
            marker="o",
            color=_COLOURS[kind],
            label=kind,
        )
        axes.fill_between(
            at,
            [_scaled(table, min(row.values)) for row in own],
            [_scaled(table, max(row.values)) for row in own],
            color=_COLOURS[kind],
            alpha=0.25,
            linewidth=0,
        )
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("MB" if "MB" in rows[0].name else "tensors")
    axes.set_ylabel(_unit(table))
    axes.legend(frameon=False, labelcolor=_INK)
    _finish(table, axes)
    return figure


def _finish(table: Table, axes: Any) -> None:
    axes.set_title(table.title, fontsize=10, loc="left")
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _number(name: str) -> int:
    """The number at the front of a row's name."""
    return int(name.split()[0].replace(",", ""))
