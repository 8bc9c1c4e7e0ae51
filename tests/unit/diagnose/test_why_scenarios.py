"""Logs of many launchers and frameworks, written after real ones, each with its verdict.

A scenario begins with `#### name | causes | the most that it may be sure of | what is known`. Lines
`#> says`, `#> advice` and `#> not` below it have what the verdict, or its advice, must say or not.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.evidence.gather import gather_log
from tests.unit.why_evidence import printed

LOGS = Path(__file__).parents[1] / "why_logs"
_SURE = ("unknown", "by-exclusion", "likely", "certain")


def scenarios() -> list[Any]:
    found = []
    for path in sorted(LOGS.glob("*.txt")):
        for part in path.read_text(encoding="utf-8").split("#### ")[1:]:
            head, _, text = part.partition("\n")
            name, causes, sure, *more = (each.strip() for each in head.split("|"))
            known = dict(each.split("=") for each in (more[0].split() if more else ()))
            while text.startswith("#> "):
                line, _, text = text.removeprefix("#> ").partition("\n")
                what, _, known[what] = line.partition(" ")
            found.append(pytest.param(causes.split(","), sure, known, text, id=name))
    return found


def evidence_of(text: str, known: dict[str, str], folder: Path) -> Evidence:
    if "status" not in known:
        (folder / "log").write_text(text, encoding="utf-8")
        return gather_log(folder / "log")
    more = {"command": known["command"].split(",")} if "command" in known else {}
    return printed(text, int(known["status"]), **more)


@pytest.mark.parametrize(("causes", "sure", "known", "text"), scenarios())
def test_a_log_tells_why_it_ended(causes, sure, known, text, tmp_path):
    verdict = judge_strictly(evidence_of(text, known, tmp_path))
    assert verdict.cause.value in causes, verdict
    assert _SURE.index(verdict.sure.value) <= _SURE.index(sure), verdict
    if "rank" in known:
        assert verdict.rank == int(known["rank"]), verdict
    said = "\n".join((verdict.sentence, *verdict.evidence, *verdict.advice, *verdict.others))
    assert re.search(known.get("says", ""), said), verdict
    assert re.search(known.get("advice", ""), "\n".join(verdict.advice)), verdict
    assert "not" not in known or not re.search(known["not"], said), verdict
