"""Whoever holds the trainer in a debugger, the keeper can read it; and whatever slows it down."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from holdfast._store.memory.control import BOUNDARY_NS, PULSE_NS
from tests.control_words import SharedWords
from tests.dap import Editor
from tests.ports import free_port
from tests.processes.terminal import Terminal
from tests.support import keepers, wait_until

_TRAINING = """\
import ctypes, os, sys, threading, time
import holdfast

def ask():
    breakpoint()
    return 1

def in_a_thread():
    thread = threading.Thread(target=ask)
    thread.start()
    while thread.is_alive():
        thread.join(0.01)

def hold_the_lock():
    ctypes.PyDLL(None).usleep(3_500_000)

def ask_a_name():
    print("hello", input("name? "), flush=True)

def look(_, event, __):
    return None

def note_lines():
    sys.settrace(look)

wish = sys.argv[1] + ".wish"
with holdfast.Run(sys.argv[1], at=0) as run:
    print("ready", flush=True)
    for step in run.steps(10**6):
        time.sleep(0.02)
        if os.path.exists(wish):
            with open(wish) as file:
                name = file.read()
            os.remove(wish)
            if name == "enough":
                break
            globals()[name]()
            print("has done", name, flush=True)
"""


@pytest.fixture
def training(tmp_path: Path) -> Path:
    path = tmp_path / "training.py"
    path.write_text(_TRAINING)
    return path


def wish(folder: Path, what: str) -> None:
    """Have the training do this in its next step."""
    part = Path(f"{folder}.part")
    part.write_text(what)
    part.rename(f"{folder}.wish")


@contextlib.contextmanager
def at_a_terminal(*command: object) -> Iterator[Terminal]:
    terminal = Terminal(*command)
    try:
        yield terminal
    finally:
        terminal.end()


def test_pdb_holds_the_trainer_only_while_it_waits_for_the_person(folder, training):
    with at_a_terminal(Path("-m"), "pdb", training, folder) as terminal:
        terminal.press("c\n")
        terminal.wait_for("ready")
        shared = SharedWords(terminal.pid)
        shared.wait_for_beats(2)
        assert shared.paused == ""  # though pdb lies around the whole script

        wish(folder, "ask")
        shared.wait_until_paused("pdb")
        shared.wait_for_beats(2)
        assert shared.paused == "pdb"
        stood = shared.words[BOUNDARY_NS]
        terminal.press("interact\n")  # a prompt inside of pdb is still pdb
        shared.wait_for_beats(2)
        assert shared.paused == "pdb"
        assert shared.words[BOUNDARY_NS] == stood
        terminal.press("\x04")
        terminal.press("c\n")
        terminal.wait_for("has done ask")
        shared.wait_until_paused("")

        wish(folder, "ask_a_name")
        shared.wait_until_paused("a prompt")
        terminal.press("Ada\n")
        terminal.wait_for("hello Ada")
        shared.wait_until_paused("")

        wish(folder, "in_a_thread")
        shared.wait_until_paused("pdb")
        terminal.press("c\n")
        terminal.wait_for("has done in_a_thread")
        shared.wait_until_paused("")

        wish(folder, "note_lines")
        wait_until(lambda: "sys.settrace" in shared.disturbed, what="the tracer")
        wish(folder, "enough")
        terminal.wait_for("The program finished")
        assert shared.words[PULSE_NS] == 0
        terminal.press("q\n")


def test_debugpy_holds_the_trainer_at_a_breakpoint_and_the_pulse_goes_on(folder, training, start):
    port = free_port()
    listen = ("debugpy", "--listen", f"127.0.0.1:{port}")
    line = 1 + _TRAINING.splitlines().index("    return 1")
    training.write_text(_TRAINING.replace("    breakpoint()\n", "    time.sleep(0)\n"))
    trainer = start(*listen, training, folder, script=Path("-m"), real=True)
    trainer.wait_for("ready")
    shared = SharedWords(trainer.pid)
    (keeper,) = keepers(folder)
    assert "pydevd" not in " ".join(keeper.cmdline())  # which would stop it with the trainer
    editor = Editor(port, {training: [line]})
    try:
        wait_until(lambda: "a debugger" in shared.disturbed, what="a debugger that is attached")
        assert shared.paused == ""

        wish(folder, "ask")
        thread, functions = editor.wait_until_stopped()
        assert functions[:2] == ["ask", "<module>"]
        shared.wait_until_paused("debugpy")
        shared.wait_for_beats(3)
        assert shared.paused == "debugpy"
        editor.go_on(thread)
        trainer.wait_for("has done ask")
        shared.wait_until_paused("")

        # The main thread only waits for the one that is stopped.
        wish(folder, "in_a_thread")
        thread, functions = editor.wait_until_stopped()
        assert functions[0] == "ask"
        shared.wait_until_paused("debugpy")
        shared.wait_for_beats(2)
        editor.go_on(thread)
        trainer.wait_for("has done in_a_thread")
        shared.wait_until_paused("")
        editor.leave()
    finally:
        editor.close()
    wish(folder, "enough")
    assert trainer.wait() == 0
    assert "WARNING" not in trainer.output


# tests/hangs/test_held.py has strace; a call that holds the interpreter is in
# tests/unit/diagnose/test_recorded_hangs.py and test_supervisor_hangs.py.
@pytest.mark.nightly
def test_the_pulse_stops_while_a_call_holds_the_lock_and_strace_is_seen(folder, training, start):
    trainer = start(folder, script=training)
    trainer.wait_for("ready")
    shared = SharedWords(trainer.pid)
    wish(folder, "hold_the_lock")
    wait_until(lambda: shared.pulse_age > 2.5, what="a pulse that stands still")
    trainer.wait_for("has done hold_the_lock")
    wait_until(lambda: shared.pulse_age < 1.5, what="the next beat")
    assert shared.disturbed == set()
    command = ["strace", "-f", "-o", "/dev/null", "-p", str(trainer.pid)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as strace:
        assert strace.stderr is not None
        if "attached" not in (said := strace.stderr.readline()):
            pytest.skip(f"no process may be traced here: {said}")
        wait_until(lambda: shared.disturbed == {"a tracer"}, what="strace")
        assert shared.paused == ""
        strace.send_signal(signal.SIGINT)
    wait_until(lambda: shared.disturbed == set(), what="the end of strace")
    wish(folder, "enough")
    assert trainer.wait() == 0


def test_a_notebook_between_two_cells_waits_for_a_person(folder, notebook):
    notebook.run(f"import holdfast, time\nrun = holdfast.Run({str(folder)!r}, at=0).__enter__()")
    shared = SharedWords(notebook.pid)
    shared.wait_until_paused("a prompt")
    cell = notebook.begin("for step in run.steps(3):\n    time.sleep(1)\nprint('made', run.step)")
    shared.wait_until_paused("")
    notebook.finish(cell)
    assert cell.output.splitlines()[-1] == "made 3"
    shared.wait_until_paused("a prompt")
    notebook.run("run.__exit__(None, None, None)")
    assert shared.words[PULSE_NS] == 0
