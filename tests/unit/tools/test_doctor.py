"""What `holdfast doctor` makes of memory, disk and places, and of the run that it looks at."""

from __future__ import annotations

import json
import time

import pytest

from holdfast._store.folder.layout import MANIFEST, RunLayout, rank_file
from holdfast._store.format.manifest import DataFile, Manifest, Part
from holdfast._tools.doctor.check import Check, Question, worst
from holdfast._tools.doctor.machine import HostMemory, judge_memory, judge_shm
from holdfast._tools.doctor.run import RunNeeds, read_run, slurm_grace
from holdfast._tools.doctor.storage import (
    Grace,
    Mount,
    bytes_to_write,
    find_mount,
    judge_file_system,
    judge_folder,
    judge_room,
    judge_speed,
)

MB, GB = 1 << 20, 1 << 30
TEN = Grace(10.0, "SIGTERM")


def told(check):
    """Whatever is wrong has a remedy in one line."""
    assert check is not None
    assert "\n" not in check.found + check.remedy
    assert bool(check.remedy) == (check.state != "ok"), check
    return check.state


def test_the_worst_counts():
    ok, warn, fail = (Check("a", state, "") for state in ("ok", "warn", "fail"))
    assert worst([]) == worst([ok]) == "ok"
    assert worst([ok, warn, ok]) == "warn"
    assert worst([fail, warn]) == "fail"


@pytest.mark.parametrize(
    ("state", "free", "verdict", "says"),
    [
        (None, 25 * GB, "ok", "three snapshots of up to 8.9 GB fit"),
        (None, 64 * MB, "warn", "container"),
        (None, None, "warn", "no /dev/shm"),
        (GB, 3 * GB, "ok", "three snapshots of 1.1 GB fit; a run takes 2.1 GB, and 3.2 GB while"),
        (GB, 3 * GB - 1, "warn", "two snapshots of 1.1 GB fit, not three"),
        (GB, 2 * GB - 1, "warn", "memory that goes when"),
    ],
)
def test_shared_memory_against_three_slots(state, free, verdict, says):
    check = judge_shm(HostMemory(state, free, free, 100 * GB))
    assert told(check) == verdict
    assert says in check.found


@pytest.mark.parametrize(
    ("state", "available", "verdict", "says"),
    [
        (None, 30 * GB, "ok", "32 GB left"),
        (None, 500 * MB, "warn", "little"),
        (GB, 30 * GB, "ok", "three snapshots"),
        (GB, 5 * GB, "warn", "leaves 2.1 GB for the training"),
        (GB, 3 * GB, "warn", "only two"),
        (GB, 2 * GB, "warn", "only one snapshot of 1.1 GB fits, not two"),
        (GB, GB, "fail", "a kill costs all work since the last checkpoint"),
    ],
)
def test_memory_against_the_slots_and_what_is_left_to_the_training(state, available, verdict, says):
    check = judge_memory(HostMemory(state, GB, GB, available, reserve=256 * MB))
    assert told(check) == verdict
    assert says in check.found


def test_without_a_proc_memory_is_not_guessed():
    assert judge_memory(HostMemory(GB, GB, GB, None)) is None


@pytest.mark.parametrize(
    ("free", "inodes", "state", "held", "verdict"),
    [
        (100 * GB, None, None, 0, "ok"),
        (500 * MB, None, None, 0, "warn"),
        (5 * GB, None, GB, 0, "ok"),
        (3 * GB, None, GB, 0, "warn"),
        (3 * GB, None, GB, 3 * GB, "ok"),  # old ones go as new ones come
        (GB - 1, None, GB, 3 * GB, "fail"),
        (100 * GB, 900, GB, 0, "warn"),
        (100 * GB, 3, GB, 0, "fail"),
    ],
)
def test_room_for_the_checkpoints_that_are_kept(free, inodes, state, held, verdict):
    assert told(judge_room(free, inodes, state, 3, held)) == verdict


@pytest.mark.parametrize(
    ("speed", "state", "grace", "taken", "verdict", "says"),
    [
        (500e6, None, TEN, None, "ok", "up to 2.5 GB fits"),
        (2e6, None, TEN, None, "warn", "20 MB are written"),
        (500e6, GB, TEN, None, "ok", "so 1.1 GB take 2.1 s"),
        (150e6, GB, TEN, None, "warn", "only if the step ends soon"),
        (100e6, GB, TEN, None, "fail", "does not fit"),
        (500e6, GB, TEN, 14.0, "fail", "a save of this run took 14 s"),
        (500e6, GB, Grace(300, "--signal", Grace(1, "KillWait")), None, "warn", "by KillWait"),
    ],
)
def test_a_save_has_to_fit_into_the_grace(speed, state, grace, taken, verdict, says):
    measured = {"bytes": int(speed / 2), "seconds": 0.5, "error": None}
    check = judge_speed(measured, state, grace, taken)
    assert told(check) == verdict
    assert says in check.found


def test_a_disk_that_takes_nothing_fails():
    assert told(judge_speed(None, GB, TEN)) == "fail"
    full = {"bytes": 5 * MB, "seconds": 0.1, "error": "Disk quota exceeded"}
    check = judge_speed(full, GB, TEN)
    assert told(check) == "fail"
    assert "Disk quota exceeded" in check.found


def test_no_more_is_written_than_tells_the_speed_and_never_a_full_disk():
    assert bytes_to_write(None, None) == bytes_to_write(100 * GB, 500 * GB) == 256 * MB
    assert bytes_to_write(1000, 500 * GB) == 32 * MB
    assert bytes_to_write(None, 8 * MB) == 2 * MB
    assert bytes_to_write(None, 3) == 0


MOUNTS = r"""22 1 8:1 / / rw,relatime - ext4 /dev/sda1 rw
23 22 0:5 / /data rw - nfs4 server:/export rw,soft,vers=4.2
24 22 0:6 / /data/with\040blank rw - xfs /dev/sdb rw
25 22 0:7 / /data rw - lustre mds@tcp:/fs rw
junk
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [("/home/a", "ext4"), ("/data/with blank/x", "xfs"), ("/data/a", "lustre"), ("/dat", "ext4")],
)
def test_a_path_is_on_the_longest_and_latest_mount(path, kind):
    mount = find_mount(path, MOUNTS)
    assert mount is not None
    assert mount.kind == kind


@pytest.mark.parametrize(
    ("mount", "verdict", "says"),
    [
        (Mount("/", "ext4", "/dev/sda", frozenset()), "ok", "local"),
        (Mount("/a", "nfs4", "s:/e", frozenset(["hard"])), "ok", "from s:/e"),
        (Mount("/a", "nfs", "s:/e", frozenset(["soft"])), "warn", "mounted soft"),
        (Mount("/a", "tmpfs", "tmpfs", frozenset()), "warn", "in memory"),
        (Mount("/", "overlay", "overlay", frozenset()), "warn", "goes with the container"),
    ],
)
def test_where_the_run_folder_is(mount, verdict, says):
    check = judge_file_system("runs/a", mount)
    assert told(check) == verdict
    assert says in check.found


@pytest.mark.parametrize(
    ("facts", "verdict", "says"),
    [
        (None, "fail", "does not answer"),
        ({"kind": "folder", "is_writable": True}, "ok", "can be written"),
        ({"kind": "missing", "is_writable": True}, "ok", "not there yet"),
        ({"kind": "closed", "error": "Permission denied"}, "fail", "Permission denied"),
        ({"kind": "folder", "is_read_only": True}, "fail", "read-only"),
        ({"kind": "folder", "refusal": "No space left", "code": "ENOSPC"}, "fail", "No space"),
    ],
)
def test_whether_the_run_folder_can_be_used(facts, verdict, says):
    check = judge_folder("runs/a", facts if facts is None else {"base": "/x", **facts})
    assert told(check) == verdict
    assert says in check.found


def test_a_question_that_is_not_answered_is_left_behind(tmp_path):
    program = tmp_path / "hangs.py"
    program.write_text("import time; print('{\"a\": 1}', flush=True); time.sleep(60)")
    began = time.monotonic()
    said = Question(program, seconds=1.0).answer()
    assert said in ({"a": 1}, None)  # what it had said until then
    program.write_text("import time; time.sleep(60)")
    assert Question(program, seconds=0.1).answer() is None
    program.write_text("print('no JSON')")
    assert Question(program, seconds=10.0).answer() is None
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("how", ["raise SystemExit(130)", "os.kill(os.getpid(), signal.SIGINT)"])
def test_ctrl_c_that_has_ended_a_check_ends_the_examination(tmp_path, how):
    """It goes to all processes of the terminal, and Python may have lost it in the first one."""
    program = tmp_path / "asked.py"
    program.write_text(
        f"import os, signal\nsignal.signal(signal.SIGINT, signal.SIG_DFL)\n{how}\nprint('{{}}')\n"
    )
    with pytest.raises(KeyboardInterrupt):
        Question(program, seconds=30.0).answer()


def test_the_state_of_many_ranks_is_counted_by_host(tmp_path):
    layout = RunLayout(tmp_path)
    sizes = [1000, 1001, 1002, 1003]
    files = tuple(
        DataFile(rank_file(rank), size, (Part("header", 0, size, "0" * 32),))
        for rank, size in enumerate(sizes)
    )
    written = Manifest("id", 2, 10, "", 0.0, files)
    for step in (5, 10):
        layout.checkpoint(step, 2).mkdir(parents=True)
        (layout.checkpoint(step, 2) / MANIFEST).write_bytes(written.to_bytes())
    layout.checkpoint(15, 2).mkdir()  # damaged: it tells nothing
    layout.identity.write_text('{"run_id": "id"}')
    layout.journal.write_text('{"event": "start", "keep_last": 5, "keep_best": "min:loss"}\n')
    known = read_run(tmp_path)
    assert (known.state_bytes, known.host_bytes, known.step) == (4006, 4006, 10)
    assert (known.kept, known.held_bytes) == (6, 8012)
    layout.ranks(2).mkdir(parents=True)
    for rank in range(4):
        host = "a" if rank < 2 else "b"
        layout.rank(2, rank).write_text(json.dumps({"keeper": {"host": host}}))
    assert read_run(tmp_path).host_bytes == 1002 + 1003


def test_a_folder_without_a_run_tells_nothing(tmp_path):
    assert read_run(tmp_path) == RunNeeds()
    assert read_run(tmp_path / "missing") == RunNeeds()


def test_in_a_job_the_grace_is_what_slurm_says(tmp_path, monkeypatch):
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '*batch_script*) printf "#!/bin/sh\\n#SBATCH --signal=B:USR1@120\\n" ;;\n'
        '*config*) echo "KillWait                = 30 sec" ;;\n'
        "esac\n"
    )
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    job = {"SLURM_JOB_ID": "7"}
    assert slurm_grace(job) == [(120.0, "--signal of job 7"), (30.0, "SLURM's KillWait")]
    assert slurm_grace({}) == []
    scontrol.write_text("#!/bin/sh\nexit 1\n")
    assert slurm_grace(job) == []
