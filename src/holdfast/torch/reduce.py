"""How fast the ranks of a group reduce numbers, and which of them is slow."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

SIZES_BYTES = (1 << 20, 1 << 24)
_SIZES_OF_GPUS_BYTES = (1 << 20, 1 << 24, 1 << 27)
_ALONE_BYTES = 1 << 22
_MOST_ALONE = 16  # ranks; all others wait for each of them
_MOST_TURNS = 5
_BYTES_OF_ONE = 4


def describe_device(local_rank: int) -> dict[str, Any]:
    """Which GPU a rank would use, and how many it sees."""
    count = torch.cuda.device_count()
    found: dict[str, Any] = {
        "gpus": count,
        "torch": torch.__version__,
        "nccl": bool(dist.is_available() and dist.is_nccl_available()),
        "gpu": None,
        "gpu_name": None,
    }
    if count:
        properties = torch.cuda.get_device_properties(local_rank % count)
        found["gpu"] = str(getattr(properties, "uuid", local_rank % count))
        found["gpu_name"] = properties.name
    return found


def choose_device(backend: str, local_rank: int) -> torch.device:
    """Where the numbers are."""
    if "nccl" not in backend or not torch.cuda.device_count():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def measure(device: torch.device, seconds: float, tell: Callable[..., None]) -> None:
    """Report how long each size takes; all ranks call this at the same time."""
    _measure(device, seconds, tell)
    dist.barrier()  # no rank may leave while another still measures


def _measure(device: torch.device, seconds: float, tell: Callable[..., None]) -> None:
    deadline = time.monotonic() + seconds
    size = dist.get_world_size()
    _check_sum(device)
    for length in _SIZES_OF_GPUS_BYTES if device.type == "cuda" else SIZES_BYTES:
        numbers = torch.ones(length // _BYTES_OF_ONE, device=device)
        taken = _time_turns(partial(dist.all_reduce, numbers), device)
        # What each rank must send and receive in any algorithm.
        moved = 2 * (size - 1) / size * length
        tell("reduced", size_bytes=length, seconds=taken, bytes_per_second=moved / taken)
        if not _all_have_time(deadline, device):
            return
    numbers = torch.ones(_ALONE_BYTES // _BYTES_OF_ONE, device=device)
    for rank in range(min(size, _MOST_ALONE)):
        taken = _time_turns(partial(dist.broadcast, numbers, rank), device, turns=2)
        tell("sent", source=rank, bytes_per_second=_ALONE_BYTES / taken)
        if not _all_have_time(deadline, device):
            return


def _check_sum(device: torch.device) -> None:
    size = dist.get_world_size()
    numbers = torch.full((1024,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(numbers)
    wanted = size * (size + 1) / 2
    if not bool((numbers == wanted).all()):
        raise ValueError(f"the sum over all ranks is {numbers[0].item()}, and should be {wanted}")


def _time_turns(turn: Callable[[], Any], device: torch.device, turns: int = _MOST_TURNS) -> float:
    """The fastest of several: other load of the machine does not count."""
    best = float("inf")
    for _ in range(turns + 1):  # the first one opens connections
        dist.barrier()
        began = time.perf_counter()
        turn()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        best = min(best, time.perf_counter() - began)
    return max(best, 1e-9)


def _all_have_time(deadline: float, device: torch.device) -> bool:
    """The same answer on all ranks: if one gave up alone, the others would wait for it."""
    left = torch.tensor([deadline - time.monotonic()], device=device)
    dist.all_reduce(left, op=dist.ReduceOp.MIN)
    return bool(left.item() > 0)
