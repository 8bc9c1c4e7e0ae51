"""In a notebook the kernel outlives the run: cells end, and nothing of ours ends the process."""

from __future__ import annotations

import os
import re
import signal
import time

import holdfast
from tests.processes.notebook import TOTAL, line_of, train
from tests.support import (
    arena_files,
    checkpoint_steps,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)

# What the keeper waits after the time for leaving before it kills, and a little more.
_KILL_SECONDS = 5.0 + 1.5


def test_an_interrupted_cell_says_one_sentence_and_run_again_goes_on_to_the_same_bits(
    folder, notebook, light_reference
):
    pid = notebook.pid
    cell = notebook.begin(train(folder, hold_at=8, held="time.sleep(0.5)"))
    behind = notebook.begin("print('believes that training is complete')")
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.finish(cell)
    notebook.finish(behind)
    assert (cell.status, behind.status) == ("error", "aborted")
    assert cell.error is not None
    assert cell.error["ename"] == "Stopped"
    assert cell.error["traceback"] == [
        "holdfast: interrupted: step 9 is durable. Run it again to go on."
    ]
    assert "interrupted: step 9 is being finished and saved." in cell.output
    for word in ("Traceback", "SystemExit", "%tb", "status", "command", "replaced"):
        assert word not in cell.shown
    assert "hash" not in cell.output
    assert behind.shown == ""
    assert checkpoint_steps(folder) == [9]
    wait_for_keeper_gone(folder)  # so nobody is left who could end the kernel
    assert arena_files(folder) == []
    alive = "import threading; print([t.name for t in threading.enumerate() if 'hold' in t.name])"
    assert notebook.run(alive).output == "[]\n"
    again = notebook.run(train(folder))
    assert notebook.pid == pid
    assert line_of(again, "ready") == "9"
    assert line_of(again, "hash") == light_reference(TOTAL)


def test_a_second_interrupt_ends_the_cell_in_mid_step_and_not_the_kernel(
    folder, notebook, light_reference
):
    pid = notebook.pid
    cell = notebook.begin(train(folder, hold_at=8, sleep=0.06, max_overhead=1.0))
    notebook.wait_for(cell, "holding ")
    in_memory = int(line_of(cell, "holding"))
    notebook.interrupt()
    notebook.interrupt_again(cell)
    notebook.finish(cell, 10)
    assert cell.error is not None
    assert cell.error["traceback"] == [
        f"holdfast: interrupted: step 9 was not finished; step {in_memory} is durable. "
        "Run it again to go on."
    ]
    assert checkpoint_steps(folder)[-1] == in_memory
    wait_for_keeper_gone(folder)
    again = notebook.run(train(folder))
    assert notebook.pid == pid
    assert line_of(again, "ready") == str(in_memory)
    assert line_of(again, "hash") == light_reference(TOTAL)


def test_stop_now_from_another_process_ends_the_cell_and_not_the_kernel(folder, notebook):
    pid = notebook.pid
    cell = notebook.begin(train(folder, hold_at=8, sleep=0.06, max_overhead=1.0))
    notebook.wait_for(cell, "holding ")
    in_memory = line_of(cell, "holding")
    holdfast.stop(folder, "the machine is needed", now=True)
    notebook.finish(cell, 10)
    assert "the machine is needed" in cell.shown
    assert f"step 9 was not finished; step {in_memory} is durable." in cell.shown
    assert "Traceback" not in cell.shown
    assert line_of(notebook.run(train(folder)), "ready") == in_memory
    assert notebook.pid == pid


def test_the_kernel_lives_on_when_the_time_for_leaving_is_over(folder, notebook):
    cell = notebook.begin(train(folder, hold_at=8, held="time.sleep(0.5)", grace_seconds=1))
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.finish(cell)
    ended = time.monotonic()
    wait_until(lambda: time.monotonic() > ended + 1 + _KILL_SECONDS)
    assert notebook.run("print('alive')").output == "alive\n"
    assert journal_events(folder, "killed-by-keeper") == []


def test_a_cell_stuck_in_c_is_durable_and_its_kernel_is_left_to_the_person(
    folder, open_notebook, light_reference
):
    notebook = open_notebook()
    stuck = train(
        folder,
        hold_at=8,
        held="time.sleep(0.3); stick_in_c(with_gil=True)",
        sleep=0.06,
        max_overhead=1.0,
    )
    cell = notebook.begin(stuck)
    notebook.wait_for(cell, "holding ")
    in_memory = int(line_of(cell, "holding"))
    notebook.interrupt()
    notebook.interrupt_again()
    wait_until(lambda: in_memory in checkpoint_steps(folder), 10, "the last snapshot on disk")
    saved = time.monotonic()
    wait_until(lambda: time.monotonic() > saved + _KILL_SECONDS)
    assert notebook.manager.is_alive()
    notebook.manager.restart_kernel(now=True)
    wait_for_keeper_gone(folder)
    again = open_notebook().run(train(folder))
    assert line_of(again, "ready") == str(in_memory)
    assert line_of(again, "hash") == light_reference(TOTAL)


def test_handlers_and_wakeup_descriptor_are_as_before_after_every_cell(folder, notebook):
    look = """
import signal
numbers = [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2]
descriptor = signal.set_wakeup_fd(-1); signal.set_wakeup_fd(descriptor)
print([signal.getsignal(n) for n in numbers], descriptor)
"""
    before = notebook.run(look).output
    cell = notebook.begin(train(folder, hold_at=8, held="time.sleep(0.5)"))
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.finish(cell)
    assert notebook.run(look).output == before
    again = notebook.run(train(folder))
    assert again.status == "ok"
    assert notebook.run(look).output == before
    assert "replaced" not in cell.shown + again.shown


def test_an_error_of_ours_is_its_sentences_and_the_line(folder, notebook):
    folder.write_text("a file, not a folder")
    cell = notebook.run(train(folder))
    assert cell.error is not None
    assert cell.error["ename"] == "FolderError"
    first, *_, last = "\n".join(cell.error["traceback"]).splitlines()
    assert first.startswith(f"FolderError: {folder}: ")
    assert re.match(r"  at line \d of the cell: with holdfast\.Run\(", last)
    assert "Traceback" not in cell.shown


def test_stopped_can_be_caught_in_a_cell_as_in_a_script(folder, notebook):
    cell = notebook.run(f"""
import holdfast
try:
    with holdfast.Run({str(folder)!r}, best=0.5) as run:
        for step in run.steps(10):
            if step == 4:
                run.stop("enough")
except holdfast.Stopped as stopped:
    print("caught", stopped.status, stopped.reason, stopped.step)
""")
    assert "caught 130 enough 5\n" in cell.output
    assert cell.status == "ok"


def test_sigterm_ends_the_kernel_once_the_step_is_durable(folder, open_notebook):
    notebook = open_notebook()
    cell = notebook.begin(train(folder, hold_at=8, held="time.sleep(0.5)"))
    notebook.wait_for(cell, "holding")
    os.kill(notebook.pid, signal.SIGTERM)
    wait_until(lambda: not notebook.manager.is_alive(), 10, "the kernel's end")
    assert checkpoint_steps(folder) == [9]
    assert journal_events(folder, "exit")[-1]["status"] == 143
    wait_for_keeper_gone(folder)


def test_an_interrupt_in_a_phase_ends_the_cell_at_once(folder, notebook):
    cell = notebook.begin(f"""
import holdfast, time
with holdfast.Run({str(folder)!r}, best=0.5) as run:
    for step in run.steps(10):
        if step == 4:
            with run.phase("eval"):
                print("holding")
                time.sleep(60)
""")
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.finish(cell, 10)
    assert re.search(r"holdfast: interrupted: step \d is durable\. Run it again", cell.shown)
    assert "Traceback" not in cell.shown


def test_a_second_interrupt_does_not_wait_for_a_loader_either(folder, notebook):
    cell = notebook.begin(f"""
import holdfast, time
class Slow:
    def __len__(self):
        return 10
    def __iter__(self):
        for number in range(10):
            if number == 4:
                print("holding")
                time.sleep(60)
            yield number
with holdfast.Run({str(folder)!r}, best=0.5) as run:
    for epoch in run.epochs(2):
        for batch in run.batches(Slow()):
            pass
""")
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.interrupt_again(cell)
    notebook.finish(cell, 10)
    assert "holdfast: interrupted: step 5 was not finished; step " in cell.shown
    assert "Traceback" not in cell.shown
