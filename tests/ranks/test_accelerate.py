"""Trainings that Accelerate shares out among ranks: its own loop, and a Trainer."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.fork_server import ForkServer
from tests.ports import free_port
from tests.ranks.test_examples import EXAMPLES, check_nothing_left, find_line, stop_amid
from tests.support import Trainer, environment

pytest.importorskip("torch", reason="pip install torch")
pytest.importorskip("accelerate", reason="pip install accelerate")
pytest.importorskip("transformers", reason="pip install transformers")

# Processes that import torch, one after another on a machine that is busy.
pytestmark = pytest.mark.timeout(500)

# Long enough to be stopped amid its steps, however slow the machine is.
LOOP = ("accelerate_loop", "--epochs", 12, "--size", 3000)
TRAINER = ("transformers_trainer", "--epochs", 3, "--size", 600, "--width", 32)


@pytest.fixture
def torchrun() -> Iterator[Callable[..., Trainer]]:
    """Start an example with two ranks; whatever is left at the end of the test is ended."""
    started: list[Trainer] = []

    def begin(folder: Path, name: str, *arguments: Any) -> Trainer:
        agent = (sys.executable, "-m", "torch.distributed.run", "--standalone")
        started.append(
            Trainer(
                *("--folder", folder, *arguments),
                script=EXAMPLES / f"{name}.py",
                prefix=(*agent, "--nproc-per-node=2", "--no-python"),
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


def train(fork_server: ForkServer, folder: Path, output: Path, name: str, *arguments: Any) -> str:
    """What two ranks say that train to the end, started as an agent would, but forked."""
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "2"}
    shared |= {"LOCAL_WORLD_SIZE": "2", "GLOO_SOCKET_IFNAME": "lo"}
    command = (EXAMPLES / f"{name}.py", "--folder", folder, *arguments)
    lives = [
        fork_server.start(
            *command,
            output=output.with_suffix(f".{rank}"),
            env=environment(**shared, RANK=str(rank), LOCAL_RANK=str(rank)),
        )
        for rank in range(2)
    ]
    statuses = [life.wait(300) for life in lives]
    said = "".join(life.output for life in lives)
    assert statuses == [0, 0], said
    assert "2 ranks" in said  # and not two runs of one
    return said


@pytest.mark.parametrize(
    "example", [LOOP, pytest.param(TRAINER, marks=pytest.mark.nightly)], ids=lambda words: words[0]
)
def test_stopped_by_the_agent_it_goes_on_to_the_same_bits(
    example, folder, torchrun, fork_server, tmp_path
):
    step = stop_amid(torchrun(folder, *example), folder)
    again = train(fork_server, folder, tmp_path / "again", *example)
    whole = train(fork_server, tmp_path / "undisturbed", tmp_path / "whole", *example)
    assert find_line(again) == find_line(whole)
    found = re.search(r"resumed at step (\d+) from", again)
    assert found is not None, again
    assert int(found[1]) == step
    check_nothing_left(folder)
