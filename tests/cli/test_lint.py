"""`holdfast lint`: what it prints, writes and leaves with."""

from __future__ import annotations

import json
import os
import stat
from pathlib import Path

import pytest

from tests.cli.command import holdfast, succeed
from tests.cli.screen import Picture

BAD = """#!/bin/bash
#SBATCH --job-name=train
#SBATCH --time=8:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --signal=USR2@60
python train.py
"""
CORRECTED = """#!/bin/bash
#SBATCH --job-name=train
#SBATCH --time=8:00:00
#SBATCH --output=logs/%x-%j.out
#SBATCH --signal=USR2@60
#SBATCH --open-mode=append
#SBATCH --requeue
srun bash -c 'trap "" USR2; exec "$@"' _ python train.py
"""
STEP = CORRECTED.splitlines()[-1]
GOOD = CORRECTED.replace("logs/", "")


@pytest.fixture
def script(tmp_path) -> Path:
    path = tmp_path / "job.sbatch"
    path.write_text(BAD)
    return path


def test_each_finding_has_its_line_what_happens_and_the_correction(script):
    done = holdfast("lint", "job.sbatch", cwd=script.parent)
    assert done.returncode == 1
    assert done.stderr == ""
    lines = done.stdout.splitlines()
    at = next(i for i, line in enumerate(lines) if line.startswith("job.sbatch:6: "))
    assert lines[at].startswith("job.sbatch:6: error: SIGUSR2 never arrives: ")
    assert lines[at].endswith(" [signal-never-arrives]")
    assert lines[at + 1 : at + 3] == ["    python train.py", f"  → {STEP}"]
    assert lines[-1] == (
        "1 script: 2 errors, 2 warnings. To fix them: holdfast lint --fix job.sbatch"
    )
    assert script.read_text() == BAD  # only looked at


def test_a_good_script_passes(script):
    script.write_text(GOOD)
    assert succeed("lint", script) == "1 script: no problem found.\n"
    assert json.loads(succeed("lint", "--json", script)) == []


def test_hints_alone_pass(script):
    script.write_text("#!/bin/bash\n#SBATCH --time=10\npython preprocess.py\n")
    assert "hint" in succeed("lint", script)


def test_json_tells_the_same(script):
    done = holdfast("lint", "--json", "job.sbatch", cwd=script.parent)
    assert done.returncode == 1
    found = json.loads(done.stdout)
    assert [(each["line"], each["rule"]) for each in found] == [
        (4, "log-folder-missing"),
        (4, "log-truncated"),
        (5, "requeue-missing"),
        (6, "signal-never-arrives"),
    ]
    last = found[-1]
    assert last["file"] == "job.sbatch"
    assert last["severity"] == "error"
    assert last["source"] == "python train.py"
    assert last["corrected"] == [STEP]
    assert last["fixable"] is True


def test_fix_writes_the_script_makes_the_folder_and_says_so(script):
    script.chmod(0o750)
    shown = succeed("lint", "--fix", "job.sbatch", cwd=script.parent)
    assert script.read_text() == CORRECTED
    assert stat.S_IMODE(script.stat().st_mode) == 0o750
    assert (script.parent / "logs").is_dir()
    assert sorted(p.name for p in script.parent.iterdir()) == ["job.sbatch", "logs"]
    assert "logs: made, for the log." in shown
    assert "  - python train.py\n" in shown
    assert f"  + {STEP}\n" in shown
    assert shown.endswith("1 script: no problem found.\n")


def test_a_second_fix_changes_nothing(script):
    succeed("lint", "--fix", script, cwd=script.parent)
    before = script.stat()
    shown = succeed("lint", "--fix", script, cwd=script.parent)
    assert "nothing to fix" in shown
    assert (script.stat().st_ino, script.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert script.read_text() == CORRECTED


def test_fix_leaves_what_only_a_person_can_do(script):
    ranks = GOOD.replace("--job-name=train", "--ntasks=2")
    script.write_text(ranks.replace("srun", "export RANK=$SLURM_PROCID\nsrun"))
    done = holdfast("lint", "--fix", script)
    assert done.returncode == 1
    assert "nothing that --fix can do" in done.stdout
    assert "[rank-of-batch-script]" in done.stdout
    assert done.stdout.endswith("1 script: 1 error left.\n")


def test_fix_follows_a_link_and_keeps_it(script):
    link = script.with_name("link.sbatch")
    link.symlink_to(script.name)
    succeed("lint", "--fix", "link.sbatch", cwd=script.parent)
    assert link.is_symlink()
    assert script.read_text() == CORRECTED


def test_fixed_findings_are_marked_in_json(script):
    found = json.loads(succeed("lint", "--fix", "--json", "job.sbatch", cwd=script.parent))
    assert len(found) == 4
    assert all(each["fixed"] for each in found)


def test_a_script_that_may_not_be_written_stays(script):
    if os.geteuid() == 0:
        pytest.skip("root may write everything: run the tests as a user to see this")
    script.chmod(0o444)
    done = holdfast("lint", "--fix", script)
    assert done.returncode == 2
    assert script.read_text() == BAD


def test_fix_goes_on_after_a_folder_that_it_cannot_make(script):
    """Nor does a script that cannot be read keep the others from being written."""
    place = script.parent
    (place / "taken").write_text("a file")
    first = place / "first.sbatch"
    first.write_text(BAD.replace("logs/", "taken/logs/"))
    done = holdfast("lint", "--fix", "first.sbatch", "missing.sbatch", "job.sbatch", cwd=place)
    assert done.returncode == 2
    assert script.read_text() == CORRECTED
    assert first.read_text() == CORRECTED.replace("logs/", "taken/logs/")
    assert "taken/logs: Not a directory.\nThe log of first.sbatch needs this" in done.stderr
    assert "missing.sbatch: No such file or directory." in done.stderr
    assert "Traceback" not in done.stderr
    assert "[log-folder-missing]" in done.stdout
    assert done.stdout.endswith("2 scripts: 1 error left.\n")


def test_what_is_not_understood_is_said_with_a_status_of_its_own(script):
    script.write_text(GOOD.replace("srun", 'bash "$SCRIPT" #'))
    done = holdfast("lint", "job.sbatch", cwd=script.parent)
    assert done.returncode == 3
    assert 'hint: lint cannot see what `bash "$SCRIPT"` starts.' in done.stdout
    assert done.stdout.endswith("1 script: 1 hint. Not understood: job.sbatch.\n")
    assert json.loads(holdfast("lint", "--json", script).stdout)[0]["rule"] == "not-understood"
    done = holdfast("lint", "--fix", script)
    assert (done.returncode, script.read_text()) == (3, GOOD.replace("srun", 'bash "$SCRIPT" #'))
    assert "nothing that --fix can do" in done.stdout
    succeed("lint", "--ignore", "not-understood", script)


def test_standard_input_is_a_script_too(tmp_path):
    done = holdfast("lint", "-", given=BAD, cwd=tmp_path)
    assert done.returncode == 1
    assert "stdin:6: error: SIGUSR2 never arrives" in done.stdout
    done = holdfast("lint", "-", "--fix", given=BAD, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == CORRECTED
    assert f"+ {STEP}" in done.stderr


def test_several_scripts_are_counted_together(script):
    other = script.with_name("good.sbatch")
    other.write_text(GOOD)
    done = holdfast("lint", script.name, other.name, cwd=script.parent)
    assert done.returncode == 1
    assert "good.sbatch:" not in done.stdout
    assert done.stdout.splitlines()[-1].startswith("2 scripts: 2 errors, 2 warnings.")
    assert done.stdout.endswith("--fix job.sbatch\n")


def test_a_rule_can_be_ignored(script):
    rules = ["log-folder-missing", "log-truncated", "requeue-missing", "signal-never-arrives"]
    succeed("lint", script, *(word for rule in rules for word in ("--ignore", rule)))


@pytest.mark.parametrize("name", ["missing.sbatch", "."])
def test_what_cannot_be_read_is_a_sentence(tmp_path, name):
    done = holdfast("lint", name, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith(f"{name}: ")
    assert "Traceback" not in done.stderr


def test_what_is_no_script_is_a_sentence(tmp_path):
    Path(tmp_path, "program").write_bytes(b"\x7fELF\0\0")
    done = holdfast("lint", tmp_path / "program")
    assert done.returncode == 2
    assert "is not a script" in done.stderr


def test_the_measured_save_counts(script, tmp_path):
    run = tmp_path / "runs" / "a"
    (run / "attempts" / "0001").mkdir(parents=True)
    (run / "run.json").write_text('{"run_id": "x"}')
    (run / "attempts" / "0001" / "heartbeat.json").write_text('{"save_seconds": 95}')
    script.write_text(GOOD)
    done = holdfast("lint", script, "--run", run)
    assert done.returncode == 1
    assert "60 s are too short: a save of a took up to 95 s" in done.stdout
    done = holdfast("lint", script, "--run", tmp_path)
    assert done.returncode == 2
    assert "there is no run here" in done.stderr


@pytest.mark.parametrize("command", ["python train.py", "torchrun --nproc-per-node=2 train.py"])
def test_what_submit_writes_is_good(tmp_path, command):
    options = ["--time=8:00:00", "--nodes=2", "--array=0-3"]
    made = holdfast("submit", "--print", *options, "--", *command.split(), cwd=tmp_path).stdout
    assert "srun" in made
    (tmp_path / "logs").mkdir(exist_ok=True)
    done = holdfast("lint", "-", given=made, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + made


def test_a_terminal_gets_colours_and_a_pipe_none(script):
    assert "\x1b" not in holdfast("lint", script).stdout
    picture = Picture("lint", script.name, columns=200, cwd=script.parent)
    assert picture.returncode == 1
    assert b"\x1b[1;31merror" in picture.raw
    assert any(STEP in line for line in picture.lines)
