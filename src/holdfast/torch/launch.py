"""Start torch's process group, after a check of everything that usually goes wrong.

    holdfast.torch.init_process_group()

in place of torch.distributed.init_process_group: the same arguments, the same group, and a
sentence where torch would hang, or print the frames of its stack.
"""

from __future__ import annotations

import multiprocessing
import re
import socket
import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import Any, TypeVar
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name
from holdfast._environment.slurm.job import rank_environment
from holdfast._errors import RanksError, SettingsError
from holdfast._run.ranks.address import (
    AddressPatience,
    Endpoint,
    await_answer,
    check_port,
    port_in_use,
    resolve,
    wait_for_all_ranks,
)
from holdfast._run.ranks.world import (
    find_contradictions,
    find_device_mistakes,
    find_mistakes,
    is_by_agent,
    rank_and_size,
)
from holdfast._text import say, speak_plainly

_STORE_SECONDS = 1800.0  # torch's default timeout of its store
_CONNECT_SECONDS = 5.0  # at least, even if the others came late
_WAYS_TO_MEET = ("rank", "world_size", "init_method", "store")
_SOURCE_PLACE = re.compile(r"\[/[^\]]*\] ?")  # in torch's messages
_T = TypeVar("_T")
_WITHOUT_ADDRESS = ("mpi", "fake")  # backends that find their ranks themselves


def init_process_group(
    backend: str | None = None, *, timeout_seconds: float = 60.0, **options: Any
) -> None:
    """Check how the ranks were started, then start torch's process group.

    Without a backend: nccl where torch sees GPUs, else gloo. `timeout_seconds` is how long the
    ranks wait for each other here; all other options are torch's. A process without a launcher
    is a group of one.
    """
    speak_plainly()
    _check_call(timeout_seconds)
    backend = backend or suitable_backend()
    now, at_start = _environments(options)
    by_address = _meets_at_an_address(backend, options)
    mistakes = find_mistakes(now, at_start) if by_address else []
    devices = torch.cuda.device_count() if "nccl" in backend else None
    mistakes += find_device_mistakes(now, devices=devices, backend=backend)
    if by_address and multiprocessing.parent_process() is None:
        # Else the environment is that of the process that has spawned this one.
        mistakes = find_contradictions(_given(options), variables.of_ranks()) or mistakes
    if mistakes:
        raise RanksError("\n".join(mistakes))
    if by_address:
        options = _meet(now, timeout_seconds, options)
    _start(backend, timeout_seconds, options)


def _check_call(timeout_seconds: float) -> None:
    if not timeout_seconds > 0:
        raise SettingsError(
            f"timeout_seconds is {timeout_seconds!r}, and must be more than 0.\n"
            "It is how long the ranks wait for each other: 60 unless you say otherwise."
        )
    if not dist.is_available():
        raise RanksError(
            f"torch {torch.__version__} is built without torch.distributed: there is no process "
            "group.\nOne process can train without: leave the call out."
        )
    if dist.is_initialized():
        raise RanksError(
            f"the process group is initialized already: backend {dist.get_backend()}, rank "
            f"{dist.get_rank()} of {dist.get_world_size()}.\n"
            "Call init_process_group once, holdfast's or torch's; for another group call "
            "torch.distributed.destroy_process_group() before."
        )


def suitable_backend() -> str:
    return "nccl" if torch.cuda.device_count() > 0 and dist.is_nccl_available() else "gloo"


def _meets_at_an_address(backend: str, options: Mapping[str, Any]) -> bool:
    """Whether the ranks meet at MASTER_ADDR, and not by a store, a file or MPI."""
    url = options.get("init_method") or "env://"
    by_address = url.startswith(("env://", "tcp://"))
    return by_address and options.get("store") is None and backend not in _WITHOUT_ADDRESS


def _given(options: Mapping[str, Any]) -> dict[str, int]:
    """The rank and size in the script's own arguments."""
    found = {name: int(options.get(name, -1)) for name in ("rank", "world_size")}
    query = dict(parse_qsl(urlsplit(options.get("init_method") or "").query))
    found |= {name: int(query[name]) for name in found if query.get(name, "").isdecimal()}
    return {name: value for name, value in found.items() if value >= 0}


def _environments(options: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str]]:
    """The variables of this rank, by environment and arguments; and those at its start."""
    now, at_start = variables.of_ranks(), variables.of_ranks_at_start()
    if multiprocessing.parent_process() is None:
        now = rank_environment(now) | now  # a task of srun
    said = {name.upper(): str(value) for name, value in _given(options).items()}
    url = urlsplit(options.get("init_method") or "")
    if url.scheme == "tcp":
        said |= {"MASTER_ADDR": url.hostname or "", "MASTER_PORT": str(url.port or "")}
        if said["MASTER_PORT"] != now.get("MASTER_PORT"):
            now.pop("TORCHELASTIC_USE_AGENT_STORE", None)  # that is somewhere else
    if multiprocessing.parent_process() is not None:
        # The variables of the parent are not those of a spawned rank.
        now.pop("LOCAL_WORLD_SIZE", None)
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
            at_start.pop(name, None)
    for name in said:
        at_start.pop(name, None)
    return now | said, at_start


def _meet(now: Mapping[str, str], seconds: float, options: Mapping[str, Any]) -> dict[str, Any]:
    """The options with a store that all ranks of the job have reached."""
    rank, size = rank_and_size(now)
    store: dist.Store
    if size > 1:
        store, prefix = _meet_at_the_address(now, seconds)
    elif hasattr(dist, "HashStore"):
        store, prefix = dist.HashStore(), ""
    else:  # torch 2.4
        store, prefix = dist.TCPStore("127.0.0.1", 0, 1, True), ""
    store.set_timeout(options.get("timeout") or timedelta(seconds=_STORE_SECONDS))
    passed_on = {name: value for name, value in options.items() if name not in _WAYS_TO_MEET}
    # Under a prefix, as torch does: other code may use the store too, and that of torchrun's
    # agent has the keys of earlier starts.
    within = dist.PrefixStore(f"{prefix}default_pg", store)
    return {**passed_on, "store": within, "rank": rank, "world_size": size}


def _meet_at_the_address(now: Mapping[str, str], seconds: float) -> tuple[dist.Store, str]:
    is_first_here = now.get("LOCAL_RANK", "0") == "0"
    patience = AddressPatience(seconds, say if is_first_here else lambda _: None)
    endpoint = Endpoint(now["MASTER_ADDR"], int(now["MASTER_PORT"]))
    addresses = resolve(endpoint.host, patience)
    if _hosts_the_store(now):
        check_port(endpoint.port)
    elif not is_by_agent(now):  # the agent's store exists before this process
        await_answer(endpoint, addresses, patience)
    store = _connect(endpoint, now, patience)
    return store, wait_for_all_ranks(store, now, endpoint, patience) + "/"


def _hosts_the_store(now: Mapping[str, str]) -> bool:
    return rank_and_size(now)[0] == 0 and not is_by_agent(now)


def _connect(
    endpoint: Endpoint, now: Mapping[str, str], patience: AddressPatience
) -> dist.TCPStore:
    seconds = max(_CONNECT_SECONDS, patience.left)

    def make() -> dist.TCPStore:
        return dist.TCPStore(
            endpoint.host,
            endpoint.port,
            rank_and_size(now)[1],
            _hosts_the_store(now),
            timedelta(seconds=seconds),
            wait_for_workers=False,
            multi_tenant=True,
        )

    try:
        # Torch would wait forever for a listener that does not answer.
        return _in_a_thread(make, seconds + 1)
    except (RuntimeError, TimeoutError) as error:
        raise RanksError(_no_store(endpoint, now, error)) from error


def _in_a_thread(call: Callable[[], _T], seconds: float) -> _T:
    """What a call returns or raises; TimeoutError if it takes longer."""
    ended: list[tuple[_T | None, Exception | None]] = []

    def run() -> None:
        try:
            ended.append((call(), None))
        except Exception as error:  # noqa: BLE001  raised again below, in the caller's thread
            ended.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not ended:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    [(found, error)] = ended
    if error is not None:
        raise error
    return found  # type: ignore[return-value]  # the call's own, which may be None


def _no_store(endpoint: Endpoint, now: Mapping[str, str], error: Exception) -> str:
    why = str(error).partition("\n")[0].rstrip(".")
    if "EADDRINUSE" in why:
        return port_in_use(endpoint.port)
    if _hosts_the_store(now):
        return (
            f"rank 0 cannot open its store at {endpoint}: {why}.\n"
            "Take another MASTER_PORT for all ranks, and see that MASTER_ADDR leads to this host."
        )
    if is_by_agent(now):
        return (
            f"torchrun's agent, which hosts the store, does not answer at {endpoint}: {why}.\n"
            "It has ended, or another program has its port: see its output."
        )
    return (
        f"what listens at {endpoint} is no store of torch: {why}.\n"
        "Another program has that port: give all ranks another MASTER_PORT."
    )


def _start(backend: str, seconds: float, options: Mapping[str, Any]) -> None:
    """Call torch; RanksError when it fails or takes too long."""
    try:
        if backend == "gloo":
            # It connects all ranks now, and waits half an hour for one that it cannot reach. Not
            # nccl, whose device is set in the caller's thread.
            _in_a_thread(lambda: dist.init_process_group(backend, **options), seconds)
        else:
            dist.init_process_group(backend, **options)
    except TimeoutError as error:
        raise RanksError(
            f"the ranks have all come, and gloo has not connected them with each other within "
            f"{seconds:g} s.\n{_unreachable()}"
        ) from error
    except RuntimeError as error:
        why = _SOURCE_PLACE.sub("", str(error).partition("\n")[0]).rstrip(".")
        raise RanksError(
            f"torch could not start the process group with {backend}: {why}.\n{_unreachable()}"
        ) from error


def _unreachable() -> str:
    """Why ranks may not reach each other although they reach MASTER_ADDR."""
    try:
        own = socket.gethostbyname(host_name())
    except OSError:
        own = ""
    if own.startswith("127."):
        return (
            f"The name of this host, {host_name()}, resolves to {own} here, where no other host "
            "reaches it: name the network that connects them, GLOO_SOCKET_IFNAME=eth0 or "
            "NCCL_SOCKET_IFNAME=eth0; `ip addr` lists them."
        )
    return (
        "The ranks reach MASTER_ADDR and perhaps not each other: see that no firewall is between "
        "them, and name the network to use, GLOO_SOCKET_IFNAME=eth0 or NCCL_SOCKET_IFNAME=eth0."
    )
