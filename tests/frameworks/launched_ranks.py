"""Ranks that start a process group, forked from a process that has imported torch.

The acts of tests/frameworks/test_torch_launch.py. Each is a process of its own, with the
environment that the test gives it; what it says is what a user would read.
"""

from __future__ import annotations

import json
import os
import sys
import time
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

import holdfast.torch
from holdfast.torch import launch


def train(times: int = 1, late_seconds: float = 0.0, **options: Any) -> None:
    """Start the group, add up a one from each rank, and end it."""
    time.sleep(late_seconds)
    for _ in range(times):
        holdfast.torch.init_process_group(**options)
        _add_up()
        dist.destroy_process_group()


def train_by_torch() -> None:
    """A job that does not know holdfast: torch's own call."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=30))


def start_twice() -> None:
    holdfast.torch.init_process_group()
    holdfast.torch.init_process_group()


def use_other_ways(file: str) -> None:
    """A store and a file of the script's own: torch's business, and left to it."""
    for way in ({"store": dist.HashStore()}, {"init_method": f"file://{file}"}):
        holdfast.torch.init_process_group("gloo", rank=0, world_size=1, **way)
        _add_up()
        dist.destroy_process_group()


def meet_something_else() -> None:
    launch._CONNECT_SECONDS = 0.2
    holdfast.torch.init_process_group(timeout_seconds=0.5)


def stay_away() -> None:
    """Come to the roll call, and not to what follows it."""
    launch._start = lambda *_: time.sleep(60)
    holdfast.torch.init_process_group()


def fail_in_torch() -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise RuntimeError("Connection closed by peer [10.0.0.7]:40961\nframe #0: c10::Error")

    dist.init_process_group = refuse
    holdfast.torch.init_process_group()


def _add_up() -> None:
    one = torch.ones(1)
    dist.all_reduce(one)
    # In one write: ranks may share their output.
    os.write(1, f"rank {dist.get_rank()}: the sum is {one.item():g}\n".encode())


if __name__ == "__main__":
    _, act, arguments = sys.argv
    globals()[act](**json.loads(arguments))
