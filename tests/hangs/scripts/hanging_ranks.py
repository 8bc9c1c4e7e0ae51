"""Two ranks of which one does not come, or goes another way than the other; or nothing is wrong.

    hanging_ranks.py HOW --run FOLDER [--timeout SECONDS]

It forks both of them and waits, as a launcher does. Each prints `ready PID rank N`. The lines at
which they then stand are marked.
"""

from __future__ import annotations

import argparse
import datetime
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Sequence

import torch
import torch.distributed as dist
from measured import is_measured  # beside this one, which is run as a script
from torch.nn.parallel import DistributedDataParallel

import holdfast

_ODD_ONE = 1


def _load(rank: int, is_stuck: bool) -> torch.Tensor:
    if is_stuck:
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()  # stuck: data of one rank
    return torch.full((4, 2), float(rank))


def _train_in_step(run: holdfast.Run, folder: str, rank: int, how: str) -> None:
    """Each step waits for the gradients of the other rank."""
    model = DistributedDataParallel(torch.nn.Linear(2, 2))
    for step in run.steps(1_000_000):
        time.sleep(0.02)
        is_late = how == "stuck" and rank == _ODD_ONE and is_measured(folder, step)
        batch = _load(rank, is_late)
        model(batch).sum().backward()  # stuck: the other rank


def _take_another_branch(run: holdfast.Run, folder: str, rank: int, _: str) -> None:
    """What each does depends on its own data, and the collectives do not match any more."""
    sums = torch.ones(4)
    for step in run.steps(1_000_000):
        time.sleep(0.02)
        if rank == _ODD_ONE and is_measured(folder, step):
            gathered = [torch.ones(4) for _ in range(2)]
            dist.all_gather(gathered, sums)  # stuck: one branch
        else:
            dist.all_reduce(sums)  # stuck: the other branch


def _be_rank(rank: int, port: int, options: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=120))
    settings = holdfast.Settings(max_overhead=1.0, hang_timeout=options.timeout)
    with holdfast.Run(options.run, settings=settings, model=torch.nn.Linear(2, 2)) as run:
        print("ready", os.getpid(), "rank", rank, flush=True)
        train = _take_another_branch if options.how == "branches" else _train_in_step
        train(run, options.run, rank, options.how)


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how", choices=("stuck", "branches", "fine"))
    parser.add_argument("--run", help="the folder of a run")
    parser.add_argument("--timeout", type=float, help="that is given; else it is learned")
    options = parser.parse_args(argv)
    port = _free_port()
    process = multiprocessing.get_context("fork").Process
    ranks = [process(target=_be_rank, args=(rank, port, options)) for rank in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()


if __name__ == "__main__":
    main()
