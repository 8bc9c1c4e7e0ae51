"""A proof in plain words: for the terminal, a failed test, a page of CI and the run's page.

`python -m holdfast._tools.prove.report FILE` turns the output of `--json` into Markdown.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast import _text
from holdfast._errors import SettingsError
from holdfast._tools.prove.proof import (
    DIFFERS,
    EQUAL,
    UNREPEATABLE,
    UNTRIED,
    Difference,
    Interruption,
    Proof,
)

if TYPE_CHECKING:
    from holdfast._report import view

HEADINGS = ("no.", "signal", "moment", "at step", "ended with", "went on from")
_MOMENTS = {
    "start": "start-up",
    "step": "in a step",
    "update": "optimizer's update",
    "save": "saving",
    "load": "loading",
    "boundary": "between two steps",
    "commit": "saving a checkpoint",
    "phase": "evaluation",
}
_SPREADS = {
    None: "not compared: the undisturbed runs have to be the same first",
    True: "no further from the undisturbed runs than they are from each other",
    False: "further from the undisturbed runs than they are from each other",
}
Rows = list[tuple[str, str]]
_MOST_OTHERS = 12
_TARGET_AT = 2  # behind the signal, where there are several ranks


def headline(proof: Proof) -> str:
    if proof.verdict == EQUAL:
        made = len(proof.interruptions)
        times = "once" if made == 1 else f"{made} times"
        return (
            f"Equal to the bit: interrupted {times} and started again, the script ends as if "
            "nothing had happened."
        )
    if proof.verdict == DIFFERS:
        return f"NOT equal: {_where(proof)} the script is not what it was."
    if proof.verdict == UNREPEATABLE:
        step = proof.unrepeatable and proof.unrepeatable.step
        since = "" if step is None else f", from step {step} on"
        return f"Not repeatable by itself: two undisturbed runs differ from each other{since}."
    assert proof.verdict == UNTRIED
    reason = (proof.trouble or "the reason is not known").strip().splitlines()[0]
    return f"Nothing is proved: {reason}"


def details(proof: Proof) -> Rows:
    """The lines below the verdict, each a label and a text."""
    rows: Rows = []
    if proof.verdict == UNTRIED:
        rows += [("", line) for line in (proof.trouble or "").strip().splitlines()[1:]]
    if proof.unrepeatable is not None:
        rows += _difference(proof.unrepeatable, ("one run", "the other"))
    if proof.verdict == UNREPEATABLE:
        rows += [("interrupted", _SPREADS[proof.within_spread])]
    if proof.difference is not None and proof.within_spread is not True:
        rows += _difference(proof.difference, ("expected", "found"))
    if proof.replay is not None:
        rows += [("to replay", proof.replay)]
    if proof.compared and proof.verdict != UNTRIED:
        rows += [("compared", ", ".join(proof.compared))]
    if proof.verdict != UNTRIED:
        rows += [("made", _made(proof))]
    rows += [("note", note) for note in proof.notes]
    if proof.kept is not None:
        rows += [("kept in", proof.kept)]
    return rows


def headings(proof: Proof) -> tuple[str, ...]:
    return _with_target(proof, HEADINGS, "to")


def _with_target(proof: Proof, row: tuple[str, ...], target: str) -> tuple[str, ...]:
    if not any(each.target for each in proof.interruptions):
        return row
    return (*row[:_TARGET_AT], target, *row[_TARGET_AT:])


def interruption_rows(proof: Proof) -> list[tuple[str, ...]]:
    rows = []
    for each in proof.interruptions:
        resumed = "" if each.resumed_at is None else f"step {each.resumed_at}"
        row = (
            str(each.number),
            each.signal,
            moment(each),
            str(each.step),
            ended_with(each),
            "the beginning" if each.resumed_at == 0 else resumed,
        )
        rows.append(_with_target(proof, row, each.target or ""))
    return rows


def moment(interruption: Interruption) -> str:
    return _MOMENTS.get(interruption.moment, interruption.moment)


def ended_with(interruption: Interruption) -> str:
    status = interruption.status
    if status is None:
        return "lived on"
    if status >= 0:
        return f"status {status}"
    return _text.signal_name(status) or f"signal {-status}"


def plain_text(proof: Proof) -> str:
    lines = [headline(proof)]
    rows = details(proof)
    width = max((len(label) for label, _ in rows), default=0)
    lines += [f"  {label:<{width}}  {text}".rstrip() for label, text in rows]
    table = interruption_rows(proof)
    if table:
        cells = [headings(proof), *table]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines.append("")
        for row in cells:
            padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def markdown(proof: Proof) -> str:
    """The same for a page of CI, with the interruptions folded."""
    lines = [f"**{_escape(headline(proof))}**", ""]
    for label, text in details(proof):
        shown = f"`{text}`" if label == "to replay" else _escape(text)
        lines += [f"- {label}: {shown}" if label else f"- {shown}"]
    table = interruption_rows(proof)
    if table:
        lines += ["", f"<details><summary>{len(table)} interruptions</summary>", ""]
        names = headings(proof)
        lines += [_row(names), _row(["---"] * len(names)), *map(_row, table)]
        lines += ["", "</details>"]
    return "\n".join([f"`{' '.join(proof.command)}`", "", *lines, ""])


def from_json(tree: dict[str, Any]) -> Proof:
    """A proof from its JSON; fields of a later version are left out."""
    values = _known(Proof, tree)
    for name in ("command", "signals", "more"):
        values[name] = tuple(values.get(name, ()))
    for name in ("difference", "unrepeatable"):
        if values.get(name) is not None:
            known = _known(Difference, values[name])
            values[name] = Difference(**known | {"others": tuple(known.get("others", ()))})
    found = values.get("interruptions", ())
    values["interruptions"] = [Interruption(**_known(Interruption, each)) for each in found]
    return Proof(**values)


def _known(kind: Any, tree: dict[str, Any]) -> dict[str, Any]:
    names = {each.name for each in dataclasses.fields(kind)}
    return {name: value for name, value in tree.items() if name in names}


def _difference(found: Difference, sides: tuple[str, str]) -> Rows:
    rows: Rows = [("first difference", found.item)]
    if found.step is not None:
        later = ", of a later epoch than the restart" if found.is_in_later_epoch else ""
        rows += [("at step", f"{found.step}{later}")]
    if found.rank is not None:
        rows += [("on rank", str(found.rank))]
    rows += [(sides[0], found.expected), (sides[1], found.found)]
    if found.others:
        more = len(found.others) - _MOST_OTHERS
        named = ", ".join(found.others[:_MOST_OTHERS])
        rows += [("differs as well", f"{named} and {more} more" if more > 0 else named)]
    if found.at_the_end is not None:
        rows += [("at the end", found.at_the_end)]
    return [
        *rows,
        ("likely cause", f"{found.cause}: {found.why}"),
        ("what to do", found.remedy),
    ]


def _where(proof: Proof) -> str:
    after = proof.difference and proof.difference.after
    if after is None:
        return "after it was interrupted"
    found = next((each for each in proof.interruptions if each.number == after), None)
    if found is None:
        return f"after interruption {after}"
    return f"after interruption {after} ({describe(found)})"


def describe(interruption: Interruption) -> str:
    """The signal, its target among ranks, the moment and the step."""
    target = f" to {interruption.target}" if interruption.target else ""
    when = f"{moment(interruption)}, at step {interruption.step}"
    return f"{interruption.signal}{target}, {when}"


def _made(proof: Proof) -> str:
    parts = [
        _text.count(proof.steps, "step"),
        _text.count(len(proof.interruptions), "interruption"),
        _text.count(proof.lives, "start"),
    ]
    if proof.ranks > 1:
        parts += [f"{proof.ranks} ranks"]
    return f"{', '.join(parts)}, in {proof.seconds:.0f} s (seed {proof.seed})"


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _escape(text: str) -> str:
    # An item's name may be __init__ or List[int], which is Markdown too.
    return "".join(f"\\{each}" if each in "\\`*_[]<>|" else each for each in text)


def read_proofs(path: Path) -> list[view.ProofRecord]:
    """The proofs in a file that `--json` has written, for the run's page."""
    hint = "Make one: holdfast prove --json -- python train.py > proof.json"
    try:
        data, written = path.read_bytes(), path.stat().st_mtime
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror or error}).\n{hint}"
        ) from error
    try:
        tree = json.loads(data)
        trees = tree if isinstance(tree, list) else tree.get("proofs", [tree])
        return [_for_page(from_json(each), written) for each in trees]
    except (ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
        raise SettingsError(
            f"{path}: is not the output of `holdfast prove --json`.\n{hint}"
        ) from error


def _for_page(proof: Proof, written: float) -> view.ProofRecord:
    from holdfast._report import view

    made = [f"{label}: {text}" for label, text in details(proof) if label == "made"]
    interruptions = []
    for each in proof.interruptions:
        target = f" to {each.target}" if each.target else ""
        went_on = "" if each.resumed_at is None else f", went on from step {each.resumed_at}"
        interruptions.append(
            view.ProofInterruption(
                step=each.step,
                kind=f"{each.signal}{target}, {moment(each)}",
                result=ended_with(each) + went_on,
            )
        )
    return view.ProofRecord(
        t=written,
        verdict=str(proof.verdict),
        sentence=" ".join([headline(proof), *made]),
        interruptions=interruptions,
    )


def main(arguments: Sequence[str]) -> None:
    tree = json.loads(Path(arguments[0]).read_text(encoding="utf-8"))
    for each in tree.get("proofs", [tree]):
        print(markdown(from_json(each)))


if __name__ == "__main__":
    main(sys.argv[1:])
