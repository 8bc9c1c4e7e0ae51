"""The examples of several ranks, as their docstrings say to start them."""

from __future__ import annotations

import hashlib
import json
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from holdfast._tools.convert.export import export
from holdfast._tools.convert.writers import ExportRequest
from tests.fork_server import ForkServer
from tests.ports import free_port
from tests.support import (
    Trainer,
    arena_files,
    environment,
    journal_events,
    wait_for_keeper_gone,
    wait_until,
)

torch = pytest.importorskip("torch")

# Ten processes that import torch, one after another on a machine that is busy.
pytestmark = pytest.mark.timeout(400)

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
DDP = ("ddp", "--epochs", 3, "--size", 6400)
FSDP = ("fsdp", "--epochs", 1, "--size", 1920)


@pytest.fixture
def torchrun(folder: Path) -> Iterator[Callable[..., Trainer]]:
    """Start an example with so many ranks; whatever is left at the end of the test is ended."""
    started: list[Trainer] = []

    def begin(ranks: int, name: str, *arguments: Any) -> Trainer:
        agent = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        started.append(
            Trainer(
                *("--folder", folder, *arguments),
                script=EXAMPLES / f"{name}.py",
                prefix=(*agent, f"--nproc-per-node={ranks}", "--no-python"),
                env=environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo"),
            )
        )
        return started[-1]

    yield begin
    for each in started:
        if each.process.poll() is None:
            for child in psutil.Process(each.pid).children(recursive=True):
                child.kill()
        each.end()


def undisturbed(
    fork_server: ForkServer, place: Path, ranks: int, name: str, *arguments: Any
) -> str:
    """The last line of an example that nobody interrupts, nor starts with torchrun."""
    variables = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    variables |= {"WORLD_SIZE": str(ranks), "GLOO_SOCKET_IFNAME": "lo"}
    command = (EXAMPLES / f"{name}.py", "--folder", place / "undisturbed", *arguments)
    lives = [
        fork_server.start(
            *command,
            output=place / f"output-{rank}",
            env=environment(**variables, RANK=str(rank)),
        )
        for rank in range(ranks)
    ]
    statuses = [life.wait(300) for life in lives]
    output = "".join(life.output for life in lives)
    assert set(statuses) == {0}, output
    return find_line(output)


def last_line(job: Trainer) -> str:
    """What a job that has trained to the end says."""
    assert job.wait(120) == 0, job.output
    return find_line(job.output)


def find_line(output: str) -> str:
    """One rank, and no other, says how it went, with a hash of the weights."""
    lines = re.findall(r"^.*, weights [0-9a-f]{16}$", output, re.MULTILINE)
    assert len(lines) == 1, output
    return str(lines[0])


def stop_amid(job: Trainer, folder: Path) -> int:
    """Ask torchrun to end as soon as a step is made; returns the step of the checkpoint."""
    beats = folder / "attempts" / "0001" / "heartbeat.json"

    def has_stepped() -> bool:
        is_over = job.process.poll() is not None
        return is_over or (beats.exists() and json.loads(beats.read_text()).get("step", 0) > 0)

    wait_until(has_stepped, 120, f"the first step in\n{job.output}\n")
    job.send(signal.SIGTERM)
    assert job.wait(120) != 0, job.output
    (stopped,) = journal_events(folder, "stop")
    assert stopped["reason"] == "SIGTERM", job.output
    check_nothing_left(folder)
    return int(stopped["step"])


def check_nothing_left(folder: Path) -> None:
    wait_for_keeper_gone(folder)
    assert arena_files(folder) == []


def stored_hash(folder: Path, out: Path) -> str:
    """Of the weights and moments in the newest checkpoint, as examples/fsdp.py makes it."""
    assert export(folder, ExportRequest(out)).chosen.loaded.world == 4
    state = torch.load(out, weights_only=True)
    entries = [state["optimizer"]["state"][n] for n in sorted(state["optimizer"]["state"])]
    tensors = [*state["model"].values(), *(m for each in entries for m in each.values())]
    data = b"".join(each.numpy().tobytes() for each in tensors if each.dim())
    return hashlib.sha256(data).hexdigest()[:16]


@pytest.mark.nightly  # test_one_stop.py
def test_ddp_stopped_by_the_agent_goes_on_to_the_same_bits(folder, torchrun, fork_server, tmp_path):
    step = stop_amid(torchrun(2, *DDP), folder)
    again = torchrun(2, *DDP)
    assert last_line(again) == undisturbed(fork_server, tmp_path, 2, *DDP)
    assert f"resumed at step {step} from" in again.output
    check_nothing_left(folder)


@pytest.mark.nightly
def test_fsdp_saved_on_four_ranks_goes_on_with_two(folder, torchrun, tmp_path):
    step = stop_amid(torchrun(4, *FSDP), folder)
    stored = stored_hash(folder, tmp_path / "stored.pt")
    job = torchrun(2, *FSDP)
    assert "2 rank(s)" in last_line(job)
    assert f"resumed at step {step} from disk" in job.output
    assert f"going on with 2 rank(s), weights and moments {stored}\n" in job.output
    check_nothing_left(folder)
