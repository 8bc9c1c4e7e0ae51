"""A batch job as it was submitted, so that it can be submitted again: script, options, folder.

SLURM keeps the script, but not the command line of sbatch. The options that are not in the script
are read from the controller.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any

from holdfast._environment.secrets import redact_text, redact_words
from holdfast._environment.slurm import controller
from holdfast._environment.slurm.options import batch_options

_MOST_BYTES = 256 << 10
_OPTIONS = {
    "JobName": "job-name",
    "Account": "account",
    "QOS": "qos",
    "Partition": "partition",
    "TimeLimit": "time",
    "NumNodes": "nodes",
    "NumTasks": "ntasks",
    "CPUs/Task": "cpus-per-task",
    "MinMemoryNode": "mem",
    "MinMemoryCPU": "mem-per-cpu",
    "Features": "constraint",
    "Reservation": "reservation",
    "TresPerNode": "gres",
    "TresPerJob": "gpus",
    "TresPerTask": "gpus-per-task",
}
_NOTHING = ("", "(null)", "N/A", "None", "UNLIMITED", "0")
# If the script has one of these, SLURM has computed the option from it.
_FOLLOWS = {
    "ntasks": ("ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "ntasks-per-core"),
    "cpus-per-task": ("cpus-per-gpu",),
    "mem": ("mem-per-cpu", "mem-per-gpu"),
    "mem-per-cpu": ("mem", "mem-per-gpu"),
    "gres": ("gpus-per-node", "gpus"),
    "gpus": ("gres", "gpus-per-node", "gpus-per-task"),
}


def read_batch(job: str) -> dict[str, Any] | None:
    """The record of a batch job in start.json; None without a batch job or an answer.

    The `folder` of sbatch, the `path` and `arguments` of the script, its text without secrets
    (`script`, None if it is long), the `digest` of the whole text, and `options` not in the text.
    """
    lines = controller.describe_job(job)
    script = controller.batch_script(job)
    if not lines or script is None:
        return None
    options = submitted_options(lines[0], batch_options(script))
    if "_" in job:
        options.append(f"--array={job.partition('_')[2]}")
    command = _field(lines[0], "Command", "WorkDir")
    path, *arguments = command.split(" ") if command not in _NOTHING else [""]
    shown = redact_text(script)
    words = redact_words(arguments)
    return {
        "folder": _field(lines[0], "WorkDir", "StdErr"),
        "path": path,
        "arguments": words.words,
        "options": options,
        "digest": digest_of(script),
        "script": shown if len(shown) <= _MOST_BYTES else None,
        "has_left_out": shown != script or bool(words.left_out),
    }


def digest_of(script: str) -> str:
    return hashlib.sha256(script.encode(errors="surrogateescape")).hexdigest()


def submitted_options(line: str, given: Mapping[str, str]) -> list[str]:
    """The options in a job's line of `scontrol show job -o` that its script does not have.

    >>> submitted_options("JobId=1 JobName=a UserId=x(0) TimeLimit=00:03:00 NumNodes=1", {})
    ['--job-name=a', '--time=00:03:00', '--nodes=1']
    """
    found: list[str] = []
    for field, option in _OPTIONS.items():
        if field == "JobName":
            value = _field(line, field, "UserId")
        else:
            value = controller.field_of(line, field)
        is_given = any(name in given for name in (option, *_FOLLOWS.get(option, ())))
        if is_given or value in _NOTHING:
            continue
        if field.startswith("Tres"):
            value = re.sub(r"gres[:/]", "", value)
            if option != "gres":
                value = value.removeprefix("gpu").lstrip(":=") or "1"
        if option == "nodes":
            value = value.partition("-")[0]
        found.append(f"--{option}={value}")
    number, out = line.partition(" ")[0].partition("=")[2], _field(line, "StdOut", "Power")
    if "output" not in given and out not in _NOTHING and not out.endswith(f"/slurm-{number}.out"):
        folder, slash, name = out.rpartition("/")
        name = re.sub(rf"(?<!\d){re.escape(number)}(?!\d)", "%j", name)
        found.append(f"--output={folder}{slash}{name}")
    return found


def _field(line: str, name: str, following: str) -> str:
    """A value that may contain spaces: it ends at the next field."""
    match = re.search(rf" {name}=(.*?) {following}=", f"{line} ")
    return match[1].strip() if match else ""
