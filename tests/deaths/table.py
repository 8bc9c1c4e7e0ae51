"""The table of deaths: how each one is made, and the verdict that it must get.

`alone` is how sure the verdict is of a run that nobody leads, `led` of a script that has never
heard of holdfast and is led by `holdfast run`. None: in that way it cannot be told from another
death, or it is no death at all, and `instead` says what is told.

`make nightly` makes each by real processes. `make test` makes a few (`often`), and judges the
recorded evidence of all: tests/unit/diagnose/test_recorded_deaths.py.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import pytest

from holdfast._diagnose.verdict import Cause, Sure

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

CERTAIN, LIKELY, BY_EXCLUSION = Sure.CERTAIN, Sure.LIKELY, Sure.BY_EXCLUSION


@dataclass(frozen=True, kw_only=True)
class Death:
    """One way to die."""

    name: str
    script: str = "dying.py"
    how: str  # the word for the script
    sent: int = 0  # the signal that ends it from outside
    status: int  # as the parent sees it
    cause: Cause
    alone: Sure | None
    led: Sure | None
    instead: str = ""
    rank: int | None = None  # whose fault it is, of several
    says: tuple[str, ...] = ()  # what must stand in the sentence or in the evidence
    needs: str = ""  # "cgroup", "large cgroup", "ranks cgroup", "small disk", "small shm", "GPU"
    as_user: bool = False  # shown as an ordinary user too, since it could differ there
    often: tuple[str, ...] = ()  # "alone" or "led": `make test` makes it for real in that way


def cases(deaths: Iterable[Death], way: str) -> list[ParameterSet]:
    """Those of the deaths that are shown in a way, "alone" or "led", for a test of each."""
    return [
        pytest.param(d, id=d.name, marks=[] if way in d.often else [pytest.mark.nightly])
        for d in deaths
        if getattr(d, way) is not None
    ]


def _by_signal(name: str, *, as_user: bool = False, often: tuple[str, ...] = ()) -> Death:
    number = getattr(signal, f"SIG{name}")
    return Death(
        name=f"SIG{name} by somebody",
        how="waits",
        sent=number,
        status=-number,
        cause=Cause.ASKED if name == "INT" else Cause.TERMINATED,
        alone=None,
        led=CERTAIN,
        instead="a run answers it: it was asked to stop",
        says=(f"SIG{name}", r"\bpid \d+"),
        as_user=as_user,
        often=often,
    )


def _by_fault(
    name: str,
    how: str,
    number: int,
    cause: Cause,
    says: str,
    *,
    needs: str = "",
    often: tuple[str, ...] = (),
) -> Death:
    return Death(
        name=name,
        how=how,
        status=-number,
        cause=cause,
        alone=LIKELY,
        led=LIKELY,
        says=(says,),
        needs=needs,
        often=often,
    )


DEATHS = (
    Death(
        name="OOM kill in a cgroup",
        how="oom",
        status=-signal.SIGKILL,
        cause=Cause.OOM_CGROUP,
        alone=CERTAIN,
        led=CERTAIN,
        says=(r"1(28|34)(\.\d)? M", "OOM"),
        needs="cgroup",
        as_user=True,
        often=("alone",),
    ),
    Death(
        name="OOM kill of a child",
        how="helper-oom",
        status=1,
        cause=Cause.OOM_WORKER,
        alone=LIKELY,
        led=LIKELY,
        says=("OOM", "128|134"),
        needs="cgroup",
        as_user=True,
    ),
    Death(
        name="kill -9 by somebody",
        how="waits",
        sent=signal.SIGKILL,
        status=-signal.SIGKILL,
        cause=Cause.KILLED,
        alone=BY_EXCLUSION,
        led=BY_EXCLUSION,
        says=("SIGKILL|kill -9",),
        as_user=True,
        often=("alone", "led"),
    ),
    _by_signal("TERM", as_user=True, often=("led",)),
    _by_signal("INT"),
    _by_signal("QUIT"),
    _by_signal("HUP"),
    _by_fault(
        "segfault",
        "segfault",
        signal.SIGSEGV,
        Cause.SEGFAULT,
        "SIGSEGV|egmentation",
        often=("alone",),
    ),
    Death(
        name="kill -11 by somebody",
        how="waits",
        sent=signal.SIGSEGV,
        status=-signal.SIGSEGV,
        cause=Cause.SEGFAULT,
        alone=LIKELY,
        led=LIKELY,
        says=("SIGSEGV|egmentation",),
    ),
    _by_fault("abort", "abort", signal.SIGABRT, Cause.ABORT, "SIGABRT|abort"),
    _by_fault(
        "illegal instruction", "illegal", signal.SIGILL, Cause.ILLEGAL_INSTRUCTION, "SIGILL|llegal"
    ),
    _by_fault("division by zero in C", "fpe", signal.SIGFPE, Cause.ABORT, "SIGFPE|loating"),
    _by_fault("a mapped file is cut", "bus-cut", signal.SIGBUS, Cause.BUS_ERROR, "SIGBUS|us error"),
    _by_fault(
        "mmap on a full disk",
        "bus-full",
        signal.SIGBUS,
        Cause.BUS_ERROR,
        "SIGBUS|us error",
        needs="small disk",
    ),
    _by_fault(
        "mmap on a full /dev/shm",
        "bus-full",
        signal.SIGBUS,
        Cause.SHM_FULL,
        "/dev/shm",
        needs="small shm",
    ),
    Death(
        name="C++ exception",
        how="cxx",
        status=-signal.SIGABRT,
        cause=Cause.CXX_EXCEPTION,
        alone=None,
        led=LIKELY,
        instead="without its output it is an abort",
        says=("std::runtime_error", "the cache of kernels is damaged"),
    ),
    Death(
        name="std::terminate",
        how="terminate",
        status=-signal.SIGABRT,
        cause=Cause.CXX_EXCEPTION,
        alone=None,
        led=LIKELY,
        instead="without its output it is an abort",
        says=("terminate called",),
    ),
    Death(
        name="Python exception",
        how="exception",
        status=1,
        cause=Cause.PYTHON_EXCEPTION,
        alone=CERTAIN,
        led=CERTAIN,
        says=("KeyError", "valid", r"dying\.py"),
        often=("alone",),
    ),
    Death(
        name="Python exception from another",
        how="exception-chained",
        status=1,
        cause=Cause.PYTHON_EXCEPTION,
        alone=CERTAIN,
        led=CERTAIN,
        says=("ValueError", "no loss of validation"),
    ),
    Death(
        name="Python exception in a thread",
        how="exception-thread",
        status=1,
        cause=Cause.PYTHON_EXCEPTION,
        alone=None,
        led=CERTAIN,
        instead="without its output it is a sys.exit(1)",
        says=("KeyError",),
    ),
    Death(
        name="full disk",
        how="disk-full",
        status=1,
        cause=Cause.DISK_FULL,
        alone=CERTAIN,
        led=CERTAIN,
        says=("full|No space left",),
        needs="small disk",
    ),
    Death(
        name="sys.exit(256)",
        how="exit-256",
        status=0,
        cause=Cause.LYING_STATUS,
        alone=CERTAIN,
        led=None,
        instead="a script that nobody knows says 0, and is believed",
        says=("256",),
    ),
    Death(
        name="sys.exit(-1)",
        how="exit-minus-1",
        status=255,
        cause=Cause.PYTHON_EXCEPTION,
        alone=CERTAIN,
        led=None,
        says=("-1|255",),
    ),
    Death(
        name="sys.exit('text')",
        how="exit-text",
        status=1,
        cause=Cause.PYTHON_EXCEPTION,
        alone=CERTAIN,
        led=None,
        says=("the data are not there",),
    ),
)


def _of_worker(name: str, how: str, sure: Sure, *says: str) -> Death:
    return Death(
        name=name,
        script="dying_torch.py",
        how=how,
        status=1,
        cause=Cause.WORKER_DIED,
        alone=sure,
        led=sure,
        says=("worker", *says),
    )


# Those that need torch; importing it takes longer than dying.
TORCH = (
    _of_worker("worker killed: RuntimeError", "worker-killed", CERTAIN, "SIGKILL|killed by signal"),
    _of_worker("worker exits: RuntimeError", "worker-exits", CERTAIN, r"\b3\b|exited"),
    _of_worker("worker gone: ConnectionResetError", "worker-reset", LIKELY, "ConnectionResetError"),
    _of_worker("worker gone: FileNotFoundError", "worker-missing", LIKELY, "FileNotFoundError"),
    _of_worker("segfault of a worker", "worker-segfault", CERTAIN, "SIGSEGV|egmentation"),
    Death(
        name="OOM kill of a data-loader worker",
        script="dying_torch.py",
        how="worker-oom",
        status=1,
        cause=Cause.OOM_WORKER,
        alone=LIKELY,
        led=LIKELY,
        says=("OOM", "worker"),
        needs="large cgroup",
    ),
    Death(
        name="Python exception in a worker",
        script="dying_torch.py",
        how="worker-raises",
        status=1,
        cause=Cause.PYTHON_EXCEPTION,
        alone=CERTAIN,
        led=CERTAIN,
        says=("sample 20 is no picture",),
    ),
    Death(
        name="full disk in torch.save",
        script="dying_torch.py",
        how="save-full",
        status=1,
        cause=Cause.DISK_FULL,
        alone=LIKELY,
        led=LIKELY,
        says=("unexpected pos",),
        needs="small disk",
    ),
    Death(
        name="full /dev/shm",
        script="dying_torch.py",
        how="shm-full",
        status=1,
        cause=Cause.SHM_FULL,
        alone=LIKELY,
        led=LIKELY,
        says=("/dev/shm",),
        needs="small shm",
    ),
)


def _of_rank(name: str, how: str, cause: Cause, sure: Sure | None, *says: str) -> Death:
    return Death(
        name=name,
        script="dying_ranks.py",
        how=how,
        status=1,
        cause=cause,
        alone=sure,
        led=sure,
        rank=1,
        says=says,
    )


def _unmet(name: str, how: str, cause: Cause, *says: str) -> Death:
    return Death(
        name=name,
        script="dying_ranks.py",
        how=how,
        status=1,
        cause=cause,
        alone=None,
        led=CERTAIN,
        instead="no run is open yet",
        says=says,
    )


RANKS = (
    _of_rank("rank 1 of 2 killed", "killed", Cause.KILLED, BY_EXCLUSION, "SIGKILL|kill -9"),
    _of_rank("rank 1 of 2 raises", "raises", Cause.PYTHON_EXCEPTION, CERTAIN, "batch of 0 samples"),
    _of_rank("rank 1 of 2 is stuck", "stuck", Cause.COLLECTIVE_TIMEOUT, LIKELY, "2000 ?ms|2 s"),
    _unmet("port in use", "port-taken", Cause.RENDEZVOUS, "EADDRINUSE|in use"),
    _unmet("MASTER_ADDR missing", "no-address", Cause.ENVIRONMENT, "MASTER_ADDR"),
    _unmet("a rank never comes", "nobody-comes", Cause.RENDEZVOUS, "1/2|1 of 2"),
    _unmet("rank 0 never comes", "no-master", Cause.RENDEZVOUS, "connect"),
)


def _of_gpu(name: str, how: str, cause: Cause, *says: str) -> Death:
    return Death(
        name=name,
        script="dying_torch.py",
        how=how,
        status=1,
        cause=cause,
        alone=CERTAIN,
        led=CERTAIN,
        says=says,
        needs="GPU",
    )


GPU = (
    _of_gpu("CUDA out of memory", "cuda-oom", Cause.CUDA_OOM, "GPU|CUDA", r"MB|GB|MiB|GiB"),
    _of_gpu("CUDA error", "cuda-assert", Cause.CUDA_ERROR, "device-side assert"),
)
