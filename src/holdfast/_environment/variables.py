"""The only file that reads the environment."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# The variables that make a process a rank.
_OF_RANKS = (
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_USE_AGENT_STORE"),
    *("SLURM_PROCID", "SLURM_NTASKS", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_STEP_NUM_TASKS"),
    *("SLURM_LOCALID", "SLURM_NODEID", "SLURM_STEP_NODELIST", "SLURM_STEP_TASKS_PER_NODE"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "PMI_RANK", "PMI_SIZE"),
    *("CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"),
)
# The variables of a SLURM job and of the process that leads it.
_OF_JOB = (
    *("SLURM_JOB_ID", "SLURM_ARRAY_JOB_ID", "SLURM_ARRAY_TASK_ID", "SLURM_RESTART_COUNT"),
    *("SLURM_TASK_PID", "TORCHELASTIC_RUN_ID", "HOLDFAST_LEADER", "HOLDFAST_MARKER"),
    "SLURM_JOB_START_TIME",
)
# sbatch would pass these on, and the new job would take itself for this one.
_OF_THIS_JOB_ALONE = (
    *("SLURM_RESTART_COUNT", "HOLDFAST_MARKER", "HOLDFAST_LEADER"),
    *("HOLDFAST_LED", "HOLDFAST_RESTART", "HOLDFAST_HANG_TIMEOUT", "HOLDFAST_SPARE"),
)
_NOT_FOR_CHILDREN = (
    *("PYTHONSTARTUP", "PYTHONPROFILEIMPORTTIME", "PYTHONTRACEMALLOC"),
    "HOLDFAST_ERRAND",  # a proof observes the script, not the keeper
)


def text(name: str) -> str:
    """One variable without spaces around it; empty if it is not set."""
    return os.environ.get(name, "").strip()


def whole_number(name: str) -> int:
    """One variable as a number; 0 if it is none."""
    value = text(name)
    return int(value) if value.isdigit() else 0


def seconds(name: str, default: float) -> float:
    """One variable as a time of 0 or more."""
    try:
        return max(0.0, float(text(name)))
    except ValueError:
        return default


def whole() -> dict[str, str]:
    """All variables, for a program of the user."""
    return dict(os.environ)


def state_folder() -> str:
    """The folder for records that belong to no run; empty if there is no such place."""
    if chosen := os.environ.get("HOLDFAST_STATE", ""):
        return chosen
    if base := os.environ.get("XDG_STATE_HOME", ""):
        return os.path.join(base, "holdfast")  # noqa: PTH118  quicker than a Path
    home = os.path.expanduser("~")  # noqa: PTH111  as above
    return "" if home == "~" else os.path.join(home, ".local/state/holdfast")  # noqa: PTH118  as above


def notices() -> str:
    """HOLDFAST_NOTICES, for settings that say "auto"."""
    from holdfast._environment.cloud.notice import CLOUDS  # only where a run is opened

    wish = text("HOLDFAST_NOTICES").lower()
    return wish if wish in (*CLOUDS, "off") else "auto"


def child_environment() -> dict[str, str]:
    """The environment of our own processes, without variables that slow down their start."""
    return {name: value for name, value in os.environ.items() if name not in _NOT_FOR_CHILDREN}


def of_interpreter() -> dict[str, str]:
    """The environment of a process outside the training: only what Python needs."""
    return _chosen(("PATH", "LD_LIBRARY_PATH", "PYTHONHOME", "LANG", "LC_ALL"))


def for_another_job() -> dict[str, str]:
    """The environment for sbatch, without the variables of the current job."""
    return {
        name: value
        for name, value in os.environ.items()
        if name not in _OF_THIS_JOB_ALONE and not name.startswith("SLURM_ARRAY_")
    }


def progress_wish() -> str:
    """HOLDFAST_PROGRESS: "off", "plain", or "" for the default."""
    wish = text("HOLDFAST_PROGRESS").lower()
    if wish in ("0", "off", "no", "false"):
        return "off"
    return "plain" if wish == "plain" else ""


def terminal_is_dumb() -> bool:
    """True if the terminal can only append."""
    return os.environ.get("TERM", "").lower() in ("dumb", "unknown")


def has_screen() -> bool:
    """True if the user would see a browser that is opened here."""
    if os.environ.get("SSH_CONNECTION"):
        return False
    if sys.platform in ("darwin", "win32"):
        return True
    return bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def temporary_folder() -> str:
    """Unlike tempfile.gettempdir(), this writes no file to test the folder."""
    return os.environ.get("TMPDIR") or "/tmp"


def led_folder() -> Path | None:
    """The folder of `holdfast run` for its records of this process; None without a leader."""
    place = os.environ.get("HOLDFAST_LED", "")
    return Path(place) if place else None


def changed_since_start() -> dict[str, int | None]:
    """A checksum of each variable that this process has set; None for each that it has removed."""
    from zlib import crc32  # would make every start slower

    start = _at_start("self")
    if start is None:
        return {}
    found: dict[str, int | None] = dict.fromkeys(start.keys() - os.environ.keys())
    for name, value in os.environ.items():
        if start.get(name) != value:
            found[name] = crc32(os.fsencode(value))
    return found


def rank_and_size() -> tuple[int, int] | None:
    """RANK and WORLD_SIZE, if a launcher has set both to whole numbers."""
    words = (os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", ""))
    return (int(words[0]), int(words[1])) if all(word.isdigit() for word in words) else None


def restarts_left() -> bool:
    """True if torchrun would restart the ranks after a failure of one of them."""
    words = (text("TORCHELASTIC_RESTART_COUNT"), text("TORCHELASTIC_MAX_RESTARTS"))
    return all(word.isdigit() for word in words) and int(words[0]) < int(words[1])


def job_words() -> list[str]:
    """Values that are equal for all ranks of a job and differ between jobs."""
    names = (
        *("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "TORCHELASTIC_RUN_ID"),
        *("TORCHELASTIC_RESTART_COUNT", "SLURM_JOB_ID", "SLURM_STEP_ID", "SLURM_RESTART_COUNT"),
    )
    return [os.environ.get(name, "") for name in names]


def of_ranks() -> dict[str, str]:
    return _chosen(_OF_RANKS)


def of_job() -> dict[str, str]:
    return _chosen(_OF_JOB)


def _chosen(names: tuple[str, ...]) -> dict[str, str]:
    return {name: os.environ[name] for name in names if name in os.environ}


def of_ranks_at_start(process: int | str = "self") -> dict[str, str]:
    """The variables of ranks that a process was started with; empty without /proc."""
    found = _at_start(process) or {}
    return {name: value for name, value in found.items() if name in _OF_RANKS}


def whole_at_start() -> dict[str, str]:
    """All variables that this process was started with; the current ones without /proc."""
    found = _at_start("self") or {}
    # A program that has changed its title may have written over its first environment.
    return found if "PATH" in found or "PATH" not in os.environ else dict(os.environ)


def _at_start(process: int | str) -> dict[str, str] | None:
    try:
        content = Path(f"/proc/{process}/environ").read_bytes()
    except OSError:
        return None
    pairs = (entry.partition("=") for entry in os.fsdecode(content).split("\0"))
    return {name: value for name, _, value in pairs if name}
