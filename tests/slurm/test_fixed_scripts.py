"""Published batch scripts on a real SLURM, as `lint --fix` leaves them: the warning arrives.

tests/unit/tools/test_lint_public.py has all of them, and shows in `make test` that they mean the
same after a fix; here ten of them are warned as SLURM warns, also while the training still imports.
"""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path

import pytest

from holdfast._tools.lint.finding import Surroundings
from holdfast._tools.lint.lint import fix
from tests.slurm.cluster import Cluster
from tests.support import wait_until

pytestmark = [pytest.mark.nightly, pytest.mark.timeout(240)]

SCRIPTS = Path(__file__).parents[1] / "unit" / "sbatch" / "public"
# It imports until there is a file `go`, and saves at a signal.
TRAIN = """
import os, pathlib, signal, sys, time
place = pathlib.Path({place!r})
def note(what):
    with (place / "notes").open("a") as file:
        file.write(" ".join([what, *sys.argv[1:]]) + "\\n")
def save(number, frame):
    note("saves")
    os._exit(0)
note("starts")
while not (place / "go").exists():
    time.sleep(0.05)
for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM):
    signal.signal(number, save)
note("trains")
while True:
    time.sleep(0.05)
"""
# What this cluster does not have.
_ELSEWHERE = re.compile(r"--(gres|gpus-per-node|account|partition|qos|constraint|output)=\S+")


class Fixed:
    """A published script after `--fix`, as a job."""

    def __init__(self, cluster: Cluster, place: Path, name: str, *options: str) -> None:
        self.cluster, self.place = cluster, place
        for file in ("train.py", "pkg/train.py", "pretraining/hf_mlm/run.py", "repo/train.py"):
            (place / file).parent.mkdir(parents=True, exist_ok=True)
            (place / file).write_text(TRAIN.format(place=str(place)))
        text = fix((SCRIPTS / f"{name}.sbatch").read_text(), Surroundings(place, place))
        self.to_batch = "--signal=B:" in text
        found = re.search(r"--signal=(?:B:)?(?:SIG)?(USR\d)", text)
        assert found is not None
        self.signal = found[1]
        (place / "job.sbatch").write_text(_ELSEWHERE.sub("", text))
        self.job = cluster.sbatch(
            place / "job.sbatch",
            "--time=10",
            f"--output={place / 'log'}",
            f"--export=ALL,HOME={place}",
            *options,
            cwd=place,
        )

    def notes(self, what: str) -> list[str]:
        path = self.place / "notes"
        lines = path.read_text().splitlines() if path.exists() else []
        return [line for line in lines if line.startswith(what)]

    def await_notes(self, what: str, count: int) -> None:
        """Wait until the trainings have said this so often."""
        try:
            wait_until(lambda: len(self.notes(what)) >= count, 90, f"{count} times {what!r}")
        except AssertionError as error:
            log = self.place / "log"
            said = log.read_text() if log.exists() else ""
            show = self.cluster.show(self.job)
            raise AssertionError(f"{error}\n{self.notes('')}\n{show}\n{said}") from None

    def warn(self) -> None:
        to = ("--batch",) if self.to_batch else ()
        self.cluster.scancel(self.job, *to, "-s", self.signal)

    def begin(self) -> None:
        (self.place / "go").touch()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("conda_and_lightning_signal", "--config configs/base.yaml --epochs 90"),
        ("arguments_in_a_text", "--experiment_name=test_requeue --strategy=ddp --num_nodes=1"),
        ("settings_in_a_here_document", "--config conf.yaml"),
        ("pipe_to_tee", ""),
        ("in_a_subshell", "--inputsize 48"),
        ("repository_in_a_variable", "--workers"),
    ],
)
def test_a_warning_in_the_import_kills_nothing_and_the_next_one_is_heard(
    cluster: Cluster, tmp_path, name, words
):
    fixed = Fixed(cluster, tmp_path, name)
    fixed.await_notes("starts", 1)
    fixed.warn()
    fixed.begin()
    fixed.await_notes("trains", 1)
    fixed.warn()
    fixed.await_notes("saves", 1)
    assert cluster.wait(fixed.job) == "COMPLETED"
    assert [line.strip() for line in fixed.notes("starts")] == [f"starts {words}".strip()]


def test_all_trainings_beside_each_other_are_told(cluster: Cluster, tmp_path):
    fixed = Fixed(cluster, tmp_path, "folds_on_each_gpu")
    fixed.begin()
    fixed.await_notes("trains", 2)
    fixed.warn()
    fixed.await_notes("saves", 2)
    assert cluster.wait(fixed.job) == "COMPLETED"
    assert sorted(fixed.notes("saves")) == ["saves --fold 0", "saves --fold 1"]


def test_each_of_several_trainings_is_told(cluster: Cluster, tmp_path):
    fixed = Fixed(cluster, tmp_path, "stages_with_a_trap")
    fixed.begin()
    for count in (1, 2):
        fixed.await_notes("trains", count)
        fixed.warn()
        fixed.await_notes("saves", count)
    assert cluster.wait(fixed.job) == "COMPLETED"
    assert fixed.notes("saves") == ["saves --stage pretrain", "saves --stage probe"]


def test_a_task_of_an_array_comes_back_alone(cluster: Cluster, tmp_path):
    fixed = Fixed(cluster, tmp_path, "array_of_settings", "--array=0-1")
    fixed.begin()
    fixed.await_notes("trains", 2)
    fixed.job += "_1"
    fixed.warn()
    fixed.await_notes("saves", 1)
    fixed.await_notes("trains", 3)
    assert cluster.show(fixed.job)["Restarts"] == "1"
    assert cluster.show(fixed.job.replace("_1", "_0"))["Restarts"] == "0"


def test_a_trap_that_submits_does_so_once(cluster: Cluster, tmp_path):
    (tmp_path / "jobs").mkdir()
    again = f"#!/bin/bash\necho again >> {tmp_path / 'notes'}\n"
    (tmp_path / "jobs" / "again.sh").write_text(again)
    fixed = Fixed(cluster, tmp_path, "trap_forwards_and_submits")
    fixed.begin()
    fixed.await_notes("trains", 1)
    fixed.warn()
    fixed.await_notes("saves", 1)
    fixed.await_notes("again", 1)
    cluster.wait(fixed.job)
    wait_until(lambda: not cluster.run("squeue", "-h").strip(), 30)
    assert len(fixed.notes("again")) == 1


def test_torchrun_starts_its_module_and_passes_the_warning_on(cluster: Cluster, tmp_path):
    if importlib.util.find_spec("torch") is None:
        pytest.skip("torchrun comes with torch: pip install torch")
    fixed = Fixed(cluster, tmp_path, "torchrun_module_standalone", "--cpus-per-task=2")
    fixed.begin()
    fixed.await_notes("trains", 2)
    fixed.warn()
    fixed.await_notes("saves", 2)
    assert fixed.notes("starts") == ["starts --steps 100"] * 2
