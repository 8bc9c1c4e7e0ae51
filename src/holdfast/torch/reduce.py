"""One sum over all ranks of a group: whether they reach each other."""

from __future__ import annotations

import torch
import torch.distributed as dist


def choose_device(backend: str, local_rank: int) -> torch.device:
    """Where the numbers of this rank are."""
    if "nccl" not in backend or not torch.cuda.device_count():
        return torch.device("cpu")
    device = torch.device("cuda", local_rank % torch.cuda.device_count())
    torch.cuda.set_device(device)
    return device


def check_sum(device: torch.device) -> None:
    """All ranks call this at the same time; ValueError if the sum is wrong."""
    size = dist.get_world_size()
    numbers = torch.full((1024,), float(dist.get_rank() + 1), device=device)
    dist.all_reduce(numbers)
    wanted = size * (size + 1) / 2
    if not bool((numbers == wanted).all()):
        raise ValueError(f"the sum over all ranks is {numbers[0].item()}, and should be {wanted}")
    dist.barrier()  # no rank leaves while another one still adds
