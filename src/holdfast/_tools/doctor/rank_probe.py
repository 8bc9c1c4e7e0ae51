"""In the place of a training: meet the other ranks as it would, and report what fails.

Runs in the ranks that `holdfast doctor` has started, by the Python that would train.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Callable

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.slurm.job import rank_environment
from holdfast._run.ranks.world import tasks_of_srun

_PARTING_SECONDS = 0.3


def meet_other_ranks(report: Callable[..., None], seconds: float, backend: str | None) -> None:
    """Report the network, the meeting and the sum, or why there is none."""
    sys.argv[:1] = sys.argv[:1] or ["doctor"]
    now = variables.of_ranks()
    now = rank_environment(now) | now
    if now.get("WORLD_SIZE", "1") == "1" and tasks_of_srun(now) in (None, 1):
        report("done")  # without other ranks, torch is not needed
        return
    local = int(now["LOCAL_RANK"]) if now.get("LOCAL_RANK", "").isdigit() else 0
    try:
        from holdfast.torch import reduce
        from holdfast.torch.launch import init_process_group, suitable_backend
    except ImportError as error:
        report("error", kind="torch", text=f"{sys.executable}: {error}")
        return
    backend = backend or suitable_backend()
    report("network", backend=backend, address_by_name=_address_by_name(backend))
    try:
        device = reduce.choose_device(backend, local)
        init_process_group(backend, timeout_seconds=seconds / 2)
        report("met")
        reduce.check_sum(device)
    except Exception as error:  # noqa: BLE001  the doctor prints it
        text = str(error).strip() or type(error).__name__
        report("error", kind=type(error).__name__, text=text)
        return
    time.sleep(_PARTING_SECONDS)  # the store may be in this process, and others still need it
    report("done")


def _address_by_name(backend: str) -> str:
    """The address of this host's name, if the backend uses it to reach this rank; else empty."""
    if "nccl" in backend or variables.whole().get("GLOO_SOCKET_IFNAME"):
        return ""
    try:
        return socket.gethostbyname(host_name())
    except OSError:
        return ""
