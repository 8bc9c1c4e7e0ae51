"""Starting the process group: real ranks, real sockets, and what each of them says."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fork_server import Forked, ForkServer
from tests.ports import free_port
from tests.support import environment, wait_until

torch = pytest.importorskip("torch", reason="pip install torch")

import holdfast.torch
from holdfast._run.ranks import address
from holdfast._run.ranks.address import (
    AddressPatience,
    Endpoint,
    describe_caller,
    wait_for_all_ranks,
)

SCRIPT = Path(__file__).with_name("launched_ranks.py")
Start = Callable[..., Forked]


@pytest.fixture
def start(fork_server: ForkServer, tmp_path: Path) -> Iterator[Start]:
    """Start one process that does an act, with some of the environment of a rank."""
    started: list[Forked] = []

    def begin(act: str, variables: dict[str, Any] | None = None, **arguments: Any) -> Forked:
        env = environment(**{name: str(value) for name, value in (variables or {}).items()})
        output = tmp_path / f"output-{len(started)}"
        started.append(
            fork_server.start(SCRIPT, act, json.dumps(arguments), output=output, env=env)
        )
        return started[-1]

    yield begin
    for life in started:
        life.kill()
        life.wait(25)


@pytest.fixture
def port() -> int:
    return free_port()


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A program that has a port and says nothing."""
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def place(rank: int, size: int, port: int) -> dict[str, Any]:
    return {"RANK": rank, "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}


def at(port: int) -> str:
    return f"MASTER_ADDR=127.0.0.1, MASTER_PORT={port}"


def answers(port: int) -> bool:
    with socket.socket() as caller:
        return caller.connect_ex(("127.0.0.1", port)) == 0


def sentence(life: Forked) -> str:
    """The two lines that a rank leaves with, and nothing else: no traceback, no frames."""
    assert life.wait(75) == 1, life.output
    lines = life.output.splitlines()
    assert lines[0].startswith("holdfast: "), life.output
    assert lines[2].startswith("  at "), life.output
    assert len(lines) == 3, life.output
    return "\n".join(lines[:2])


def ok(life: Forked, text: str) -> None:
    assert life.wait(75) == 0, life.output
    assert life.output == text


def test_ranks_start_without_a_word(start, port):
    first = start("train", place(0, 2, port), late_seconds=0.3, times=2)
    ok(start("train", place(1, 2, port), times=2), "rank 1: the sum is 2\n" * 2)
    ok(first, "rank 0: the sum is 2\n" * 2)


def test_rank_and_address_may_come_by_arguments(start, port):
    options = {"world_size": 2, "init_method": f"tcp://127.0.0.1:{port}", "backend": "gloo"}
    first = start("train", rank=0, **options)
    ok(start("train", rank=1, **options), "rank 1: the sum is 2\n")
    ok(first, "rank 0: the sum is 2\n")


def test_a_process_that_is_no_rank_is_a_group_of_one(start):
    ok(start("train", times=2), "rank 0: the sum is 1\n" * 2)


def test_a_store_or_a_file_of_the_script_is_left_to_torch(start, tmp_path):
    ok(start("use_other_ways", file=str(tmp_path / "meet")), "rank 0: the sum is 1\n" * 2)


def test_a_second_start_is_told(start):
    life = start("start_twice")
    assert life.wait(75) == 1
    assert "the process group is initialized already: backend gloo, rank 0 of 1." in life.output
    assert "Traceback" not in life.output


def test_a_wrong_environment_is_told_before_anything_is_waited_for(start, port):
    said = sentence(start("train", {**place(2, 2, port)}))
    assert "RANK is 2 and WORLD_SIZE is 2, and ranks count from 0." in said
    task = {"SLURM_PROCID": 1, "SLURM_NTASKS": 4, "SLURM_STEP_ID": 0}
    assert "srun has started 4 processes" in sentence(start("train", task))
    named = place(0, 2, port) | {"MASTER_ADDR": "no.such.host.invalid"}
    said = sentence(start("train", named, timeout_seconds=0.2))
    assert 'MASTER_ADDR is "no.such.host.invalid", which does not resolve on' in said


@pytest.mark.skipif(torch.cuda.is_available(), reason="there are GPUs here")
def test_nccl_without_a_gpu_is_told(start):
    said = sentence(start("train", backend="nccl"))
    assert "the backend is nccl, which needs a GPU, and torch sees none here" in said


def test_ranks_that_do_not_come_are_named_on_all_that_wait(start, port):
    waiting = start("train", place(2, 4, port))
    for life in (start("train", place(0, 4, port), timeout_seconds=3), waiting):
        said = sentence(life)
        assert f"ranks 1 and 3 of 4 have not come to {at(port)} within 3 s; ranks 0 and 2" in said


def test_a_world_that_is_larger_than_what_srun_started_is_told(start, port):
    task = {"SLURM_PROCID": 0, "SLURM_NTASKS": 2, "SLURM_STEP_ID": 0}
    said = sentence(start("train", {**place(0, 4, port), **task}, timeout_seconds=0.5))
    assert "srun has started 2 tasks (SLURM_NTASKS): set WORLD_SIZE to 2." in said


def test_rank_0_that_does_not_come_is_told(start, port):
    said = sentence(start("train", place(1, 2, port), timeout_seconds=0.5))
    assert f"rank 0 did not answer at {at(port)} within 0.5 s" in said


def test_two_processes_with_one_rank_are_told(start, port):
    first = start("train", place(0, 3, port))
    twins = [start("train", place(1, 3, port)) for _ in range(2)]
    wait_until(lambda: any(twin.is_over for twin in twins), what="the end of one")
    [second], [left] = [[t for t in twins if t.is_over is over] for over in (True, False)]
    said = sentence(second)
    assert f"two processes say that they are rank 1: pid {left.pid} on" in said
    assert f"and this one, pid {second.pid} on" in said
    ok(start("train", place(2, 3, port)), "rank 2: the sum is 3\n")
    ok(left, "rank 1: the sum is 3\n")
    ok(first, "rank 0: the sum is 3\n")


def test_ranks_that_wait_in_vain_hear_of_two_with_one_rank():
    store, endpoint = torch.distributed.HashStore(), Endpoint("127.0.0.1", 1)

    def call(rank: int) -> str:
        now = {name: str(value) for name, value in place(rank, 3, 1).items()}
        with pytest.raises(holdfast.RanksError) as error:
            wait_for_all_ranks(store, now, endpoint, AddressPatience(0.1, print))
        return str(error.value)

    other = {"process": "pid 7 on node7", "command": "train.py"}
    store.set(f"holdfast/0/{address._calls}/rank-1", json.dumps(other))
    store.set(
        f"holdfast/0/{address._calls}/rank-0", json.dumps(describe_caller({"WORLD_SIZE": "3"}))
    )
    assert "two processes say that they are rank 1: pid 7 on node7 (train.py), and" in call(1)
    assert "ranks 0 and 1 are there, and two processes say that they are rank 1." in call(0)


def test_another_job_at_the_same_port_is_told_and_not_disturbed(start, port):
    first = start("train", place(0, 2, port))
    size, job = place(1, 3, port), {**place(1, 2, port), "SLURM_JOB_ID": 8}
    said = sentence(start("train", size))
    assert f"another job answers at {at(port)}: its rank 0 is" in said
    assert f"pid {first.pid} on" in said
    assert "WORLD_SIZE is 2 there and 3 here." in said
    said = sentence(start("train", place(0, 3, port)))
    assert re.search(f"that port is in use by pid {first.pid} ", said)
    # Only one of the two knows a job: that is no proof of another one.
    ok(start("train", job), "rank 1: the sum is 2\n")
    ok(first, "rank 0: the sum is 2\n")


def test_two_slurm_jobs_at_one_port_are_told(start, port):
    start("train", {**place(0, 2, port), "SLURM_JOB_ID": 7})
    said = sentence(start("train", {**place(1, 2, port), "SLURM_JOB_ID": 8}))
    assert "SLURM_JOB_ID is 7 there and 8 here." in said


def test_a_job_that_does_not_know_holdfast_is_told(start, port):
    start("train_by_torch", place(0, 2, port))
    wait_until(lambda: answers(port), what="torch's store")
    said = sentence(start("train", place(1, 2, port), timeout_seconds=0.3))
    assert f"a store of torch answers at {at(port)}, and within 0.3 s no rank 0 of this job" in said


def test_a_port_that_another_program_has_is_told(start, listener):
    port = listener.getsockname()[1]
    said = sentence(start("train", place(0, 2, port)))
    assert (
        f"MASTER_PORT is {port}, and on this host that port is in use by pid {os.getpid()} ("
        in (said)
    )
    said = sentence(start("meet_something_else", place(1, 2, port)))
    assert f"what listens at {at(port)} is no store of torch" in said


def test_rank_0_that_dies_while_the_others_wait_is_told(start, port):
    first = start("train", place(0, 3, port))
    life = start("train", place(1, 3, port))
    wait_until(lambda: answers(port), what="the store of rank 0")
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    wait_until(lambda: store.compare_set("holdfast/0/0/rank-1", "?", "?") != b"?", what="rank 1")
    first.kill()
    assert life.wait(75) == 1
    assert f"the store at {at(port)} was lost while the ranks gathered: " in life.output
    assert "Traceback" not in life.output


@pytest.mark.nightly
def test_ranks_that_gloo_does_not_connect_are_told(start, port):
    start("stay_away", place(1, 2, port))
    said = sentence(start("train", place(0, 2, port), timeout_seconds=3))
    assert "the ranks have all come, and gloo has not connected them with each other within" in said
    assert "GLOO_SOCKET_IFNAME=eth0" in said


def test_what_torch_itself_fails_with_is_a_sentence(start):
    said = sentence(start("fail_in_torch"))
    assert "torch could not start the process group with gloo: Connection closed by peer [" in said
    assert "frame" not in said


def test_a_time_that_is_none_is_refused():
    with pytest.raises(holdfast.SettingsError, match="timeout_seconds is 0, and must be more"):
        holdfast.torch.init_process_group(timeout_seconds=0)


BY_TORCHRUN = """
import os, sys, torch, torch.distributed as dist, holdfast.torch

before = dict(os.environ)
holdfast.torch.init_process_group()
one = torch.ones(1)
dist.all_reduce(one)
assert dict(os.environ) == before
life = os.environ["TORCHELASTIC_RESTART_COUNT"]
os.write(1, f"life {life}: the sum is {one.item():g}\\n".encode())
dist.destroy_process_group()
if life == "0":
    sys.exit(3)
os.environ["MASTER_PORT"] = "12355"
try:
    holdfast.torch.init_process_group()
except holdfast.RanksError as error:
    os.write(1, f"{error}\\n".encode())
"""


@pytest.mark.nightly
def test_torchrun_starts_ranks_again_and_sees_no_word_until_the_script_changes_a_variable(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(BY_TORCHRUN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1"]
    found = subprocess.run(
        [*command, "--monitor-interval=0.1", "--nproc-per-node=2", str(script)],
        capture_output=True,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert sorted(lines[:4]) == ["life 0: the sum is 2"] * 2 + ["life 1: the sum is 2"] * 2
    assert found.stdout.count('has been set to "12355" since, by the script') == 2
    assert "holdfast" not in found.stderr


BY_SPAWN = """
import os, torch, torch.distributed as dist, torch.multiprocessing as mp, holdfast.torch

def work(rank, port):
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = port
    holdfast.torch.init_process_group("gloo", rank=rank, world_size=2)
    one = torch.ones(1)
    dist.all_reduce(one)
    os.write(1, f"the sum is {one.item():g}\\n".encode())
    dist.destroy_process_group()

if __name__ == "__main__":
    mp.spawn(work, ("{port}",), 2)
"""


@pytest.mark.nightly  # tests/ranks/test_spawned.py
def test_spawned_ranks_start_without_a_word(tmp_path, port):
    script = tmp_path / "train.py"
    script.write_text(BY_SPAWN.replace("{port}", str(port)))
    found = subprocess.run(
        [sys.executable, script],
        capture_output=True,
        text=True,
        env=environment(OMP_NUM_THREADS="1"),
    )
    assert found.returncode == 0, found.stderr
    assert (found.stdout, found.stderr) == ("the sum is 2\n" * 2, "")
