"""docs/benchmarks.md and its pictures, from the figures that were kept.

The page is written by hand but for what stands between `<!-- bench:NAME -->` and `<!-- end -->`.
"""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

from bench.figures import Table
from bench.pictures import draw

_PART = re.compile(r"(<!-- bench:([a-z-]+) -->\n).*?(<!-- end -->)", re.DOTALL)
COMMANDS = {
    "stall": "saving",
    "durable": "saving",
    "memory": "saving",
    "resume": "resuming",
    "boundary": "steps",
    "agreement": "steps",
    "decision": "steps",
    "interference": "beside",
    "size": "growing",
    "tensors": "growing",
    "checkpoints": "growing",
    "age": "growing",
    "unchanged": "unchanged",
    "start": "starting",
}
# One bar for each way; by size and by number, a line says more.
LINES = ("size-stall", "size-durable", "tensors-stall", "tensors-durable", "tensors-resume")


def write_pages(results: Path, docs: Path) -> None:
    kept = json.loads(results.read_text(encoding="utf-8"))
    tables = {name: Table.of(each["table"]) for name, each in kept.items()}
    page = docs / "benchmarks.md"
    text = page.read_text(encoding="utf-8")

    def part(match: re.Match[str]) -> str:
        name = match[2]
        if name == "summary":
            return f"{match[1]}{summary(tables)}\n{match[3]}"
        if name == "machine":
            return f"{match[1]}{_machine(kept, results)}\n{match[3]}"
        if name not in tables:
            return f"{match[1]}Not measured yet.\n{match[3]}"
        table = tables[name]
        picture = docs / "pictures" / f"bench-{name}.svg"
        draw(table, picture, as_line=name in LINES)
        shown = f"![{table.title}](pictures/{picture.name})"
        told = _wrapped(f"{table.setting}. `{command(name)}`")
        return f"{match[1]}{told}\n\n{table.markdown()}\n\n{shown}\n{match[3]}"

    page.write_text(_PART.sub(part, text), encoding="utf-8")
    print(f"wrote {page}")


def command(topic: str) -> str:
    """What makes a table again."""
    return f"make bench TOPICS={COMMANDS[topic.split('-')[0]]}"


def summary(tables: dict[str, Table]) -> str:
    """Every target in one table: what was reached, and whether it is met."""
    lines = ["| | reached | target | |", "|---|---|---|---|"]
    for table in tables.values():
        for row in table.rows:
            verdict = table.verdict(row)
            if not verdict:
                continue
            wanted, _, met = verdict.partition(": ")
            if row.at_most_value is not None:
                reached = table.written(row.median)
            else:
                ratio = table.ratio(row)
                assert ratio is not None
                reached = f"{ratio:.2f} ×" if ratio >= 0.1 else f"{ratio:.2g} ×"
            name = table.title.split(":")[0]
            told = row.name if row.name not in ("holdfast", name) else ""
            told = told.replace("holdfast, ", "").replace(": holdfast", "")
            shown = met if met == "met" else f"**{met}**"
            lines.append(
                f"| {name}{f' ({told})' if told else ''} | {reached} | {wanted} | {shown} |"
            )
    return "\n".join(lines)


def _machine(kept: dict[str, dict[str, dict[str, str]]], results: Path) -> str:
    about = [each["about"] for each in kept.values()]
    machines = sorted({each["machine"] for each in about})
    days = sorted({each["measured"] for each in about})
    commits = sorted({each["commit"] for each in about})
    when = days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"
    return _wrapped(
        f"Measured on {'; '.join(machines)}, {when}, commit {', '.join(commits)}. Every figure of "
        f"every round: [`bench/results/{results.name}`](../bench/results/{results.name})."
    )


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_long_words=False, break_on_hyphens=False)
