"""An interrupted training is compared with the undisturbed one, update by update."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from holdfast._tools.cli.prove import follow
from holdfast._tools.prove import prove
from holdfast._tools.prove.causes import RankAttempt, RankHistory, UpdateRecord
from holdfast._tools.prove.interrupted import InterruptedRun, RankComparison
from holdfast._tools.prove.proof import Interruption, Proof, ProofRequest
from holdfast._tools.prove.prove import _Prover
from holdfast._tools.prove.script_run import EventListener, start_process

_BATCHES = 4  # in an epoch


def update_at(place: int, rate: float = 0.1) -> UpdateRecord:
    items = {"weight/0/w": [f"w{place}", float(place), 2], "setting/0/lr": [str(rate), rate, 1]}
    batch = {"at": place % _BATCHES, "bytes": f"batch {place}", "indices": None, "workers": 0}
    return UpdateRecord(0, items, (batch,), {}, None)


@pytest.mark.parametrize(
    ("began", "differs", "is_later"), [(5, 6, False), (5, 8, True), (4, 4, False), (0, 11, True)]
)
def test_a_difference_that_came_in_a_later_epoch_is_marked(began, differs, is_later):
    history = RankHistory()
    for place in range(12):
        history.updates.append(update_at(place))
    comparison = RankComparison(history)
    comparison.attempt = RankAttempt(1, began)
    for place in range(began, differs):
        comparison.compare_update(update_at(place))
    assert comparison.finding is None
    comparison.compare_update(update_at(differs, rate=0.2))
    found = comparison.finding
    assert (found.place, found.is_in_later_epoch) == (differs, is_later)


def test_an_interruption_that_is_repeated_alone_keeps_its_number(monkeypatch, tmp_path, capsys):
    class Struck(InterruptedRun):
        def __init__(self, script, reference, plan, volatile, watcher, *_, **__):
            (only,) = plan
            self.interruptions = [Interruption(only.number, only.signal, "step", 16)]
            self.plan, self.script, self._watcher = [], SimpleNamespace(starts=1), watcher

        repeated = 0

        def run(self):
            self._watcher.interruption(self.interruptions[0])

    monkeypatch.setattr(prove, "InterruptedRun", Struck)
    monkeypatch.setattr(_Prover, "_decide", lambda *_: None)
    request = ProofRequest(("python", "train.py"), kills=6, only=3)
    reference = SimpleNamespace(moments=lambda: ["step"])
    proof = Proof(request.command, 7, 6, request.signals)
    with follow() as watcher, contextlib.closing(EventListener()) as listener:
        prover = _Prover(request, watcher, proof, tmp_path, listener, start_process)
        prover._interrupt(reference, reference, frozenset())
    (found,) = proof.interruptions
    line = f"holdfast: interruption 3: {found.signal}, in a step, at step 16"
    assert capsys.readouterr().err.splitlines() == ["holdfast: interrupted", line]
