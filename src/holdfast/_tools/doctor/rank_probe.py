"""In the place of a training: meet the other ranks as it would, and report what fails.

Runs in the ranks that `holdfast doctor` has started, by the Python that would train.
"""

from __future__ import annotations

import fcntl
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.slurm.tasks import rank_environment
from holdfast._run.ranks.environment import tasks_of_srun

_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR
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
        from holdfast.torch.launch import init_process_group
    except ImportError as error:
        report("error", kind="torch", text=f"{sys.executable}: {error}")
        return
    backend = backend or reduce.usual_backend()
    report("network", backend=backend, **find_network(backend, now))
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


def find_network(backend: str, now: dict[str, str]) -> dict[str, Any]:
    """The interface by which this rank reaches the others, and what has chosen it."""
    variable = "NCCL_SOCKET_IFNAME" if "nccl" in backend else "GLOO_SOCKET_IFNAME"
    chosen = variables.whole().get(variable, "")
    own = _address_of(host_name())
    found: dict[str, Any] = {"host_address": own, "chosen_by": "the host's name"}
    if chosen:
        return {**found, "interface": chosen, "address": "", "chosen_by": variable}
    address = own
    if "nccl" in backend or not own:
        address = _address_towards(now.get("MASTER_ADDR", ""))
        found["chosen_by"] = "the route"
    return {**found, "interface": _interface_of(address), "address": address}


def _address_of(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return ""


def _address_towards(host: str) -> str:
    """Our own address on the route to a host; connecting a datagram socket sends nothing."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way:
            way.connect((host or "192.0.2.1", 9))
            return str(way.getsockname()[0])
    except OSError:
        return ""


def _interface_of(address: str) -> str:
    if address.startswith("127."):
        return "lo"
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asker:
        for _, name in socket.if_nameindex():
            try:
                request = struct.pack("256s", name.encode()[:15])
                answer = fcntl.ioctl(asker.fileno(), _ADDRESS_OF_INTERFACE, request)
            except OSError:  # one without an address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return ""
