"""How a run was started: its hyperparameters, its variables, what has changed, its repository."""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
from pathlib import Path, PurePosixPath

import numpy
import pytest

from holdfast._environment import started
from holdfast._environment.git import find_repository, read_changes, read_commit
from holdfast._environment.secrets import LEFT_OUT, redact_tree
from holdfast._environment.slurm.controller import submitted_options
from holdfast._environment.started import environment_again, own_folder, relevant
from holdfast._errors import SettingsError
from holdfast._run.attempt import checked_config, find_changes

# -- config ----------------------------------------------------------------------------------------


@dataclasses.dataclass
class Model:
    width: int = 8
    path: PurePosixPath | None = None

    def __post_init__(self) -> None:
        self.path = PurePosixPath("data/x")


@pytest.mark.parametrize(
    ("given", "recorded"),
    [
        (None, {}),
        ({"lr": 0.1, "on": True, "none": None, "name": "a"}, None),
        (argparse.Namespace(lr=0.1, layers=[1, 2]), {"lr": 0.1, "layers": [1, 2]}),
        (Model(), {"width": 8, "path": "PurePosixPath('data/x')"}),
        ({"model": Model(width=2)}, {"model": {"width": 2, "path": "PurePosixPath('data/x')"}}),
        ({"betas": (0.9, 0.99), 3: "three"}, {"betas": [0.9, 0.99], "3": "three"}),
        ({"x": float("nan"), "big": 1 << 60}, {"x": "nan", "big": str(1 << 60)}),
        ({"s": numpy.float32(0.5), "kind": numpy.float32}, {"s": 0.5, "kind": "numpy.float32"}),
    ],
)
def test_hyperparameters_become_json(given, recorded):
    found = checked_config(given)
    assert found == (given if recorded is None else recorded)
    assert json.loads(json.dumps(found, allow_nan=False)) == found


class Stateful:
    def state_dict(self):
        return {}


@pytest.mark.parametrize("given", [Stateful(), numpy.zeros(3), "lr=0.1", 3, [1, 2], Model])
def test_what_has_no_names_is_refused_as_config(given):
    with pytest.raises(SettingsError, match="config has the hyperparameters of the run"):
        checked_config(given)


@pytest.mark.parametrize("value", [Stateful(), numpy.zeros(3)])
def test_state_in_a_config_is_refused(value):
    with pytest.raises(
        SettingsError, match=r"Give state by its own name: .*Run\(folder, model=…\)"
    ):
        checked_config({"lr": 0.1, "model": value})


def test_a_large_config_is_recorded_in_part():
    found = checked_config({"names": ["x" * 5000] * 10_000, "deep": _nested(50)})
    assert len(json.dumps(found)) < 6_000_000
    assert "more" in found["names"][-1]


def _nested(depth: int) -> dict[str, object]:
    return {"a": _nested(depth - 1)} if depth else {}


class Hostile:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_a_repr_that_fails_is_no_error():
    assert checked_config({"x": Hostile()}) == {"x": "<Hostile>"}


def test_numbers_with_the_name_of_a_secret_are_left_out_unless_they_are_small():
    config = {"api_key": 123456789012, "num_tokens": 5, "use_auth_token": True, "password": 1234}
    assert redact_tree(config) == {**config, "api_key": LEFT_OUT, "password": LEFT_OUT}


# -- variables -------------------------------------------------------------------------------------


def test_the_next_start_has_the_recorded_variables_and_no_others_of_their_kind():
    recorded = {"PATH": "/venv/bin", "OMP_NUM_THREADS": "1", "RANK": "0", "HOLDFAST_LEADER": "7"}
    now = {"PATH": "/bin", "HOME": "/home/me", "PYTHONPATH": "/x", "CUDA_VISIBLE_DEVICES": "3"}
    found = environment_again(recorded, now, [], was_in_job=False, is_in_job=False)
    assert found == {"PATH": "/venv/bin", "OMP_NUM_THREADS": "1", "HOME": "/home/me"}


def test_devices_and_ranks_in_a_job_are_those_of_the_scheduler():
    recorded = {"SLURM_JOB_ID": "1", "CUDA_VISIBLE_DEVICES": "0", "SLURM_CONF": "/c"}
    now = {"SLURM_JOB_ID": "2", "CUDA_VISIBLE_DEVICES": "3"}
    submitted = environment_again(recorded, now, [], was_in_job=True, is_in_job=False)
    assert submitted == {"SLURM_CONF": "/c"}
    within = environment_again(recorded, now, [], was_in_job=True, is_in_job=True)
    assert within == {**now, "SLURM_CONF": "/c"}


def test_what_was_left_out_is_taken_from_the_shell():
    found = environment_again(
        {}, {"HF_TOKEN": "x"}, ["HF_TOKEN"], was_in_job=False, is_in_job=False
    )
    assert found == {"HF_TOKEN": "x"}


def test_only_known_variables_are_recorded():
    known = {"CUDA_VISIBLE_DEVICES": "0", "VIRTUAL_ENV": "/venv", "SLURM_JOB_ID": "1"}
    assert relevant({**known, "MY_DATABASE": "x", "SSH_CONNECTION": "y"}) == known


# -- launchers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (["/v/bin/python", "/v/bin/torchrun", "--nproc-per-node=2", "train.py"], "torchrun"),
        (["python3.11", "-m", "torch.distributed.run", "train.py"], "torchrun"),
        (["/v/bin/python", "/v/bin/accelerate", "launch", "train.py"], "accelerate"),
        (["/v/bin/python", "/v/bin/accelerate-launch", "train.py"], "accelerate"),
        (["python", "-m", "accelerate.commands.accelerate_cli", "launch", "t.py"], "accelerate"),
        (["mpirun", "-n", "2", "python", "train.py"], "mpirun"),
        (["bash", "-c", "torchrun train.py"], ""),
        (["python", "train.py", "torchrun"], ""),
        (["pytest", "tests"], ""),
    ],
)
def test_a_launcher_is_known_by_its_command(words, name):
    assert started._launcher(words) == name


def test_the_folder_of_the_start_is_found_after_a_chdir(monkeypatch, tmp_path):
    monkeypatch.setattr(sys.modules["__main__"], "__file__", "/home/me/src/train.py", raising=False)
    assert own_folder(["python", "src/train.py", "--lr", "1"]) == "/home/me"
    assert own_folder(["python", "train.py"]) == "/home/me/src"
    monkeypatch.chdir(tmp_path)
    assert own_folder(["python", "/home/me/src/train.py"]) == str(tmp_path)


# -- changes ---------------------------------------------------------------------------------------


def _record(*words: str, cwd: str = "/w", commit: str = "", **packages: str) -> dict[str, object]:
    git = {"commit": commit} if commit else None
    command = ["/v/bin/python", *words]
    facts = {"command": command, "cwd": cwd, "python": "3.11.7"}
    return {**facts, "git": git, "packages": packages}


def test_nothing_is_said_where_nothing_has_changed():
    old = _record("src/train.py", "--lr", "1", commit="a" * 40, torch="2.13.0")
    new = {**_record("train.py", "--lr", "1", cwd="/w/src", commit="a" * 40, torch="2.13.0")}
    assert find_changes(old, old) == []
    assert find_changes(old, new) == []  # the same script, from another folder
    assert find_changes({}, new) == []
    assert find_changes(_record("-u", "train.py"), _record("train.py")) == []


def test_the_commands_of_a_kernel_are_not_compared():
    old, new = (_record("-m", "ipykernel_launcher", "-f", f"kernel-{n}.json") for n in "12")
    assert find_changes({**old, "launcher": "interactive"}, new) == []


def test_the_command_of_a_spawned_rank_has_no_numbers_of_its_start(monkeypatch):
    words = ["python", "-c", "spawn_main(tracker_fd=5, pipe_handle=7)", "--multiprocessing-fork"]
    monkeypatch.setattr(sys, "orig_argv", words)
    monkeypatch.setattr(sys, "argv", ["train.py", "--lr", "1"])
    assert started.own_command() == [sys.executable, "train.py", "--lr", "1"]


def test_command_commit_and_versions_are_named():
    old = _record("train.py", "--lr", "1", "-v", commit="a" * 40, torch="2.12.0", numpy="2.0")
    new = _record("train.py", "--lr", "2", "-v", commit="b" * 40, torch="2.13.0", jax="0.1")
    assert find_changes(old, {**new, "python": "3.12.0"}) == [
        "the command (--lr 1 → --lr 2)",
        "the commit aaaaaaaaaa → bbbbbbbbbb",
        "Python 3.11.7 → 3.12.0",
        "torch 2.12.0 → 2.13.0",
    ]


def test_words_that_only_one_command_has_are_called_new_or_gone():
    short, long = _record("train.py"), _record("train.py", "--fast")
    assert find_changes(short, long) == ["the command (new: --fast)"]
    assert find_changes(long, short) == ["the command (gone: --fast)"]


# -- git -------------------------------------------------------------------------------------------


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("lr = 0.1\n")
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "first"]):
        _git(tmp_path, *words)
    return tmp_path


def _git(place: Path, *words: str) -> str:
    git = ["git", "-C", str(place), "-c", "user.name=a", "-c", "user.email=a@example.org"]
    done = subprocess.run([*git, *words], check=True, timeout=30, capture_output=True, text=True)
    return done.stdout.strip()


def test_the_commit_is_read_as_git_tells_it(repository):
    commit = _git(repository, "rev-parse", "HEAD")
    folder = repository / "src" / "deep"
    folder.mkdir(parents=True)
    assert find_repository(folder) == repository
    assert read_commit(repository) == commit
    _git(repository, "pack-refs", "--all")
    assert read_commit(repository) == commit
    _git(repository, "checkout", "-q", "--detach")
    assert read_commit(repository) == commit


def test_the_commit_of_a_linked_work_tree_is_its_own(repository):
    _git(repository, "worktree", "add", "-q", "-b", "other", str(repository / "linked"))
    linked = repository / "linked"
    (linked / "new.py").write_text("x = 1\n")
    _git(linked, "add", ".")
    _git(linked, "commit", "-q", "-m", "second")
    assert read_commit(linked) == _git(linked, "rev-parse", "HEAD") != read_commit(repository)


def test_there_is_no_commit_without_a_repository(tmp_path):
    (tmp_path / ".git").mkdir()
    assert read_commit(tmp_path) is None
    (tmp_path / ".git" / "HEAD").write_text("ref: refs/heads/none\n")
    assert read_commit(tmp_path) is None
    assert read_changes(tmp_path) == {}


def test_changes_are_read_with_their_diff(repository):
    assert read_changes(repository) == {"dirty": False, "diff": None}
    (repository / "train.py").write_text('lr = 0.2\npassword = "hunter2"\n')
    found = read_changes(repository)
    assert found["dirty"] is True
    assert "+lr = 0.2" in found["diff"]
    assert "hunter2" not in found["diff"]


def test_a_large_diff_is_not_kept(repository):
    (repository / "train.py").write_text("x = 1\n" * 100_000)
    assert read_changes(repository) == {"dirty": True, "diff": None}


def test_git_runs_no_program_that_the_repository_names(repository):
    marker = repository / "ran"
    program = repository / "program.sh"
    program.write_text(f"#!/bin/sh\ntouch {marker}\n")
    program.chmod(0o755)
    for name in ("diff.external", "core.fsmonitor", "core.pager"):
        _git(repository, "config", name, str(program))
    (repository / "train.py").write_text("lr = 0.3\n")
    assert read_changes(repository)["dirty"] is True
    assert not marker.exists()


# -- batch jobs ------------------------------------------------------------------------------------

LINE = (
    "JobId=7 JobName=na me UserId=me(0) Account=lab QOS=(null) TimeLimit=00:03:00 Partition=main "
    "NumNodes=2 NumTasks=4 CPUs/Task=2 MinMemoryCPU=1000M Features=(null) Command=/j.sh a b "
    "WorkDir=/w StdErr=/w/7.out StdIn=/dev/null StdOut=/w7/out-7.log Power= TresPerNode=gres:gpu:2"
)


def test_options_of_the_line_that_submitted_a_job_are_found():
    assert submitted_options(LINE, {}) == [
        *("--job-name=na me", "--account=lab", "--partition=main", "--time=00:03:00", "--nodes=2"),
        *("--ntasks=4", "--cpus-per-task=2", "--mem-per-cpu=1000M", "--gres=gpu:2"),
        "--output=/w7/out-%j.log",
    ]


def test_options_of_the_script_are_not_repeated():
    given = {"job-name": "x", "time": "3", "ntasks-per-node": "2", "mem": "4G", "gpus": "4"}
    found = submitted_options(LINE, {**given, "output": "o", "nodes": "2"})
    assert found == ["--account=lab", "--partition=main", "--cpus-per-task=2"]


TASK = (
    "JobId={number} ArrayJobId=12 ArrayTaskId=3 JobName=a UserId=me(0) Command=/j.sh WorkDir=/w "
    "StdErr={out} StdIn=/dev/null StdOut={out}{rest}"
)


@pytest.mark.parametrize("rest", [" Power=", " TresPerNode=gres/gpu:2", ""])
@pytest.mark.parametrize("number", [12, 15])  # the last task has the array's own number
def test_a_task_of_an_array_has_the_output_of_a_task_of_an_array(number, rest):
    def output(out: str) -> list[str]:
        line = TASK.format(number=number, out=out, rest=rest)
        return [word for word in submitted_options(line, {}) if word.startswith("--output")]

    assert output("/w/slurm-12_3.out") == []
    assert output("/w/my logs/run 3-12_3.log") == ["--output=/w/my logs/run 3-%A_3.log"]
    if number == 15:
        assert output("/w/15.log") == ["--output=/w/%j.log"]
