"""The exit status says who should start the run again, and what is durable is exact."""

from __future__ import annotations

import json
import re
import signal

import pytest

from tests.processes.conftest import EAGER
from tests.support import (
    arena_files,
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)


@pytest.mark.parametrize(
    ("number", "status", "said"),
    [
        (signal.SIGINT, 130, "Ctrl-C: step 9 is being finished"),
        (signal.SIGTERM, 143, "SIGTERM: step 9 is being finished"),
        (signal.SIGHUP, 129, "SIGHUP: step 9 is being finished"),
        (signal.SIGUSR1, 75, "SIGUSR1: step 9 is being finished"),
        (signal.SIGUSR2, 75, "SIGUSR2: step 9 is being finished"),
    ],
    ids=lambda value: value.name if isinstance(value, signal.Signals) else "",
)
def test_a_signal_ends_the_step_and_the_run_leaves_with_its_status(
    folder, gate, light, light_reference, number, status, said
):
    trainer = light(folder, "--total", 40, "--hold-at", 8)
    trainer.wait_for("holding")
    trainer.send(number)
    trainer.wait_for(said)
    assert trainer.process.poll() is None
    gate.touch()
    assert trainer.wait() == status
    assert "Traceback" not in trainer.output
    assert f"step 9 is durable; leaving with status {status}" in trainer.output
    assert checkpoint_steps(folder) == [9]
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    record = json.loads((folder / "attempts/0001/exit.json").read_text())
    assert (record["status"], record["durable_step"]) == (status, 9)
    again = light(folder, "--total", 40)
    assert again.ready() == 9
    assert again.state_hash() == light_reference(40)


def test_ctrl_c_while_a_run_is_opened_is_one_line_and_loses_nothing(folder, script):
    body = """
        class Slow:
            def state_dict(self):
                return {"weights": weights}

            def load_state_dict(self, state):
                if len(sys.argv) > 3:
                    print("loading")
                    wait_for(gate)
                weights[:] = state["weights"]

        weights = make_weights()
        with holdfast.Run(folder, model=Slow()) as run:
            for step in run.steps(int(sys.argv[2])):
                train_one(weights)
        show_hash(weights)
        """
    assert script(folder, body, 5).wait() == 0
    trainer = script(folder, body, 9, "slow")
    trainer.wait_for("loading")
    trainer.send(signal.SIGINT)
    assert trainer.wait() == 130
    assert trainer.output.splitlines() == [
        "loading",
        "holdfast: Ctrl-C while the run was being opened: no step was made, and what was saved "
        "stays; leaving with status 130.",
    ]
    record = json.loads((folder / "attempts/0002/exit.json").read_text())
    assert (record["status"], record["how"]) == (130, "Ctrl-C")
    wait_for_keeper_gone(folder)
    assert (checkpoint_steps(folder), arena_files(folder)) == ([5], [])
    again = script(folder, body, 9)
    reference = script(folder.with_name("undisturbed"), body, 9)
    assert again.state_hash() == reference.state_hash()


def test_under_nohup_a_closed_terminal_does_not_stop_the_run(folder, gate, light):
    trainer = light(folder, "--total", 40, "--hold-at", 8, prefix=("nohup",))
    trainer.wait_for("holding")
    trainer.send(signal.SIGHUP)
    gate.touch()
    assert trainer.wait() == 0
    assert "SIGHUP" not in trainer.output


def test_ctrl_backslash_dies_of_the_signal_with_stacks_and_the_last_snapshot(
    folder, gate, light, light_reference
):
    trainer = light(folder, "--total", 40, "--hold-at", 8, "--sleep", 0.06, "--settings", EAGER)
    in_memory = int(trainer.wait_for("holding").split()[1])
    assert in_memory > 0
    trainer.send(signal.SIGQUIT)
    assert trainer.wait() == -signal.SIGQUIT
    wait_for_keeper_gone(folder)
    stacks = (folder / "attempts/0001/stacks.txt").read_text()
    assert re.search(r"light\.py.* in (show_holding|wait_for|main)", stacks)
    # Other threads change their stacks meanwhile: to walk those has ended trainings by SIGSEGV.
    assert stacks.count("most recent call first") == 1
    assert checkpoint_steps(folder) == [in_memory]
    assert journal_events(folder, "death")[0]["durable_step"] == in_memory
    again = light(folder, "--total", 40)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40)


def test_a_finished_training_leaves_with_0_and_no_stacks(folder, light):
    trainer = light(folder, "--total", 20)
    assert trainer.wait() == 0
    assert checkpoint_steps(folder) == [20]
    assert journal_events(folder, "finished")[0]["step"] == 20
    assert not (folder / "attempts/0001/stacks.txt").exists()
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


def test_a_signal_in_the_last_step_does_not_unmake_the_end(folder, gate, light, light_reference):
    trainer = light(folder, "--total", 9, "--hold-at", 8)
    trainer.wait_for("holding")
    trainer.send(signal.SIGTERM)
    trainer.wait_for("SIGTERM: step 9")
    gate.touch()
    assert trainer.state_hash() == light_reference(9)
    assert checkpoint_steps(folder) == [9]


def test_run_stop_leaves_with_130(folder, script, light, light_reference):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 6:
                    run.stop("enough for today")
        """,
    )
    assert trainer.wait() == 130
    assert "enough for today" in trainer.output
    assert checkpoint_steps(folder) == [7]
    assert light(folder, "--total", 40).state_hash() == light_reference(40)


def test_an_exception_leaves_with_1_and_never_saves_the_failed_step(
    folder, script, light, light_reference
):
    trainer = script(
        folder,
        """
        weights = make_weights()
        settings = holdfast.Settings(max_overhead=1.0)
        with holdfast.Run(folder, settings=settings, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                time.sleep(0.06)
                if step == 8:
                    show_holding(run)
                    weights += 1000
                    raise ValueError("planted")
        """,
    )
    assert trainer.wait() == 1
    in_memory = int(trainer.wait_for("holding").split()[1])
    assert 0 < in_memory <= 8
    assert 'raise ValueError("planted")' in trainer.output
    assert trainer.lines[-1] == "ValueError: planted\n"
    assert "holdfast/_" not in trainer.output  # the traceback is the user's, not ours
    assert checkpoint_steps(folder) == [in_memory]
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []
    again = light(folder, "--total", 40)
    assert again.ready() == in_memory
    assert again.state_hash() == light_reference(40)


_BOUNDARY_LOOP = """
    weights = make_weights()
    with holdfast.Run(folder, weights=weights) as run:
        print("ready", run.step, run.resumed_from, run.attempt)
        while run.step < 40:
            train_one(weights)
            if run.step == 8 and not run.resumed_from:
                show_holding(run)
                wait_for(gate)
            if run.boundary():
                break
        print("after the loop")
    print("after the run")
    show_hash(weights)
"""


def test_after_a_loop_with_boundaries_the_code_goes_on_but_the_process_still_leaves(
    folder, gate, script, light_reference
):
    trainer = script(folder, _BOUNDARY_LOOP)
    trainer.wait_for("holding")
    trainer.send(signal.SIGTERM)
    trainer.wait_for("SIGTERM: step 9")
    gate.touch()
    assert trainer.wait() == 143
    assert "after the loop\n" in trainer.lines
    assert "after the run\n" not in trainer.lines
    assert checkpoint_steps(folder) == [9]
    again = script(folder, _BOUNDARY_LOOP)
    assert again.ready() == 9
    assert again.state_hash() == light_reference(40)
    assert "after the run\n" in again.lines


def test_code_after_run_steps_does_not_run_while_finally_does(folder, gate, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            try:
                for step in run.steps(40):
                    train_one(weights)
                    if step == 8:
                        show_holding(run)
                        wait_for(gate)
                print("trained to the end")
            finally:
                print("cleaned up")
        print("after the run")
        """,
    )
    trainer.wait_for("holding")
    trainer.send(signal.SIGINT)
    trainer.wait_for("Ctrl-C: step 9")
    gate.touch()
    assert trainer.wait() == 130
    assert "cleaned up\n" in trainer.lines
    assert "trained to the end\n" not in trainer.lines
    assert "after the run\n" not in trainer.lines


def test_a_signal_that_no_boundary_answers_never_ends_in_status_0(folder, gate, script):
    """The loop is left by `break`, so the boundary that would have stopped never comes."""
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for step in run.steps(40):
                train_one(weights)
                if step == 8:
                    show_holding(run)
                    wait_for(gate)
                    break
        print("after the run")
        """,
    )
    trainer.wait_for("holding")
    trainer.send(signal.SIGTERM)
    trainer.wait_for("SIGTERM: step 9")
    gate.touch()
    assert trainer.wait() == 143
    assert "after the run\n" not in trainer.lines


def test_a_stop_in_code_after_a_loop_with_boundaries_is_obeyed(folder, gate, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            while run.step < 8:
                train_one(weights)
                run.boundary()
            show_holding(run)
            wait_for(gate)
        print("after the run")
        """,
    )
    trainer.wait_for("holding")
    trainer.send(signal.SIGTERM)
    wait_until(lambda: journal_events(folder, "signal") or trainer.process.poll() is not None)
    gate.touch()
    assert trainer.wait() == 143
    assert "after the run\n" not in trainer.lines


def test_between_two_epochs_the_message_names_the_last_step(folder, gate, script):
    trainer = script(
        folder,
        """
        weights = make_weights()
        with holdfast.Run(folder, weights=weights) as run:
            for epoch in run.epochs(3):
                for batch in run.batches(range(8)):
                    train_one(weights)
                show_holding(run)
                wait_for(gate)
        """,
    )
    trainer.wait_for("holding")
    trainer.send(signal.SIGTERM)
    trainer.wait_for("SIGTERM: step 8 is being finished")
    gate.touch()
    assert trainer.wait() == 143
    assert checkpoint_steps(folder)[-1] == 8
