"""Variables of this shell that make a training slow or let it hang."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

from holdfast._run.ranks.address import is_taken, port_owner
from holdfast._text import cut
from holdfast._tools.doctor.check import Check, State
from holdfast._tools.lint.rules_options import LOCAL_ADDRESS

# All that holdfast reads: another name with this prefix is a typing error.
_OURS = frozenset(
    f"HOLDFAST_{name}"
    for name in (
        *("ADDRESS", "ERRAND", "FAULT", "GRACE_SECONDS", "HANG_TIMEOUT", "KEEP_MEMORY"),
        *("LEADER", "LED", "MARKER", "MIRROR_PIECE_BYTES", "NOTICES", "NOTICES_ADDRESS"),
        *("PAUSE_SECONDS", "PROGRESS", "PY_SPY", "RESTART", "SPARE", "SPARE_SECONDS", "STATE"),
    )
)
_ON = "1|true|yes|on"
# Values that slow a training down or let it hang; the value is compared in lower case.
_HARMFUL = (
    ("CUDA_LAUNCH_BLOCKING", _ON, "every kernel is waited for, and steps are several times slower"),
    ("PYTHONDEVMODE", _ON, "Python checks itself, and is slower"),
    ("PYTHONTRACEMALLOC", "(?!0$).+", "every allocation is traced, which takes time and memory"),
    ("PYTHONPROFILEIMPORTTIME", _ON, "every import is written to the log"),
    ("TORCH_SHOW_DISPATCH_TRACE", _ON, "every operation is written to the log"),
    ("NCCL_P2P_DISABLE", _ON, "GPUs do not talk directly to each other, and all_reduce is slower"),
    ("NCCL_IB_DISABLE", _ON, "nodes talk by TCP though there may be InfiniBand"),
    ("NCCL_SHM_DISABLE", _ON, "ranks of one node talk by the network"),
    ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0", "a collective that fails hangs forever"),
    ("NCCL_ASYNC_ERROR_HANDLING", "0", "a collective that fails hangs forever"),
    ("NCCL_DEBUG", "trace", "every call is written to the log"),
    ("TORCH_DISTRIBUTED_DEBUG", "detail", "every collective is checked by another, and is slower"),
    ("PYTHONMALLOC", ".*debug.*", "Python checks memory, and is slower"),
)


def nodes_of(environment: Mapping[str, str]) -> int:
    """The hosts of the job, by its variables; 1 if they do not say."""
    value = environment.get("SLURM_JOB_NUM_NODES", "")
    if value.isdigit() and int(value) > 0:
        return int(value)
    world, local = environment.get("WORLD_SIZE", ""), environment.get("LOCAL_WORLD_SIZE", "")
    if world.isdigit() and local.isdigit() and int(local) > 0:
        return -(-int(world) // int(local))
    return 1


_ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)'


def judge_environment(environment: Mapping[str, str], nodes: int = 1) -> list[Check]:
    """One for each harmful variable; if there is none, one that says so."""
    found = [*_of_ranks(environment, nodes), *_of_speed_and_holdfast(environment)]
    if found:
        return found
    prefixes = ("NCCL_", "GLOO_", "CUDA_", "TORCH_", "OMP_", "MASTER_", "PYTHON", "HOLDFAST_")
    checked = sorted(name for name in environment if name.startswith(prefixes))
    shown = ", ".join(checked[:4]) + (f" and {len(checked) - 4} more" if len(checked) > 4 else "")
    said = f"nothing that does harm ({shown})" if checked else "nothing set that does harm"
    return [Check("environment", "ok", said, "", {"looked_at": checked})]


def _harmful(state: State, name: str, value: str, what: str, remedy: str = "") -> Check:
    found, data = f"{name}={cut(value, 60)}: {what}", {"variable": name, "value": value}
    return Check("environment", state, found, remedy or f"unset {name}", data)


def _of_ranks(environment: Mapping[str, str], nodes: int) -> Iterator[Check]:
    rank, size = environment.get("RANK", ""), environment.get("WORLD_SIZE", "")
    address = environment.get("MASTER_ADDR", "")
    if rank.isdigit() and not size:
        what = "without WORLD_SIZE the number of ranks is not known"
        yield _harmful("fail", "RANK", rank, what, "unset RANK   (or set WORLD_SIZE too)")
    elif size.isdigit() and int(size) > 1 and not rank:
        what = "set without RANK: a script alone waits for the others until it times out"
        yield _harmful("warn", "WORLD_SIZE", size, what)
    elif size.isdigit() and int(size) > 1 and not address:
        what = "without MASTER_ADDR no rank knows where to meet the others"
        yield _harmful("fail", "WORLD_SIZE", size, what, _ADDRESS)
    if nodes > 1 and LOCAL_ADDRESS.fullmatch(address):
        what = f"on {nodes} nodes each looks for the others at itself, and the job hangs"
        yield _harmful("fail", "MASTER_ADDR", address, what, _ADDRESS)
    port = environment.get("MASTER_PORT", "")
    has_agent = environment.get("TORCHELASTIC_USE_AGENT_STORE", "")  # it listens, not rank 0
    if port.isdigit() and rank == "0" and not has_agent and is_taken(int(port)):
        what = f"rank 0 is to listen there, and the port is in use by {port_owner(int(port))}"
        yield _harmful("fail", "MASTER_PORT", port, what, f"export MASTER_PORT={int(port) + 1}")


def _of_speed_and_holdfast(environment: Mapping[str, str]) -> Iterator[Check]:
    for name, pattern, what in _HARMFUL:
        value = environment.get(name, "")
        if re.fullmatch(pattern, value.lower()):
            remedy = "export NCCL_DEBUG=WARN" if name == "NCCL_DEBUG" else ""
            yield _harmful("warn", name, value, what, remedy)
    for name in sorted(environment):
        if name.startswith("HOLDFAST_") and name not in _OURS:
            yield _harmful("warn", name, environment[name], "holdfast knows no such variable")
    fault = environment.get("HOLDFAST_FAULT")
    if fault:
        what = "made for tests: it kills the process that writes a checkpoint"
        yield _harmful("fail", "HOLDFAST_FAULT", fault, what)
