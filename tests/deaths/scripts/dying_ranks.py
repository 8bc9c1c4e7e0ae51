"""Two ranks of which one dies, or never comes, in the way that it is told to.

    dying_ranks.py HOW [--run FOLDER] [--seconds TIMEOUT] [--sleep SECONDS]

Started by torchrun it is one of the ranks; alone it forks both of them and waits for them, as a
launcher does: when one has failed, the others are told to leave, and it leaves with 1 itself.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import multiprocessing
import os
import signal
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch
import torch.distributed as dist

_GUILTY = 1


def _meet(seconds: float) -> None:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=seconds))


def _set_environment(rank: int, port: int) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank), LOCAL_WORLD_SIZE="2")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))


def _free_port() -> int:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def _go_wrong(how: str) -> None:
    """The end of the rank that is guilty of all that follows."""
    if how == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "raises":
        raise ValueError("a batch of 0 samples")
    elif how == "leaves":
        os._exit(0)
    elif how == "oom":
        # The other processes of the cgroup have torch too: the killer must choose this one.
        Path("/proc/self/oom_score_adj").write_text("500")
        held = []
        while True:
            held.append(torch.ones(1 << 20))
    elif how == "stuck":
        time.sleep(30)


@contextlib.contextmanager
def _steps(folder: str | None) -> Iterator[Iterator[int]]:
    if folder is None:
        yield iter(range(10))
        return
    import holdfast

    settings = holdfast.Settings(max_overhead=1.0)
    with holdfast.Run(folder, settings=settings, model=torch.nn.Linear(2, 2)) as run:
        yield run.steps(10)


def _be_rank(how: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    _meet(options.seconds)
    sums = torch.ones(4)
    with _steps(options.run) as steps:
        for step in steps:
            time.sleep(options.sleep)
            if step == 5 and dist.get_rank() == _GUILTY:
                _go_wrong(how)
            dist.all_reduce(sums)
    dist.destroy_process_group()


def _fail_to_meet(how: str, seconds: float) -> None:
    _set_environment(1 if how == "no-master" else 0, _free_port())
    if how == "no-address":
        del os.environ["MASTER_ADDR"]
    with socket.socket() as other:
        if how == "port-taken":
            other.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
            other.listen()
        _meet(seconds)


def _launch(how: str, options: argparse.Namespace) -> None:
    port = _free_port()
    ranks = []
    for rank in range(2):
        _set_environment(rank, port)
        ranks.append(
            multiprocessing.get_context("fork").Process(
                target=_be_rank, args=(how, options), name=f"rank {rank}"
            )
        )
        ranks[-1].start()
    while all(rank.is_alive() for rank in ranks):
        time.sleep(0.01)
    # Whoever saw the other go says so by himself.
    deadline = time.monotonic() + 1.0
    while how != "stuck" and any(r.is_alive() for r in ranks) and time.monotonic() < deadline:
        time.sleep(0.01)
    for rank in ranks:
        rank.terminate()
    for rank in ranks:
        rank.join(0.5)
        rank.kill()
        rank.join()
    sys.exit(1)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("how")
    parser.add_argument("--run", help="the folder of a run")
    parser.add_argument("--seconds", type=float, default=10.0, help="a collective's timeout")
    parser.add_argument("--sleep", type=float, default=0.0, help="seconds of each step")
    options = parser.parse_args(argv)
    if options.how in ("port-taken", "no-address", "nobody-comes", "no-master"):
        _fail_to_meet(options.how, options.seconds)
    elif "TORCHELASTIC_RUN_ID" in os.environ:
        _be_rank(options.how, options)
    else:
        _launch(options.how, options)


if __name__ == "__main__":
    main()
