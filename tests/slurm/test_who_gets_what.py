"""Who gets SLURM's warning and who its end: the table of docs/slurm.md, row by row.

The rows run side by side, since all they do is wait. In `make test` the warning is sent by scancel,
which reaches the same processes; in `make nightly` it is the one that `--signal` asks for.
"""

from __future__ import annotations

import importlib.util
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.slurm.cluster import ENDED, Cluster
from tests.support import wait_until

LISTENER = Path(__file__).with_name("listener.py")
# How long a signal that must not arrive is given to arrive all the same. Measured: 25 ms.
QUIET_SECONDS = 1.0
TIME_SECONDS = 120
LEAD_SECONDS = 60


@dataclass(frozen=True)
class Row:
    """A way to write a batch script, and what becomes of it when warned and then out of time."""

    to: str  # whom the warning is for: the steps (USR2@60) or the batch shell (B:USR2@60)
    script: str  # with LISTEN where the training is
    ends: str  # the job's last state; FAILED: it did not live to see its time limit
    warned: bool = False  # whether the training gets the warning
    child_warned: bool = False  # whether what the training has started gets it too
    terminated: bool | None = False  # whether the training gets SIGTERM and time; None: it varies


ROWS = {
    "bare python": Row("steps", "LISTEN", "TIMEOUT"),
    "exec python": Row("steps", "exec LISTEN", "TIMEOUT", terminated=True),
    "srun python": Row("steps", "srun LISTEN", "TIMEOUT", warned=True, terminated=True),
    "srun wrapper": Row("steps", "srun bash -c 'LISTEN; true'", "FAILED"),
    "srun wrapper that execs": Row(
        "steps",
        """srun bash -c 'trap "" USR2; exec LISTEN'""",
        "TIMEOUT",
        warned=True,
        terminated=True,
    ),
    "B: bare python": Row("batch", "LISTEN", "FAILED"),
    # Early, but not without a word: the step outlives its batch script by KillWait.
    "B: srun python": Row("batch", "srun LISTEN", "FAILED", terminated=True),
    "B: exec python": Row("batch", "exec LISTEN", "TIMEOUT", warned=True, terminated=True),
    "B: exec srun python": Row(
        "batch", "exec srun LISTEN", "TIMEOUT", warned=True, terminated=True
    ),
    # The second wait is the one that waits: the first is over once the trap has run.
    "B: trap, &, wait": Row(
        "batch",
        "trap 'kill -USR2 $child' USR2; LISTEN & child=$!; wait $child; wait $child",
        "TIMEOUT",
        warned=True,
    ),
    "B: trap, python in the foreground": Row(
        "batch", "trap 'kill -USR2 $!' USR2; LISTEN", "TIMEOUT"
    ),
}
if importlib.util.find_spec("torch") is not None:
    forwarded = "--signals-to-handle=SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR2"
    ROWS |= {
        "srun torchrun": Row("steps", "srun torchrun --standalone SCRIPT", "FAILED"),
        # Half a minute after it has passed the warning on, torchrun kills its workers and fails.
        "srun torchrun that forwards": Row(
            "steps",
            f"srun torchrun --standalone {forwarded} SCRIPT",
            "TIMEOUT or FAILED",
            warned=True,
            child_warned=True,
            terminated=None,
        ),
    }


@dataclass
class Outcome:
    """What a row's training heard, and what its job ended as."""

    heard: list[str]
    state: str


@pytest.fixture(scope="module")
def warned_by_hand(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """What became of every row, warned by scancel."""
    jobs = _submit(cluster, tmp_path_factory.mktemp("by-hand"))
    for name, job in jobs.items():
        to_the_shell = ["--batch"] if ROWS[name].to == "batch" else []
        cluster.scancel(job.number, "--signal=USR2", *to_the_shell)
    return _outcomes(cluster, jobs)


@pytest.fixture(scope="module")
def warned_by_slurm(
    cluster: Cluster, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Outcome]:
    """What became of every row, warned by SLURM itself."""
    jobs = _submit(cluster, tmp_path_factory.mktemp("by-slurm"), by_slurm=True)
    # The warning comes up to half a minute early, and never late.
    time.sleep(TIME_SECONDS - LEAD_SECONDS + 5)
    return _outcomes(cluster, jobs)


@pytest.fixture(autouse=True, scope="module")
def _needs_cgroups(cluster: Cluster) -> None:
    if not cluster.tracks_by_cgroup:
        pytest.skip("without a /sys/fs/cgroup/freezer to write to, signals reach all descendants")


@pytest.mark.parametrize("name", ROWS)
def test_scancel_reaches(name: str, warned_by_hand: dict[str, Outcome]) -> None:
    _compare(ROWS[name], warned_by_hand[name])


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", ROWS)
def test_the_warning_reaches(name: str, warned_by_slurm: dict[str, Outcome]) -> None:
    _compare(ROWS[name], warned_by_slurm[name])


@dataclass
class _Job:
    row: Row
    number: str
    file: Path

    def heard(self) -> list[str]:
        return self.file.read_text().splitlines() if self.file.exists() else []

    def wait_to_hear(self, *lines: str) -> None:
        wait_until(lambda: set(lines) <= set(self.heard()), 60, f"{lines} of {self.row}")


def _submit(cluster: Cluster, folder: Path, by_slurm: bool = False) -> dict[str, _Job]:
    """Start a job for each row, and return when every training listens."""
    jobs = {}
    for index, (name, row) in enumerate(ROWS.items()):
        file = folder / f"{index}.heard"
        script = row.script.replace("LISTEN", "python SCRIPT")
        options = [f"--time={TIME_SECONDS // 60}", "--no-requeue"]
        if by_slurm:
            shell = "B:" if row.to == "batch" else ""
            options.append(f"--signal={shell}USR2@{LEAD_SECONDS}")
        number = cluster.sbatch(
            script.replace("SCRIPT", f"{LISTENER} {file}"), *options, cwd=folder
        )
        jobs[name] = _Job(row, number, file)
    for job in jobs.values():
        job.wait_to_hear("python ready", "child ready")
    return jobs


def _outcomes(cluster: Cluster, jobs: dict[str, _Job]) -> dict[str, Outcome]:
    """Wait for the warnings, move the time limit of what still runs to now, and see the end."""
    for job in jobs.values():
        if job.row.warned:
            job.wait_to_hear("python SIGUSR2")
    time.sleep(QUIET_SECONDS)  # for those who should hear nothing
    for job in jobs.values():
        if cluster.state(job.number) == "RUNNING":
            cluster.end_in(job.number, 1)
    outcomes = {}
    for name, job in jobs.items():
        # SLURM looks at time limits every half minute.
        state = cluster.wait(job.number, ENDED, 60)
        wait_until(partial(cluster.is_over, job.number), 30, f"the last process of {name!r}")
        outcomes[name] = Outcome(job.heard(), state)
    return outcomes


def _compare(row: Row, outcome: Outcome) -> None:
    assert outcome.state in row.ends.split(" or "), outcome
    assert ("python SIGUSR2" in outcome.heard) == row.warned, outcome
    assert row.terminated in (None, "python left-alone" in outcome.heard), outcome
    assert ("child SIGUSR2" in outcome.heard) == row.child_warned, outcome
