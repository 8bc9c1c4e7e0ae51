"""Runs of several ranks as jobs: on two nodes, with a rank killed, and with a node lost."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from tests.slurm.cluster import Cluster
from tests.slurm.jobs import TRAIN, TRAIN_RANKS, Training, holdfast, read
from tests.slurm.jobs import submit as submit_command
from tests.support import journal_events, wait_until

pytestmark = pytest.mark.timeout(300)
ON_TWO_NODES = ("--nodes=2", "--ntasks-per-node=2")
STEPS = 400


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory) -> Path:
    """Four ranks, by torchrun and on one host."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=4"]
    subprocess.run(
        [*launcher, str(TRAIN_RANKS), str(folder), str(STEPS), "0"],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
        timeout=200,
        capture_output=True,
    )
    return Path(f"{folder}.pt")


def submit(cluster: Cluster, place: Path, *options: str, **more) -> Training:
    more = {"script": TRAIN_RANKS, "steps": STEPS, "seconds": 0.02} | more
    return Training.submit(cluster, place, *(options or ON_TWO_NODES), **more)


def check_equal(training: Training, undisturbed: Path) -> None:
    found = torch.load(f"{training.folder}.pt", weights_only=True)
    expected = torch.load(undisturbed, weights_only=True)
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), f"{name}\n{training.log}"


def trainer_of(training: Training, rank: int) -> int:
    """Its pid: what `holdfast run` leads in that task."""
    pids = training.cluster.pids(training.job, rank=rank)
    scripts = (TRAIN.name, TRAIN_RANKS.name)
    found = [pid for pid in pids if set(scripts) & set(_words(pid)[1:2])]
    assert len(found) == 1, found
    return found[0]


def _words(pid: int) -> list[str]:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return []
    return [Path(os.fsdecode(word)).name for word in words]


def test_a_warning_on_two_nodes_changes_no_bit(cluster, tmp_path, undisturbed):
    training = submit(cluster, tmp_path)
    training.wait_for_step(20)
    cluster.scancel(training.job, "-s", "USR2")
    left = training.wait_for_exit()
    assert (left["status"], left["how"]) == (75, "SIGUSR2")
    training.wait_until_trained(120)
    assert training.lives == [0, left["step"]]
    assert len(training.requeues) == 1
    check_equal(training, undisturbed)


@pytest.mark.nightly
def test_four_interruptions_on_two_nodes_change_no_bit(cluster, tmp_path, undisturbed):
    node = cluster.nodes[0]
    where = f"--nodelist={','.join(cluster.nodes[:2])}"
    training = submit(cluster, tmp_path, *ON_TWO_NODES, "--partition=low", where)

    def warn() -> None:
        cluster.scancel(training.job, "-s", "USR2")

    def requeue() -> None:
        cluster.requeue(training.job)

    def preempt() -> None:
        cluster.sbatch("true", "--partition=high", f"-w{node}", "-c8", "--time=1")

    def kill_a_rank() -> None:
        os.kill(trainer_of(training, rank=3), signal.SIGKILL)
        # Nobody starts again what was killed; here a person does.
        training.wait_for_exit(attempt=4)
        cluster.wait(training.job, "FAILED")
        cluster.requeue(training.job)

    step = 0
    for attempt, interrupt in enumerate((warn, requeue, preempt, kill_a_rank), 1):
        training.wait_for_step(step + 30, attempt)
        interrupt()
        step = training.wait_for_exit(attempt)["durable_step"]
    training.wait_until_trained(120)
    assert len(training.lives) == 5
    check_equal(training, undisturbed)


@pytest.mark.nightly
def test_torchrun_in_a_task_needs_no_flag_for_the_warning(cluster, tmp_path):
    """It would die of USR2; the leader gives it to the ranks instead."""
    folder = tmp_path / "run"
    launcher = ["torchrun", "--standalone", "--nproc-per-node=2", "--max-restarts=2"]
    command = [*launcher, str(TRAIN_RANKS), str(folder), "200", "0.02"]
    job = submit_command(cluster, tmp_path, "--mem=2000M", command=command)
    training = Training(cluster, folder, job)
    training.wait_for_step(20)
    cluster.scancel(job, "-s", "USR2")
    left = training.wait_for_exit()
    assert (left["status"], left["how"]) == (75, "SIGUSR2")
    training.wait_until_trained(90)
    assert training.lives == [0, left["step"]]
    assert cluster.show(job)["Restarts"] == "1"


def test_when_a_rank_is_killed_its_keeper_saves_its_part(cluster, tmp_path):
    """Leader and keeper live on: the step that all ranks hold is durable, and the rank is named."""
    training = Training.submit(cluster, tmp_path, *ON_TWO_NODES, steps=1000)
    training.wait_for_step(30)
    os.kill(trainer_of(training, rank=3), signal.SIGKILL)
    left = training.wait_for_exit()
    assert left["status"] == 75
    assert f"rank 3 on {cluster.nodes[1]} was killed by SIGKILL" in left["how"]
    assert training.newest_on_disk == left["durable_step"] >= left["step"] - 40
    assert cluster.wait(training.job) == "FAILED"
    assert training.requeues == []


def test_a_memory_limit_that_kills_a_rank_leaves_its_state(cluster, tmp_path):
    if not cluster.limits_memory:
        pytest.skip("memory is not limited here: no writable cgroup of memory")
    script, may_grow = tmp_path / "train.py", tmp_path / "may-grow"
    grow = (
        f"        if os.environ['RANK'] == '1' and os.path.exists({str(may_grow)!r}):\n"
        "            hoard.append(bytearray(8 << 20))\n"
    )
    grown = TRAIN.read_text().replace("        weights *=", f"{grow}        weights *=")
    script.write_text(grown.replace("import sys\n", "import os\nimport sys\nhoard = []\n", 1))
    training = Training.submit(
        cluster, tmp_path, "--ntasks=2", "--mem=600M", script=script, steps=4000
    )
    held = training.wait_for_memory(30)
    may_grow.touch()
    left = training.wait_for_exit()
    assert "rank 1" in left["how"], left
    assert "was killed by SIGKILL" in left["how"]
    assert held <= training.newest_on_disk == left["durable_step"]
    assert cluster.wait(training.job) in ("FAILED", "OUT_OF_MEMORY")
    assert holdfast(cluster, tmp_path, "verify", "run").count("whole") >= 1


@pytest.mark.parametrize(
    "noticed", ["by an operator", pytest.param("by SLURM", marks=pytest.mark.nightly)]
)
def test_a_life_on_a_lost_node_is_fenced_off(cluster, tmp_path, noticed):
    """SLURM starts the job elsewhere, and the old life runs on: of two writers one counts."""
    first, second = cluster.nodes[:2]
    training = Training.submit(
        cluster, tmp_path, f"--exclude={cluster.nodes[2]}", steps=4000, seconds=0.05
    )
    training.wait_for_step(20)
    node = cluster.show(training.job)["NodeList"]
    cluster.kill_slurmd(node)
    if noticed == "by an operator":  # a minute earlier
        cluster.declare_down(node)
    lease = training.folder / "attempts" / "0002" / "lease.json"
    wait_until(lease.exists, 120, "the next life")
    training.wait_for_step(1, attempt=2)
    other = cluster.show(training.job)["NodeList"]
    assert {node, other} == {first, second}
    text = "SLURM has restarted the job; taking over from"
    assert f"{text} {node} " in cluster.wait_for_log(training.job, text)
    assert read(training.folder / "attempts/0002/lease.json")["job"]["restarts"] == 1
    # The old life hears of it, says so, and ends without writing.
    wait_until(lambda: (training.folder / "attempts/0001/exit.json").exists(), 30, "its end")
    left = read(training.folder / "attempts/0001/exit.json")
    assert "attempt 2 took over" in left["how"], left
    assert training.requeues == []
    before = {event["name"] for event in journal_events(training.folder, "checkpoint")}
    began = training.wait_for_step(1, attempt=2)
    training.wait_for_step(began + 40, attempt=2)
    cluster.scancel(training.job, "-s", "USR2")
    new = training.wait_for_exit(attempt=2)
    saved = {event["name"] for event in journal_events(training.folder, "checkpoint")} - before
    assert saved == {f"step-{new['step']:012d}-a0002"}
    cluster.scancel(training.job)
