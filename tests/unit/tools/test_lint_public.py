"""`--fix` on batch scripts as they are published: bash still reads them, and they do the same.

The scripts are in `sbatch/public`. One from which something is left to a person ends with its
rules: `# left: launcher-dies`. Here they run with stand-ins for SLURM and Python, which write
down what is started; tests/slurm/test_fixed_scripts.py runs ten of them on a real SLURM.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from holdfast._tools.lint.finding import NOT_UNDERSTOOD, Surroundings
from holdfast._tools.lint.lint import fix, lint

SCRIPTS = sorted((Path(__file__).parents[1] / "sbatch" / "public").glob("*.sbatch"))
# Options of srun with a value in the next word are not in these scripts.
_SRUN = '#!/bin/bash\nwhile [[ $1 == -* ]]; do shift; done\nexec "$@"\n'
_NOTE = """#!/bin/bash
[ "${0##*/}" != scontrol ] || [ "$1" != show ] || { echo n1; exit; }
echo "${0##*/} $* (in ${PWD##*/}, GPU $CUDA_VISIBLE_DEVICES)" >> "$TRACE"
exit "${STATUS:-0}"
"""
_NOTED = "python torchrun accelerate deepspeed apptainer singularity uv sbatch scontrol"
_SILENT = "module conda nvidia-smi"
# What a change adds or replaces in the words of a launcher.
_CHANGED = re.compile(r" --signals-to-handle=SIGTERM\S+|(?<=[: =])29500\b|\b2\d{4}\b(?= )")


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Path:
    folder: Path = tmp_path_factory.mktemp("bin")
    texts = dict.fromkeys(_NOTED.split(), _NOTE) | {"srun": _SRUN}
    texts |= dict.fromkeys(_SILENT.split(), "#!/bin/sh\n")
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return folder


def run(text: str, place: Path, programs: Path, status: int = 0) -> tuple[int, list[str]]:
    """The script's status, and what it has started."""
    home = place / "home"
    for name in ("pretraining", "projects/vision/.venv/bin", ".venv/bin"):
        (home / name).mkdir(parents=True, exist_ok=True)
    for name in ("projects/vision/.venv/bin/activate", ".venv/bin/activate"):
        (home / name).touch()
    trace = place / "trace"
    trace.write_text("")
    script = place / "job.sh"
    script.write_text(text)
    ended, is_open = os.pipe()
    done = subprocess.run(
        ["bash", script, "a", "b"],
        pass_fds=[is_open],
        cwd=home,
        env={
            "HOME": str(home), "TRACE": str(trace), "STATUS": str(status),
            "PATH": f"{programs}{os.pathsep}/usr/bin:/bin",
            "SLURM_JOB_ID": "12", "SLURM_NNODES": "2", "SLURM_NODEID": "0",
            "SLURM_CPUS_PER_TASK": "4", "SLURM_JOB_NODELIST": "n[1-2]",
            "SLURM_ARRAY_JOB_ID": "12", "SLURM_ARRAY_TASK_ID": "1",
            "SLURM_SUBMIT_DIR": str(home), "SCRATCH": "/scratch",
        },
        capture_output=True,
        text=True,
        timeout=30,
    )  # fmt: skip
    os.close(is_open)
    with open(ended, "rb") as file:  # noqa: PTH123  a number
        file.read()  # until what it left in the background has ended, too
    started = [_CHANGED.sub("", line) for line in trace.read_text().splitlines()]
    assert "syntax error" not in done.stderr
    return done.returncode, sorted(started)


def test_there_are_thirty_of_them():
    assert len(SCRIPTS) >= 30


@pytest.mark.parametrize("path", SCRIPTS, ids=lambda path: path.stem)
def test_a_published_script_means_the_same_after_a_fix(path, tmp_path, programs):
    text = path.read_text()
    around = Surroundings(tmp_path, tmp_path)
    corrected = fix(text, around)
    subprocess.run(["bash", "-n"], input=corrected, text=True, check=True, timeout=20)
    assert fix(corrected, around) == corrected
    expected = re.search(r"^# left: (.*)$", text, re.MULTILINE)
    left = [each for each in lint(corrected, around) if each.severity != "hint"]
    left += [each for each in lint(corrected, around) if each.rule == NOT_UNDERSTOOD]
    assert [each.rule for each in left] == (expected[1].split() if expected else [])
    before, after = (run(each, tmp_path, programs) for each in (text, corrected))
    assert before[1] or NOT_UNDERSTOOD in [each.rule for each in left]
    assert after == before
    # One that fails starts nothing else either, and hides it no more than before.
    before, after = (run(each, tmp_path, programs, status=3) for each in (text, corrected))
    assert after[1] == before[1]
    assert after[0] == before[0] or after[0] != 0
