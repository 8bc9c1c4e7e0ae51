"""A cell that is run again goes on, whatever the one before it has left behind."""

from __future__ import annotations

import os
import signal

import pytest

from tests.processes.notebook import TOTAL, line_of, train, without_with
from tests.support import arena_files, checkpoint_steps, wait_for_keeper_gone


def test_an_error_of_the_user_is_shown_whole_and_run_again_goes_on(
    folder, notebook, light_reference
):
    cell = notebook.run(train(folder, hold_at=8, held="1 / 0", sleep=0.06, max_overhead=1.0))
    assert cell.error is not None
    assert cell.error["ename"] == "ZeroDivisionError"
    assert "Traceback" in cell.shown
    assert (
        f"ZeroDivisionError in step 9; step {line_of(cell, 'holding')} is durable." in cell.output
    )
    again = notebook.run(train(folder))
    assert line_of(again, "ready") == line_of(cell, "holding")
    assert line_of(again, "hash") == light_reference(TOTAL)


def test_a_run_left_open_is_closed_by_the_next_opening(folder, notebook, light_reference):
    cell = notebook.begin(without_with(folder, hold_at=8))
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.interrupt_again(cell)
    notebook.finish(cell)
    assert cell.error is not None
    assert cell.error["ename"] == "KeyboardInterrupt"  # nobody was there to say more
    again = notebook.run(without_with(folder))
    assert f"{folder} was still open; closed, and continued from there." in again.output
    assert line_of(again, "hash") == light_reference(TOTAL)
    notebook.run("run.__exit__(None, None, None)")
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


def test_a_loop_over_a_run_that_was_closed_meanwhile_says_so(folder, notebook):
    cell = notebook.run(f"""
import holdfast
former = holdfast.Run({str(folder)!r}, best=0.5).__enter__()
loop = former.steps(10)
print(next(loop), next(loop))
with holdfast.Run({str(folder)!r}, best=0.5) as run:
    print("ready", run.step)
    try:
        next(loop)
    except holdfast.HoldfastError as error:
        print(error)
    del loop
    for step in run.steps(5): pass
former.__exit__(None, None, None)
print("end", run.step)
""")
    assert f"{folder}: the run is not open." in cell.output
    assert line_of(cell, "end") == "5", cell.shown


def test_one_run_object_serves_many_cells_even_while_a_traceback_holds_its_old_loop(
    folder, notebook, light_reference
):
    notebook.run(f"""
from light import make_weights, show_hash, train_one
import holdfast, time
weights = make_weights()
run = holdfast.Run({str(folder)!r}, weights=weights)
""")
    loop = f"""
with run:
    for step in run.steps({TOTAL}):
        train_one(weights)
        if step == {{hold_at}}:
            print("holding")
            {{held}}
"""
    failed = notebook.run(loop.format(hold_at=8, held="1 / 0"))
    assert failed.error is not None
    # The loop of the failed cell ends in the midst of this one.
    dropped = "import sys, gc; sys.last_traceback = sys.last_value = None; "
    dropped += "get_ipython().InteractiveTB.tb = None; gc.collect(); time.sleep(0.5)"
    cell = notebook.begin(loop.format(hold_at=20, held=dropped))
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.finish(cell)
    assert "interrupted: step 21 is durable." in cell.shown
    last = notebook.run(loop.format(hold_at=-1, held="pass") + "show_hash(weights)")
    assert last.status == "ok", last.shown
    assert line_of(last, "hash") == light_reference(TOTAL)


def test_a_run_that_trains_in_a_thread_is_not_taken_from_it(folder, notebook):
    cell = notebook.run(f"""
import holdfast, threading
ready, go = threading.Event(), threading.Event()
def work():
    with holdfast.Run({str(folder)!r}, best=0.5) as run:
        for step in run.steps(10):
            ready.set()
            go.wait()
thread = threading.Thread(target=work, name="trains")
thread.start(); ready.wait()
holdfast.Run({str(folder)!r}, best=0.5).__enter__()
""")
    assert cell.error is not None
    assert cell.error["ename"] == "RunIsLive"
    assert "this process trains here already, in its thread trains." in cell.shown
    assert notebook.run("go.set(); thread.join()").status == "ok"
    assert checkpoint_steps(folder)[-1] == 10


def test_run_magic_behaves_like_a_cell(folder, notebook, tmp_path, light_reference):
    script = tmp_path / "train_here.py"
    script.write_text(train(folder, hold_at=8, held="time.sleep(0.5 if run.attempt == 1 else 0)"))
    cell = notebook.begin(f"%run {script}")
    notebook.wait_for(cell, "holding")
    notebook.interrupt()
    notebook.finish(cell)
    assert "holdfast: interrupted: step 9 is durable. Run it again to go on." in cell.shown
    assert "Traceback" not in cell.shown
    again = notebook.run(f"%run {script}")
    assert line_of(again, "ready") == "9"
    assert line_of(again, "hash") == light_reference(TOTAL)


@pytest.mark.parametrize("is_killed", [True, False], ids=["killed", "restarted"])
def test_a_new_kernel_goes_on_from_the_last_snapshot_of_the_old_one(
    folder, open_notebook, light_reference, is_killed
):
    notebook = open_notebook()
    cell = notebook.begin(train(folder, hold_at=8, sleep=0.06, max_overhead=1.0))
    notebook.wait_for(cell, "holding ")
    if is_killed:
        os.kill(notebook.pid, signal.SIGKILL)
    notebook.restart(now=is_killed)
    again = notebook.run(train(folder))
    assert line_of(again, "ready") == line_of(cell, "holding")
    assert line_of(again, "hash") == light_reference(TOTAL)


def test_a_run_that_a_restarted_kernel_had_left_open_goes_on(
    folder, open_notebook, light_reference
):
    notebook = open_notebook()
    cell = notebook.run(f"""
from light import make_weights, train_one
import holdfast
weights = make_weights()
run = holdfast.Run({str(folder)!r}, weights=weights).__enter__()
for step in run.steps({TOTAL}):
    train_one(weights)
    if step == 8:
        break
""")
    assert cell.status == "ok"
    notebook.restart()
    again = notebook.run(train(folder))
    assert line_of(again, "hash") == light_reference(TOTAL)


def test_a_run_opened_in_one_cell_and_trained_in_the_next_stops_as_usual(folder, notebook):
    notebook.run(f"""
import holdfast, time
run = holdfast.Run({str(folder)!r}, best=0.5).__enter__()
""")
    cell = notebook.begin("""
for step in run.steps(1000):
    if step == 0:
        print("holding")
        time.sleep(0.5)
""")
    notebook.wait_for(cell, "holding")  # the first step: nobody has looked after handlers yet
    notebook.interrupt()
    notebook.finish(cell)
    assert cell.shown.endswith("holdfast: interrupted: step 1 is durable. Run it again to go on.")
    assert "replaced" not in cell.shown
    assert notebook.run("run.__exit__(None, None, None)").error["ename"] == "Stopped"
    wait_for_keeper_gone(folder)
