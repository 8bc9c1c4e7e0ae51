"""How this process was started: its command, its launcher, its folder and its variables.

The outermost process of a run has the command that starts it again: `holdfast run`, torchrun, or
the script itself. The command is read from /proc. Only variables with a known meaning are recorded,
so that no secret is among them.
"""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePath

from holdfast._environment.processes.proc import read_bytes
from holdfast._environment.processes.tree import parent
from holdfast._errors import is_interactive

_MOST_LEVELS = 16
_LAUNCHERS = {
    **dict.fromkeys(("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "horovodrun"), "mpirun"),
    **dict.fromkeys(("accelerate", "accelerate-launch"), "accelerate"),
    "deepspeed": "deepspeed",
    "torchrun": "torchrun",
}
_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    **dict.fromkeys(
        ("accelerate.commands.launch", "accelerate.commands.accelerate_cli"), "accelerate"
    ),
    "deepspeed.launcher.runner": "deepspeed",
}

# A launcher or a job sets these for one attempt. The next attempt gets its own.
_BY_LAUNCHER = """
    RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE GROUP_RANK GROUP_WORLD_SIZE ROLE_RANK ROLE_NAME
    ROLE_WORLD_SIZE NODE_RANK MASTER_ADDR MASTER_PORT ENVIRONMENT
"""
_BY_HOLDFAST = """
    HOLDFAST_LEADER HOLDFAST_LED HOLDFAST_RESTART HOLDFAST_HANG_TIMEOUT HOLDFAST_MARKER
    HOLDFAST_ERRAND HOLDFAST_FAULT
"""
# Variables that choose the interpreter, the devices or the bits.
_CHOOSING = "PATH VIRTUAL_ENV LD_LIBRARY_PATH LD_PRELOAD LANG LC_ALL TZ"
_FAMILIES = """
    CUDA_ NVIDIA_ NCCL_ HIP_ ROCR_ HSA_ CUBLAS_ CUDNN_ TORCH PYTORCH_ PET_ TRITON_ TF_ XLA_ JAX_
    KERAS_ OMP_ MKL_ KMP_ GOMP_ OPENBLAS_ NUMEXPR_ MALLOC_ GLOO_ UCX_ ACCELERATE_ DEEPSPEED_ HF_
    TRANSFORMERS_ TOKENIZERS_ WANDB_ MLFLOW_ CONDA_ PYTHON HOLDFAST_ SLURM_ OMPI_ PMI_
"""
_OF_ONE_LIFE = frozenset(f"{_BY_LAUNCHER} {_BY_HOLDFAST}".split())
_NAMES = frozenset(f"{_CHOOSING} {_BY_LAUNCHER}".split())
_PREFIXES = tuple(_FAMILIES.split())
_OF_ONE_LIFE_PREFIXES = ("SLURM_", "TORCHELASTIC_", "OMPI_", "PMI_", "PET_")
_DEVICES = ("CUDA_VISIBLE_", "HIP_VISIBLE_", "ROCR_VISIBLE_", "NVIDIA_VISIBLE_")
_OF_THE_CLUSTER = "SLURM_CONF"


@dataclass(frozen=True)
class StartCommand:
    """The outermost process that belongs to a run."""

    launcher: str  # python, torchrun, holdfast run, interactive, ray, …
    command: list[str]
    cwd: str
    pid: int


def own_command() -> list[str]:
    """The command of this process, with the whole path of its interpreter."""
    words = list(getattr(sys, "orig_argv", None) or [sys.executable, *sys.argv])
    if "--multiprocessing-fork" in words:  # its other words are valid for this start only
        words = [sys.executable, *sys.argv]
    return [sys.executable or words[0], *words[1:]]


def own_folder(command: Sequence[str]) -> str:
    """The folder that this process was started in; the script may have changed it since."""
    try:
        here = str(Path.cwd())
    except OSError:
        here = ""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    if not isinstance(file, str) or not PurePath(file).is_absolute():
        return here
    for word in command[1:]:
        # Python has made the script's path absolute at its start.
        tail = f"/{word}"
        if not PurePath(word).is_absolute() and file.endswith(tail) and word:
            return file.removesuffix(tail) or "/"
    # With -m it is the first place of modules.
    first = sys.path[0] if sys.path else ""
    is_module = "-m" in command and PurePath(first).is_absolute()
    return first if is_module and file.startswith(f"{first}/") else here


def find_start(environment: Mapping[str, str]) -> StartCommand:
    """The start of this process's run; `environment` is that of its start."""
    command = own_command()
    launcher = "python"
    if is_interactive():
        launcher = "interactive"
    elif "RAY_RAYLET_PID" in environment:
        launcher = "ray"
    found = StartCommand(launcher, command, own_folder(command), os.getpid())
    if launcher != "python":
        return found
    leader = environment.get("HOLDFAST_LEADER", "")
    spawned_by = multiprocessing.parent_process()
    pid = os.getpid()
    for _ in range(_MOST_LEVELS):
        pid = parent(pid)
        if pid <= 1:
            break
        words = _command(pid)
        if not words:
            continue
        name = "holdfast run" if str(pid) == leader else _launcher(words)
        if name or (spawned_by is not None and pid == spawned_by.pid):
            cwd = found.cwd
            with contextlib.suppress(OSError):
                cwd = str(Path(f"/proc/{pid}/cwd").readlink())
            found = StartCommand(name or "python", words, cwd, pid)
    return found


def _launcher(words: Sequence[str]) -> str:
    for word in words[:2]:  # a program of Python has the interpreter before it
        name = _LAUNCHERS.get(PurePath(word).name)
        if name is not None:
            return name
    for first, second in itertools.pairwise(words[1:]):
        if first == "-m":
            return _MODULES.get(second, "")
        if not first.startswith("-"):
            break  # the script of a Python
    return ""


def _command(pid: int) -> list[str]:
    """Its words; the interpreter by its whole path, as far as the system knows it."""
    words = [os.fsdecode(word) for word in (read_bytes(f"/proc/{pid}/cmdline") or b"").split(b"\0")]
    # /proc/PID/exe would be the interpreter outside the virtual environment.
    if words[0] and "/" not in words[0] and sys.executable:
        in_environment = Path(sys.executable).with_name(words[0])
        if in_environment.exists():
            words[0] = str(in_environment)
    return words[:-1]


def is_relevant(name: str) -> bool:
    """Whether a variable is recorded and given to the next start."""
    return name in _NAMES or name.startswith(_PREFIXES)


def relevant(environment: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in environment.items() if is_relevant(name)}


def environment_again(
    recorded: Mapping[str, str],
    now: Mapping[str, str],
    left_out: Sequence[str],
    *,
    was_in_job: bool,
    is_in_job: bool,
) -> dict[str, str]:
    """The environment for the next start: as recorded where that is known, else as it is now.

    In a job, ranks and devices are as the scheduler says.
    """

    def is_kept(name: str) -> bool:
        if not is_relevant(name) or name in left_out or name == _OF_THE_CLUSTER:
            return True
        return is_in_job and (name.startswith(("SLURM_", *_DEVICES)))

    def is_given_again(name: str) -> bool:
        if was_in_job and name.startswith(_DEVICES):
            return False
        is_of_one_life = name in _OF_ONE_LIFE or name.startswith(_OF_ONE_LIFE_PREFIXES)
        return name == _OF_THE_CLUSTER or not is_of_one_life

    kept = {name: value for name, value in now.items() if is_kept(name)}
    return kept | {name: value for name, value in recorded.items() if is_given_again(name)}


_FRAMEWORKS = (
    *("numpy", "torch", "torchvision", "torchaudio", "torchdata", "jax", "jaxlib", "flax", "optax"),
    *("tensorflow", "keras", "lightning", "pytorch_lightning", "transformers", "accelerate"),
    *("datasets", "deepspeed", "ray", "triton", "scipy"),
)


def package_versions() -> dict[str, str]:
    """The versions of the frameworks that are imported; nothing is imported for it."""
    found: dict[str, str] = {}
    for name in _FRAMEWORKS:
        with contextlib.suppress(Exception):  # a module of the user may have such a name
            version = getattr(sys.modules.get(name), "__version__", None)
            if version is not None:
                found[name] = str(version)[:100]
    with contextlib.suppress(Exception):
        cuda = getattr(sys.modules.get("torch.version"), "cuda", None)
        if cuda:
            found["cuda"] = str(cuda)[:100]
    return found
