"""What `holdfast doctor` says of a check that is late: slow, if the machine is busy."""

from __future__ import annotations

import signal
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from holdfast._environment.processes.proc import FairDeadline
from holdfast._environment.processes.stacks import Dump
from holdfast._tools.doctor import check, doctor, machine, ranks
from holdfast._tools.doctor.check import Check, Question
from holdfast._tools.doctor.signals import chain, path
from holdfast._tools.doctor.signals.chain import Probe

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux and its /proc")


@pytest.fixture(params=[True, False], ids=["busy", "idle"])
def is_busy(request, monkeypatch) -> bool:
    """Stands for the kernel: every process waits for a processor most of the time, or never."""
    share = 0.9 if request.param else 0.0
    late = partial(FairDeadline, waits=lambda pids: {1: share * time.monotonic()})
    for module in (check, chain, machine):
        monkeypatch.setattr(module, "FairDeadline", late)
    return bool(request.param)


@pytest.fixture
def place(tmp_path, monkeypatch) -> Path:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "tmp"))
    (tmp_path / "train.py").write_text("")
    return tmp_path


def check_words(check: Check, is_busy: bool, state: str, found: str) -> None:
    """Of the same thing, on a busy machine and on an idle one."""
    assert check.remedy
    if is_busy:
        assert check.state == "warn", check
        assert check.found.startswith("slow: "), check
        assert "the machine is busy (load " in check.found
        assert "does not answer" not in check.found
    else:
        assert (check.state, "slow" in check.found) == (state, False), check
        assert found in check.found


def test_an_answer_that_does_not_come(is_busy, tmp_path, monkeypatch):
    program = tmp_path / "hangs.py"
    program.write_text("import time; time.sleep(60)")
    monkeypatch.setattr(doctor, "FACTS", program)
    monkeypatch.setattr(doctor, "_ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(doctor, "_DRIVERS", ("/dev/null",))
    request = doctor.DoctorRequest(tmp_path, is_quick=True)
    found = {check.name: check for check in doctor.Examination(request).run()}
    check_words(found["run folder"], is_busy, "fail", "does not answer")
    check_words(found["gpu"], is_busy, "fail", "does not answer")


def test_a_question_that_waits_for_a_processor_has_its_time(is_busy, tmp_path):
    program = tmp_path / "tell.py"
    program.write_text("import time; time.sleep(0.6); print('{\"a\": 1}')\n")
    asked = Question(program, seconds=0.3)
    assert asked.answer() == ({"a": 1} if is_busy else None)
    assert asked.slow("it") is None


def test_stacks_that_are_not_read(is_busy, monkeypatch):
    def read_none(pids: list[int], *_: object) -> dict[int, Dump]:
        time.sleep(0.05)  # much more than between two looks at the clock
        return {pids[0]: Dump()}

    monkeypatch.setattr(machine, "_STACKS_SECONDS", 0.1)
    monkeypatch.setattr(machine, "find_pyspy", lambda: "py-spy")
    monkeypatch.setattr(machine, "children", lambda _: [])
    monkeypatch.setattr(machine, "dump_stacks", read_none)
    check = machine.try_stacks()
    assert check is not None
    check_words(check, is_busy, "warn", "it saw no frames")


def test_a_training_that_is_not_reached(is_busy, place):
    (place / "job.sh").write_text("sleep 60\npython train.py\n")
    [check, *_] = path.check_signal_path(["bash", "job.sh"], folder=place, start_seconds=0.3)
    check_words(check, is_busy, "warn", "train.py was not reached within 0 s")


@pytest.mark.parametrize(
    "job", ["trap : TERM", ":"], ids=["a trap that waits", "a shell that dies"]
)
def test_a_signal_that_does_not_arrive(is_busy, place, monkeypatch, job):
    monkeypatch.setattr(path, "_DEAD_SECONDS", 0.3)
    (place / "job.sh").write_text(f"{job}\n'{sys.executable}' train.py\ntouch after\n")
    [check, *_] = path.check_signal_path(
        ["bash", "job.sh"], folder=place, signals=[signal.SIGTERM], arrive_seconds=0.5
    )
    # That a process has died of it is a fact on a busy machine too.
    check_words(check, is_busy and job != ":", "fail", "it does not arrive: bash job.sh")


class SilentRanks:
    """Two ranks that were started, and have reported nothing since; or an error."""

    def __init__(self, *_: object, error: str = "", **__: object) -> None:
        self.process = self
        self._error = error

    def __enter__(self) -> SilentRanks:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def await_probes(self, _: float) -> None:
        pass

    def probes(self) -> list[Probe]:
        error = {"what": "error", "kind": "RanksError", "text": self._error, "time": 1.0}
        return [
            Probe(
                [
                    {"what": "here", "time": 1.0, "pid": rank, "host": "a"}
                    | {"variables": {"RANK": str(rank), "WORLD_SIZE": "2"}},
                    *([error] if self._error else []),
                ]
            )
            for rank in range(2)
        ]

    def guard(self) -> None:
        pass

    def poll(self) -> None:
        return None

    def deadline(self, seconds: float) -> FairDeadline:
        return chain.FairDeadline(seconds, lambda: [1])


@pytest.mark.parametrize(
    ("error", "found"),
    [
        ("", "did not meet within"),
        ("no answer within 15 s\nSee the firewall.", "no answer within 15 s"),
        ("the port is taken", ""),
    ],
)
def test_ranks_that_do_not_meet(is_busy, place, monkeypatch, error, found):
    silent: Callable[..., SilentRanks] = partial(SilentRanks, error=error)
    monkeypatch.setattr(ranks, "Chain", silent)
    [check] = ranks.check_ranks(["python", "train.py"], folder=place, seconds=0.2)
    check_words(check, is_busy and found != "", "fail", found or "the port is taken")
