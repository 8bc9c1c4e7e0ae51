"""Variables that make a training slow, hang or see no GPU, as they are in this shell."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from holdfast._run.ranks.address import is_taken, port_owner
from holdfast._tools.doctor.finding import Check, State

_ON = ("1", "true", "yes", "on")
_LOCAL = re.compile(r"localhost|127\.\d+\.\d+\.\d+|::1|0\.0\.0\.0")
_NUMBERED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
# What has a meaning for holdfast: another name is a slip of the finger.
_OURS = frozenset(
    f"HOLDFAST_{name}"
    for name in (
        *("ADDRESS", "ERRAND", "FAULT", "GRACE_SECONDS", "HANG_TIMEOUT", "LEADER", "LED"),
        *("MARKER", "MIRROR_PIECE_BYTES", "NOTICES", "NOTICES_ADDRESS", "PAUSE_SECONDS"),
        *("PROGRESS", "PY_SPY", "RESTART", "STATE"),
    )
)
# A variable that is set like this, and what it does to a training.
_SLOW = {
    "CUDA_LAUNCH_BLOCKING": "every kernel is waited for, and steps are several times slower",
    "PYTHONDEVMODE": "Python checks itself, and is slower",
    "PYTHONTRACEMALLOC": "every allocation is traced, which takes time and memory",
    "PYTHONPROFILEIMPORTTIME": "every import is written to the log",
    "TORCH_SHOW_DISPATCH_TRACE": "every operation is written to the log",
    "NCCL_P2P_DISABLE": "GPUs do not talk directly to each other, and all_reduce is slower",
    "NCCL_IB_DISABLE": "nodes talk by TCP though there may be InfiniBand",
    "NCCL_SHM_DISABLE": "ranks of one node talk by the network",
}
_RISKY = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "a collective that fails hangs for ever",
    "NCCL_ASYNC_ERROR_HANDLING": "a collective that fails hangs for ever",
}


@dataclass(frozen=True)
class Around:
    """What the variables are held against."""

    interfaces: frozenset[str] = frozenset()  # of the network; none: not known
    gpus: int | None = None  # that the driver shows
    nodes: int = 1


def interfaces() -> frozenset[str]:
    """The network interfaces of this host."""
    try:
        return frozenset(each.name for each in Path("/sys/class/net").iterdir())
    except OSError:
        return frozenset()


def nodes_of(environment: Mapping[str, str]) -> int:
    """How many hosts the job has, as far as variables say."""
    value = environment.get("SLURM_JOB_NUM_NODES", "")
    if value.isdigit() and int(value) > 0:
        return int(value)
    world, local = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_WORLD_SIZE", "")
    if world.isdigit() and local.isdigit() and int(local) > 0:
        return -(-int(world) // int(local))
    return 1


_ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def judge_environment(environment: Mapping[str, str], around: Around) -> list[Check]:
    """One for each variable that does harm; if none does, one that says so."""
    found = [
        *_of_ranks(environment, around),
        *_of_networks(environment, around),
        *_of_gpus(environment, around),
        *_of_speed(environment),
        *_of_holdfast(environment),
    ]
    if found:
        return found
    prefixes = ("NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_", "MASTER_", "PYTHON", "HOLDFAST_")
    looked = sorted(name for name in environment if name.startswith(prefixes))
    shown = ", ".join(looked[:4]) + (f" and {len(looked) - 4} more" if len(looked) > 4 else "")
    said = f"nothing that does harm ({shown})" if looked else "nothing set that does harm"
    return [Check("environment", "ok", said, "", {"looked_at": looked})]


def _note(state: State, name: str, value: str, what: str, remedy: str) -> Check:
    shown = value if len(value) <= 60 else value[:59] + "…"
    data = {"variable": name, "value": value}
    return Check("environment", state, f"{name}={shown}: {what}", remedy, data)


def _of_ranks(environment: Mapping[str, str], around: Around) -> Iterator[Check]:
    for name in _NUMBERED:
        value = environment.get(name)
        if value is not None and not value.isdigit():
            yield _note("fail", name, value, "is no whole number", f"unset {name}")
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    address = environment.get("MASTER_ADDR", "")
    if rank.isdigit() and not size:
        what = "without WORLD_SIZE nobody knows of how many"
        yield _note("fail", "RANK", rank, what, "unset RANK   (or set WORLD_SIZE too)")
    elif rank.isdigit() and size.isdigit() and int(rank) >= int(size):
        what = f"ranks go from 0 to WORLD_SIZE - 1, which is {int(size) - 1}"
        yield _note("fail", "RANK", rank, what, "unset RANK WORLD_SIZE   (the launcher sets them)")
    elif size.isdigit() and int(size) > 1 and not rank:
        what = "set without RANK: a script alone waits for the others until it times out"
        yield _note("warn", "WORLD_SIZE", size, what, "unset WORLD_SIZE")
    elif size.isdigit() and int(size) > 1 and not address:
        what = "without MASTER_ADDR no rank knows where to meet the others"
        yield _note("fail", "WORLD_SIZE", size, what, _ADDRESS)
    if around.nodes > 1 and _LOCAL.fullmatch(address):
        yield _note(
            "fail",
            "MASTER_ADDR",
            address,
            f"on {around.nodes} nodes each looks for the others at itself, and the job hangs",
            _ADDRESS,
        )
    port = environment.get("MASTER_PORT", "")
    if port.isdigit() and not 0 < int(port) < 65536:
        yield _note("fail", "MASTER_PORT", port, "is no port", "export MASTER_PORT=29500")
    elif port.isdigit() and _is_to_listen(environment) and is_taken(int(port)):
        what = f"rank 0 is to listen there, and the port is in use by {port_owner(int(port))}"
        yield _note("fail", "MASTER_PORT", port, what, f"export MASTER_PORT={int(port) + 1}")


def _is_to_listen(environment: Mapping[str, str]) -> bool:
    """Whether rank 0 itself listens at the port, and not torchrun's agent, which does already."""
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "")
    return environment.get("RANK") == "0" and not has_agent


def _of_networks(environment: Mapping[str, str], around: Around) -> Iterator[Check]:
    known = around.interfaces
    for name in ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME"):
        value = environment.get(name, "")
        if not value or not known or value.startswith("^"):
            continue
        wanted = value.removeprefix("=").split(",")
        # NCCL takes each for the beginning of a name unless there is a `=`, gloo for the whole.
        is_whole = value.startswith("=") or name.startswith("GLOO")
        fits = [
            each
            for each in known
            if (each in wanted if is_whole else each.startswith(tuple(wanted)))
        ]
        there = sorted(known - {"lo"}) or ["lo"]
        if not fits:
            yield _note(
                "fail",
                name,
                value,
                f"there is no such interface here ({', '.join(sorted(known))})",
                f"export {name}={there[0]}",
            )
        elif around.nodes > 1 and set(fits) == {"lo"}:
            what = f"on {around.nodes} nodes the loopback reaches nobody"
            yield _note("fail", name, value, what, f"export {name}={there[0]}")


def _of_gpus(environment: Mapping[str, str], around: Around) -> Iterator[Check]:
    name = "CUDA_VISIBLE_DEVICES"
    value = environment.get(name)
    if value is None or not around.gpus:
        return
    words = [word.strip() for word in value.split(",")]
    if value.strip() in ("", "-1", "none", "NoDevFiles"):
        gpus = f"{around.gpus} GPU{'s' if around.gpus > 1 else ''}"
        yield _note(
            "warn", name, value, f"hides {gpus}: the training runs on the CPU", f"unset {name}"
        )
        return
    beyond = [word for word in words if word.isdigit() and int(word) >= around.gpus]
    if beyond:
        last = around.gpus - 1
        what = f"there is no GPU {beyond[0]}; CUDA stops at it and shows only those before"
        yield _note("fail", name, value, what, f"export {name}=0" + (f",{last}" if last else ""))
    elif len(set(words)) < len(words):
        unique = ",".join(dict.fromkeys(words))
        yield _note(
            "fail", name, value, "names one twice: CUDA shows none", f"export {name}={unique}"
        )


def _of_speed(environment: Mapping[str, str]) -> Iterator[Check]:
    for name, what in _SLOW.items():
        value = environment.get(name, "")
        is_on = value.lower() in _ON or (name == "PYTHONTRACEMALLOC" and value not in ("", "0"))
        if is_on:
            yield _note("warn", name, value, what, f"unset {name}")
    for name, what in _RISKY.items():
        if environment.get(name) == "0":
            yield _note("warn", name, "0", what, f"unset {name}")
    if environment.get("NCCL_DEBUG", "").upper() == "TRACE":
        what = "every call is written to the log"
        yield _note("warn", "NCCL_DEBUG", "TRACE", what, "export NCCL_DEBUG=WARN")
    if environment.get("TORCH_DISTRIBUTED_DEBUG", "").upper() == "DETAIL":
        what = "every collective is checked by another one, and steps are slower"
        remedy = "unset TORCH_DISTRIBUTED_DEBUG"
        yield _note("warn", "TORCH_DISTRIBUTED_DEBUG", "DETAIL", what, remedy)
    value = environment.get("PYTHONMALLOC", "")
    if "debug" in value:
        yield _note(
            "warn",
            "PYTHONMALLOC",
            value,
            "Python checks memory, and is slower",
            "unset PYTHONMALLOC",
        )
    for path in re.split(r"[: ]+", environment.get("LD_PRELOAD", "")):
        if "/" in path and not Path(path).exists():
            what = f"{path} is not there: every program complains"
            yield _note("warn", "LD_PRELOAD", environment["LD_PRELOAD"], what, "unset LD_PRELOAD")
            break


def _of_holdfast(environment: Mapping[str, str]) -> Iterator[Check]:
    for name in sorted(environment):
        if name.startswith("HOLDFAST_") and name not in _OURS:
            what = "holdfast knows no such variable"
            yield _note("warn", name, environment[name], what, f"unset {name}")
    if environment.get("HOLDFAST_FAULT"):
        what = "made for tests: it kills the process that writes a checkpoint"
        yield _note(
            "fail", "HOLDFAST_FAULT", environment["HOLDFAST_FAULT"], what, "unset HOLDFAST_FAULT"
        )
