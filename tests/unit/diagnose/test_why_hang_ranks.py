"""The looks of several ranks: which of them stands elsewhere, and who only waits for it."""

from __future__ import annotations

from typing import Any

from holdfast._diagnose.hangs.explain import explain, explain_strictly
from holdfast._diagnose.verdict import Cause
from tests.unit.hang_looks import (
    BACKWARD,
    LOADER,
    LOADER_WORKER,
    alone,
    collective,
    look,
    process,
    rank,
    ranks,
    thread,
)

Record = dict[str, Any]


def waiting(*numbers: int, step: int = 40) -> list[Record]:
    return [rank(n, *collective("all_reduce", 41), step=step) for n in numbers]


def test_the_odd_stack_is_guilty():
    odd = rank(2, "dataset.py:17 load", wchan="hrtimer_nanosleep")
    found = explain_strictly(ranks(*waiting(0, 1), odd, *waiting(3)))
    assert (found.cause, found.rank) == (Cause.HANG_RANK, 2)
    assert found.sentence.startswith(
        "No step for 21 s: rank 2 on node3 sleeps at dataset.py:17 in load(), while ranks 0, 1 and "
        "3 wait for it in all_reduce at train.py:41."
    )
    assert "3 ranks (0, 1 and 3) in all_reduce at train.py:41" in found.evidence
    assert len(found.others) == 3


def test_a_rank_in_backward_waits_for_the_reducer_and_one_that_computes_there_does_not():
    odd = rank(1, "dataset.py:17 load")
    found = explain_strictly(ranks(rank(0, *BACKWARD), odd))
    assert (found.cause, found.rank) == (Cause.HANG_RANK, 1)
    assert "while rank 0 waits for it in backward at train.py:41" in found.sentence
    busy = rank(1, *BACKWARD, state="R", cpu=1.0)
    busy["processes"][0]["cpu"] = 1.0
    found = explain_strictly(ranks(rank(0, *collective("all_reduce", 50)), busy))
    assert (found.cause, found.rank) == (Cause.HANG_RANK, 1)
    assert "computes" in found.sentence


def test_ranks_that_spin_for_their_gpus_wait_for_the_one_that_does_not(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("total += loss.item()\n")
    driver = thread(name="cuda-EvtHandlr")
    main = thread(f"{script}:1 step", state="R", cpu=1.0, wchan=None)
    spins = process(100, main, driver, cpu=1.0)
    looks = [{**look(spins), "rank": n} for n in (0, 1)]
    found = explain_strictly(ranks(*looks, rank(2, "dataset.py:17 load")))
    assert (found.cause, found.rank) == (Cause.HANG_RANK, 2)
    assert "while ranks 0 and 1 wait for it in train.py:1" in found.sentence
    assert "waits for the GPU" in "".join(found.others)


def test_the_line_of_a_loaders_worker_is_named_among_ranks_too():
    odd = look(
        process(100, thread(*LOADER)), process(8211, thread("data.py:7 get", *LOADER_WORKER))
    )
    found = explain_strictly(ranks(*waiting(0), {**odd, "rank": 1}))
    assert (found.cause, found.rank) == (Cause.HANG_RANK, 1)
    assert "worker (pid 8211) waits for a lock" in found.sentence
    assert "data.py:7 in get()" in found.sentence
    assert any("hang-loader" in line for line in found.evidence)


def test_of_two_that_do_not_wait_the_one_behind_is_guilty():
    ahead, behind = rank(1, "a.py:3 f", step=41), rank(2, "a.py:9 g", step=39)
    found = explain_strictly(ranks(*waiting(0), ahead, behind))
    assert found.rank == 2
    assert "a.py:9 in g()" in found.sentence


def test_ranks_in_different_collectives_are_on_different_branches():
    other = rank(1, *collective("all_gather", 45))
    found = explain_strictly(ranks(*waiting(0, 2), other))
    assert (found.cause, found.rank) == (Cause.HANG_BRANCHES, 1)
    assert "rank 1 waits in all_gather at train.py:45" in found.sentence
    assert "ranks 0 and 2 in all_reduce at train.py:41" in found.sentence
    assert "the same collectives in the same order" in found.sentence
    assert "drop_last=True" in found.advice[1]
    assert "join" not in found.advice[1]  # a run refuses uneven numbers of batches


def test_of_two_ranks_on_two_branches_neither_is_guilty():
    found = explain_strictly(ranks(*waiting(0), rank(1, *collective("all_reduce", 45))))
    assert (found.cause, found.rank) == (Cause.HANG_BRANCHES, None)
    assert "train.py:41" in found.sentence
    assert "train.py:45" in found.sentence


def test_the_same_line_reached_by_two_ways_is_two_branches():
    inner = ("torch/distributed/distributed_c10d.py:3252 all_reduce", "util.py:5 mean")
    one = rank(0, *inner, "model.py:20 forward", "train.py:9")
    other = rank(1, *inner, "model.py:24 forward", "train.py:9")
    found = explain_strictly(ranks(one, other))
    assert found.cause is Cause.HANG_BRANCHES
    assert "called from model.py:20" in found.sentence
    assert "called from model.py:24" in found.sentence


def test_a_rank_that_has_made_fewer_steps_and_waits_in_the_same_collective_is_named():
    found = explain_strictly(ranks(*waiting(0, 1), *waiting(2, step=39)))
    assert (found.cause, found.rank) == (Cause.HANG_BRANCHES, 2)
    assert "after step 39, the others after step 40" in found.sentence


def test_all_at_one_collective_is_the_network():
    found = explain_strictly(ranks(*waiting(0, 1, 2, 3)))
    assert found.cause is Cause.HANG_CALL
    assert "all 4 ranks wait in all_reduce at train.py:41" in found.sentence
    assert "holdfast doctor" in found.sentence


def test_a_rank_that_gives_no_answer_is_named():
    found = explain_strictly(ranks(*waiting(0, 1), missing=[2]))
    assert (found.cause, found.rank) == (Cause.HANG_RANK, 2)
    assert "rank 2 gave no answer" in found.sentence


def test_a_rank_in_a_debugger_explains_all_the_others():
    held = {**rank(1, "train.py:3 f"), "paused": "debugpy"}
    found = explain_strictly(ranks(*waiting(0), held))
    assert (found.cause, found.rank) == (Cause.DEBUGGER, 1)
    assert found.sentence.startswith("Rank 1 on node3 is held by debugpy at train.py:3 in f()")


def test_what_holds_all_of_them_alike_is_said_once():
    looks = [rank(n, "a.py:2 load", wchan="rpc_wait_bit_killable") for n in range(4)]
    found = explain_strictly(ranks(*looks))
    assert (found.cause, found.rank) == (Cause.HANG_DISK, None)
    assert "all 4 ranks" in found.sentence


def test_a_command_without_steps_is_not_said_to_make_none():
    record = alone("train.py:2", wchan="hrtimer_nanosleep")
    for key in ("rank", "step", "mark", "boundary_age", "usual_step_seconds"):
        del record[key]
    found = explain({"looks": [record], "missing": [], "quiet_seconds": 60.0})
    assert found.sentence.startswith("No output and no work for 60 s: it sleeps at train.py:2.")
