"""The mistakes of starting ranks: what is said of each, and that a right start hears no word."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import RanksError
from holdfast._environment import variables
from holdfast._run.ranks.address import (
    AddressPatience,
    Endpoint,
    await_answer,
    check_port,
    describe_caller,
    find_difference,
    port_owner,
    resolve,
)
from holdfast._run.ranks.world import (
    code_print,
    compare_prints,
    compare_trees,
    find_contradictions,
    find_device_mistakes,
    find_mistakes,
    name_ranks,
    tasks_of_srun,
)
from tests.ports import free_port

PLACE = {"MASTER_ADDR": "node1", "MASTER_PORT": "29500"}
RIGHT = {"RANK": "1", "WORLD_SIZE": "2", **PLACE}
TORCHRUN = {**RIGHT, "TORCHELASTIC_RUN_ID": "7", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}
TASK = {"SLURM_PROCID": "1", "SLURM_NTASKS": "4", "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "9"}
BATCH_SCRIPT = {"SLURM_PROCID": "0", "SLURM_NTASKS": "4", "SLURM_JOB_ID": "9"}


def mistakes(now, at_start=None, devices=None, backend="gloo"):
    of_devices = find_device_mistakes(now, devices=devices, backend=backend)
    return find_mistakes(now, at_start or {}) + of_devices


RIGHT_STARTS = {
    "plain python": {},
    "one process, said so": {"WORLD_SIZE": "1"},
    "one process, said so in full": {"RANK": "0", "WORLD_SIZE": "1"},
    "by hand": RIGHT,
    "torchrun": TORCHRUN,
    "torchrun that srun has started once on each host": {**TORCHRUN, **TASK, "SLURM_NTASKS": "2"},
    "the batch script itself": BATCH_SCRIPT,
    "ranks that the batch script has spawned": {**RIGHT, **BATCH_SCRIPT, "WORLD_SIZE": "4"},
    "srun with the ranks set": {**RIGHT, **TASK, "WORLD_SIZE": "4"},
    "two ranks spawned in each task of srun": {**RIGHT, **TASK, "RANK": "3", "WORLD_SIZE": "8"},
    "srun of independent runs": {**TASK, "RANK": "0", "WORLD_SIZE": "1"},
}


@pytest.mark.parametrize("now", RIGHT_STARTS.values(), ids=RIGHT_STARTS)
def test_a_right_start_hears_no_word(now):
    assert mistakes(now) == []
    assert mistakes(now, at_start=now) == []


@given(st.integers(1, 64), st.integers(1, 8), st.data())
def test_no_rank_of_torchrun_hears_a_word(hosts, on_each, data):
    rank = data.draw(st.integers(0, hosts * on_each - 1))
    now = {
        **{"RANK": str(rank), "WORLD_SIZE": str(hosts * on_each), "TORCHELASTIC_RUN_ID": "x"},
        **{"LOCAL_RANK": str(rank % on_each), "LOCAL_WORLD_SIZE": str(on_each), **PLACE},
        **{"SLURM_PROCID": str(rank // on_each), "SLURM_NTASKS": str(hosts), "SLURM_STEP_ID": "0"},
    }
    assert mistakes(now, at_start=now, devices=on_each, backend="nccl") == []


WRONG_STARTS = [
    ({"RANK": "1"}, 'RANK is "1" and WORLD_SIZE is not set.'),
    ({"WORLD_SIZE": "4"}, 'WORLD_SIZE is "4" and RANK is not set.'),
    ({**RIGHT, "RANK": "one"}, 'RANK is "one", and must be a whole number.'),
    ({**RIGHT, "RANK": "-1"}, 'RANK is "-1", and must be a whole number.'),
    ({**RIGHT, "WORLD_SIZE": ""}, 'WORLD_SIZE is "", and must be a whole number.'),
    ({**RIGHT, "WORLD_SIZE": "0"}, "WORLD_SIZE is 0, and there is at least this process."),
    ({**RIGHT, "RANK": "2"}, "RANK is 2 and WORLD_SIZE is 2, and ranks count from 0."),
    (PLACE, "MASTER_ADDR=node1 and MASTER_PORT=29500 are set, and RANK and WORLD_SIZE are not set"),
    ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR and MASTER_PORT are not set"),
    ({**RIGHT, "MASTER_ADDR": ""}, "MASTER_ADDR is not set: the ranks do not know where to meet."),
    ({**RIGHT, "MASTER_PORT": "http"}, 'MASTER_PORT is "http", and must be a number from 1'),
    ({**RIGHT, "MASTER_PORT": "99999"}, 'MASTER_PORT is "99999", and must be a number from 1'),
    ({**TORCHRUN, "LOCAL_RANK": "2"}, "LOCAL_RANK is 2 and LOCAL_WORLD_SIZE is 2"),
    ({**TORCHRUN, "LOCAL_RANK": "x"}, 'LOCAL_RANK is "x", and must be a whole number.'),
    ({**TORCHRUN, "LOCAL_WORLD_SIZE": "4"}, "one host would have more ranks than all"),
    (TASK, "srun has started 4 processes, this one as SLURM_PROCID=1, and RANK and WORLD_SIZE"),
    ({**TASK, **PLACE, "WORLD_SIZE": "4"}, "SLURM_PROCID=1, and RANK is not set"),
    ({**TASK, **RIGHT, "RANK": "0", "WORLD_SIZE": "4"}, "RANK is 0 in task 1 of srun"),
    ({**TASK, **RIGHT, "RANK": "3"}, "srun has started 4 tasks (SLURM_NTASKS): set WORLD_SIZE to"),
    ({"OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_RANK": "1"}, "mpirun has started 2 processes"),
]


@pytest.mark.parametrize(("now", "words"), WRONG_STARTS, ids=lambda case: str(case)[:50])
def test_a_wrong_start_is_told_with_the_value_and_the_next_step(now, words):
    [found] = mistakes(now)
    assert words in found
    fact, step = found.split("\n")
    assert fact.endswith(".")
    assert step


def test_several_mistakes_are_told_together():
    found = mistakes({**RIGHT, "RANK": "x", "MASTER_PORT": "0"})
    assert [each.split()[0] for each in found] == ["RANK", "MASTER_PORT"]


def test_only_tasks_of_srun_are_tasks_of_srun():
    assert tasks_of_srun(TASK) == 4
    assert tasks_of_srun({**TASK, "SLURM_STEP_NUM_TASKS": "2"}) == 2
    assert tasks_of_srun(BATCH_SCRIPT) is None
    assert tasks_of_srun({**TASK, "TORCHELASTIC_RUN_ID": "7"}) is None
    assert tasks_of_srun({}) is None


@pytest.mark.parametrize("name", ["MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK"])
def test_a_variable_that_the_script_has_changed_is_named_with_both_values(name):
    [found] = mistakes({**RIGHT, name: "0"}, at_start=RIGHT)
    assert f'{name} was "{RIGHT[name]}" when this process was started' in found
    assert 'has been set to "0" since' in found
    without = {key: value for key, value in RIGHT.items() if key != name}
    [found] = mistakes(without, at_start=RIGHT)
    assert f'{name} was "{RIGHT[name]}"' in found
    assert "has been removed since" in found


def test_what_no_launcher_had_given_may_be_set_by_the_script():
    assert mistakes(RIGHT, at_start={}) == []
    assert mistakes({**RIGHT, "LOCAL_RANK": "0"}, at_start={**RIGHT, "LOCAL_RANK": "1"}) == []


def test_two_ways_to_say_this_host_are_one():
    by_launcher = {**RIGHT, "MASTER_ADDR": "localhost"}
    assert mistakes({**RIGHT, "MASTER_ADDR": "127.0.0.1"}, at_start=by_launcher) == []


def test_the_environment_at_the_start_is_not_that_of_now():
    program = (
        "import os; from holdfast._environment import variables as _env\n"
        "os.environ['MASTER_ADDR'] = 'localhost'\n"
        "del os.environ['RANK']\n"
        "print(_env.of_ranks_at_start() == {'MASTER_ADDR': 'node1', 'RANK': '1'})\n"
        "print(_env.of_ranks() == {'MASTER_ADDR': 'localhost'})\n"
        "print(_env.of_ranks_at_start(os.getppid()))\n"
    )
    environment = {"PATH": os.environ["PATH"], "MASTER_ADDR": "node1", "RANK": "1", "SECRET": "x"}
    said = subprocess.check_output([sys.executable, "-c", program], env=environment, text=True)
    assert said.splitlines() == ["True", "True", str(variables.of_ranks_at_start())]


def test_arguments_that_differ_from_what_torchrun_gave_are_told():
    [found] = find_contradictions({"rank": 0, "world_size": 2}, TORCHRUN)
    assert "with rank=0, and torchrun has given it RANK=1." in found
    assert find_contradictions({"rank": 1, "world_size": 2}, TORCHRUN) == []
    assert find_contradictions({"rank": 5, "world_size": 8}, RIGHT) == []


def test_nccl_without_a_gpu_says_gloo():
    [found] = mistakes({}, devices=0, backend="nccl")
    assert "torch sees none here." in found
    assert 'init_process_group("gloo")' in found
    [found] = mistakes({"CUDA_VISIBLE_DEVICES": ""}, devices=0, backend="cpu:gloo,cuda:nccl")
    assert 'torch sees none here (CUDA_VISIBLE_DEVICES is "").' in found
    assert mistakes({}, devices=0, backend="gloo") == []


def test_ranks_are_named_shortly():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([1, 0]) == "ranks 0 and 1"
    assert name_ranks([0, 1, 2, 3, 7]) == "ranks 0 to 3 and 7"
    assert len(name_ranks(range(0, 1000, 2))) < 50


def test_the_print_of_the_code_follows_the_script(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from holdfast._run.ranks.world import code_print; print(code_print())")

    def run():
        return subprocess.check_output([sys.executable, script], text=True)

    first = run()
    assert first == run()
    assert "'script': 'train.py (" in first
    assert "torch" not in first
    script.write_text(script.read_text() + "  # another line")
    assert first != run()


def test_ranks_with_other_code_are_named_with_what_differs():
    mine = code_print()
    assert compare_prints([mine, dict(mine), dict(mine)]) is None
    found = compare_prints([mine, mine, {**mine, "script": "old.py (0)"}, mine])
    assert (
        f"the script is {mine['script'] or 'unknown'} on rank 0 and old.py (0) on rank 2" in found
    )
    found = compare_prints([{"torch": "2.4"}, {"torch": "2.5"}, {"torch": "2.5"}])
    assert "torch is 2.4 on rank 0 and 2.5 on ranks 1 and 2." in found
    assert "torch is 2.4 on rank 0 and unknown on rank 1." in compare_prints([{"torch": "2.4"}, {}])


def test_trees_that_differ_are_named_with_the_ranks():
    assert compare_trees([{"model": "a"}, {"model": "a"}]) is None
    found = compare_trees([{"model": "a", "ema": "b"}, {"model": "a"}])
    assert found.startswith('rank 1 has no state "ema", which rank 0 has.')
    found = compare_trees([{"model": "a"}, {"model": "a", "ema": "b"}, {"model": "a"}])
    assert found.startswith('ranks 0 and 2 have no state "ema", which rank 1 has.')
    found = compare_trees([{"model": "a"}, {"model": "a"}, {"model": "x"}])
    assert found.startswith('the state "model" of rank 2 is not made as that of ranks 0 and 1 is.')


def test_rank_0_of_another_job_is_known_by_what_its_launcher_gave():
    mine = describe_caller({**RIGHT, "SLURM_JOB_ID": "9"})
    assert find_difference(mine, mine) is None
    assert find_difference(mine, {**mine, "slurm": ""}) is None
    assert find_difference(mine, {**mine, "world": "4"}) == "WORLD_SIZE is 4 there and 2 here"
    assert "SLURM_JOB_ID is 8 there and 9 here" in find_difference(mine, {**mine, "slurm": "8"})
    assert "TORCHELASTIC_RUN_ID is x there" in find_difference(mine, {**mine, "run": "x"})
    assert "it runs other.py" in find_difference(mine, {**mine, "script": "other.py"})
    spawned = {**mine, "spawned": "train.py --lr 0.1", "command": "train.py --lr 0.1"}
    other = {**spawned, "spawned": "train.py --lr 0.2", "command": "train.py --lr 0.2"}
    assert "it was started as train.py --lr 0.2" in find_difference(spawned, other)
    assert find_difference(spawned, {**other, "host": "another"}) is None


# What has to ask the network: real sockets, on this host only.


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as made:
        yield made


def patience(seconds=0.3, told=None):
    return AddressPatience(seconds, (told if told is not None else []).append)


def test_a_name_that_does_not_resolve_is_told():
    with pytest.raises(RanksError, match=r'MASTER_ADDR is "no\.such\.host\.invalid", which doe'):
        resolve("no.such.host.invalid", patience())
    assert "127.0.0.1" in resolve("localhost", patience())


def test_a_name_server_that_is_silent_does_not_hold_us(monkeypatch):
    forever = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", lambda *_, **__: [forever.wait(30)][:0])
    began = time.monotonic()
    with pytest.raises(RanksError, match="no answer from the name server"):
        resolve("node1", patience())
    forever.set()
    assert time.monotonic() - began < 10


def test_nobody_answers():
    endpoint = Endpoint("127.0.0.1", free_port())
    with pytest.raises(RanksError) as error:
        await_answer(endpoint, ["127.0.0.1"], patience())
    fact, step = str(error.value).split("\n")
    assert fact == (
        f"rank 0 did not answer at MASTER_ADDR=127.0.0.1, MASTER_PORT={endpoint.port} within "
        "0.3 s: connection refused."
    )
    assert step.startswith("127.0.0.1 is this host itself. Rank 0 has not started here yet")


def test_whoever_comes_late_is_waited_for():
    port = free_port()
    late: list[socket.socket] = []
    come = threading.Timer(0.3, lambda: late.append(socket.create_server(("127.0.0.1", port))))
    come.start()
    await_answer(Endpoint("127.0.0.1", port), ["127.0.0.1"], patience(30))
    come.join()
    late[0].close()


def test_a_long_wait_is_said_once_and_for_what():
    told: list[str] = []
    waiting = patience(60, told)
    waiting._began -= 20
    assert waiting.wait(0, "rank 3 not there yet")
    assert waiting.wait(0, "rank 3 not there yet")
    assert told == ["rank 3 not there yet; waiting for 40 s more."]


def test_a_port_in_use_is_told_with_its_owner(listener):
    port = listener.getsockname()[1]
    check_port(port)  # our own: torch shares it
    program = "import sys\nfrom holdfast._run.ranks.address import *\ncheck_port(int(sys.argv[1]))"
    found = subprocess.run(
        [sys.executable, "-c", program, str(port)], capture_output=True, text=True
    )
    said = found.stderr.splitlines()[-2]
    assert f"MASTER_PORT is {port}, and on this host that port is in use by pid" in said
    assert f"{port_owner(port)}." in said
    assert port_owner(port).startswith(f"pid {os.getpid()} (")
