"""Looks at processes that stand still, as they were recorded of real ones, put in few words."""

from __future__ import annotations

from typing import Any

from tests.unit.why_evidence import NOW

Record = dict[str, Any]

PYTHON, PACKAGES, USER = "/usr/lib/python3.11", "/venv/lib/python3.11/site-packages", "/home/a"


def frames(*lines: str) -> list[Record]:
    """`py/queue.py:171 Queue.get`, `torch/_tensor.py:623 Tensor.backward`, `train.py:7 step`."""
    found = []
    for line in lines:
        place, _, name = line.partition(" ") if line[0] != "<" else line.rpartition(" ")
        path, _, number = place.rpartition(":")
        if path.startswith("py/"):
            path = f"{PYTHON}/{path[3:]}"
        elif path.startswith("torch/"):
            path = f"{PACKAGES}/{path}"
        elif path[:1] not in ("/", "<"):
            path = f"{USER}/{path}"
        found.append({"file": path, "line": int(number), "name": name or "<module>"})
    return found


def thread(*lines: str, name: str = "MainThread", **more: Any) -> Record:
    found = {
        **{"tid": 1, "name": name, "is_main": name == "MainThread", "state": "S", "cpu": 0.0},
        **{"wchan": "futex_do_wait", "owns_gil": False, "moved": False, "frames": frames(*lines)},
    }
    return {**found, **more}


def process(pid: int, *threads: Record, **more: Any) -> Record:
    found = {
        **{"pid": pid, "parent": 1, "name": "python", "command": "python train.py", "state": "S"},
        **{"frozen": False, "tracer": 0, "tracer_name": None, "wchan": None, "cpu": 0.0, "io": 0},
        **{"wakes": 0.0, "rss": 10**8, "swap": 0, "major_faults": 0, "threads": list(threads)},
    }
    return {**found, **more}


def look(*processes: Record, **more: Any) -> Record:
    found = {
        **{"time": 1e9, "host": "node3", "pid": 100, "rank": 0, "step": 40, "mark": 80, "by": "x"},
        **{"boundary_age": 34.0, "pulse_age": 0.5, "seconds": 0.5, "cores": 2, "load": 0.1},
        **{"in_loop": True, "rests": False, "work": 0, "paused": "", "disturbed": []},
        **{"compiles": 0, "usual_step_seconds": 0.05, "processes": list(processes)},
    }
    return {**found, **more}


def alone(*lines: str, **more: Any) -> Record:
    """A look at a process of one thread."""
    return look(process(100, thread(*lines, **more)))


def rank(number: int, *lines: str, step: int = 40, **more: Any) -> Record:
    """The same, of one rank of several."""
    return {**alone(*lines, **more), "rank": number, "step": step, "mark": 2 * step}


EVENT = ("py/threading.py:327 Condition.wait", "py/threading.py:629 Event.wait")
GET = (
    *EVENT,
    "py/multiprocessing/pool.py:765 ApplyResult.wait",
    "py/multiprocessing/pool.py:768 ApplyResult.get",
)
RECV = (
    "py/multiprocessing/connection.py:395 Connection._recv",
    "py/multiprocessing/connection.py:216 _ConnectionBase.recv_bytes",
)
# What a forked child has of its parent's stack, below its own.
FORKED = (
    "py/multiprocessing/process.py:108 BaseProcess.run",
    "py/multiprocessing/process.py:314 BaseProcess._bootstrap",
    "py/multiprocessing/popen_fork.py:71 Popen._launch",
    "train.py:5 main",
)
POOL_WORKER = ("py/multiprocessing/pool.py:125 worker", *FORKED)
IDLE_POOL_WORKER = (
    *RECV,
    "py/multiprocessing/queues.py:365 SimpleQueue.get",
    "py/multiprocessing/pool.py:114 worker",
    *FORKED,
)
LOADER = (
    "py/selectors.py:415 _PollLikeSelector.select",
    "py/multiprocessing/connection.py:257 _ConnectionBase.poll",
    "py/multiprocessing/queues.py:113 Queue.get",
    "torch/utils/data/dataloader.py:1291 _MultiProcessingDataLoaderIter._try_get_data",
    "torch/utils/data/dataloader.py:725 _BaseDataLoaderIter.__next__",
    "train.py:30 train",
)
LOADER_WORKER = (
    "torch/utils/data/_utils/fetch.py:54 _MapDatasetFetcher.fetch",
    "torch/utils/data/_utils/worker.py:374 _worker_loop",
    *FORKED,
)
IDLE_LOADER_WORKER = (
    "py/selectors.py:415 _PollLikeSelector.select",
    "py/multiprocessing/queues.py:113 Queue.get",
    "torch/utils/data/_utils/worker.py:334 _worker_loop",
    *FORKED,
)


def collective(name: str, line: int) -> tuple[str, ...]:
    """The stack of a rank that waits in one."""
    return (
        f"torch/distributed/distributed_c10d.py:3252 {name}",
        "torch/distributed/c10d_logger.py:83 _exception_logger.<locals>.wrapper",
        f"train.py:{line} step",
        "train.py:90 main",
    )


BACKWARD = (
    "torch/autograd/graph.py:979 _engine_run_backward",
    "torch/autograd/__init__.py:395 backward",
    "torch/_tensor.py:623 Tensor.backward",
    "train.py:41 step",
)


def ranks(*looks: Record, **more: Any) -> Record:
    """As hang.json has the looks of several ranks."""
    return {"looks": list(looks), "missing": [], "began": NOW, "found": NOW + 21, **more}
