"""What one save costs, by every way that was measured: the hero figure, from bench/results.

Three columns of one interleaved run, and in the third of them holdfast is the worst:
the figure is to persuade people who will find that out anyway.
"""

from __future__ import annotations

import json
import statistics
from html import escape
from pathlib import Path
from typing import Any

_RESULTS = Path("bench") / "results" / "2-cores-x86_64.json"
_TOPICS = {
    "stall": ("training stands still for", 1e3, "ms"),
    "durable": ("until it is durable", 1e3, "ms"),
    "memory": ("extra memory it takes", 1e-9, "GB"),
}
_WIDTH, _NAMES, _ROW, _TOP = 1000, 322, 26, 92
_COLUMN = (_WIDTH - _NAMES) / len(_TOPICS)
_BAR = _COLUMN - 78  # the rest is for the number behind it
_STYLE = """
:root{--ink:#24292f;--dim:#57606a;--ours:#1a7f4b;--peer:#a3b1c2;--limit:#7d56c2}
@media (prefers-color-scheme:dark){
:root{--ink:#e6edf3;--dim:#9aa6b2;--ours:#3fb97a;--peer:#5b6b7d;--limit:#b394f0}}
text{font:13px -apple-system,'Segoe UI','Noto Sans','DejaVu Sans',sans-serif;fill:var(--ink)}
.dim{fill:var(--dim);font-size:12px}.head{font-weight:600}.big{font-size:17px;font-weight:600}
.ours{fill:var(--ours)}.peer{fill:var(--peer)}.told{font-weight:700;fill:var(--ours)}
.limit{stroke:var(--limit);stroke-width:1.5;stroke-dasharray:4 3}.limit-word{fill:var(--limit)}
"""


def make(root: Path, pictures: Path) -> list[Path]:
    """Draw it."""
    results = json.loads((root / _RESULTS).read_text(encoding="utf-8"))
    path = pictures / "hero.svg"
    path.write_text(draw(results), encoding="utf-8")
    return [path]


def draw(results: dict[str, Any]) -> str:
    """The figure, as text; the same figures make the same text."""
    tables = {topic: results[topic]["table"] for topic in _TOPICS}
    about = results["stall"]["about"]
    medians = {
        topic: {row["name"]: statistics.median(row["values"]) for row in table["rows"]}
        for topic, table in tables.items()
    }
    names = [row["name"] for row in tables["stall"]["rows"] if row["kind"] != "limit"]
    height = _TOP + _ROW * len(names) + 58
    size = medians["memory"]["the state itself"] / 1e6
    drawn = [
        f'<text x="0" y="20" class="big">One checkpoint of {size:.0f} MB (model + AdamW), '
        "all ways in turns on the same machine</text>",
        '<text x="0" y="42" class="dim">Medians of 3 rounds, everything fsynced. '
        "The dashed line is what the machine itself can do. Shorter is better.</text>",
    ]
    for number, (topic, (title, factor, unit)) in enumerate(_TOPICS.items()):
        left = _NAMES + number * _COLUMN
        drawn += _column(topic, title, factor, unit, left, names, tables[topic], medians[topic])
    for number, name in enumerate(names):
        kind = "told" if name == "holdfast" else ""
        drawn.append(
            f'<text x="{_NAMES - 12}" y="{_TOP + _ROW * number + 17}" text-anchor="end" '
            f'class="{kind}">{escape(_short(name))}</text>'
        )
    drawn.append(
        f'<text x="0" y="{height - 12}" class="dim">{escape(_machine(about))}. '
        "Every figure: bench/results</text>"
    )
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" '
            f'width="{_WIDTH}" height="{height}" role="img" aria-labelledby="t d">',
            f'<title id="t">What one checkpoint costs, by {len(names)} ways</title>',
            f'<desc id="d">{escape(_told(names, medians))}</desc>',
            f"<style>{_STYLE}</style>",
            *drawn,
            "</svg>\n",
        ]
    )


def _column(
    topic: str,
    title: str,
    factor: float,
    unit: str,
    left: float,
    names: list[str],
    table: dict[str, Any],
    medians: dict[str, float],
) -> list[str]:
    widest = max(medians[name] for name in names)
    drawn = [f'<text x="{left}" y="{_TOP - 22}" class="head">{escape(title)}</text>']
    for number, name in enumerate(names):
        value = medians[name]
        kind = "ours" if name == "holdfast" else "peer"
        top = _TOP + _ROW * number
        wide = max(1.5, _BAR * value / widest)
        told = "told" if name == "holdfast" else ""
        drawn.append(
            f'<rect x="{left}" y="{top + 4}" width="{wide:.1f}" height="{_ROW - 8}" rx="2" '
            f'class="{kind}"/>'
            f'<text x="{left + wide + 6:.1f}" y="{top + 17}" class="{told}">'
            f"{_written(value * factor)} {unit}</text>"
        )
    if topic != "memory":
        limit = medians[table["limit"]]
        at = left + _BAR * limit / widest
        drawn.append(
            f'<path class="limit" d="M{at:.1f} {_TOP - 4}V{_TOP + _ROW * len(names)}"/>'
            f'<text x="{at:.1f}" y="{_TOP + _ROW * len(names) + 16}" text-anchor="middle" '
            f'class="dim limit-word">{_written(limit * factor)} {unit}</text>'
        )
    return drawn


def _written(value: float) -> str:
    return f"{value:,.0f}" if value >= 10 else f"{value:.2f}"


def _short(name: str) -> str:
    """Without what holds for all of them."""
    return name.removesuffix(", fsync")


def _machine(about: dict[str, Any]) -> str:
    cores, _, _ = str(about["machine"]).partition(" (")
    return f"{cores}, ext4, {about['measured']}, commit {about['commit']}"


def _told(names: list[str], medians: dict[str, dict[str, float]]) -> str:
    """The figures in words, for those who do not see the bars."""
    return "; ".join(
        f"{_short(name)}: "
        + ", ".join(
            f"{title} {_written(medians[topic][name] * factor)} {unit}"
            for topic, (title, factor, unit) in _TOPICS.items()
        )
        for name in names
    )
