"""Rules stop real processes: well, with status 0, or for what is bad, and that never comes back."""

from __future__ import annotations

import json
import signal

import pytest

from holdfast._store.folder.layout import RunLayout
from holdfast._store.folder.lineage import void_steps
from tests.support import (
    arena_files,
    checkpoint_steps,
    journal_events,
    keepers,
    wait_for_keeper_gone,
    wait_until,
)

# Argument 2: the rules. It trains 20 steps, logs what a table says, and is killed where it says so.
BODY = """
    import json
    import math
    from holdfast.rules import *

    plan = json.loads(sys.argv[2])
    weights = make_weights(50)
    settings = holdfast.Settings(**{"max_overhead": 1.0, **plan.get("settings", {})})
    with holdfast.Run(folder, settings=settings, stop_when=eval(plan["rule"]), w=weights) as run:
        print("ready", run.step, run.resumed_from, run.attempt, flush=True)
        bad = plan.get("bad") if run.attempt == 1 else None
        for step in run.steps(20):
            train_one(weights)
            value = plan.get("values", [1.0] * 20)[step]
            run.log(loss=math.nan if step + 1 == bad else value, lr=0.1)
            if plan.get("save"):
                run.save()
            if plan.get("die") == step and run.attempt == 1:
                show_holding(run)
                os.kill(os.getpid(), signal.SIGKILL)
            if plan.get("hold") == step and run.attempt == 1:
                show_holding(run)
                wait_for(gate)
    print("after", run.step, run.over, flush=True)
    show_hash(weights)
"""
# The same with epochs and an evaluation, which finds it bad only when its state is saved already.
EPOCHS = """
    import math
    from holdfast.rules import NotFinite

    weights = make_weights(50)
    with holdfast.Run(
        folder,
        settings=holdfast.Settings(max_overhead=1.0),
        stop_when=NotFinite("val_loss"),
        w=weights,
    ) as run:
        print("ready", run.step, run.resumed_from, run.attempt, flush=True)
        for epoch in run.epochs(3):
            for batch in run.batches(list(range(5))):
                train_one(weights)
                run.log(loss=1.0)
                handle = run.save()
            with run.phase("eval"):
                if run.attempt == 1 and epoch == 1:
                    handle.wait()
                    show_holding(run)
                    wait_for(gate)
                run.log(val_loss=math.nan if run.attempt == 1 and epoch == 1 else 1.0)
            if run.attempt == 1 and epoch == 1 and sys.argv[2] == "die":
                def die(step):  # right after the record is durable: memory still has the slot
                    os.kill(os.getpid(), signal.SIGKILL)
                from holdfast._run.driver import session_of
                session_of(run).saver.void_from = die
    show_hash(weights)
"""


@pytest.fixture
def train(script, folder):
    def begin(**plan):
        return script(folder, BODY, json.dumps(plan))

    return begin


def _hash(trainer):
    return next(line.split()[1] for line in trainer.lines if line.startswith("hash "))


def test_a_plateau_ends_the_loop_at_the_very_step_interrupted_or_not(train, folder, gate):
    values = [5.0, 4.0, 3.0, *[3.5] * 17]
    plan = {"rule": "Plateau('loss', patience=6)", "values": values, "hold": 5}
    first = train(**plan)
    first.wait_for("holding")
    first.send(signal.SIGTERM)
    first.wait_for("SIGTERM:")
    gate.touch()
    assert first.wait() in (-signal.SIGTERM, 143), first.output
    assert checkpoint_steps(folder) == [6]
    second = train(**plan)
    assert second.wait() == 0, second.output
    assert "after 9 Plateau: loss has not improved for 6 values; the best is 3 (step 3)" in (
        second.output
    )
    assert checkpoint_steps(folder)[-1] == 9
    (event,) = journal_events(folder, "rule")
    assert (event["step"], event["outcome"]) == (9, "success")
    assert event["rules"][0]["knows"] == {"best": 3.0, "best_step": 3, "last": 3.5, "waited": 6}
    third = train(**plan)
    assert third.wait() == 0
    assert _hash(third) == _hash(second)
    assert "ended at step 9 by a rule (Plateau: loss" in third.output
    # By a rule that has been changed since, the run goes on.
    fourth = train(**{**plan, "rule": "Plateau('loss', patience=8)"})
    assert fourth.wait() == 0
    assert "after 11 Plateau" in fourth.output
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


@pytest.mark.parametrize("last", [11, 20])
def test_what_is_not_finite_leaves_with_65_and_a_later_start_resumes_before_it(train, folder, last):
    plan = {"rule": "NotFinite() | Budget(steps=500)", "bad": last, "save": True}
    first = train(**plan)
    assert first.wait() == 65, first.output
    said = f"NotFinite: loss is nan (step {last}): no start resumes from step {last} or later."
    assert said in first.output
    assert checkpoint_steps(folder) == [last - 3, last - 2, last - 1]
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    exit_record = json.loads((folder / "attempts/0001/exit.json").read_text())
    assert exit_record["status"] == 65
    assert exit_record["how"] == f"NotFinite: loss is nan (step {last})"
    second = train(**plan)
    assert second.ready() == last - 1
    assert second.wait() == 0, second.output


def test_killed_right_after_the_bad_step_only_what_was_before_it_is_resumed(train, folder):
    first = train(rule="NotFinite()", bad=8, die=8, save=True)
    assert first.wait() == 65, first.output  # the boundary of step 8 comes before the kill
    again = train(rule="NotFinite()")
    assert again.ready() == 7
    assert again.wait() == 0


def test_killed_within_the_bad_step_nothing_of_it_is_resumed(train, folder):
    first = train(rule="NotFinite()", bad=9, die=8)
    assert first.wait() == -signal.SIGKILL
    second = train(rule="NotFinite()")
    assert second.ready() <= 8
    assert second.wait() == 0


@pytest.mark.parametrize("how", ["leave", "die", "both"])
def test_an_evaluation_that_finds_a_saved_state_bad_makes_it_void(script, folder, gate, how):
    """Its slot is in memory, its checkpoint on disk; with "both" the keeper is killed as well."""
    first = script(folder, EPOCHS, "leave" if how == "leave" else "die")
    first.wait_for("holding 10")
    assert checkpoint_steps(folder)[-1] == 10
    (keeper,) = keepers(folder)
    if how == "both":
        keeper.suspend()
    gate.touch()
    if how == "both":
        wait_until(lambda: first.process.poll() is not None)
        keeper.kill()
    assert first.wait() == (65 if how == "leave" else -signal.SIGKILL), first.output
    assert void_steps(RunLayout(folder)) == {1: 10}
    second = script(folder, EPOCHS, "leave")
    assert second.ready() == 9
    assert second.wait() == 0, second.output
    assert (folder / "set-aside/void-step-000000000010-a0001").is_dir()
    assert not (folder / "checkpoints/step-000000000010-a0001").exists()
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


def test_states_that_held_it_before_anybody_logged_it_are_void_too(script, folder):
    body = """
        import math
        import numpy as np
        from holdfast.rules import NotFinite

        weights, mask = make_weights(50), np.full(4, -math.inf)
        settings = holdfast.Settings(keep_last=9)
        rule = NotFinite()
        with holdfast.Run(folder, settings=settings, stop_when=rule, w=weights, m=mask) as run:
            print("ready", run.step, flush=True)
            for step in run.steps(20):
                train_one(weights)
                if step == 6 and run.attempt == 1:
                    weights[3] = math.nan
                run.save()
                if step % 5 == 4:
                    run.log(loss=weights.sum())
        """
    first = script(folder, body)
    assert first.wait() == 65
    assert "no start resumes from step 7 or later" in first.output
    assert "not finite: w, m." in first.output
    assert checkpoint_steps(folder)[-1] == 6
    second = script(folder, body)
    assert second.ready() == 6
    assert second.wait() == 0, second.output


def test_epochs_end_with_the_epoch_in_which_a_rule_holds_and_the_code_behind_them_runs(
    script, folder
):
    body = """
        from holdfast.rules import Threshold
        weights = make_weights(50)
        run = holdfast.Run(folder, stop_when=Threshold("batch", above=2.5), w=weights)
        with run:
            print("ready", run.step, flush=True)
            for epoch in run.epochs(3):
                for batch in run.batches([0, 1, 2, 3, 4]):
                    train_one(weights)
                    run.log(batch=batch)
                for batch in run.batches([7, 8]):
                    print("never", flush=True)
                print("end of epoch", epoch, flush=True)
            print("behind", run.step, flush=True)
        show_hash(weights)
        """
    first, again = script(folder, body), None
    assert first.wait() == 0, first.output
    assert "never" not in first.output
    assert "end of epoch 0\n" in first.output
    assert "behind 4\n" in first.output
    again = script(folder, body)
    assert again.wait() == 0
    assert "end of epoch" not in again.output
    assert _hash(again) == _hash(first)


def test_a_loop_of_ones_own_ends_and_is_not_begun_again(script, folder):
    body = """
        from holdfast.rules import Budget
        weights = make_weights(50)
        with holdfast.Run(folder, stop_when=Budget(steps=4), w=weights) as run:
            while not run.over:
                train_one(weights)
                if run.boundary():
                    break
            run.finish()
            print("behind", run.step, flush=True)
        show_hash(weights)
        """
    hashes = set()
    for _ in range(2):
        trainer = script(folder, body)
        assert trainer.wait() == 0, trainer.output
        assert "behind 4\n" in trainer.output
        hashes.add(_hash(trainer))
    assert len(hashes) == 1
    assert journal_events(folder, "finished")[0]["step"] == 4
    assert len(journal_events(folder, "finished")) == 1


def test_hours_are_those_of_all_lives(script, folder):
    body = """
        from holdfast.rules import Budget
        weights = make_weights(50)
        with holdfast.Run(folder, stop_when=Budget(hours=0.7 / 3600), w=weights) as run:
            print("ready", run.step, flush=True)
            for step in run.steps(10_000):
                train_one(weights)
                time.sleep(0.01)  # hours are what is counted
                if step == 25 and run.attempt == 1:
                    run.stop()
        print("after", run.over, flush=True)
        """
    first = script(folder, body)
    assert first.wait() == 130, first.output
    second = script(folder, body)
    assert second.wait() == 0, second.output
    steps = checkpoint_steps(folder)
    assert 27 <= steps[-1] <= 75
    assert "hours are used" in second.output


def test_the_supervisor_does_not_start_it_again(script, folder, start, tmp_path):
    import sys

    path = tmp_path / "bad.py"
    path.write_text(
        "import sys, math, numpy as np, holdfast\n"
        "from holdfast.rules import NotFinite\n"
        "print('life', flush=True)\n"
        "with holdfast.Run(sys.argv[1], stop_when=NotFinite(), w=np.zeros(4)) as run:\n"
        "    for step in run.steps(9):\n"
        "        run.log(loss=math.nan if step == 5 else 1.0)\n"
    )
    prefix = (sys.executable, "-m", "holdfast", "run", "--")
    trainer = start(folder, script=path, prefix=prefix)
    assert trainer.wait() == 65, trainer.output
    assert trainer.output.count("life\n") == 1
