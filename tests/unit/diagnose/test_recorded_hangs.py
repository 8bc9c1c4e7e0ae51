"""The verdict on every hang of the table, by what the real one has left.

tests/hangs makes them; three of them also in `make test`.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._diagnose.deaths.judge import judge
from holdfast._diagnose.evidence import gather
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.evidence.gather import gather_run
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout
from tests.hangs.stage import check
from tests.hangs.table import DISK, HANGS, LOADER, RANKS
from tests.unit.restored import restore

_ALL = (*HANGS, DISK, LOADER, *RANKS)


@pytest.fixture(autouse=True)
def _no_next_heartbeat(monkeypatch):
    """A record of some minutes ago is not watched for the next heartbeat of its run."""
    monkeypatch.setattr(gather, "_WATCH_SECONDS", 0.0)


def _evidence(home: Path) -> Evidence:
    """Of a run that lived when it was recorded; on another machine nobody can look at it."""
    found = gather_run(home / "run")
    assert not found.is_live
    found.is_live = True
    return found


@pytest.mark.parametrize("hang", _ALL, ids=lambda each: each.name)
def test_it_is_named_by_a_look_at_it(hang, tmp_path):
    home = restore(tmp_path, "hangs", hang.name, "live")
    evidence = _evidence(home)
    evidence.look = read_json(RunLayout(home / "run").look(1))
    verdict = judge(evidence)
    check(verdict.to_json(), hang, home / "scripts")
    assert (verdict.step, verdict.host) == (evidence.beat["step"], "node1")


@pytest.mark.parametrize("hang", _ALL, ids=lambda each: each.name)
def test_it_is_named_by_the_record_of_the_watch_alone(hang, tmp_path):
    """Nothing answers any more: hang.json has what the keepers saw when they called it one."""
    home = restore(tmp_path, "hangs", hang.name, "live")
    evidence = _evidence(home)
    assert evidence.hang["cause"] == hang.cause.value
    check(judge(evidence).to_json(), hang, home / "scripts")
