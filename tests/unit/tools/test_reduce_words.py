"""What is said of ranks that met, that did not, and that are slow."""

from __future__ import annotations

from typing import Any

from holdfast._tools.doctor.finding import Check
from holdfast._tools.doctor.reduce import judge_ranks
from holdfast._tools.doctor.signals.probed import Probe

LOOPBACK = {"interface": "lo", "host_address": "127.0.1.1", "chosen_by": "the host's name"}


def rank(number: int, *more: dict[str, Any], host: str = "a", **device: Any) -> Probe:
    """A rank that has told of itself, reduced and sent, unless it is told to be otherwise."""
    here = {"what": "here", "time": 1.0, "pid": number, "host": host}
    here["variables"] = {"RANK": str(number), "WORLD_SIZE": "2"}
    told = {"gpus": 0, "gpu": None, "nccl": True, "backend": "gloo", "network": LOOPBACK}
    return Probe([here, {"what": "device", "time": 2.0, **told, **device}, *more])


def ended(speed: float = 1e9, sent: tuple[float, ...] = ()) -> list[dict[str, Any]]:
    reduced = {"what": "reduced", "size_bytes": 1 << 24, "bytes_per_second": speed}
    events = [
        {"what": "sent", "source": at, "bytes_per_second": each} for at, each in enumerate(sent)
    ]
    return [{"what": "met"}, reduced, *events, {"what": "done"}]


def judge(*probes: Probe) -> dict[str, Check]:
    return {each.name: each for each in judge_ranks(probes, 60)}


def test_ranks_that_reduce_tell_their_speed():
    found = judge(rank(0, *ended(2e9)), rank(1, *ended(1.5e9)))
    assert found["all_reduce"].state == "ok"
    assert "2 ranks on 1 host: 1.5 GB/s for each rank with 16 MiB" in found["all_reduce"].found
    assert found["interface"].found == "lo, chosen by the host's name"


def test_a_doctor_on_each_node_tells_of_its_own_ranks():
    assert "2 ranks (1 of them seen here)" in judge(rank(1, *ended()))["all_reduce"].found


def test_gloo_on_gpus_and_nccl_without_are_told():
    gpu = {"gpus": 8, "gpu": "x"}
    check = judge(rank(0, *ended(), **gpu))["backend"]
    assert (check.state, "through the CPU" in check.found) == ("warn", True)
    assert "built for CUDA" in judge(rank(0, *ended(), **gpu, nccl=False))["backend"].remedy
    found = judge(rank(0, **gpu, backend="nccl"), rank(1, backend="nccl"))["backend"]
    assert (found.state, "rank 1 sees no GPU" in found.found) == ("fail", True)


def test_ranks_with_one_gpu_are_named():
    on = {"gpus": 1, "gpu": "x", "backend": "nccl"}
    check = judge(rank(0, **on), rank(1, **on), rank(2, **on, host="b"))["GPU sharing"]
    assert (check.state, check.data["ranks"]) == ("fail", [0, 1])
    assert "ranks 0, 1 share one GPU on a" in check.found


def test_a_host_whose_name_leads_to_itself_is_named():
    far = {"interface": "eth0", "host_address": "10.0.0.2", "chosen_by": "the host's name"}
    check = judge(rank(0), rank(1, host="b", network=far))["host name"]
    assert (check.state, check.data["hosts"]) == ("fail", ["a"])
    check = judge(rank(0, *ended()), rank(1, *ended(), host="b", network=far))["host name"]
    assert check.state == "warn"  # they reach each other all the same
    assert "host name" not in judge(rank(0, *ended()), rank(1, *ended()))


def test_processes_that_know_nothing_of_each_other_do_not_reduce():
    alone = rank(0, {"what": "error", "kind": "import", "text": "no holdfast", "time": 1.0})
    alone.here["variables"] = {}
    assert judge(alone)["all_reduce"].found.startswith("one process")
    two = [rank(0, {"what": "done"}), rank(0, {"what": "done"})]
    for one in two:
        one.here["variables"] = {}
    assert "2 processes without RANK" in judge(*two)["all_reduce"].found


def test_the_slow_rank_is_named():
    sent = (1e9, 1e9, 1e8, 1.1e9)
    probes = [rank(n, *ended(sent=sent), host="slow" if n == 2 else "a") for n in range(4)]
    check = judge(*probes)["slowest rank"]
    assert check.state == "warn"
    assert check.found == "rank 2 on slow sends 100 MB/s, the others 1.0 GB/s"


def test_the_first_error_is_the_one_that_is_told():
    why = {"what": "error", "kind": "RanksError", "text": "port 1 is taken.\nTake another.\n"}
    after = {"what": "error", "kind": "RuntimeError", "text": "connection closed", "time": 9.0}
    check = judge(rank(0, after), rank(1, {**why, "time": 5.0}))["all_reduce"]
    assert (check.state, check.found) == ("fail", "rank 1 of 2: port 1 is taken")
    assert check.remedy == "Take another"


def test_ranks_that_are_silent_are_counted():
    met = {"what": "met"}
    check = judge(rank(0, met), rank(1, met))["all_reduce"]
    assert "ranks 0, 1 of 2 met, and did not end their all_reduce within 60 s" in check.found
    assert "did not meet" in judge(rank(0, met), rank(1))["all_reduce"].found
