"""What is seen of an exception: never an error of its own, and never for long."""

from __future__ import annotations

import os
import sys
import threading
import time
import weakref

import pytest

from holdfast._errors import Stopped
from holdfast._run.exit import leaving
from holdfast._run.exit.leaving import (
    ErrorContext,
    ExitRecord,
    errors_of,
    frames_of,
    is_failure,
    is_users,
    places_of,
    reason_of,
    record_exception,
    variables_of,
    workers_of,
    written_targets,
)
from holdfast._store.folder.attempts import read_json
from holdfast._store.folder.layout import RunLayout


@pytest.fixture
def scene(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.attempt(1).mkdir(parents=True)
    return ErrorContext(layout, 1, rank=0, ranks=1, step=7, steps=7, where="loop", phase="eval")


def caught(work):
    try:
        work()
    except BaseException as error:  # noqa: BLE001  whatever it raises is what is looked at
        return error
    raise AssertionError("it raised nothing")


def fail():
    raise ValueError("a number that cannot be")


def test_a_stop_a_key_press_and_a_plain_exit_are_no_failures():
    for error in (None, Stopped(143), KeyboardInterrupt(), SystemExit(), SystemExit(0)):
        assert not is_failure(error)
    for error in (ValueError(), SystemExit(256), SystemExit(-1), SystemExit("no"), MemoryError()):
        assert is_failure(error)


class _Worker:
    """A process that its parent is told of only after some questions, or never."""

    def __init__(self, answers):
        self.pid, self._answers = 4711, iter(answers)

    @property
    def exitcode(self):
        return next(self._answers, None)


@pytest.mark.parametrize(
    ("stat", "answers", "status"),
    [
        (b"4711 (pt_data_worker) R 1 2 3 4 5 4194308 0", [None] * 20 + [-9] * 9, -9),
        (b"4711 (pt_data_worker) S 1 2 3 4 5 4194304 0", [None, None, -9], None),  # it lives
    ],
    ids=["dying", "alive"],
)
def test_a_worker_that_is_dying_is_waited_for_until_it_is_known_how(
    stat, answers, status, monkeypatch
):
    """The connection to it is reset a moment before."""
    monkeypatch.setattr(leaving, "_children", lambda: [_Worker(answers)])
    monkeypatch.setattr(leaving, "read_bytes", lambda path: stat)
    (found,) = workers_of([])
    assert (found["exitcode"], found["alive"]) == (status, status is None)


def test_one_that_dies_for_ever_is_not_waited_for_as_long(monkeypatch):
    monkeypatch.setattr(leaving, "_DYING_SECONDS", 0.05)
    monkeypatch.setattr(leaving, "_children", lambda: [_Worker([])])
    monkeypatch.setattr(leaving, "read_bytes", lambda path: b"4711 (w) Z 1")
    assert workers_of([])[0]["alive"]


def test_an_exception_is_recorded_with_where_it_came_up(scene):
    def work():
        try:
            {}["absent"]
        except KeyError as error:
            raise RuntimeError("no such thing") from error

    record_exception(caught(work), scene)
    found = read_json(scene.layout.error(1))
    assert found["type"] == found["qualified"] == "RuntimeError"
    assert found["message"] == "no such thing"
    assert found["chain"] == ["KeyError: 'absent'"]
    assert found["frames"][-1][0] == __file__
    assert found["frames"][-1][2] == "work"
    assert "raise RuntimeError" in found["traceback"]
    assert (found["step"], found["phase"], found["where"]) == (7, "eval", "loop")
    assert (found["pid"], found["rank"], found["ranks"]) == (os.getpid(), 0, 1)
    assert found["is_configuration"] is False
    assert found["exit_code"] is None
    assert {disk["role"] for disk in found["disks"]} == {"run", "tmp", "cwd"}
    assert all(0 < disk["free"] <= disk["total"] for disk in found["disks"])
    assert found["memory"]["rss"] > 1_000_000


def test_what_a_script_gave_to_exit_is_kept(scene):
    for code in (256, -1, "no such data"):
        record_exception(caught(lambda code=code: sys.exit(code)), scene)
        assert read_json(scene.layout.error(1))["exit_code"] == repr(code)


def test_an_exception_that_cannot_be_printed_is_recorded(scene):
    class Broken(Exception):
        def __str__(self):
            raise TypeError("no text")

    def work():
        raise Broken

    found = record_exception(caught(work), scene)
    assert found["type"] == "Broken"
    assert "TypeError" in found["message"]


def test_a_text_that_ends_the_process_does_not(scene):
    class Broken(Exception):
        def __str__(self):
            sys.exit(3)

    def work():
        raise Broken

    assert "SystemExit" in record_exception(caught(work), scene)["message"]


def test_the_note_of_an_exit_is_short_and_never_fails(scene):
    class Broken(Exception):
        def __str__(self):
            raise TypeError("no text")

    assert reason_of(Broken()) == "Broken: (its text could not be had: TypeError)"
    assert len(reason_of(ValueError("x" * 10_000_000))) < 5000
    record = ExitRecord(scene.layout, 1)
    record.write_trouble(ValueError("\udcff"))
    assert "udcff" in scene.layout.trouble(1).read_text()


def test_of_a_group_each_exception_is_told(scene):
    def work():
        raise ExceptionGroup(
            "several", [ValueError("bad"), ExceptionGroup("in", [OSError(28, "x")])]
        )

    found = record_exception(caught(work), scene)
    assert "ValueError: bad; ExceptionGroup: in" in found["message"]
    assert "OSError: [Errno 28] x" in found["message"]


def test_long_messages_and_endless_recursions_stay_small(scene):
    def recurse():
        recurse()

    def shout():
        raise ValueError("x" * 10_000_000)

    for work in (recurse, shout):
        record_exception(caught(work), scene)
        assert scene.layout.error(1).stat().st_size < 60_000
        assert len(read_json(scene.layout.error(1))["frames"]) <= 40


def test_exceptions_that_refer_to_each_other_end():
    one, two = ValueError("one"), ValueError("two")
    one.__cause__, two.__cause__ = two, one
    assert errors_of(one) == [one, two]


def test_a_disk_that_never_answers_is_left_out(scene, monkeypatch):
    from holdfast._environment.processes import memory_sample as disk

    dead, look = threading.Event(), disk.room

    def room(path):
        if str(path) == str(scene.layout.folder):
            dead.wait(30)
        return look(path)

    monkeypatch.setattr(disk, "room", room)
    began = time.monotonic()
    found = record_exception(caught(fail), scene)
    dead.set()
    assert time.monotonic() - began < 15
    assert {each["role"] for each in found["disks"]} == {"tmp", "cwd"}
    assert read_json(scene.layout.error(1))["traceback"]


def test_what_hangs_altogether_is_not_waited_for(scene, monkeypatch):
    over = threading.Event()
    monkeypatch.setattr(leaving, "_SECONDS", 0.3)
    monkeypatch.setattr(leaving, "_of_memory", lambda scene: over.wait(30))
    began = time.monotonic()
    record_exception(caught(fail), scene)
    over.set()
    assert time.monotonic() - began < 15
    found = read_json(scene.layout.error(1))
    assert found["type"] == "ValueError"
    assert "disks" in found
    assert "traceback" not in found


def test_a_record_that_cannot_be_written_is_still_known(scene):
    scene.layout.attempt(1).rmdir()
    found = record_exception(caught(fail), scene)
    assert found["type"] == "ValueError"
    assert "is_recorded" not in found


def test_the_target_of_a_write_is_found_in_the_frames(tmp_path):
    def save_all(path):
        raise RuntimeError("unexpected pos 704 vs 598")

    def load_all(path):
        raise RuntimeError("cannot be read")

    target = tmp_path / "kept" / "model.pt"
    assert written_targets([caught(lambda: save_all(target))]) == [str(target)]
    # A disk that is only read may be full by design.
    assert written_targets([caught(lambda: load_all(target))]) == []
    missing = caught(lambda: (tmp_path / "absent" / "a").open("w"))
    assert written_targets([missing]) == [str(tmp_path / "absent" / "a")]


def test_the_users_frames_are_told_from_a_librarys():
    error = caught(lambda: os.fspath(pytest.importorskip("json").loads("{")))
    frames = frames_of(error)
    assert is_users(next(frame for frame, _ in frames if frame.f_code.co_filename == __file__))
    assert not is_users(frames[-1][0])
    assert places_of(frames)[-1][2] == "raw_decode"


def test_a_function_that_tries_again_finds_its_memory_free(scene):
    class Large:
        pass

    def fail_with(large):
        raise MemoryError

    def try_twice():
        for _ in range(2):
            large = Large()
            try:
                fail_with(large)
            except MemoryError as error:
                record_exception(error, scene)
            known = weakref.ref(large)
            large = None
            yield known() is None

    assert list(try_twice()) == [True, True]


def test_variables_that_a_function_has_asked_for_stay():
    def ask():
        number = 7
        mine = locals()
        assert variables_of(sys._getframe())["number"] == number
        return mine

    assert ask()["number"] == 7
