"""The only file that reads the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# What tells a process that it is a rank, and of what.
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
# What tells a process that it is part of a job of SLURM, and who leads it.
_OF_JOB = (
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"),
    *("SLURM_TASK_PID", "TORCHELASTIC_RUN_ID", "HOLDFAST_LEADER", "HOLDFAST_MARKER"),
    "SLURM_JOB_START_TIME",
)
# What sbatch would hand on to another job, which then takes itself for this one.
_OF_THIS_JOB_ALONE = (
    *("SLURM_RESTART_COUNT", "HOLDFAST_MARKER", "HOLDFAST_LEADER"),
    *("HOLDFAST_LED", "HOLDFAST_RESTART", "HOLDFAST_HANG_TIMEOUT", "HOLDFAST_SPARE"),
)
_NOT_FOR_CHILDREN = (
    *("PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC"),
    "HOLDFAST_ERRAND",  # the keeper is no script to be watched
)


def fault_spec() -> str:
    """The commit stage at which the tests kill this process: `stage@marker-file`, or nothing."""
    return os.environ.get("HOLDFAST_FAULT", "")


def whole() -> dict[str, str]:
    """All of it, for a program of the user's own."""
    return dict(os.environ)


def state_folder() -> str:
    """Where holdfast keeps what belongs to no run; empty if there is no such place."""
    if chosen := os.environ.get("HOLDFAST_STATE", ""):
        return chosen
    if base := os.environ.get("XDG_STATE_HOME", ""):
        return os.path.join(base, "holdfast")  # noqa: PTH118  quicker than a Path
    home = os.path.expanduser("~")  # noqa: PTH111  as above
    return "" if home == "~" else os.path.join(home, ".local/state/holdfast")  # noqa: PTH118


def first_pause_seconds() -> float:
    """How long `holdfast run` pauses before the first restart that counts; for the tests."""
    try:
        return max(0.0, float(os.environ.get("HOLDFAST_PAUSE_SECONDS", "")))
    except ValueError:
        return 1.0


def mirror_piece_bytes() -> int:
    """How large the pieces are in which checkpoints go to a mirror; 0: as is usual. For tests."""
    text = os.environ.get("HOLDFAST_MIRROR_PIECE_BYTES", "")
    return int(text) if text.isdigit() else 0


def hang_timeout() -> str:
    """What `holdfast run --hang-timeout` has asked for: seconds, "auto", or nothing."""
    return os.environ.get("HOLDFAST_HANG_TIMEOUT", "")


def py_spy() -> str:
    """Which py-spy reads the stacks of a run that hangs: a path, "off", or "" for any there is."""
    return os.environ.get("HOLDFAST_PY_SPY", "").strip()


def notices() -> str:
    """HOLDFAST_NOTICES, for settings that say "auto"."""
    from holdfast._environment.cloud.provider import CLOUDS  # only where a run is opened

    wish = os.environ.get("HOLDFAST_NOTICES", "").strip().lower()
    return wish if wish in (*CLOUDS, "off") else "auto"


def notices_address() -> str:
    """Where the metadata service is, for the tests: http://HOST:PORT, or nothing."""
    return os.environ.get("HOLDFAST_NOTICES_ADDRESS", "").strip()


def local_rank() -> int:
    """Which of the ranks on this machine this is, as far as a launcher says so."""
    text = os.environ.get("LOCAL_RANK", "")
    return int(text) if text.isdigit() else 0


def is_in_ray() -> bool:
    """Whether this process is a worker of Ray, or was started by one."""
    return "RAY_RAYLET_PID" in os.environ


def grace_seconds() -> str:
    """HOLDFAST_GRACE_SECONDS: the time between SIGTERM and the kill; not checked."""
    return os.environ.get("HOLDFAST_GRACE_SECONDS", "").strip()


def child_environment() -> dict[str, str]:
    """The environment for a process of ours: without what would make its start slower."""
    environment = dict(os.environ)
    for name in _NOT_FOR_CHILDREN:
        environment.pop(name, None)
    return environment


def of_interpreter() -> dict[str, str]:
    """The environment for a process that is no part of the training: only what Python needs."""
    names = ("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL")
    return {name: os.environ[name] for name in names if name in os.environ}


def keep_memory() -> str:
    """HOLDFAST_KEEP_MEMORY: how long a waiting arena stays; not checked."""
    return os.environ.get("HOLDFAST_KEEP_MEMORY", "").strip()


def is_led() -> bool:
    """Whether `holdfast run` has started this process, or one above it."""
    return bool(os.environ.get("HOLDFAST_LEADER"))


def has_hash_seed() -> bool:
    """Whether the order of sets is chosen by the user."""
    return "PYTHONHASHSEED" in os.environ


def for_another_job() -> dict[str, str]:
    """The environment for sbatch: without what SLURM and holdfast say of the job we are in."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THIS_JOB_ALONE and not name.startswith("SLURM_ARRAY_")
    }


def progress_wish() -> str:
    """What HOLDFAST_PROGRESS asks for: "off", "plain", or "" for whatever suits."""
    wish = os.environ.get("HOLDFAST_PROGRESS", "").strip().lower()
    if wish in ("0", "off", "no", "false"):
        return "off"
    return "plain" if wish == "plain" else ""


def terminal_is_dumb() -> bool:
    """Whether the terminal can only append."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def has_screen() -> bool:
    """Whether a browser that is opened here would be seen by whoever has called us."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def errand_text() -> str:
    """What a proof has asked this process to tell, as JSON; nothing in an ordinary run."""
    return os.environ.get("HOLDFAST_ERRAND", "")


def temporary_folder() -> str:
    """Where files of a moment go; without making one to see whether it can be written to."""
    return os.environ.get("TMPDIR") or "/tmp"


def led_folder() -> Path | None:
    """Where `holdfast run`, if it has started this process, keeps what it sees of it."""
    place = os.environ.get("HOLDFAST_LED", "")
    return Path(place) if place else None


def has_spare() -> bool:
    """Whether `holdfast run` would like to know what this process has imported."""
    return os.environ.get("HOLDFAST_SPARE", "") == "1"


def spare_delay_seconds() -> float:
    """How long a run is open before `holdfast run` starts a spare; for the tests."""
    try:
        return max(0.0, float(os.environ.get("HOLDFAST_SPARE_SECONDS", "")))
    except ValueError:
        return 5.0


def changed_since_start() -> dict[str, int | None]:
    """A checksum of each variable that this process has set, None for each that it has removed."""
    from zlib import crc32  # would make every start slower

    try:
        content = Path("/proc/self/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0") if entry)
    start = {name: value for name, _, value in pairs}
    found: dict[str, int | None] = dict.fromkeys(start.keys() - os.environ.keys())
    for name, value in os.environ.items():
        if start.get(name) != value:
            found[name] = crc32(os.fsencode(value))
    return found


def is_started_again() -> bool:
    """Whether `holdfast run` has started this process after another one had died."""
    return os.environ.get("HOLDFAST_RESTART", "0") != "0"


def rank() -> int:
    """Which process of a job that was started by torchrun this is."""
    text = os.environ.get("RANK", "")
    return int(text) if text.isdigit() else 0


def rank_and_size() -> tuple[int, int] | None:
    """RANK and WORLD_SIZE, if a launcher has set both to whole numbers."""
    words = (os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", ""))
    return (int(words[0]), int(words[1])) if all(word.isdigit() for word in words) else None


def is_torchrun() -> bool:
    """Whether an agent of torchrun has started this process."""
    return bool(os.environ.get("TORCHELASTIC_RUN_ID"))


def restarts_left() -> bool:
    """Whether torchrun would start the ranks once more if one of them failed."""
    words = (
        os.environ.get("TORCHELASTIC_RESTART_COUNT", ""),
        os.environ.get("TORCHELASTIC_MAX_RESTARTS", ""),
    )
    return all(word.isdigit() for word in words) and int(words[0]) < int(words[1])


def restart_count() -> str:
    """Which life of the ranks this is, for the agent of torchrun that started it."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


def job_words() -> list[str]:
    """What the ranks of one job have in common, and those of another have not."""
    names = (
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    )
    return [os.environ.get(name, "") for name in names]


def tf_config() -> str:
    """What tells a process its place in a TensorFlow cluster, as JSON."""
    return os.environ.get("TF_CONFIG", "")


def master_address() -> str:
    """The host of rank 0, as the others know it."""
    return os.environ.get("MASTER_ADDR", "")


def chosen_address() -> str:
    """The address by which the keepers of other hosts reach this one, if somebody chose it."""
    return os.environ.get("HOLDFAST_ADDRESS", "")


def of_ranks() -> dict[str, str]:
    """The variables that tell a process that it is a rank, as they are now."""
    return {name: os.environ[name] for name in _OF_RANKS if name in os.environ}


def of_job() -> dict[str, str]:
    """The variables that tell a process of its job."""
    return {name: os.environ[name] for name in _OF_JOB if name in os.environ}


def of_ranks_at_start(process: int | str = "self") -> dict[str, str]:
    """The same as a process was started with, whatever it has done since; none without a /proc."""
    found = _at_start(process)
    return {name: value for name, value in found.items() if name in _OF_RANKS}


def whole_at_start() -> dict[str, str]:
    """All that this process was started with; as it is now where the system does not say."""
    found = _at_start("self")
    # A program that has changed its title may have written over its first environment.
    return found if "PATH" in found or "PATH" not in os.environ else dict(os.environ)


def _at_start(process: int | str) -> dict[str, str]:
    try:
        content = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return {}
    pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0"))
    return {name: value for name, _, value in pairs if name}
