"""A training with torch that dies in the way it is told to, as dying.py does.

dying_torch.py HOW [--run FOLDER] [--place FOLDER]
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import mmap
import multiprocessing.connection
import multiprocessing.resource_sharer
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, get_worker_info

_BATCH = 4
_LAST = 5 * _BATCH  # the sample at which a worker ends
_MEGABYTE = 1 << 20
_taken = mmap.mmap(-1, 1)  # how many batches the trainer has, for its workers to see


class Samples(Dataset[torch.Tensor]):
    """A data set at one sample of which something is wrong."""

    def __init__(self, how: str) -> None:
        self._how = how

    def __len__(self) -> int:
        return 40 * _BATCH

    def __getitem__(self, index: int) -> torch.Tensor:
        time.sleep(0.001)
        is_worker = get_worker_info() is not None
        if is_worker and index == 0:
            _prepare_worker(self._how)
        if is_worker and index == _LAST:
            _end_worker(self._how)
        # 1.2 MB each where they are to fill a small /dev/shm.
        return torch.full((300_000 if self._how == "shm-full" else 8,), float(index))


def _prepare_worker(how: str) -> None:
    if how == "worker-reset":
        # A worker that dies just when the trainer asks it for a batch's memory: its sockets are
        # closed a moment before the kernel tells its parent.
        accept = multiprocessing.connection.Listener.accept

        def accept_and_die(listener: Any) -> Any:
            connection = accept(listener)
            connection.poll(5)
            connection.close()
            time.sleep(0.3)
            return os.kill(os.getpid(), signal.SIGKILL)

        multiprocessing.connection.Listener.accept = accept_and_die


def _wait_until_taken() -> None:
    """Until the trainer has all batches before this one.

    While it fetches one from a worker that dies, it gets ConnectionResetError or FileNotFoundError
    at random; afterwards it is torch that says how the worker died.
    """
    deadline = time.monotonic() + 30
    while _taken[0] < _LAST // _BATCH and time.monotonic() < deadline:
        time.sleep(0.001)


def _end_worker(how: str) -> None:
    if how in ("worker-killed", "worker-exits", "worker-segfault"):
        _wait_until_taken()
    if how == "worker-killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "worker-exits":
        os._exit(3)
    elif how == "worker-segfault":
        ctypes.string_at(0)
    elif how == "worker-raises":
        raise ValueError(f"sample {_LAST} is no picture")
    elif how == "worker-oom":
        # Two of them fill up side by side, and then the trainer may be the largest of the three.
        Path("/proc/self/oom_score_adj").write_text("500")
        held = []
        for _ in range(1000):
            held.append(torch.ones(_MEGABYTE))
            time.sleep(0.005)
    elif how == "worker-missing":
        # A worker that takes its time to leave: its socket's file is gone, it is not yet.
        multiprocessing.resource_sharer._resource_sharer._listener.close()
        threading.Timer(0.3, os._exit, (1,)).start()


def _save(place: Path) -> None:
    torch.save({"weights": torch.ones(3_000_000), "step": 5}, place / "last.pt")


def _keep_graphs() -> None:
    """The best known way to fill a GPU: to sum up losses with all that they came from."""
    torch.cuda.set_per_process_memory_fraction(0.02)
    weight = torch.ones(4096, 4096, device="cuda", requires_grad=True)
    losses = []
    while True:
        losses.append((weight * 2.0).square().sum())


def _miss_the_table() -> None:
    table = torch.ones(4, device="cuda")
    print(table[torch.tensor([9], device="cuda")])


@contextlib.contextmanager
def _batches(how: str, folder: str | None) -> Iterator[Any]:
    """The batches, of a run or of a bare loop."""
    workers = 1 if how.startswith("worker") or how == "shm-full" else 0
    loader = DataLoader(Samples(how), batch_size=_BATCH, num_workers=workers)
    if folder is None:
        print("ready", os.getpid(), flush=True)
        yield loader
        return
    import holdfast

    model = torch.nn.Linear(2, 2)
    settings = holdfast.Settings(max_overhead=1.0)
    with holdfast.Run(folder, settings=settings, model=model) as run:
        print("ready", os.getpid(), flush=True)
        yield (batch for _ in run.epochs(1) for batch in run.batches(loader))


def main(argv: Sequence[str] | None = None) -> None:
    global _taken
    _taken = mmap.mmap(-1, 1)  # not that of another life of the same fork server
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--run", help="the folder of a run")
    parser.add_argument("--place", type=Path, default=Path(), help="where it writes")
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    with _batches(options.how, options.run) as batches:
        for count, _ in enumerate(batches):
            _taken[0] = min(255, count + 1)
            if count == 5 and options.how == "save-full":
                _save(options.place)
            elif count == 5 and options.how == "cuda-oom":
                _keep_graphs()
            elif count == 5 and options.how == "cuda-assert":
                _miss_the_table()
    print("done", flush=True)


if __name__ == "__main__":
    main()
