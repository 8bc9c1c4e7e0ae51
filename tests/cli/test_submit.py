"""`holdfast submit`: shown, handed to sbatch, or refused in a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.command import environment, holdfast, holdfast_process, succeed

TRAIN = ("--", "python", "train.py", "--print")


@pytest.fixture
def cluster(tmp_path: Path) -> dict[str, str]:
    """An environment whose sbatch takes anything and says which job it is."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "sbatch").write_text(
        f'#!/bin/sh\ncat > "{tmp_path}/given"\necho "$@" >> "{tmp_path}/given"\necho "12;main"\n'
    )
    (folder / "sbatch").chmod(0o755)
    return environment(PATH=f"{folder}:/usr/bin:/bin")


def test_print_shows_the_script_and_does_nothing(tmp_path):
    shown = succeed("submit", "--print", "--time=60", "-Jhello", *TRAIN, cwd=tmp_path)
    lines = shown.splitlines()
    assert lines[:3] == ["#!/bin/bash", "#SBATCH --time=60", "#SBATCH -Jhello"]
    assert f"    {sys.executable} -P -m holdfast run -- \\" in lines
    assert "    python train.py --print" in lines
    assert list(tmp_path.iterdir()) == []


def test_what_is_shown_is_what_is_submitted(tmp_path, cluster):
    shown = succeed("submit", "--print", "--lead=99", "--time=60", *TRAIN, cwd=tmp_path)
    assert "#SBATCH --signal=USR2@99" in shown
    said = succeed("submit", "--lead=99", "--time=60", *TRAIN, cwd=tmp_path, env=cluster)
    assert (tmp_path / "given").read_text() == f"{shown}--parsable\n"
    assert said.splitlines()[0] == "train: submitted as job 12."
    assert "tail -F logs/train-12.out" in said
    assert "scancel 12" in said
    assert "holdfast status RUN" in said
    assert (tmp_path / "logs").is_dir()


def test_the_folders_of_the_logs_are_made_where_the_job_runs(tmp_path, cluster):
    (tmp_path / "there").mkdir()
    words = ("--chdir=there", "-o", "a/b/%j.out", "-e", "c/%j.err", "--array=0-3", *TRAIN)
    said = succeed("submit", *words, cwd=tmp_path, env=cluster)
    assert (tmp_path / "there/a/b").is_dir()
    assert (tmp_path / "there/c").is_dir()
    assert "job 12 (an array)" in said
    assert "tail -F there/a/b/*.out" in said


def test_a_folder_that_nobody_can_make_yet_is_told(tmp_path, cluster):
    done = holdfast("submit", "-o", "%j/log", *TRAIN, cwd=tmp_path, env=cluster)
    assert done.returncode == 0
    assert "Note: --output=%j/log: SLURM makes no folders." in done.stderr


def test_options_that_defeat_it_are_told_and_submitted(tmp_path, cluster):
    done = holdfast("submit", "--no-requeue", *TRAIN, cwd=tmp_path, env=cluster)
    assert done.returncode == 0
    assert done.stderr.startswith("Note: --no-requeue: ")
    assert "#SBATCH --no-requeue\n" in (tmp_path / "given").read_text()


def test_a_job_that_is_submitted_by_another_one_is_not_that_one(tmp_path, cluster):
    """sbatch hands its environment on, and by these a job would requeue the wrong one."""
    (tmp_path / "bin/sbatch").write_text(f'#!/bin/sh\nenv > "{tmp_path}/given"\necho 12\n')
    of_the_other = {
        "SLURM_ARRAY_JOB_ID": "13",
        "SLURM_ARRAY_TASK_ID": "3",
        "SLURM_ARRAY_TASK_MAX": "4",
        "SLURM_RESTART_COUNT": "2",
        "HOLDFAST_MARKER": "/x/.holdfast-requeue-13",
        "HOLDFAST_LEADER": "1",
    }
    kept = {"SLURM_CONF": "/etc/other.conf", "HOLDFAST_PROGRESS": "plain", "MINE": "1"}
    succeed("submit", *TRAIN, cwd=tmp_path, env=cluster | of_the_other | kept)
    given = dict(line.split("=", 1) for line in (tmp_path / "given").read_text().splitlines())
    assert not of_the_other.keys() & given.keys()
    assert kept.items() <= given.items()


def test_the_script_can_be_kept(tmp_path, cluster):
    for time in ("60", "90"):  # ours is replaced
        succeed("submit", "--to", "job.sbatch", f"--time={time}", *TRAIN, cwd=tmp_path, env=cluster)
        kept = (tmp_path / "job.sbatch").read_text()
        assert f"#SBATCH --time={time}\n" in kept
    assert (tmp_path / "given").read_text().startswith(kept)


def test_a_file_of_the_persons_own_is_not_replaced(tmp_path, cluster):
    (tmp_path / "job.sbatch").write_text("#!/bin/bash\nmine\n")
    done = holdfast("submit", "--to", "job.sbatch", *TRAIN, cwd=tmp_path, env=cluster)
    assert done.returncode == 2
    assert done.stderr == (
        "job.sbatch: is there already, and holdfast has not written it.\nChoose another name.\n"
    )
    assert not (tmp_path / "given").exists()


def test_what_sbatch_says_and_its_status_are_passed_on(tmp_path, cluster):
    (tmp_path / "bin/sbatch").write_text("#!/bin/sh\necho 'sbatch: error: no' >&2\nexit 3\n")
    done = holdfast_process("submit", "--time=60", *TRAIN, cwd=tmp_path, env=cluster)
    assert done.returncode == 3
    assert done.stderr == "sbatch: error: no\n"
    assert done.stdout == ""


def test_without_sbatch_it_is_a_sentence(tmp_path):
    done = holdfast("submit", *TRAIN, cwd=tmp_path, env=environment(PATH=str(tmp_path)))
    assert done.returncode == 2
    assert done.stderr.startswith("sbatch: there is no such program here.\n")


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["python", "train.py"], "'python' is not an option of sbatch."),
        (["--time=60"], "There is no command to submit."),
        ([], "There is no command to submit."),
        (["--lead=60", "--signal=USR2@60", *TRAIN], "--lead and --signal both say"),
        (["--wrap=x", *TRAIN], "--wrap: holdfast writes the script itself."),
    ],
)
def test_wrong_use_is_two_sentences_and_status_2(tmp_path, words, error):
    done = holdfast("submit", *words, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stderr.startswith(error)
    assert len(done.stderr.splitlines()) == 2
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("lead", ["0", "x", "-5"])
def test_a_lead_that_is_no_number_of_seconds_is_refused(lead):
    done = holdfast("submit", f"--lead={lead}", *TRAIN)
    assert done.returncode == 2
    assert "--lead" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("word", ["-h", "--help"])
def test_it_explains_itself(word):
    shown = succeed("submit", word)
    assert shown.startswith("Usage: holdfast submit [OPTIONS] [SBATCH OPTIONS] -- COMMAND...")
    assert max(map(len, shown.splitlines())) <= 80
