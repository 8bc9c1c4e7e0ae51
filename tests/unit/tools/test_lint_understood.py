"""What lint says of a script that it cannot read, and what it must not take for an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._tools.lint.finding import Surroundings
from holdfast._tools.lint.lint import fix, lint

HEAD = "#!/bin/bash\n#SBATCH --time=8:00:00 --requeue --open-mode=append --signal=USR2@60"


def rules(tmp_path: Path, *lines: str, head: str = HEAD) -> list[str]:
    text = "\n".join([head, *lines, ""])
    return [each.rule for each in lint(text, Surroundings(tmp_path, tmp_path))]


@pytest.mark.parametrize(
    "lines",
    [
        ["bash $SCRIPT"],
        ["bash -l ./run_experiment.sh --lr 1"],
        ["./run.sh"],
        ["source run.sh"],
        ["make train"],
        ["$CMD"],
        ['eval "$CMD"'],
        ["srun $CMD"],
        ["srun ./launch"],
        ["srun --multi-prog tasks.conf"],
        ["mpirun python train.py"],
        ["parallel python train.py --seed {} ::: 1 2 3"],
        ["docker run --gpus all image python train.py"],
        ["singularity run --nv image.sif"],
        ["python - <<EOF", "import train", "EOF"],
        ["julia train.jl"],
        ["for s in 1 2; do ./one $s; done"],
        ['echo "never closed', "python train.py"],
    ],
)
def test_what_is_not_understood_is_said(tmp_path, lines):
    assert rules(tmp_path, *lines) == ["not-understood"]
    text = "\n".join([HEAD, *lines, ""])
    assert fix(text, Surroundings(tmp_path, tmp_path)) == text


def test_another_language_is_not_understood(tmp_path):
    head = HEAD.replace("bash", "tcsh")
    assert rules(tmp_path, "foreach s (1 2)", "end", head=head) == ["not-understood"]


@pytest.mark.parametrize(
    "line",
    [
        'srun python "$HOME/train.py"',
        'srun python "${ROOT}/src/train.py" --lr 1',
        'srun python "$SCRIPT"',
        "srun python $1",
        "srun python -u $SCRIPT $ARGS",
        "srun torchrun --signals-to-handle=SIGUSR2 $SCRIPT",
    ],
)
def test_a_script_whose_name_stands_in_a_variable_is_a_training(tmp_path, line):
    assert rules(tmp_path, line) == []
    assert "signal-never-arrives" in rules(tmp_path, line.removeprefix("srun "))


@pytest.mark.parametrize(
    "lines",
    [
        ["module load cuda", "rsync -a a b", "echo done"],
        ["source ~/venv/bin/activate", "cd x && mkdir -p y", "squeue -j $SLURM_JOB_ID"],
        ["python -c 'import torch; print(torch.__version__)'", "pip install x"],
        ['python "$HOME/setup.py" develop', 'python -c "$CODE"'],
    ],
)
def test_a_script_that_only_prepares_is_understood(tmp_path, lines):
    assert rules(tmp_path, *lines) == []


@pytest.mark.parametrize(
    ("option", "lines"),
    [
        ('--comment="<ECCV deadline>"', []),
        ("--partition={{ partition }}", []),
        ("--job-name={{name}}", ["srun python train.py --name {{name}}"]),
        ("--time={{ time }}", []),
        ("--output=/checkpoint/user/logs/%j.out", []),
        ("--output=/home/user-of-another-cluster/logs/%j.out", []),
        ("--output=/tmp/of-the-node/%j.out", []),
    ],
)
def test_what_another_place_fills_in_is_no_error(tmp_path, option, lines):
    head = f"{HEAD}\n#SBATCH {option}"
    assert rules(tmp_path, "srun python train.py", *lines, head=head) == []


def test_an_absolute_folder_of_this_machine_is_still_looked_for(tmp_path):
    head = f"{HEAD}\n#SBATCH --output={tmp_path}/logs/%j.out"
    assert rules(tmp_path, "srun python train.py", head=head) == ["log-folder-missing"]


@pytest.mark.parametrize(
    "line", ["{% if account %}", "{{ extra_lines }}", "  {{ executable }} {{ arguments }}"]
)
def test_a_template_is_not_judged_before_it_is_a_script(tmp_path, line):
    assert rules(tmp_path, line, "#SBATCH --gres=gpu:1", "python train.py") == ["not-understood"]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("bash $SCRIPT", ["trap-waits-for-command", "not-understood"]),
        ("bash $SCRIPT &\nwait || wait", ["not-understood"]),
        ("srun $CMD", ["trap-waits-for-command", "not-understood"]),
    ],
)
def test_a_trap_waits_for_any_command_in_the_foreground(tmp_path, line, expected):
    head = HEAD.replace("USR2", "B:USR2")
    found = rules(tmp_path, "trap 'scontrol requeue $SLURM_JOB_ID' USR2", line, head=head)
    assert [rule for rule in found if rule != "trap-does-not-forward"] == expected


def test_without_a_trap_the_shell_dies_whatever_it_waits_for(tmp_path):
    head = HEAD.replace("USR2", "B:USR2")
    assert rules(tmp_path, "bash $SCRIPT", head=head) == ["signal-kills-shell", "not-understood"]


@pytest.mark.parametrize(
    ("signal", "status"), [("USR1", 138), ("USR2", 140), ("INT", 130), ("10", 138)]
)
def test_the_status_is_that_of_the_signal(tmp_path, signal, status):
    head = HEAD.replace("USR2", f"B:{signal}")
    name = {"10": "USR1"}.get(signal, signal)
    lines = [head, f"trap 'kill -{name} $!' {name}", "python train.py &", "wait", ""]
    (found,) = lint("\n".join(lines), Surroundings(tmp_path, tmp_path))
    assert f"ends this wait with status {status} " in found.message
