"""Whether the ranks of a command reach each other, and how fast: by a real all_reduce."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from holdfast._environment.processes.tree import is_known
from holdfast._environment.slurm.torchrun import starts_torchrun
from holdfast._run.ranks.address import port_owner
from holdfast._tools.doctor.finding import Check
from holdfast._tools.doctor.signals.chain import Chain, ChainError
from holdfast._tools.doctor.signals.probed import Probe
from holdfast._tools.doctor.signals.target import Target, find_target

# -- What the ranks of a chain have told of their all_reduce, as findings --------------------------


_FINDING = "all_reduce"
_SLOW = 0.5  # of what the others reach


def judge_ranks(probes: Sequence[Probe], seconds: float) -> list[Check]:
    """All that the ranks have told."""
    return [
        *_check_backend(probes),
        *_check_sharing(probes),
        *_check_names(probes),
        _check_speed(probes, seconds),
        *_check_slow(probes),
        *_check_interface(probes),
    ]


def _device(one: Probe) -> dict[str, Any]:
    return next(iter(one.events("device")), {})


def _ranks(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, sorted(numbers)[:8])) + ("…" if len(numbers) > 8 else "")
    return f"rank{'s' if len(numbers) > 1 else ''} {shown}"


def _check_backend(probes: Sequence[Probe]) -> list[Check]:
    told = [each for each in map(_device, probes) if each]
    if not told:
        return []
    backend, gpus = told[0]["backend"], [each["gpus"] for each in told]
    data = {"backend": backend, "gpus": gpus}
    if "gloo" in backend and "nccl" not in backend and any(gpus):
        why = "torch has no nccl here" if not told[0]["nccl"] else "the training asks for it"
        remedy = (
            "install a torch that is built for CUDA"
            if not told[0]["nccl"]
            else 'init_process_group("nccl")'
        )
        found = f"gloo, though there are GPUs: every sum goes through the CPU ({why})"
        return [Check("backend", "warn", found, remedy, data)]
    if "nccl" in backend and not all(gpus):
        without = [one.rank for one in probes if _device(one) and not _device(one)["gpus"]]
        found = f"nccl, and {_ranks(without)} sees no GPU"
        remedy = 'init_process_group("gloo"), or give the job GPUs: --gpus-per-task=1'
        return [Check("backend", "fail", found, remedy, data)]
    where = f"{min(gpus)} GPUs for each rank" if any(gpus) else "no GPU here"
    return [Check("backend", "ok", f"{backend}, with {where}", "", data)]


def _check_sharing(probes: Sequence[Probe]) -> list[Check]:
    users: dict[tuple[str, str], list[int]] = defaultdict(list)
    for one in probes:
        gpu = _device(one).get("gpu")
        if gpu is not None:
            users[one.here["host"], gpu].append(one.rank)
    shared = [(host, ranks) for (host, _), ranks in users.items() if len(ranks) > 1]
    if not shared:
        return []
    host, ranks = shared[0]
    return [
        Check(
            "GPU sharing",
            "fail" if "nccl" in _device(probes[0]).get("backend", "") else "warn",
            f"{_ranks(ranks)} share one GPU on {host}",
            "start as many ranks as there are GPUs: torchrun --nproc-per-node=gpu",
            {"host": host, "ranks": ranks},
        )
    ]


def _check_names(probes: Sequence[Probe]) -> list[Check]:
    """A host whose name leads to itself alone tells the others to look for it at themselves."""
    hosts = {one.here["host"] for one in probes}
    if len(hosts) < 2:
        return []
    wrong = sorted(
        {
            one.here["host"]
            for one in probes
            if (network := _device(one).get("network", {})).get("chosen_by") == "the host's name"
            and network.get("host_address", "").startswith("127.")
        }
    )
    if not wrong:
        return []
    works = all(one.events("done") for one in probes)  # all the same: hosts may share an address
    return [
        Check(
            "host name",
            "warn" if works else "fail",
            f"the name of {', '.join(wrong[:4])} leads to 127.… there, where no other host is",
            "name the network that connects them: GLOO_SOCKET_IFNAME=eth0 (`ip addr` lists them)",
            {"hosts": wrong},
        )
    ]


def _check_speed(probes: Sequence[Probe], seconds: float) -> Check:
    # A doctor in each task, or on each node, sees only its own.
    size = max(len(probes), *(one.world or 1 for one in probes))
    if size < 2:
        return Check(_FINDING, "ok", "one process: there is nobody to reduce with")
    errors = [(one.rank, each) for one in probes for each in one.events("error")]
    if errors:
        # Whoever fails first takes the others down with him, and they can only say that.
        rank, first = min(errors, key=lambda each: each[1]["time"])
        if first["kind"] in ("import", "torch"):
            remedy = "install it into the environment that trains, or choose another"
            return Check(_FINDING, "warn", f"not tried: {_one_line(first['text'])}", remedy)
        fact, _, step = str(first["text"]).partition("\n")
        return Check(
            _FINDING,
            "fail",
            f"rank {rank} of {size}: {_one_line(fact)}",
            _one_line(step) or "see that the ranks reach each other: holdfast doctor on each host",
            {"rank": rank, "error": first["text"]},
        )
    silent = [one.rank for one in probes if not one.events("done")]
    if silent:
        met = [one.rank for one in probes if one.events("met")]
        stage = (
            "did not meet" if len(met) < len(probes) else "met, and did not end their all_reduce"
        )
        return Check(
            _FINDING,
            "fail",
            f"{_ranks(silent)} of {size} {stage} within {seconds:.0f} s",
            "see that no firewall is between them; NCCL_DEBUG=INFO tells what nccl waits for",
            {"silent": silent},
        )
    speeds = _speeds(probes)
    if not speeds:
        found = f"{size} processes without RANK and WORLD_SIZE: each trains by itself"
        return Check(_FINDING, "ok", found)
    largest = max(speeds)
    slowest = min(speeds[largest].values())
    hosts = len({one.here["host"] for one in probes})
    where = f"on {hosts} host{'s' if hosts > 1 else ''}"
    if size > len(probes):
        where = f"({len(probes)} of them seen here)"
    return Check(
        _FINDING,
        "ok",
        f"{size} ranks {where}: {_rate(slowest)} for each rank "
        f"with {largest >> 20} MiB, sums right",
        "",
        {
            "ranks": size,
            "hosts": hosts,
            "bytes_per_second": {
                str(length): {str(rank): round(speed) for rank, speed in by_rank.items()}
                for length, by_rank in speeds.items()
            },
        },
    )


def _speeds(probes: Sequence[Probe]) -> dict[int, dict[int, float]]:
    """Bytes per second by size and rank."""
    found: dict[int, dict[int, float]] = defaultdict(dict)
    for one in probes:
        for each in one.events("reduced"):
            found[int(each["size_bytes"])][one.rank] = float(each["bytes_per_second"])
    return dict(found)


def _check_slow(probes: Sequence[Probe]) -> list[Check]:
    """In a sum all wait for the slowest; who that is shows where each sends alone."""
    alone: dict[int, float] = {}
    for one in probes:
        for each in one.events("sent"):
            rank, speed = int(each["source"]), float(each["bytes_per_second"])
            alone[rank] = min(speed, alone.get(rank, speed))
    if len(alone) < 3:  # of two, neither is the slow one
        return []
    usual, slowest = median(alone.values()), min(alone, key=lambda rank: alone[rank])
    host = next((one.here["host"] for one in probes if one.rank == slowest), "?")
    data = {"bytes_per_second": {str(rank): round(speed) for rank, speed in alone.items()}}
    told = f"rank {slowest} on {host} sends {_rate(alone[slowest])}, the others {_rate(usual)}"
    if alone[slowest] >= _SLOW * usual:
        return [Check("slowest rank", "ok", told, "", data)]
    remedy = f"all ranks wait for it: look at {host}'s network and load, or leave it out"
    return [Check("slowest rank", "warn", told, remedy, data)]


def _check_interface(probes: Sequence[Probe]) -> list[Check]:
    used: dict[str, list[int]] = defaultdict(list)
    by: set[str] = set()
    for one in probes:
        network = _device(one).get("network", {})
        if network.get("interface"):
            used[network["interface"]].append(one.rank)
            by.add(network["chosen_by"])
    if not used:
        return []
    data = {"interfaces": dict(used)}
    told = ", ".join(sorted(used))
    if len(used) > 1:
        parts = "; ".join(f"{name}: {_ranks(ranks)}" for name, ranks in sorted(used.items()))
        remedy = "name one that connects all: GLOO_SOCKET_IFNAME=…, NCCL_SOCKET_IFNAME=…"
        return [Check("interface", "warn", f"the ranks use different ones: {parts}", remedy, data)]
    return [Check("interface", "ok", f"{told}, chosen by {', '.join(sorted(by))}", "", data)]


def _rate(speed: float) -> str:
    return f"{speed / 1e9:.1f} GB/s" if speed >= 1e9 else f"{speed / 1e6:.0f} MB/s"


def _one_line(text: str) -> str:
    return " ".join(str(text).split())[:300].rstrip(".")


SECONDS = 60.0
_LOOK_SECONDS = 0.05
_NAME = "all_reduce"
_USUAL_PORT = 29500
_ENDPOINT = re.compile(r"--?rdzv[-_]endpoint(?:=|\s+)(\S*)")
_PORT = re.compile(r"--?master[-_]port(?:=|\s+)(\d+)")
_BACKEND = re.compile(r"init_process_group\(\s*(?:backend\s*=\s*)?[\"']([\w:,]+)[\"']")


def check_ranks(
    command: Sequence[str], *, folder: Path | None = None, seconds: float = SECONDS
) -> list[Check]:
    """Start the ranks for real, with a probe in the place of each, and let them reduce."""
    if not sys.platform.startswith("linux") or not is_known():
        return [Check(_NAME, "warn", "not tried: it needs Linux and its /proc")]
    where = folder or Path.cwd()
    target = find_target(command, where)
    keeps_out = target.clears or target.elsewhere or target.loses_path
    if keeps_out or not (target.names or target.scripts):
        return []  # the test of signals has said why
    taken = _check_port(command)
    if taken is not None:
        return [taken]
    began = time.monotonic()
    try:
        probes = _follow(command, target, where, seconds)
    except ChainError as error:
        return [Check(_NAME, error.state, error.found, _remedy(command, error))]
    return judge_ranks(probes, time.monotonic() - began)


def _follow(command: Sequence[str], target: Target, folder: Path, seconds: float) -> list[Probe]:
    deadline = time.monotonic() + seconds
    backend = _backend_of(target, folder)
    chain = Chain(command, target, "ranks", seconds=seconds / 2, folder=folder, backend=backend)
    with chain:
        chain.await_probes(seconds / 2)
        while True:
            probes = chain.probes()
            chain.guard()
            is_over = all(each.events("done") or each.events("error") for each in probes)
            ended = chain.process.poll() is not None
            if is_over or ended or time.monotonic() > deadline:
                return chain.probes()
            time.sleep(_LOOK_SECONDS)


def _backend_of(target: Target, folder: Path) -> str:
    """The one that the script names literally; empty if it names none."""
    for name in target.names:
        with contextlib.suppress(OSError, ValueError):
            found = _BACKEND.search((folder / name).read_text(errors="replace"))
            if found:
                return found[1]
    return ""


def _check_port(command: Sequence[str]) -> Check | None:
    """Whether somebody has the port at which torchrun's ranks are to meet on this host."""
    words = " ".join(command)
    if not starts_torchrun(command) or "--standalone" in words:
        return None
    endpoint, given = _ENDPOINT.search(words), _PORT.search(words)
    port = int(given[1]) if given else _USUAL_PORT
    if endpoint is not None:
        host, _, text = endpoint[1].rpartition(":")
        if not text.isdigit() or host not in ("localhost", "127.0.0.1", ""):
            return None  # the first of the nodes hosts it, and that may be another one
        port = int(text)
    if port == 0 or _is_free(port):
        return None
    return Check(
        "rendezvous port",
        "fail",
        f"port {port}, at which the ranks are to meet, is in use by {port_owner(port)}",
        f"torchrun --standalone finds a free one; or give another: --master-port={port + 1}",
        {"port": port},
    )


def _is_free(port: int) -> bool:
    import socket

    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
        tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            tried.bind(("", port))
        except OSError:
            return False
    return True


def _remedy(command: Sequence[str], error: ChainError) -> str:
    if re.search(r"--?nnodes[= ]+(?!1\b)\d", " ".join(command)):
        return "start the same on every node, at the same time, or by srun"
    return error.remedy
