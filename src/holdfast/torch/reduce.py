"""One sum over all ranks: whether they reach each other.

Runs in the place of a training, in the ranks that `holdfast doctor` has started.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from holdfast._environment import variables
from holdfast._environment.slurm.job import rank_environment
from holdfast.torch.launch import init_process_group, suitable_backend

_PARTING_SECONDS = 0.3


def meet_other_ranks(report: Callable[..., None], seconds: float, backend: str | None) -> None:
    """Report the meeting and the sum, or why there is none."""
    sys.argv[:1] = sys.argv[:1] or ["doctor"]
    backend = backend or suitable_backend()
    try:
        device = _choose_device(backend)
        init_process_group(backend, timeout_seconds=seconds / 2)
        report("met", backend=backend)
        _check_sum(device)
    except Exception as error:  # noqa: BLE001  the doctor prints it
        text = str(error).strip() or type(error).__name__
        report("error", kind=type(error).__name__, text=text)
        return
    time.sleep(_PARTING_SECONDS)  # the store may be in this process, and others still need it
    report("done")


def _choose_device(backend: str) -> torch.device:
    if "nccl" not in backend or not torch.cuda.device_count():
        return torch.device("cpu")
    now = variables.of_ranks()
    local_rank = (rank_environment(now) | now).get("LOCAL_RANK", "")
    number = int(local_rank) if local_rank.isdigit() else 0
    device = torch.device("cuda", number % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def _check_sum(device: torch.device) -> None:
    """All ranks call this at the same time; ValueError if the sum is wrong."""
    size = dist.get_world_size()
    numbers = torch.full((1024,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(numbers)
    wanted = size * (size + 1) / 2
    if not bool((numbers == wanted).all()):
        raise ValueError(f"the sum over all ranks is {numbers[0].item()}, and should be {wanted}")
    dist.barrier()  # no rank leaves while another one still adds
