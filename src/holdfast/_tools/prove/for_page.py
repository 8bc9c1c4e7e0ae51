"""What `holdfast prove --json` has printed, for the page."""

from __future__ import annotations

import json
from pathlib import Path

from holdfast._errors import SettingsError
from holdfast._report.view import Interruption, Proof
from holdfast._tools.prove import report
from holdfast._tools.prove.proof import Interruption as Struck
from holdfast._tools.prove.proof import Proof as Proven


def read_proofs(path: Path) -> list[Proof]:
    """The proofs in a file; SettingsError if there is none."""
    hint = "Make one: holdfast prove --json -- python train.py > proof.json"
    try:
        data = path.read_bytes()
        written = path.stat().st_mtime
    except OSError as error:
        raise SettingsError(
            f"{path}: cannot be read ({error.strerror or error}).\n{hint}"
        ) from error
    try:
        tree = json.loads(data)
        trees = tree if isinstance(tree, list) else tree.get("proofs", [tree])
        found = [_plain(report.from_json(each), written) for each in trees]
    except (ValueError, TypeError, AttributeError, KeyError, AssertionError) as error:
        raise SettingsError(f"{path}: is no proof of `holdfast prove`.\n{hint}") from error
    return found


def _plain(proof: Proven, written: float) -> Proof:
    rest = [f"{label}: {text}" for label, text in report.details(proof) if label == "made"]
    return Proof(
        t=written,
        verdict=str(proof.verdict),
        sentence=" ".join([report.headline(proof), *rest]),
        interruptions=[_struck(each) for each in proof.interruptions],
    )


def _struck(each: Struck) -> Interruption:
    whom = f" to {each.target}" if each.target else ""
    went_on = "" if each.resumed_at is None else f", went on from step {each.resumed_at}"
    return Interruption(
        step=each.step,
        kind=f"{each.signal}{whom}, {report.moment(each)}",
        result=report.ended_with(each) + went_on,
    )
