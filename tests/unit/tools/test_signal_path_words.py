"""Which program of a command trains, who keeps a signal from it, and what is said about that."""

from __future__ import annotations

import doctest
import shlex
import signal

import pytest

from holdfast._tools.doctor.signals import explain, probe, target
from holdfast._tools.doctor.signals.chain import Probe
from holdfast._tools.doctor.signals.explain import (
    TO_FIRST,
    TO_GROUP,
    TO_STEP,
    Hop,
    Tried,
    find_culprit,
    find_hops,
    judge,
    name_hop,
)
from holdfast._tools.doctor.signals.probe import role
from holdfast._tools.doctor.signals.target import find_target

USR2 = signal.SIGUSR2
CAUGHT = 1 << (USR2 - 1)


@pytest.mark.parametrize("module", [explain, probe, target])
def test_the_examples_in_the_docstrings_hold(module):
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize(
    ("command", "names"),
    [
        ("python -u train.py --lr 3", ["train.py"]),
        ("srun -n 4 python -m package.train", ["package.train"]),
        ("torchrun --nproc-per-node 2 src/main.py config.yaml", ["main.py"]),
        ("python -m torch.distributed.run --standalone main.py", ["main.py"]),
        ("accelerate launch --config_file a.yaml -m pack.main", ["pack.main"]),
        ("holdfast run --max-restarts 3 -- uv run finetune.py", ["finetune.py"]),
        ("tini -- conda run -n env python3.11 train.py", ["train.py"]),
        ("srun bash task.sh python main.py", ["main.py"]),
        ("bash job.sh", ["train.py"]),
        ("./job.sh", ["train.py"]),
        ("bash vague.sh", []),
    ],
)
def test_the_training_of_a_command_is_found(tmp_path, command, names):
    (tmp_path / "task.sh").write_text('#!/bin/bash\nexec "$@"\n')
    (tmp_path / "vague.sh").write_text('python prepare.py\npython "$SCRIPT"\nsbatch next.sh\n')
    job = (
        '#!/bin/sh\nS=train.py\npython -c "1" ; python prepare.py\nif true; then srun python $S; fi'
    )
    (tmp_path / "job.sh").write_text(job)
    found = find_target(command.split(), tmp_path)
    assert (found.names, found.refusal) == (names, None)


def test_what_cannot_be_tried_is_known_before(tmp_path):
    (tmp_path / "job.sh").write_text("export PYTHONPATH=src\npython train.py\n")
    (tmp_path / "good.sh").write_text("export PYTHONPATH=src:$PYTHONPATH\npython train.py\n")
    for command, found in (
        ("bash job.sh", "job.sh:1 keeps PYTHONPATH from"),
        ("env -i python train.py", "the command keeps PYTHONPATH from"),
        ("env A=1 -u PYTHONPATH python train.py", "the command keeps PYTHONPATH from"),
        ("env A=1 PYTHONPATH=src python train.py", "the command keeps PYTHONPATH from"),
        ("sh -c 'unset A PYTHONPATH; python train.py'", "the command keeps PYTHONPATH from"),
        ("sh -c 'A=1 PYTHONPATH=. python train.py'", "the command keeps PYTHONPATH from"),
        ("python -uI train.py", "python -uI keeps PYTHONPATH from"),
        ("docker run image python train.py", "docker starts the training where"),
        ("sbatch job.sh", "sbatch starts the training where"),
        ("mpirun -H a,b train.py", "mpirun starts the training where"),
        ("srun --export=NONE python train.py", "with --export=NONE the probe does not reach"),
    ):
        refusal = find_target(shlex.split(command), tmp_path).refusal
        assert refusal is not None
        assert refusal[0].startswith(found)
    for command in (
        "bash good.sh",
        "env A=1 python -u train.py",
        "srun --export=ALL,A=1 python train.py",
    ):
        assert find_target(shlex.split(command), tmp_path).refusal is None


def test_only_the_training_is_replaced_and_no_launcher():
    assert role(["python", "/home/ada/train.py"], ["train.py"]) == "train"
    assert role(["python", "/home/ada/prepare.py"], ["train.py"]) == "skip"
    assert role(["python", "/home/ada/prepare.py"], []) == "train"
    assert role(["python", "/opt/lib/site-packages/tool.py"], []) == "go on"
    assert role(["python", "-m", "torch.distributed.run", "train.py"], ["train.py"]) == "go on"
    assert role(["python", "-c", "import train"], []) == "go on"


@pytest.mark.parametrize(
    ("told", "around", "expected"),
    [
        ("RANK=0 WORLD_SIZE=4 LOCAL_WORLD_SIZE=2 TORCHELASTIC_RUN_ID=a", "", 2),
        ("RANK=0 WORLD_SIZE=4", "", 4),
        ("RANK=0 WORLD_SIZE=4", "RANK=0 WORLD_SIZE=4", 1),
        (
            "SLURM_JOB_ID=7 SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4",
            "SLURM_JOB_ID=7",
            4,
        ),
        (
            "SLURM_JOB_ID=7 SLURM_STEP_ID=1 SLURM_PROCID=0 SLURM_STEP_NUM_TASKS=4",
            "SLURM_JOB_ID=7 SLURM_STEP_ID=1",
            1,
        ),
        ("LANG=C", "", None),
    ],
)
def test_a_chain_knows_how_many_ranks_are_its_own(told, around, expected):
    def variables(text: str) -> dict[str, str]:
        return dict(word.split("=") for word in text.split())

    assert Probe([{"variables": variables(told)}]).expected(variables(around)) == expected


def hop(pid: int, words: str, caught: int = 0, ignored: int = 0) -> Hop:
    return Hop(pid, 1, *name_hop(words.split()), caught, ignored)


PYTHON = Hop(9, 1, "train.py", "training", CAUGHT)


@pytest.mark.parametrize(
    ("chain", "gone", "culprit"),
    [
        ([hop(1, "bash job.sh"), PYTHON], [1], "bash job.sh"),
        # Whoever dies first is the cause; those above leave because of it.
        ([hop(1, "holdfast run", CAUGHT), hop(2, "torchrun"), PYTHON], [2, 1], "torchrun"),
        # A trap waits; and whoever is below it cannot have got anything.
        ([hop(1, "bash job.sh", CAUGHT), hop(2, "torchrun", CAUGHT), PYTHON], [], "bash job.sh"),
        ([hop(1, "tini", CAUGHT), hop(2, "nohup", 0, CAUGHT), PYTHON], [], "nohup"),
        ([hop(1, "tini", CAUGHT), hop(2, "time"), PYTHON], [], "tini"),
        ([PYTHON], [], None),
    ],
)
def test_the_hop_that_keeps_the_signal_is_named(chain, gone, culprit):
    found = find_culprit(tried(*chain, gone=gone))
    assert (None if found is None else found.label) == culprit


def test_behind_srun_the_hops_begin_at_the_first_process_of_the_task():
    def process(pid: int, name: str) -> dict[str, object]:
        return {"pid": pid, "started": 1, "name": name, "words": [name], "caught": 0, "ignored": 0}

    above = [process(9, "python"), process(8, "bash"), process(7, "slurmstepd"), process(1, "init")]
    beside = [process(5, "srun"), process(4, "sh"), process(3, "zsh")]
    local, below = find_hops(above, 4, beside)
    assert [each.label for each in local] == ["sh", "srun"]
    assert [each.pid for each in below] == [8, 9]


def tried(*chain: Hop, counts=None, route=TO_FIRST, number=USR2, **more) -> Tried:
    return Tried(number, route, list(chain), counts or {0: 0}, **more)


def test_a_warning_that_nobody_asked_for_is_no_failure():
    lost = tried(hop(1, "torchrun"), PYTHON, gone=[1], living=2)
    assert judge(lost, {"SIGTERM"}, in_job=False).state == "warn"
    check = judge(lost, {"SIGTERM", "SIGUSR2"}, in_job=True)
    assert check.state == "fail"
    assert check.found == (
        "it does not arrive: torchrun dies of it, and train.py runs on and never hears of it"
    )
    assert "SIGQUIT,SIGUSR2" in check.remedy
    assert "holdfast run -- torchrun" in check.remedy


def test_a_first_process_on_another_host_that_does_nothing_about_it_has_died():
    check = judge(tried(hop(1, "torchrun"), PYTHON, route=TO_STEP, living=None), (), in_job=True)
    assert check.found == (
        "it does not arrive: torchrun dies of it, and train.py below it never hears of it"
    )


def test_what_came_in_its_place_and_who_missed_it_are_said():
    chain = (hop(1, "accelerate launch", CAUGHT), PYTHON)
    check = judge(tried(*chain, instead=["SIGTERM"], gone=[1]), (), in_job=False)
    assert check.found.endswith("train.py gets SIGTERM in its place")
    check = judge(tried(*chain, counts={0: 1, 1: 0}, living=2), (), in_job=False)
    assert check.found == (
        "it does not arrive at rank 1 of 2: accelerate launch does not pass it on"
    )


def test_a_trap_that_passes_on_another_signal_is_told_so():
    mask = 1 << (signal.SIGUSR1 - 1)
    shell = Hop(1, 1, "bash job.sh", "shell", caught=mask)
    training = Hop(2, 1, "train.py", "training")
    tried = Tried(signal.SIGUSR1, TO_FIRST, [shell, training], {0: 0})
    tried.living, tried.instead = 1, ["SIGTERM"]
    check = judge(tried, {"SIGTERM"}, in_job=False)
    assert check.found == "it does not arrive: bash job.sh passes on SIGTERM in its place"
    assert "kill -USR1" in check.remedy


def test_a_batch_shell_before_srun_is_told_of_the_tasks():
    chain = (hop(1, "bash job.sh"), hop(2, "srun"), PYTHON)
    check = judge(tried(*chain, gone=[1], status=-USR2), ("SIGUSR2",), in_job=True)
    assert "without B:" in check.remedy
    assert "exec srun" in check.remedy


def test_a_leader_that_lives_on_makes_up_for_a_shell_that_dies():
    chain = (hop(1, "holdfast run", CAUGHT), hop(2, "bash job.sh"), PYTHON)
    assert judge(tried(*chain, counts={0: 1}, gone=[2]), (), in_job=False).state == "ok"
    assert judge(tried(*chain[1:], counts={0: 1}, gone=[2]), (), in_job=False).state == "warn"


def test_a_ctrl_c_that_comes_twice_is_warned_of():
    twice = tried(PYTHON, counts={0: 2}, route=TO_GROUP, number=signal.SIGINT)
    assert judge(twice, (), in_job=False).state == "warn"
    # SLURM often says the same twice, and everybody is used to it.
    again = tried(PYTHON, counts={0: 2}, route=TO_STEP, number=signal.SIGTERM)
    assert judge(again, (), in_job=False).state == "ok"
