"""What `holdfast doctor` makes of limits, cores, variables and GPUs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import holdfast
from holdfast._environment.processes.stacks import Dump
from holdfast._tools.doctor.check import worst
from holdfast._tools.doctor.environment import _OURS, judge_environment, nodes_of
from holdfast._tools.doctor.machine import (
    Cores,
    Limits,
    judge_cores,
    judge_gpus,
    judge_limits,
    judge_stacks,
    ranks_here,
)
from tests.unit.tools.test_doctor import GB, told


def only(checks):
    """What is not ok, by name."""
    return {check.name: check.state for check in checks if check.state != "ok"}


@pytest.mark.parametrize(
    ("limits", "found"),
    [
        (Limits(), {}),
        (Limits(files=(1024, 524288)), {"open files": "warn"}),
        (Limits(files=(64, 64)), {"open files": "fail"}),
        (Limits(processes=(4096, 4096), used_processes=100), {}),
        (Limits(processes=(256, 512), used_processes=100), {"processes": "warn"}),
        (Limits(processes=(256, 256), used_processes=250), {"processes": "fail"}),
        (Limits(tasks_left=40), {"processes": "warn"}),
        (Limits(locked=(64 << 10, 64 << 10)), {}),
        (Limits(locked=(64 << 10, None), has_fast_network=True), {"locked memory": "warn"}),
        (Limits(file_size=(10 * GB, None)), {"file size": "warn"}),
        (Limits(file_size=(2 * GB, None)), {"file size": "fail"}),
        (Limits(cpu_seconds=(3600, None)), {"cpu time": "warn"}),
    ],
)
def test_limits(limits, found):
    checks = list(judge_limits(limits, GB))
    assert all(told(check) for check in checks)
    assert only(checks) == found


@pytest.mark.parametrize(
    ("cores", "variables", "verdict", "says"),
    [
        (Cores(8, None, 1.0), {}, "ok", "8 cores for 8 threads"),
        (Cores(8, None, 1.0), {"OMP_NUM_THREADS": "16"}, "warn", "16 threads"),
        (Cores(64, 4.0, 1.0), {}, "warn", "4 of 64 cores"),
        (Cores(64, 4.0, 1.0), {"OMP_NUM_THREADS": "4"}, "ok", "4 threads"),
        (Cores(8, None, 1.0, ranks=4), {}, "warn", "4 ranks with 8 threads each"),
        (Cores(8, None, 1.0, ranks=4, launcher_sets_one=True), {}, "ok", "1 thread each"),
        (Cores(8, None, 30.0), {}, "warn", "others compute here too"),
    ],
)
def test_cores_against_threads(cores, variables, verdict, says):
    check = judge_cores(cores, variables)
    assert told(check) == verdict
    assert says in check.found


def test_the_ranks_on_this_host_are_read_off_words_and_variables():
    assert ranks_here(["torchrun", "--nproc-per-node=4", "train.py"], {}) == 4
    assert ranks_here(["torchrun", "--nproc_per_node", "2", "train.py"], {}) == 2
    assert ranks_here(["python", "train.py"], {"LOCAL_WORLD_SIZE": "8"}) == 8
    assert ranks_here(["torchrun", "--nproc-per-node=gpu", "train.py"], {}) == 1


@pytest.mark.parametrize(
    ("variables", "verdict"),
    [
        ({"PYTHONFAULTHANDLER": "1", "NCCL_DEBUG": "INFO", "OMP_NUM_THREADS": "4"}, "ok"),
        ({"RANK": "0", "WORLD_SIZE": "4", "MASTER_ADDR": "node1", "MASTER_PORT": "29500"}, "ok"),
        ({"RANK": "0"}, "fail"),
        ({"WORLD_SIZE": "4"}, "warn"),
        ({"MASTER_ADDR": "127.0.0.1"}, "fail"),
        ({"CUDA_LAUNCH_BLOCKING": "1"}, "warn"),
        ({"CUDA_LAUNCH_BLOCKING": "0"}, "ok"),
        ({"PYTHONTRACEMALLOC": "25"}, "warn"),
        ({"PYTHONMALLOC": "debug"}, "warn"),
        ({"NCCL_DEBUG": "trace"}, "warn"),
        ({"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, "warn"),
        ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"}, "warn"),
        ({"HOLDFAST_PROGRES": "0"}, "warn"),
        ({"HOLDFAST_PROGRESS": "0"}, "ok"),
    ],
    ids=str,
)
def test_variables(variables, verdict):
    checks = judge_environment(variables, nodes=2)
    assert worst(checks) == verdict
    assert all(told(check) for check in checks)
    if verdict != "ok":
        assert [check.data["variable"] for check in checks] == [next(iter(variables))]


def test_every_variable_of_ours_is_known():
    files = Path(holdfast.__file__).parent.rglob("*.py")
    read = re.compile(r"""["'](HOLDFAST_[A-Z_]+)["']""")
    assert {name for file in files for name in read.findall(file.read_text())} <= _OURS


def test_the_number_of_nodes_is_what_variables_say():
    assert nodes_of({}) == 1
    assert nodes_of({"SLURM_JOB_NUM_NODES": "3"}) == 3
    assert nodes_of({"WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}) == 2


GPU = {"index": 0, "name": "H200", "used": 0, "total": 150 * GB, "ecc": 0}
DRIVER = {"driver": "580.1", "gpus": [GPU]}


@pytest.mark.parametrize(
    ("facts", "found"),
    [
        ({}, {}),  # there is no GPU, and that is no fault
        (None, {"gpu": "fail"}),
        ({**DRIVER, "error": "Driver/library version mismatch"}, {"gpu": "fail"}),
        (DRIVER, {}),
        ({**DRIVER, "gpus": [{**GPU, "ecc": 3}]}, {"gpu": "warn"}),
        ({**DRIVER, "gpus": [{**GPU, "used": 34 * GB}]}, {"gpu": "warn"}),
        ({**DRIVER, "gpus": [{"index": 1, "error": "GPU is lost"}]}, {"gpu": "fail"}),
    ],
)
def test_gpus_and_their_driver(facts, found):
    checks = judge_gpus(facts)
    assert all(told(check) for check in checks)
    assert only(checks) == found
    assert bool(checks) == (facts != {})


def test_stacks_that_cannot_be_read_are_only_warned_of():
    assert told(judge_stacks(None, 0.0)) == "warn"
    refused = judge_stacks(Dump(error="py-spy may not read process 7"), 0.1)
    assert told(refused) == "warn"
    assert "may not read" in refused.found
