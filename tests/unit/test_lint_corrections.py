"""The corrected lines, to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._check.lint import Surroundings, fix, lint

OPTIONS = "#SBATCH --time=8:00:00 --requeue --open-mode=append"


def corrected(tmp_path: Path, *lines: str) -> list[str]:
    text = "\n".join(["#!/bin/bash", OPTIONS, *lines, ""])
    return fix(text, Surroundings(tmp_path, tmp_path)).splitlines()[2:]


@pytest.mark.parametrize(
    ("options", "command", "expected"),
    [
        ("", "python train.py", "srun python train.py"),
        ("", "A=1 python train.py", "A=1 srun python train.py"),
        ("", "time python train.py", "time srun python train.py"),
        ("", "timeout 7h python train.py", "timeout 7h srun python train.py"),
        (
            "",
            "cd x && python train.py 2>&1 | tee log",
            "cd x && srun python train.py 2>&1 | tee log",
        ),
        ("", "exec python train.py", "exec srun python train.py"),
        ("", "~/env/bin/python train.py", "srun ~/env/bin/python train.py"),
        ("", 'apptainer exec "$I" python train.py', 'srun apptainer exec "$I" python train.py'),
        (" --ntasks=4", "python train.py", "srun --ntasks=1 python train.py"),
        (" -N2", "python train.py", "srun --nodes=1 --ntasks=1 python train.py"),
        (
            " -c 8",
            "python train.py",
            'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" python train.py',
        ),
    ],
)
def test_a_bare_python_becomes_a_step(tmp_path, options, command, expected):
    assert corrected(tmp_path, f"#SBATCH --signal=USR2@60{options}", command)[1] == expected


def test_a_script_that_uses_holdfast_gets_its_leader(tmp_path):
    Path(tmp_path, "train.py").write_text("import holdfast\n")
    lines = corrected(tmp_path, "#SBATCH --signal=USR2@60", "python train.py")
    assert lines[1] == "srun holdfast run -- python train.py"
    lines = corrected(tmp_path, "#SBATCH --signal=USR2@60", "srun torchrun train.py")
    assert lines[1] == "srun holdfast run -- torchrun train.py"


def test_the_signal_is_added_only_for_a_program_that_hears_it(tmp_path):
    """To any other it would be the end, a minute or two before the limit."""
    Path(tmp_path, "train.py").write_text("print('deaf')\n")
    assert corrected(tmp_path, "python train.py") == ["srun python train.py"]
    Path(tmp_path, "train.py").write_text("signal.signal(signal.SIGUSR2, save)\n")
    assert corrected(tmp_path, "python train.py") == [
        "#SBATCH --signal=USR2@120",
        "srun python train.py",
    ]


def test_b_goes_and_srun_comes(tmp_path):
    assert corrected(tmp_path, "#SBATCH --signal=B:SIGUSR1@90", "python train.py") == [
        "#SBATCH --signal=SIGUSR1@90",
        "srun python train.py",
    ]


def test_a_trap_gets_a_training_that_it_need_not_wait_for(tmp_path):
    lines = corrected(
        tmp_path, "#SBATCH --signal=B:USR2@60", "trap 'date' USR2", "python train.py; echo $?"
    )
    assert lines == [
        "#SBATCH --signal=B:USR2@60",
        "trap 'kill -USR2 \"$trainer\"; date' USR2",
        "python train.py &",
        "trainer=$!",
        'wait "$trainer" || wait "$trainer"; echo $?',
    ]


def test_torchrun_is_told_to_pass_the_signal_on(tmp_path):
    flag = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
    lines = corrected(
        tmp_path,
        "#SBATCH --signal=USR2@60",
        "srun torchrun \\",
        "  train.py",
    )
    assert lines[1:] == [f"srun torchrun {flag} \\", "  train.py"]


def test_late_options_move_up_in_their_order(tmp_path):
    lines = corrected(
        tmp_path, "", "true", "#SBATCH --signal=USR2@60", "#SBATCH -J x", "srun python train.py"
    )
    assert lines == [
        "#SBATCH --signal=USR2@60",
        "#SBATCH -J x",
        "",
        "true",
        "srun python train.py",
    ]


def test_what_is_not_understood_is_left_alone(tmp_path):
    """Options are still read, since sbatch reads them without reading the rest."""
    lines = ["#SBATCH --signal=B:USR2@60", 'echo "never closed', "python train.py"]
    assert corrected(tmp_path, *lines) == lines


def test_bytes_that_are_no_text_survive(tmp_path):
    raw = (
        b"#!/bin/bash\n# caf\xe9\n#SBATCH --time=60 --requeue --open-mode=append --signal=USR2@9\n"
    )
    text = raw.decode("utf-8", errors="surrogateescape")
    done = fix(text + "srun python train.py\n", Surroundings(tmp_path, tmp_path))
    assert b"# caf\xe9\n" in done.encode("utf-8", errors="surrogateescape")
    assert "--signal=USR2@120" in done


def test_a_folder_of_the_log_is_looked_for_where_the_job_is_submitted(tmp_path):
    text = f"#!/bin/bash\n{OPTIONS} -o logs/%j.out --signal=USR2@60\nsrun python train.py\n"
    around = Surroundings(tmp_path, tmp_path)
    assert [each.rule for each in lint(text, around)] == ["log-folder-missing"]
    Path(tmp_path, "logs").mkdir()
    assert lint(text, around) == []
    elsewhere = text.replace("logs/", "/no-such-disk/logs/")
    assert lint(elsewhere, around) == []  # of another machine's disk nothing is known


def test_a_rule_can_be_left_out(tmp_path):
    text = f"#!/bin/bash\n{OPTIONS} --signal=USR2@60\npython train.py\n"
    around = Surroundings(tmp_path, tmp_path, ignored=("signal-never-arrives",))
    assert lint(text, around) == []
    assert fix(text, around) == text
