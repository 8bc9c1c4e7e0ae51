"""A proof in plain words: for the terminal, a failed test, a page of CI and the run's page.

`python -m holdfast._tools.prove.report FILE` turns the output of `--json` into Markdown.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
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

_HEADINGS = ("no.", "signal", "to", "moment", "at step", "ended with", "went on from")
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
    return f"Nothing is proved: {(proof.trouble or 'the reason is not known').splitlines()[0]}"


def details(proof: Proof) -> Rows:
    """The lines below the verdict, each a label and a text."""
    rows: Rows = []
    if proof.verdict == UNTRIED:
        rows += [("", line) for line in (proof.trouble or "").splitlines()[1:]]
    if proof.unrepeatable is not None:
        rows += _difference(proof.unrepeatable, ("one run", "the other"))
    if proof.verdict == UNREPEATABLE:
        rows += [("interrupted", _SPREADS[proof.within_spread])]
    if proof.difference is not None and proof.within_spread is not True:
        rows += _difference(proof.difference, ("expected", "found"))
    if proof.replay is not None:
        rows += [("to replay", proof.replay)]
    if proof.verdict != UNTRIED:
        rows += [("compared", ", ".join(proof.compared))] if proof.compared else []
        rows += [("made", _made(proof))]
    rows += [("note", note) for note in proof.notes]
    return [*rows, ("kept in", proof.kept)] if proof.kept is not None else rows


def table(proof: Proof) -> list[tuple[str, ...]]:
    """The interruptions below their headings; the target only where there are several ranks."""
    rows: list[tuple[str, ...]] = [_HEADINGS]
    for each in proof.interruptions:
        resumed = "" if each.resumed_at is None else f"step {each.resumed_at}"
        if proof.verdict == EQUAL and each.resumed_at is None and each.status is not None:
            resumed = "the end"  # nothing was left to train
        rows.append(
            (
                str(each.number),
                each.signal,
                each.target or "",
                moment(each),
                str(each.step),
                ended_with(each),
                "the beginning" if each.resumed_at == 0 else resumed,
            )
        )
    if any(each.target for each in proof.interruptions):
        return rows
    return [(*row[:2], *row[3:]) for row in rows]


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
    if proof.interruptions:
        widths = [max(map(len, column)) for column in zip(*table(proof), strict=True)]
        lines.append("")
        for row in table(proof):
            padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
            lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)


def markdown(proof: Proof) -> str:
    """The same for a page of CI, with the interruptions folded."""
    lines = [f"**{_escape(headline(proof))}**", ""]
    for label, text in details(proof):
        shown = f"`{text}`" if label == "to replay" else _escape(text)
        lines += [f"- {label}: {shown}" if label else f"- {shown}"]
    if proof.interruptions:
        names, *rows = table(proof)
        lines += ["", f"<details><summary>{len(rows)} interruptions</summary>", ""]
        lines += [f"| {' | '.join(row)} |" for row in (names, ["---"] * len(names), *rows)]
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
    later = ", of a later epoch than the restart" if found.is_in_later_epoch else ""
    more = len(found.others) - _MOST_OTHERS
    others = ", ".join(found.others[:_MOST_OTHERS]) + (f" and {more} more" if more > 0 else "")
    rows = [
        ("first difference", found.item),
        ("at step", None if found.step is None else f"{found.step}{later}"),
        ("on rank", None if found.rank is None else str(found.rank)),
        (sides[0], found.expected),
        (sides[1], found.found),
        ("differs as well", others or None),
        ("at the end", found.at_the_end),
        ("likely cause", f"{found.cause}: {found.why}"),
        ("what to do", found.remedy),
    ]
    return [(label, text) for label, text in rows if text is not None]


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
    return f"{_event(interruption)}, at step {interruption.step}"


def _event(interruption: Interruption) -> str:
    target = f" to {interruption.target}" if interruption.target else ""
    return f"{interruption.signal}{target}, {moment(interruption)}"


def _made(proof: Proof) -> str:
    parts = [
        _text.count(proof.steps, "step"),
        _text.count(len(proof.interruptions), "interruption"),
        _text.count(proof.lives, "start"),
    ]
    if proof.ranks > 1:
        parts += [f"{proof.ranks} ranks"]
    return f"{', '.join(parts)}, in {proof.seconds:.0f} s (seed {proof.seed})"


def _escape(text: str) -> str:
    # An item's name may be __init__ or List[int], which is Markdown too.
    return "".join(f"\\{each}" if each in "\\`*_[]<>|" else each for each in text)


def read_proofs(path: Path) -> list[view.ProofRecord]:
    """The proofs in a file that `--json` has written, for the run's page."""
    hint = "Make one: holdfast prove --json -- python train.py > proof.json"
    try:
        text, written = path.read_text(encoding="utf-8"), path.stat().st_mtime
        return [_for_page(proof, written) for proof in _proofs_in(text)]
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror or error}).\n{hint}"
        ) from error
    except (ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
        raise SettingsError(
            f"{path}: is not the output of `holdfast prove --json`.\n{hint}"
        ) from error


def _proofs_in(text: str) -> list[Proof]:
    tree = json.loads(text)
    trees = tree if isinstance(tree, list) else tree.get("proofs", [tree])
    return [from_json(each) for each in trees]


def _for_page(proof: Proof, written: float) -> view.ProofRecord:
    interruptions: list[view.ProofInterruption] = []
    for each in proof.interruptions:
        went_on = "" if each.resumed_at is None else f", went on from step {each.resumed_at}"
        result = ended_with(each) + went_on
        interruptions.append({"step": each.step, "kind": _event(each), "result": result})
    made = "" if proof.verdict == UNTRIED else f" made: {_made(proof)}"
    return {
        "t": written,
        "verdict": str(proof.verdict),
        "sentence": headline(proof) + made,
        "interruptions": interruptions,
    }


def main(arguments: Sequence[str]) -> None:
    for each in _proofs_in(Path(arguments[0]).read_text(encoding="utf-8")):
        print(markdown(each))


if __name__ == "__main__":
    main(sys.argv[1:])
