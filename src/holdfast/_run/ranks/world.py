"""Which process of its job this is, and who started it."""

from __future__ import annotations

import contextlib
import hashlib
import json
import multiprocessing
import os
import socket
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from holdfast._environment import variables
from holdfast._environment.processes.identity import host_name, of_process
from holdfast._environment.slurm.job import rank_environment
from holdfast._store.format.version import __version__

# -- The tasks of a TensorFlow cluster, and which of them are the ranks of a run -------------------
# The chief, if there is one, and the workers train together. An evaluator and a parameter server
# do not.


_TRAINING = ("chief", "worker")  # in the order in which TensorFlow counts them


def rank_in(tasks: Mapping[str, Sequence[int]], job: str, index: int) -> tuple[int, int] | None:
    """The rank of a task and the number of ranks; None if the task does not train."""
    ranks = [(name, each) for name in _TRAINING for each in tasks.get(name, ())]
    return (ranks.index((job, index)), len(ranks)) if (job, index) in ranks else None


def rank_by_config(text: str) -> tuple[int, int] | None:
    """The same by what TF_CONFIG says."""
    cluster, job, index = _read(text)
    return rank_in({name: range(len(found)) for name, found in cluster.items()}, job, index)


def address_by_config(text: str) -> str:
    """The host under which the others know this task; empty if TF_CONFIG does not say."""
    cluster, job, index = _read(text)
    found = cluster.get(job, [])
    return found[index].rpartition(":")[0].strip("[]") if index < len(found) else ""


def cluster_by_config(text: str) -> str:
    """What TF_CONFIG says alike to all tasks of a cluster."""
    cluster, _, _ = _read(text)
    return json.dumps(cluster, sort_keys=True) if cluster else ""


def _read(text: str) -> tuple[dict[str, list[str]], str, int]:
    """The addresses by job, and the job and number of this task; nothing where it makes no sense.

    TensorFlow reads the variable before us, and says what is wrong with it.
    """
    try:
        config: Any = json.loads(text) if text else {}
        jobs, task = config["cluster"], config["task"]
        cluster = {str(job): list(map(str, found)) for job, found in jobs.items()}
        index = int(task["index"])
        return (cluster, str(task["type"]), index) if index >= 0 else ({}, "", 0)
    except (ValueError, TypeError, KeyError, AttributeError):
        return {}, "", 0


@dataclass(frozen=True)
class World:
    rank: int = 0
    size: int = 1

    @property
    def is_alone(self) -> bool:
        return self.size == 1


def find_world() -> World:
    """From what a framework has connected if there is any, else from what the launcher has set."""
    found = _connected() or variables.rank_and_size()
    if found is None and _is_loaded("tensorflow"):  # no other script uses TF_CONFIG
        found = rank_by_config(variables.text("TF_CONFIG"))
    if found is None and multiprocessing.parent_process() is None:  # else its parent is the task
        # The tasks of a job step are the ranks, unless the environment says otherwise.
        of_task = rank_environment(variables.of_ranks())
        found = (int(of_task["RANK"]), int(of_task["WORLD_SIZE"])) if of_task else None
    return World(*(found or (0, 1)))


def _connected() -> tuple[int, int] | None:
    """Of torch's process group, JAX's processes or TensorFlow's workers."""
    if "torch.distributed" in sys.modules:
        from holdfast.torch import group

        if (found := group.rank_and_size()) is not None:
            return found
    if _is_loaded("jax"):
        from holdfast.jax import adapter

        if (found := adapter.rank_and_size()) is not None:
            return found
    if _is_loaded("tensorflow"):
        from holdfast.tensorflow import distribute

        if (cluster := distribute.cluster()) is not None:
            return rank_in(*cluster)
    return None


def _is_loaded(framework: str) -> bool:
    # One that is just being imported has no version yet.
    return hasattr(sys.modules.get(framework), "__version__")


@dataclass(frozen=True)
class Launcher:
    name: str
    process: dict[str, Any]
    restarts: bool  # whether it would start them again


def find_launcher() -> Launcher | None:
    """The process that would have to end this rank; None if no particular one does."""
    parent = os.getppid()
    if variables.text("TORCHELASTIC_RUN_ID"):
        return Launcher("torchrun", asdict(of_process(parent)), variables.restarts_left())
    started_by = multiprocessing.parent_process()
    if started_by is not None and started_by.pid == parent:
        return Launcher("the process that started it", asdict(of_process(parent)), False)
    return None


def host_key() -> str:
    """Equal for two processes that share memory, pids and network."""
    parts = [host_name()]
    for name in ("pid", "net", "ipc"):
        with contextlib.suppress(OSError):
            parts.append(str(Path(f"/proc/self/ns/{name}").readlink()))
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
    return " ".join(parts)


def addresses() -> list[str]:
    """By which other hosts may reach this one, the likeliest first."""
    # A chosen address comes first: behind a translation of addresses it is not our own.
    chosen = _resolve(variables.text("HOLDFAST_ADDRESS"))
    known_as = address_by_config(variables.text("TF_CONFIG"))
    found = [*_resolve(variables.text("MASTER_ADDR")), *_resolve(known_as), *_resolve(host_name())]
    ours = [address for address in found if is_own(address)] or found
    # Many systems have their own name at 127.0.1.1.
    outside = [each for each in ours if not each.startswith("127.") and each != "::1"]
    return list(dict.fromkeys([*chosen, *(outside or ours)]))


def _resolve(name: str) -> list[str]:
    """The addresses of a name, without those that are valid on one link only."""
    with contextlib.suppress(OSError, UnicodeError):
        infos = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM) if name else []
        return [str(info[4][0]) for info in infos if "%" not in str(info[4][0])]
    return []


def is_own(address: str) -> bool:
    """Whether this host has the address: only then it can be bound."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.bind((address, 0))
        return True
    return False


# -- The usual mistakes of starting ranks, each told in a sentence instead of a hang ---------------
# Pure functions of the environment now and at the start, and of the devices. Each sentence has the
# fact and then the next step. What has to ask the network is in `address.py`.


_GIVEN_BY_LAUNCHERS = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MASKS = ("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES")
# Launchers that do not tell torch of the ranks: name, and variables of number and rank.
_OTHER_LAUNCHERS = (
    ("srun", "SLURM_NTASKS", "SLURM_PROCID"),
    ("mpirun", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("mpirun", "PMI_SIZE", "PMI_RANK"),
)


def find_mistakes(now: Mapping[str, str], at_start: Mapping[str, str]) -> list[str]:
    """What keeps this process from being a rank, as far as it can be known without the others.

    What may be intended is no mistake: it would keep the user from training.
    """
    # What follows from a variable that the script has changed would only lead away from it.
    return _changed_by_the_script(now, at_start) or [
        *_wrong_ranks(now),
        *_wrong_local_ranks(now),
        *_wrong_address(now),
    ]


def find_contradictions(arguments: Mapping[str, int], now: Mapping[str, str]) -> list[str]:
    """Arguments of the script's call that differ from what torchrun has given."""
    if "TORCHELASTIC_RUN_ID" not in now:
        return []  # rank and size by arguments, and those of the hosts in the environment: a custom
    found = []
    for name, value in arguments.items():
        given = now.get(name.upper())
        if given is not None and given != str(value):
            found.append(
                f"the script calls init_process_group with {name}={value}, and torchrun has given "
                f"it {name.upper()}={given}.\n"
                f"Leave {name}= out of the call: torchrun knows it."
            )
    return found


def rank_and_size(now: Mapping[str, str]) -> tuple[int, int]:
    """Of an environment without mistakes; a process that is no rank is a world of one."""
    return int(now.get("RANK", "0")), int(now.get("WORLD_SIZE", "1"))


def is_by_agent(now: Mapping[str, str]) -> bool:
    """Whether torchrun's agent hosts the store at MASTER_ADDR, and not rank 0."""
    return now.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _changed_by_the_script(now: Mapping[str, str], at_start: Mapping[str, str]) -> list[str]:
    mistakes = []
    for name in _GIVEN_BY_LAUNCHERS:
        given, value = at_start.get(name, ""), now.get(name)
        if not given or value == given or (given in _LOOPBACK and value in _LOOPBACK):
            continue
        done = "removed" if value is None else f'set to "{value}"'
        for_whom = "each rank its own" if name == "RANK" else "all ranks the same"
        mistakes.append(
            f'{name} was "{given}" when this process was started, and has been {done} since, by '
            "the script or by what it imports.\n"
            f'Take out what changes os.environ["{name}"]: the launcher gives {for_whom}.'
        )
    return mistakes


def _number(now: Mapping[str, str], name: str) -> int | None:
    """A variable as a number; None if it is missing or no number."""
    text = now.get(name, "").strip()
    return int(text) if text.isdecimal() else None


def _not_numbers(now: Mapping[str, str], *names: str) -> list[str]:
    return [
        f'{name} is "{now[name]}", and must be a whole number.\n'
        f"Correct it where it is set, or let torchrun set it."
        for name in names
        if name in now and _number(now, name) is None
    ]


def _wrong_ranks(now: Mapping[str, str]) -> list[str]:
    if "RANK" not in now or "WORLD_SIZE" not in now:
        return _missing_ranks(now)
    if wrong := _not_numbers(now, "RANK", "WORLD_SIZE"):
        return wrong
    rank, size = _number(now, "RANK") or 0, _number(now, "WORLD_SIZE") or 0
    tasks = tasks_of_srun(now)
    if size == 0:
        return ["WORLD_SIZE is 0, and there is at least this process.\nSet it to their number."]
    if rank >= size:
        step = f"Give each of the {size} processes its own RANK, from 0 to {size - 1}."
        if tasks is not None and tasks > size:
            step = f"srun has started {tasks} tasks (SLURM_NTASKS): set WORLD_SIZE to {tasks}."
        return [f"RANK is {rank} and WORLD_SIZE is {size}, and ranks count from 0.\n{step}"]
    task = _number(now, "SLURM_PROCID")
    if size == tasks and size > 1 and rank != task:
        return [
            f"RANK is {rank} in task {task} of srun (SLURM_PROCID), while WORLD_SIZE and "
            f"SLURM_NTASKS are both {size}.\n"
            "Set RANK=$SLURM_PROCID inside of the task: in the batch script SLURM_PROCID is 0, and "
            "so all ranks would be."
        ]
    return []


def _missing_ranks(now: Mapping[str, str]) -> list[str]:
    if "RANK" not in now and now.get("WORLD_SIZE", "").strip() == "1":
        return []  # which can only be rank 0
    missing = [name for name in ("RANK", "WORLD_SIZE") if name not in now]
    are_missing = f"{_are(missing)} not set"
    for name, size_name, rank_name in _OTHER_LAUNCHERS:
        size = tasks_of_srun(now) if name == "srun" else _number(now, size_name)
        if size is not None and size > 1 and "TORCHELASTIC_RUN_ID" not in now:
            local = " LOCAL_RANK=$SLURM_LOCALID" if name == "srun" else ""
            return [
                f"{name} has started {size} processes, this one as {rank_name}="
                f"{now.get(rank_name, '')}, and {are_missing}: each would train alone.\n"
                f"Set RANK=${rank_name} WORLD_SIZE=${size_name}{local} in each of them before "
                "Python starts, or let it start one torchrun on each host."
            ]
    if len(missing) == 1:
        [other] = {"RANK", "WORLD_SIZE"} - set(missing)
        return [
            f'{other} is "{now[other]}" and {are_missing}.\n'
            "Start the script with torchrun, which sets both, or set both yourself."
        ]
    left = [f"{name}={now[name]}" for name in ("MASTER_ADDR", "MASTER_PORT") if now.get(name)]
    if left:
        return [
            f"{_are(left)} set, and {are_missing}.\n"
            "Set them too, or start the script with torchrun; for one process alone: unset "
            "MASTER_ADDR MASTER_PORT"
        ]
    return []


def _are(names: list[str]) -> str:
    return f"{' and '.join(names)} {'is' if len(names) == 1 else 'are'}"


def tasks_of_srun(now: Mapping[str, str]) -> int | None:
    """How many processes srun has started, of which this is one; None if it is no such task."""
    # Under torchrun, srun has started the agents. And the batch script itself has the numbers of
    # the job too: only the tasks of srun have a step.
    if "TORCHELASTIC_RUN_ID" in now or "SLURM_PROCID" not in now:
        return None
    if "SLURM_STEP_ID" not in now and not _number(now, "SLURM_PROCID"):
        return None
    return _number(now, "SLURM_STEP_NUM_TASKS") or _number(now, "SLURM_NTASKS")


def _wrong_local_ranks(now: Mapping[str, str]) -> list[str]:
    names = ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE")
    wrong = _not_numbers(now, *names[:2])
    local, size, world = (_number(now, name) for name in names)
    if local is not None and size is not None and local >= size:
        wrong.append(
            f"LOCAL_RANK is {local} and LOCAL_WORLD_SIZE is {size}, and ranks count from 0.\n"
            f"LOCAL_RANK counts the ranks of one host: from 0 to {max(0, size - 1)} here."
        )
    if world is not None and size is not None and size > world:
        wrong.append(
            f"LOCAL_WORLD_SIZE is {size} and WORLD_SIZE is {world}: one host would have more ranks "
            "than all.\nSet WORLD_SIZE to the number of processes on all hosts together."
        )
    return wrong


def _wrong_address(now: Mapping[str, str]) -> list[str]:
    world = _number(now, "WORLD_SIZE")
    if world is None or world < 2 or "RANK" not in now:
        return []  # there is no other rank, or the ranks must be set right first
    missing = [name for name in ("MASTER_ADDR", "MASTER_PORT") if not now.get(name)]
    if missing:
        return [
            f"WORLD_SIZE is {world} and {_are(missing)} not set: the ranks do not know where to "
            "meet.\n"
            "Start the script with torchrun, which sets them; or give all ranks the name of rank "
            "0's host and a free port there: MASTER_ADDR=node1 MASTER_PORT=29500"
        ]
    port = _number(now, "MASTER_PORT")
    if port is None or not 0 < port < 65536:
        return [
            f'MASTER_PORT is "{now["MASTER_PORT"]}", and must be a number from 1 to 65535.\n'
            "Take any free port of rank 0's host, the same for all ranks: MASTER_PORT=29500"
        ]
    return []


def find_device_mistakes(now: Mapping[str, str], *, devices: int | None, backend: str) -> list[str]:
    """nccl without a GPU; torch itself says clearly what is wrong with a GPU that it sees."""
    if "nccl" not in backend or devices != 0:
        return []
    mask = next((name for name in _MASKS if name in now), None)
    by_mask = "" if mask is None else f' ({mask} is "{now[mask]}")'
    return [
        f"the backend is nccl, which needs a GPU, and torch sees none here{by_mask}.\n"
        'On CPUs: init_process_group("gloo"). Does `nvidia-smi` show a GPU, and is this torch '
        "built for it?"
    ]


def code_print() -> dict[str, str]:
    """What this process runs, in a form that can be compared with the other ranks'."""
    main = Path(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    found = {"script": "", "python": ".".join(map(str, sys.version_info[:2]))}
    with contextlib.suppress(OSError):  # a prompt, a notebook, or a script that has gone meanwhile
        digest = hashlib.blake2b(main.read_bytes(), digest_size=4).hexdigest()
        found["script"] = f"{main.name} ({digest})"
    for name in ("torch", "tensorflow", "jax"):
        if (version := getattr(sys.modules.get(name), "__version__", None)) is not None:
            found[name] = str(version)
    return {**found, "holdfast": __version__}


def compare_prints(prints: Sequence[Mapping[str, str]]) -> str | None:
    """The sentence that names the ranks that run something else than rank 0, and what."""
    for what in dict.fromkeys(name for each in prints for name in each):
        values = [each.get(what, "") for each in prints]
        other = next((value for value in values[1:] if value != values[0]), None)
        if other is None:
            continue
        ranks = [rank for rank, value in enumerate(values) if value == other]
        name = "the script" if what == "script" else what
        return (
            f"the ranks do not run the same code: {name} is {values[0] or 'unknown'} on rank 0 and "
            f"{other or 'unknown'} on {name_ranks(ranks)}.\n"
            "Bring the same files and the same environment to all hosts, and start all ranks again."
        )
    return None


def compare_trees(trees: Sequence[Mapping[str, str]]) -> str | None:
    """The sentence that names the first state that the ranks do not all have alike, and who."""
    for name in dict.fromkeys(name for tree in trees for name in tree):
        lacking = [rank for rank, tree in enumerate(trees) if name not in tree]
        having = [rank for rank, tree in enumerate(trees) if name in tree]
        if lacking:
            have = "has" if len(lacking) == 1 else "have"
            return (
                f'{name_ranks(lacking)} {have} no state "{name}", which {name_ranks(having)} '
                f"{'has' if len(having) == 1 else 'have'}.\n"
                "Give Run the same names on all ranks: each keeps its own part of every one."
            )
        first = trees[having[0]][name]
        other = [rank for rank in having if trees[rank][name] != first]
        if other:
            alike = [rank for rank in having if rank not in other]
            return (
                f'the state "{name}" of {name_ranks(other)} is not made as that of '
                f"{name_ranks(alike)} is.\n"
                f'Make "{name}" in the same way on all ranks, before Run is opened.'
            )
    return None


def name_ranks(ranks: Sequence[int]) -> str:
    """Ranks as one says them: rank 3, or ranks 0 to 3 and 7."""
    spans: list[list[int]] = []
    for rank in sorted(ranks):
        if spans and rank == spans[-1][-1] + 1:
            spans[-1].append(rank)
        else:
            spans.append([rank])
    words: list[str] = []
    for span in spans:
        words += [f"{span[0]} to {span[-1]}"] if len(span) > 2 else map(str, span)
        if len(words) > 6:
            words.append("others")
            break
    text = ", ".join(words[:-1]) + f" and {words[-1]}" if len(words) > 1 else words[0]
    return f"rank{'s' * (len(ranks) > 1)} {text}"
