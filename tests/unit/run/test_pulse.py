"""The second beat: it goes on its own, sees what it should, and is gone when it is stopped."""

from __future__ import annotations

import code
import cProfile
import os
import subprocess
import sys
import threading
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from holdfast._run.saving import pulse as pulse_module
from holdfast._run.saving.pulse import Pulse, _name_tool
from holdfast._store.memory.control import (
    DEBUGGERS,
    DISTURBANCES,
    DISTURBED,
    PAUSED,
    PULSE_NS,
    SAVES,
    SLOWING,
    WORK,
    ControlPage,
    at_work,
)
from tests.support import wait_until


@pytest.fixture
def page(monkeypatch: pytest.MonkeyPatch) -> Iterator[ControlPage]:
    monkeypatch.setattr(pulse_module, "_BEAT_SECONDS", 0.01)
    monkeypatch.setattr(pulse_module, "_MOST_SHARE", 1.0)
    page = ControlPage.create()
    yield page
    page.close()


@pytest.fixture
def pulse(page: ControlPage) -> Iterator[Pulse]:
    pulse = Pulse(page.words)
    yield pulse
    pulse.stop()


def pulses() -> list[threading.Thread]:
    return [each for each in threading.enumerate() if each.name == "holdfast-pulse"]


def wait_for_beats(page: ControlPage, count: int = 2) -> None:
    for _ in range(count):
        last = page.words[PULSE_NS]
        wait_until(lambda last=last: page.words[PULSE_NS] != last, 10, "a beat")


def disturbed(page: ControlPage) -> set[str]:
    bits = page.words[DISTURBED]
    return {name for number, name in enumerate(DISTURBANCES) if bits >> number & 1}


def test_it_beats_until_it_is_stopped_and_leaves_nothing(page):
    pulse = Pulse(page.words)
    wait_for_beats(page)
    assert time.monotonic_ns() - page.words[PULSE_NS] < 5e9
    assert len(pulses()) == 1
    pulse.stop()
    pulse.stop()
    assert pulses() == []
    assert page.words[PULSE_NS] == 0


def test_it_ends_by_itself_when_the_words_are_gone(monkeypatch):
    monkeypatch.setattr(pulse_module, "_BEAT_SECONDS", 0.01)
    page = ControlPage.create()
    Pulse(page.words)
    page.close()
    wait_until(lambda: not pulses(), 10, "the end of the thread")


@pytest.mark.parametrize("set_for_all", [threading.settrace, threading.setprofile])
def test_no_tracer_of_all_threads_is_told_of_it(page, set_for_all: Callable[[Any], None]):
    seen: list[str] = []

    def look(frame: Any, *_: Any) -> None:
        if threading.current_thread().name == "holdfast-pulse":
            seen.append(frame.f_code.co_filename)

    set_for_all(look)
    try:
        pulse = Pulse(page.words)
    finally:
        set_for_all(None)
    wait_for_beats(page)
    pulse.stop()
    assert [each for each in seen if "threading.py" not in each] == []


def test_a_forked_child_has_no_such_thread_and_stops_nothing(page, pulse):
    wait_for_beats(page)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of a fork amid threads
        child = os.fork()
    if child == 0:
        before = page.words[PULSE_NS]
        pulse.stop()
        os._exit(1 if pulses() or (before and not page.words[PULSE_NS]) else 0)
    assert os.waitpid(child, 0)[1] == 0
    wait_for_beats(page)


def test_it_keeps_no_process_alive():
    program = (
        "from holdfast._run.saving.pulse import Pulse\n"
        "from holdfast._store.memory.control import ControlPage\n"
        "page = ControlPage.create()\n"
        "pulse = Pulse(page.words)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], timeout=30, capture_output=True, text=True
    )
    assert (done.returncode, done.stderr) == (0, "")


def test_a_prompt_around_the_training_does_not_hold_it_but_one_inside_does(page, monkeypatch):
    monkeypatch.setattr(sys, "ps1", ">>> ", raising=False)  # the prompt sets it and leaves it
    paused: list[str] = []
    pulses: list[Pulse] = []

    def read(_: str = "") -> str:
        if not pulses:
            return "train()"
        wait_for_beats(page)
        paused.append(DEBUGGERS[page.words[PAUSED]])
        raise EOFError

    def train() -> None:
        pulses.append(Pulse(page.words))
        wait_for_beats(page)
        paused.append(DEBUGGERS[page.words[PAUSED]])
        code.interact(banner="", readfunc=read, exitmsg="")
        wait_for_beats(page)
        paused.append(DEBUGGERS[page.words[PAUSED]])

    code.interact(banner="", readfunc=read, local={"train": train}, exitmsg="")
    pulses[0].stop()
    # The last one is asked by the outer prompt again, where nobody has noted anything since.
    assert paused[:3] == ["", "a prompt", ""]


def test_what_traces_and_profiles_is_named(page, pulse):
    def now() -> set[str]:
        pulse.note()
        wait_for_beats(page)
        return disturbed(page)

    before = now()  # whatever the tests are run under
    profile = cProfile.Profile()
    profile.enable()
    with_profile = now()
    profile.disable()
    tracer = sys.gettrace()
    sys.settrace(lambda *_: None)
    with_tracer = now()
    sys.settrace(tracer)
    sys.setprofile(lambda *_: None)
    with_function = now()
    sys.setprofile(None)
    tracemalloc.start()
    with_memory = now()
    tracemalloc.stop()
    assert with_profile - before == {"cProfile"}
    assert with_tracer - before <= {"sys.settrace"}
    assert with_function - before == {"sys.setprofile"}
    assert with_memory - before == {"tracemalloc"}
    assert now() == before


def test_a_tool_of_sys_monitoring_is_named_by_what_it_is():
    debuggers = 0
    assert _name_tool(0, "pydevd", debuggers) == "a debugger"
    assert _name_tool(1, "coverage.py", debuggers) == "coverage"
    assert _name_tool(2, "cProfile", debuggers) == "cProfile"
    assert _name_tool(2, "another", debuggers) == "a profiler"


@pytest.mark.skipif(sys.version_info < (3, 12), reason="needs Python 3.12")
def test_a_tool_of_sys_monitoring_is_seen(page, pulse):
    monitoring = sys.monitoring
    monitoring.use_tool_id(monitoring.DEBUGGER_ID, "tests")
    try:
        wait_for_beats(page)
        assert "a debugger" in disturbed(page)
    finally:
        monitoring.free_tool_id(monitoring.DEBUGGER_ID)


def test_work_of_ours_is_shown_while_it_lasts(page):
    with pytest.raises(KeyError), at_work(page.words, SAVES):
        assert page.words[WORK] == SAVES
        raise KeyError
    assert page.words[WORK] == 0


def test_a_writer_is_no_reason_for_patience():
    assert not SLOWING >> DISTURBANCES.index("a TensorBoard writer") & 1
    assert SLOWING >> DISTURBANCES.index("torch.profiler") & 1
