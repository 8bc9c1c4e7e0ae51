"""Logs whose cause stands far from their last error, or in other words than it."""

from __future__ import annotations

import pytest

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.evidence.evidence import Evidence
from holdfast._diagnose.texts.signs import read_signs
from holdfast._diagnose.verdict import Cause, Sure, Verdict


def judged(text: str) -> Verdict:
    return judge_strictly(Evidence(kind="log", signs=read_signs(text), output=text))


def raised(error: str, *frames: tuple[str, int, str], lead: str = "") -> str:
    """A traceback, as Python prints it."""
    places = frames or (("/home/ada/train.py", 7, "step"),)
    lines = ["Traceback (most recent call last):"]
    for file, line, function in places:
        lines += [f'  File "{file}", line {line}, in {function}', "    call()"]
    return "".join(f"{lead}{each}\n" for each in (*lines, *error.split("\n")))


def steps(ranks: range, first: int, last: int) -> str:
    lines = (f"[rank {r}] step {n} loss 0.5\n" for n in range(first, last) for r in ranks)
    return "".join(lines)


def timed_out(rank: int) -> str:
    return (
        f"[rank {rank}] [E ProcessGroupNCCL.cpp:475] [Rank {rank}] Watchdog caught collective "
        "operation timeout: WorkNCCL(SeqNum=9, OpType=ALLREDUCE, Timeout(ms)=600000) ran for "
        "600005 milliseconds before timing out.\n"
    )


def test_a_rank_that_fell_silent_after_its_error_did_not_get_over_it():
    error = raised("OSError: [Errno 5] Input/output error", lead="[rank 3] ")
    said = "[rank 3] rank 3 exits with status 1\n"
    end = "".join(map(timed_out, range(3))) + (
        "srun: error: n1: tasks 0-2: Aborted (core dumped)\n"
        "srun: error: n1: task 3: Exited with exit code 1\n"
    )
    text = steps(range(4), 0, 100) + error + said + steps(range(3), 100, 300) + end
    verdict = judged(text)
    assert (verdict.rank, verdict.cause) == (3, Cause.PYTHON_EXCEPTION), verdict
    assert "Input/output error" in verdict.sentence
    assert not any("told to leave" in line for line in verdict.others), verdict
    # It goes on, or it never printed much.
    for before, after in ((range(4), range(4)), (range(1), range(1))):
        text = steps(before, 0, 100) + error + steps(after, 100, 500)
        assert judged(text + timed_out(0)).cause is not Cause.PYTHON_EXCEPTION


def test_an_error_that_a_restart_of_the_workers_got_over_is_not_the_cause():
    failed = "torch.distributed.elastic: [ERROR] failed (exitcode: 1) local_rank: {} (pid: 9) of "
    again = "Worker group FAILED. {}/3 attempts left; will restart worker group\n"
    early = raised("urllib3.exceptions.ReadTimeoutError: read timed out", lead="[rank1]: ")
    late = raised("RuntimeError: shape '[3]' is invalid for input of size 4")
    fields = "  time      : 1\n  host      : n1\n  rank      : {0}\n  exitcode  : 1 (pid: 7{0})\n"
    summary = (
        f"Failures:\n[1]:\n{fields.format(1)}Root Cause (first observed failure):\n[0]:\n"
        f"{fields.format(0)}=====\n"
    )
    ends = failed.format(1) + "binary: python\n", failed.format(0) + "binary: python\n"
    text = (
        f"step 100\n{early}{ends[0]}{again.format(3)}resumed from a.pt\nstep 200\nstep 300\n"
        f"{late}{ends[1]}{again.format(2)}resumed from b.pt\n{late}{ends[1]}{summary}"
    )
    verdict = judged(text)
    assert "RuntimeError: shape '[3]' is invalid" in verdict.sentence, verdict
    assert not any("ReadTimeout" in line for line in (*verdict.evidence, *verdict.others))


REFUSED = (
    "requests.exceptions.ConnectionError: HTTPConnectionPool(host='{}', port=8123): Max retries "
    "exceeded with url: /health (Caused by NewConnectionError('[Errno 111] Connection refused'))"
)


@pytest.mark.parametrize("host", ["0.0.0.0", "127.0.0.1", "localhost", "10.2.3.4"])
def test_a_server_beside_the_training_that_is_not_up_is_no_missing_internet(host):
    verdict = judged("starting\n" + raised(REFUSED.format(host)))
    assert (verdict.cause, verdict.sure) == (Cause.PYTHON_EXCEPTION, Sure.LIKELY), verdict
    assert f"could not reach the server at {host}:8123" in verdict.sentence
    assert not any("internet" in line for line in verdict.advice), verdict
    died = raised("RuntimeError: no room for the index", ("/home/ada/serve.py", 4, "main"))
    verdict = judged(f"Process Server-1:\n{died}" + "waiting\n" * 4 + raised(REFUSED.format(host)))
    assert "raised RuntimeError: no room for the index" in verdict.sentence, verdict
    assert "then the training process could not reach" in verdict.sentence


def test_a_server_elsewhere_is_still_one_of_the_internet():
    verdict = judged("starting\n" + raised(REFUSED.format("models.example.org")))
    assert verdict.cause is Cause.ENVIRONMENT, verdict
    assert any("internet" in line for line in verdict.advice)


MANY_PARAGRAPHS = (
    "builder.errors.BuildError: The shards could not be joined\n\n"
    "Every shard needs the same fields, but one has 2 more ({'tags'})\n\n"
    "That was found while the builder read\n\n/srv/shards/part-0031.jsonl\n\n"
    "Please make the fields of all shards equal"
)


@pytest.mark.parametrize("end", ["", "srun: error: n1: task 0: Exited with exit code 1\n"])
def test_the_paragraphs_of_a_message_belong_to_it(end):
    verdict = judged("step 1\n" + raised(MANY_PARAGRAPHS) + end)
    assert verdict.sure is Sure.CERTAIN, verdict
    assert "{'tags'}" in verdict.sentence
    assert "/srv/shards/part-0031.jsonl" in verdict.sentence
    assert not any("recovered" in line for line in verdict.evidence)


def test_what_a_script_prints_after_an_error_is_no_part_of_its_message():
    after = "\nThe last shard is left out and the others are read\nSaving the index to /srv/index\n"
    verdict = judged(raised("ValueError: bad shard") + after * 3)
    assert verdict.sure is Sure.LIKELY, verdict
    assert "/srv/index" not in verdict.sentence


def test_a_log_that_ends_inside_a_traceback_has_a_place_and_no_exception():
    text = raised("x", ("/home/ada/train.py", 9, "main"), ("/home/ada/eval.py", 57, "compute"))
    verdict = judged("step 1\n" + text.partition("    call()\nx")[0])
    assert "ends inside a traceback" in verdict.sentence, verdict
    assert "/home/ada/eval.py:57" in verdict.sentence
    assert "raised Exception" not in str(verdict)


def test_a_path_that_rich_wraps_is_one_path():
    inner = [
        "/home/ada/train.py:12 in <module>",
        "",
        "   12 \u2502   main()",
        "",
        "/home/ada/very/long/folder/of/opt",
        "imizers/own.py:145 in load",
        "",
        "   145 \u2502   raise ValueError(said)",
    ]
    box = "".join(f"\u2502 {line:<36} \u2502\n" for line in inner)
    text = f"\u256d\u2500 Traceback (most recent call last) \u2500\u256e\n{box}\u2570\u2500\u256f\n"
    verdict = judged(f"{text}ValueError: no such group\n")
    assert "at /home/ada/very/long/folder/of/optimizers/own.py:145 in load" in verdict.evidence


def test_the_place_is_the_scripts_own_where_a_worker_has_only_frames_of_libraries():
    library = "/opt/lib/python3.11/site-packages/torch/utils/data/_utils/{}.py"
    outer = raised(
        "RuntimeError: Caught RuntimeError in DataLoader worker process 2.",
        ("/home/ada/train.py", 98, "epoch"),
        (library.format("../dataloader"), 630, "__next__"),
    )
    error = "RuntimeError: stack expects each tensor to be equal size, but got [3, 8] at entry 0"
    inner = raised(error, (library.format("collate"), 162, "collate_tensor_fn"))
    verdict = judged(f"{outer}Original {inner}")
    assert "at /home/ada/train.py:98 in epoch" in verdict.evidence, verdict
    assert any("resize" in line for line in verdict.advice)
