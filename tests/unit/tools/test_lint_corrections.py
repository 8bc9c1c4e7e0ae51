"""The corrected lines, to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._tools.lint.finding import Surroundings
from holdfast._tools.lint.lint import fix, lint

OPTIONS = "#SBATCH --time=8:00:00 --requeue --open-mode=append"

GUARD = """bash -c 'trap "" USR2; exec "$@"' _"""
FLAG = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"


def corrected(tmp_path: Path, *lines: str) -> list[str]:
    text = "\n".join(["#!/bin/bash", OPTIONS, *lines, ""])
    return fix(text, Surroundings(tmp_path, tmp_path)).splitlines()[2:]


@pytest.mark.parametrize(
    ("options", "command", "expected"),
    [
        ("", "python train.py", "srun GUARD python train.py"),
        ("", "A=1 python train.py", "A=1 srun GUARD python train.py"),
        ("", "time python train.py", "time srun GUARD python train.py"),
        ("", "timeout 7h python train.py", "timeout 7h srun GUARD python train.py"),
        (
            "",
            "cd x && python train.py 2>&1 | tee log",
            "cd x && srun GUARD python train.py 2>&1 | tee log",
        ),
        ("", "exec python train.py", "exec srun GUARD python train.py"),
        ("", "~/env/bin/python train.py", "srun GUARD ~/env/bin/python train.py"),
        (
            "",
            'apptainer exec "$I" python train.py',
            'srun GUARD apptainer exec "$I" python train.py',
        ),
        (" --ntasks=4", "python train.py", "srun --ntasks=1 GUARD python train.py"),
        (" -N2", "python train.py", "srun --nodes=1 --ntasks=1 GUARD python train.py"),
        (
            " -c 8",
            "python train.py",
            'srun --cpus-per-task="$SLURM_CPUS_PER_TASK" GUARD python train.py',
        ),
    ],
)
def test_a_bare_python_becomes_a_step(tmp_path, options, command, expected):
    """One that nothing kills while it imports."""
    lines = corrected(tmp_path, f"#SBATCH --signal=USR2@60{options}", command)
    assert lines[1] == expected.replace("GUARD", GUARD)


def test_a_script_that_uses_holdfast_gets_its_leader(tmp_path):
    Path(tmp_path, "train.py").write_text("import holdfast\n")
    lines = corrected(tmp_path, "#SBATCH --signal=USR2@60", "python train.py")
    assert lines[1] == f"srun {GUARD} holdfast run -- python train.py"
    lines = corrected(tmp_path, "#SBATCH --signal=USR2@60", "srun torchrun train.py")
    assert lines[1] == f"srun {GUARD} holdfast run -- torchrun train.py"


def test_the_signal_is_added_only_for_a_program_that_hears_it(tmp_path):
    """To any other it would be the end, a minute or two before the limit."""
    Path(tmp_path, "train.py").write_text("print('deaf')\n")
    assert corrected(tmp_path, "python train.py") == ["srun python train.py"]
    Path(tmp_path, "train.py").write_text("signal.signal(signal.SIGUSR2, save)\n")
    assert corrected(tmp_path, "python train.py") == [
        "#SBATCH --signal=USR2@120",
        f"srun {GUARD} python train.py",
    ]


def test_a_script_with_a_deaf_training_is_not_good_after_a_fix(tmp_path):
    """Started by srun it hears the warning, and dies of it: that is for a person to decide."""
    Path(tmp_path, "train.py").write_text("import torch\n")
    lines = corrected(tmp_path, "#SBATCH --signal=USR2@60", "python train.py")
    assert lines == ["#SBATCH --signal=USR2@60", "srun python train.py"]
    text = "\n".join(["#!/bin/bash", OPTIONS, *lines, ""])
    (left,) = lint(text, Surroundings(tmp_path, tmp_path))
    assert (left.rule, left.severity, left.is_fixable) == ("signal-not-handled", "warning", False)
    assert left.message == (
        "train.py installs no handler for SIGUSR2: it dies of it, 60 to 90 s before the limit."
    )
    assert "holdfast.Run" in left.corrected[0]
    assert "no --signal" in left.corrected[1]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"train.py": "import torch, numpy.random\nmodel.eval()\ntorch.sigmoid(x)\n"}, True),
        ({"train.py": "import model\n", "model.py": "from torch import nn\n"}, True),
        ({"train.py": "from a.b import c\n", "a/b.py": "import os\n"}, True),
        ({"train.py": "import a\n", "a.py": "import b\n", "b.py": "import a\n"}, True),
        ({"train.py": "import model\n", "model.py": "import signal\n"}, False),
        ({"train.py": "from a.b import c\n", "a/b.py": "", "a/__init__.py": "import z\n"}, False),
        ({"train.py": "import mine\n"}, False),
        ({"train.py": "from . import other\n"}, False),
        ({"train.py": "import lightning\n"}, False),
        ({"train.py": "from pytorch_lightning import Trainer\n"}, False),
        ({"train.py": "if True:\n    import submitit\n"}, False),
        ({"train.py": "from transformers import Trainer\n"}, False),
        ({"train.py": "import accelerate\n"}, False),
        ({"train.py": "from composer import Trainer\n"}, False),
        ({"train.py": "import holdfast\n"}, False),
        ({"train.py": "loop.add_signal_handler(10, save)\n"}, False),
        ({"train.py": "exec(text)\n"}, False),
        ({"train.py": "import torch\nthis is no python\n"}, False),
        ({}, False),
    ],
)
def test_a_training_is_called_deaf_only_if_that_is_certain(tmp_path, files, expected):
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    text = f"#!/bin/bash\n{OPTIONS} --signal=USR2@60\nsrun python train.py\n"
    found = lint(text, Surroundings(tmp_path, tmp_path))
    assert [each.rule for each in found if each.severity != "hint"] == (
        ["signal-not-handled"] if expected else []
    )


@pytest.mark.parametrize(
    ("line", "left"),
    [
        ("trap 'scontrol requeue $SLURM_JOB_ID' USR2", []),
        ("trap 'echo bye; kill -USR2 $pid; scontrol requeue \"$SLURM_JOB_ID\"' USR2 TERM", []),
        ("cd x && trap 'scontrol requeue 1' USR2", ["cd x && :"]),
        ("trap 'cp a b' USR2", ["trap 'cp a b' USR2"]),
        ("trap '' USR2", ["trap '' USR2"]),
    ],
)
def test_beside_holdfast_a_trap_that_requeues_goes(tmp_path, line, left):
    """Made to run, it would requeue the job before the state is saved."""
    train = "srun holdfast run -- python train.py"
    lines = corrected(tmp_path, "#SBATCH --signal=USR2@60", line, train)
    assert lines == ["#SBATCH --signal=USR2@60", *left, train]


@pytest.mark.parametrize(
    ("lines", "is_told"),
    [
        (["srun holdfast run -- python train.py"], True),
        (["srun holdfast run -- python train.py", "exit $?"], True),
        (["srun holdfast run --max-restarts 5 -- python train.py"], True),
        (["trap : TERM", "srun holdfast run -- python train.py"], False),
        (["trap 'echo end' USR1 SIGTERM", "srun holdfast run -- python train.py"], False),
        (["exec srun holdfast run -- python train.py"], False),
        (["srun holdfast run -- python train.py &", "wait"], False),
        (["srun holdfast run -- python train.py", "rm -r cache"], False),
        (["srun python train.py"], False),
    ],
)
def test_that_bash_takes_the_end_of_the_log_along_is_a_hint(tmp_path, lines, is_told):
    text = "\n".join(["#!/bin/bash", f"{OPTIONS} --signal=USR2@60", *lines, ""])
    found = lint(text, Surroundings(tmp_path, tmp_path))
    assert [(each.rule, each.severity) for each in found] == (
        [("trap-missing", "hint")] if is_told else []
    )


def test_b_goes_and_srun_comes(tmp_path):
    assert corrected(tmp_path, "#SBATCH --signal=B:SIGUSR1@90", "python train.py") == [
        "#SBATCH --signal=SIGUSR1@90",
        f"srun {GUARD.replace('USR2', 'USR1')} python train.py",
    ]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("srun -n 4 python train.py", "srun -n 4 GUARD python train.py"),
        ("srun GUARD python train.py", "srun GUARD python train.py"),
        ("srun holdfast run -- python train.py", "srun holdfast run -- python train.py"),
        ('CMD="srun python train.py"; $CMD', 'CMD="srun python train.py"; $CMD'),
    ],
)
def test_a_step_to_which_the_signal_is_turned_gets_the_guard(tmp_path, before, after):
    lines = corrected(tmp_path, "#SBATCH --signal=B:USR2@60", before.replace("GUARD", GUARD))
    assert lines == ["#SBATCH --signal=USR2@60", after.replace("GUARD", GUARD)]


@pytest.mark.parametrize("signal", ["TERM", "INT", "HUP"])
def test_a_signal_that_also_means_the_end_is_never_ignored(tmp_path, signal):
    lines = corrected(tmp_path, f"#SBATCH --signal={signal}@60", "python train.py")
    assert lines[1] == "srun python train.py"


def test_the_guard_hides_nothing_from_the_other_rules(tmp_path):
    lines = corrected(
        tmp_path,
        "#SBATCH --signal=USR2@60",
        f"srun {GUARD} torchrun --master-port=29500 train.py",
    )
    port = "$((20000 + SLURM_JOB_ID % 10000))"
    assert lines[1] == f"srun {GUARD} torchrun {FLAG} --master-port={port} train.py"


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


def test_every_training_goes_to_the_background(tmp_path):
    lines = corrected(
        tmp_path,
        "#SBATCH --signal=B:USR2@60",
        "trap 'date' USR2",
        "python train.py --stage 1",
        "if true; then",
        "  python train.py --stage 2",
        "fi",
    )
    assert lines == [
        "#SBATCH --signal=B:USR2@60",
        "trap 'kill -USR2 \"$trainer\"; date' USR2",
        "python train.py --stage 1 &",
        "trainer=$!",
        'wait "$trainer" || wait "$trainer"',
        "if true; then",
        "  python train.py --stage 2 &",
        "  trainer=$!",
        '  wait "$trainer" || wait "$trainer"',
        "fi",
    ]


def test_a_trap_tells_all_trainings_that_run_beside_each_other(tmp_path):
    lines = corrected(
        tmp_path,
        "#SBATCH --signal=B:USR1@60",
        "trap 'date' USR1",
        "python train.py --fold 1 &",
        "python train.py --fold 2 &",
        "wait",
    )
    assert lines[1] == "trap 'kill -USR1 $(jobs -p); date' USR1"
    assert lines[-1] == "wait || wait"


def test_each_wait_of_several_trainings_is_repeated(tmp_path):
    lines = corrected(
        tmp_path,
        "#SBATCH --signal=B:USR1@60",
        "trap 'kill -USR1 $!' USR1",
        "python train.py --stage 1 &",
        "wait",
        "python train.py --stage 2 &",
        "wait",
    )
    assert [line for line in lines if "wait" in line] == ["wait || wait"] * 2


@pytest.mark.parametrize(
    "handler",
    [
        ["trap 'sbatch job.sh' USR1"],
        ["trap 'kill -USR1 $!; sbatch \"$0\"' SIGUSR1"],
        ["again() {", "  sbatch \\", "    job.sh", "}", "trap again USR1", "trap again TERM"],
        ["again() { if true; then sbatch job.sh; fi; }", "trap again USR1"],
    ],
)
@pytest.mark.parametrize(
    "training", [["python train.py &", "wait"], ["python train.py"], ["bash $SCRIPT"]]
)
def test_a_trap_that_submits_is_left_to_a_person(tmp_path, handler, training):
    """With a second wait it would run a second time, at SIGTERM, and the jobs would double."""
    lines = ["#SBATCH --signal=B:USR1@60", *handler, *training]
    assert corrected(tmp_path, *lines) == lines
    text = "\n".join(["#!/bin/bash", OPTIONS, *lines, ""])
    found = lint(text, Surroundings(tmp_path, tmp_path))
    rule = "wait-ends-early" if "wait" in training else "trap-waits-for-command"
    (early,) = [each for each in found if each.rule == rule]
    assert any('trap "" USR1 TERM' in line for line in early.corrected)
    assert ("status 138" in early.message) == (rule == "wait-ends-early")
    assert [each.rule for each in found if "SIGTERM submits" in each.message] == (
        ["requeue-after-cancel"] if "trap again TERM" in handler else []
    )


def test_torchrun_is_told_to_pass_the_signal_on(tmp_path):
    lines = corrected(
        tmp_path,
        "#SBATCH --signal=USR2@60",
        "srun torchrun \\",
        "  train.py",
    )
    assert lines[1:] == [f"srun torchrun {FLAG} \\", "  train.py"]


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torchrun -m pkg.train", "torchrun FLAG -m pkg.train"),
        (
            "torchrun --nproc_per_node 4 -m pkg.train",
            "torchrun FLAG --nproc_per_node 4 -m pkg.train",
        ),
        ("torchrun --module pkg.train -m 3", "torchrun FLAG --module pkg.train -m 3"),
        ("torchrun --standalone train.py FLAG", "torchrun FLAG --standalone train.py FLAG"),
        ("torchrun -m pkg.train FLAG", "torchrun FLAG -m pkg.train FLAG"),
        (
            "python -u -m torch.distributed.run --nnodes 1 -m pkg.train",
            "python -u -m torch.distributed.run FLAG --nnodes 1 -m pkg.train",
        ),
        ("torchrun $ARGS FLAG --nnodes=1 -m a", "torchrun $ARGS FLAG --nnodes=1 -m a"),
        ('T="torchrun --nnodes 1"; srun $T a.py', 'T="torchrun --nnodes 1"; srun $T a.py'),
        ("T=torchrun; srun $T -m a", "T=torchrun; srun $T FLAG -m a"),
    ],
)
def test_the_flag_of_torchrun_stands_before_what_it_starts(tmp_path, before, after):
    """Behind the script or the module it is a word for the training, and lint does not count it."""
    srun = "" if "srun" in before else "srun "
    lines = corrected(tmp_path, "#SBATCH --signal=USR2@60", srun + before.replace("FLAG", FLAG))
    assert lines[1] == srun + after.replace("FLAG", FLAG)
    text = "\n".join(["#!/bin/bash", OPTIONS, *lines, ""])
    left = {each.rule for each in lint(text, Surroundings(tmp_path, tmp_path))}
    assert left == ({"launcher-dies"} if FLAG not in lines[1].partition("a.py")[0] else set())


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


def test_wait_is_added_once_even_where_bash_reads_no_further(tmp_path):
    once = corrected(tmp_path, "python train.py &;;")
    assert once[-1] == "wait"
    assert once.count("wait") == 1
    assert corrected(tmp_path, *once).count("wait") == 1
