"""What real texts tell. Those in deaths_texts were printed by the programs that they name.

Only what needs a GPU is shortened from reports, with the wording of torch 2.1 to 2.13.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast._diagnose.deaths.judge import judge_strictly
from holdfast._diagnose.texts.lines import Text, split_prefix
from holdfast._diagnose.texts.patterns import PATTERNS
from holdfast._diagnose.texts.signs import Sign, culprits_of, read_signs
from tests.unit.why_evidence import printed

TEXTS = Path(__file__).parents[1] / "deaths_texts"

# The file, the kind that must be among its signs, the rank, and some of the details.
EXPECTED: list[tuple[str, str, int | None, dict[str, Any]]] = [
    (
        "python_chained",
        "python_exception",
        None,
        {
            "type": "ZeroDivisionError",
            "message": "division by zero",
            "chain": ["ValueError: no learning rate in conf.yaml", "KeyError: 'lr'"],
            "from_end": 0,
        },
    ),
    (
        "python_group",
        "python_exception",
        None,
        {
            "type": "ExceptionGroup",
            "parts": ["ValueError: shard 3 is empty", "OSError: [Errno 5] Input/output error"],
        },
    ),
    ("python_syntax", "python_exception", None, {"type": "SyntaxError"}),
    ("python_in_a_pool", "python_exception", None, {"type": "ZeroDivisionError"}),
    ("python_in_a_process", "python_exception", None, {"process": "Process-1"}),
    ("python_in_a_thread", "python_exception", None, {"thread": "prefetch"}),
    ("spawn_raised", "python_exception", 1, {"type": "ValueError", "message": "bad batch"}),
    ("spawn_killed", "torchrun_summary", 1, {"exitcodes": {1: -9}}),
    ("spawn_left_with_3", "torchrun_summary", 1, {"exitcodes": {1: 3}}),
    ("torchrun_killed", "torchrun_summary", 1, {"exitcodes": {1: -9}}),
    ("torchrun_killed", "peer_lost", 2, {"peer": "127.0.0.1"}),
    ("torchrun_raised", "torchrun_summary", 1, {"exitcodes": {1: 1}}),
    ("torchrun_raised", "python_exception", 1, {"message": "bad batch at step 7"}),
    ("torchrun_segfault", "torchrun_summary", 0, {"exitcodes": {1: -11}}),
    ("torchrun_segfault", "faulthandler", 1, {"signal": 11}),
    ("torchrun_left_with_3", "torchrun_summary", 0, {"exitcodes": {1: 3}}),
    ("torchrun_timeout", "torchrun_summary", 0, {"exitcodes": {0: 1}}),
    ("torchrun_timeout", "gloo_timeout", 0, {"operation": "recv", "timeout_ms": 3000}),
    ("torchrun_barrier", "gloo_timeout", 0, {"missing": [1]}),
    ("torchrun_mismatch", "collective_mismatch", None, {}),
    ("torchrun_mismatch", "cxx_exception", 1, {"type": "gloo::EnforceNotMet"}),
    ("torchrun_terminated", "torchrun_summary", 1, {"exitcodes": {1: -15}}),
    ("worker_killed", "worker_killed", None, {"pid": 3579, "signal_name": "Killed"}),
    ("worker_killed_then_missed", "worker_killed", None, {"signal_name": "Killed"}),
    ("worker_exited", "worker_exited", None, {"exitcode": 1}),
    ("worker_conn_reset", "worker_conn_reset", None, {"type": "ConnectionResetError"}),
    ("worker_file_not_found", "worker_file_not_found", None, {}),
    ("worker_bus_error", "worker_killed", None, {"signal_name": "Bus error"}),
    ("worker_bus_error", "shm_full", None, {}),
    (
        "worker_raised",
        "python_exception",
        None,
        {"message": "sample 9 is damaged", "caught_in": "DataLoader worker process 0"},
    ),
    ("too_many_files", "files_limit", None, {}),
    ("too_many_files_ancdata", "files_limit", None, {}),
    ("shm_full", "shm_full", None, {}),
    ("disk_full_torch_save", "torch_save_short", None, {"position": 576, "wanted": 534}),
    ("disk_full", "disk_full", None, {}),
    ("faulthandler_segfault", "faulthandler", None, {"signal": 11}),
    ("faulthandler_segfault", "segfault_line", None, {"signal": 11}),
    ("faulthandler_aborted", "faulthandler", None, {"signal": 6}),
    ("faulthandler_bus_error", "faulthandler", None, {"signal": 7}),
    ("faulthandler_bus_error", "bus_error", None, {}),
    ("faulthandler_illegal_instruction", "faulthandler", None, {"signal": 4}),
    ("cxx_exception", "cxx_exception", None, {"what": "shape mismatch: 3 vs 4"}),
    ("rendezvous_too_few", "rendezvous", None, {"joined": 1, "wanted": 2}),
    ("rendezvous_no_server", "rendezvous", None, {"host": "127.0.0.1", "port": 29779}),
    ("rendezvous_unset", "rendezvous", None, {"variable": "MASTER_ADDR"}),
    ("rendezvous_store_timeout", "rendezvous", None, {"keys": "/x"}),
    ("rendezvous_port_in_use", "address_in_use", None, {"port": 29780}),
    ("environment_no_cuda", "environment", None, {}),
    (
        "nccl_timeout",
        "nccl_timeout",
        3,
        {"sequence": 7753, "operation": "ALLREDUCE", "timeout_ms": 600000, "ran_ms": 600099},
    ),
    ("nccl_timeout", "nccl_progress", 0, {"at": 7753, "enqueued": 7755, "completed": 7752}),
    ("nccl_timeout", "cxx_exception", 0, {}),
    ("nccl_behind", "nccl_progress", 5, {"at": 120049, "completed": 120048}),
    ("nccl_behind", "nccl_timeout", 5, {"operation": "BROADCAST"}),
    ("nccl_peer_lost", "peer_lost", 2, {"peer": "10.0.4.7"}),
    (
        "cuda_out_of_memory",
        "cuda_oom",
        None,
        {"tried": int(22.78 * 2**30), "total": int(31.47 * 2**30)},
    ),
    ("cuda_assert", "cuda_error", None, {"what": "device-side assert triggered"}),
    ("cuda_assert", "cuda_assert", None, {"assertion": "srcIndex < srcSelectDimSize"}),
    ("jax_out_of_memory", "cuda_oom", None, {"tried": 4770354232}),
    ("tensorflow_out_of_memory", "cuda_oom", None, {"shape": "[128,128,109,109]"}),
]


def read(name: str) -> str:
    return (TEXTS / f"{name}.txt").read_text(encoding="utf-8")


def find(signs: list[Sign], kind: str, rank: int | None, details: dict[str, Any]) -> Sign | None:
    for sign in signs:
        fits = all(sign.details.get(key) == value for key, value in details.items())
        if fits and (sign.kind, sign.rank) == (kind, rank):
            return sign
    return None


@pytest.mark.parametrize(("name", "kind", "rank", "details"), EXPECTED)
def test_a_real_text_tells(name: str, kind: str, rank: int | None, details: dict[str, Any]) -> None:
    signs = read_signs(read(name))
    found = find(signs, kind, rank, details)
    assert found is not None, "\n".join(map(str, signs))
    line = read(name).splitlines()[found.line - 1]
    assert found.text in line or split_prefix(line)[1].strip() == found.text


def test_every_text_is_looked_at() -> None:
    names = {path.stem for path in TEXTS.glob("*.txt")}
    assert names == {name for name, *_ in EXPECTED} | {"harmless"}


def test_words_that_only_sound_like_a_death_are_no_signs() -> None:
    assert read_signs(read("harmless")) == []


@pytest.mark.parametrize(
    ("name", "culprits"),
    [
        ("torchrun_timeout", [1]),  # the others had waited for it
        ("torchrun_barrier", [1]),
        ("nccl_timeout", [2]),  # it printed nothing
        ("nccl_behind", [7]),  # two collectives behind
        ("torchrun_killed", []),  # no timeout
    ],
)
def test_whoever_did_not_time_out_is_to_blame(name: str, culprits: list[int]) -> None:
    assert culprits_of(read_signs(read(name))) == culprits


def test_what_torchrun_did_to_the_rest_says_nothing_of_them() -> None:
    """Rank 1 was the one that all waited for: it did not end of itself."""
    text = read("torchrun_timeout")
    (summary,) = [sign for sign in read_signs(text) if sign.kind == "torchrun_summary"]
    assert summary.details["exitcodes"] == {0: 1}
    ends = {each["rank"]: each["exitcode"] for each in _failures(summary)}
    assert ends == {0: 1, 1: None, 2: None}
    # A rank that did not answer is killed after half a minute, which nobody else did either.
    pid = next(each["pid"] for each in _failures(summary) if each["rank"] == 1)
    forced = (
        f"W1116 02:46:34.920000 4467 torch/distributed/elastic/multiprocessing/api.py:1048] "
        f"Unable to shutdown process {pid} via 15, forcefully exiting via 9\n"
    )
    text = forced + text.replace(f"-15 (pid: {pid})  (SIGTERM)", f"-9 (pid: {pid})  (SIGKILL)")
    (summary,) = [sign for sign in read_signs(text) if sign.kind == "torchrun_summary"]
    assert summary.details["exitcodes"] == {0: 1}
    assert judge_strictly(printed(text, 1)).rank == 1


@pytest.mark.parametrize("name", ["killed", "raised", "segfault", "left_with_3", "timeout"])
def test_the_rank_that_failed_is_told_where_the_root_cause_of_torchrun_is_a_victim(name):
    assert judge_strictly(printed(read(f"torchrun_{name}"), 1)).rank == 1


def _failures(summary: Sign) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = summary.details["failures"]
    return found


def test_a_traceback_in_the_middle_of_a_running_log_says_how_far_from_the_end_it_is() -> None:
    text = read("python_chained") + "step 5 loss 0.1\n" * 10_000
    (sign,) = read_signs(text)
    assert (sign.line, sign.details["from_end"]) == (24, 10_000)


def test_code_that_a_traceback_shows_is_not_taken_for_what_was_said() -> None:
    text = (
        "Traceback (most recent call last):\n"
        '  File "/home/u/a.py", line 1, in f\n'
        '    raise RuntimeError("CUDA out of memory. Tried to allocate 2.00 GiB")\n'
        "ValueError: no\n"
    )
    assert [sign.kind for sign in read_signs(text)] == ["python_exception"]


def test_ignored_exceptions_are_no_signs() -> None:
    text = (
        "Exception ignored in: <function Pool.__del__ at 0x7f>\n"
        "Traceback (most recent call last):\n"
        '  File "/usr/lib/python3.11/multiprocessing/pool.py", line 268, in __del__\n'
        "ResourceWarning: unclosed running multiprocessing pool\n"
    )
    assert read_signs(text) == []


def test_tracebacks_of_two_ranks_that_are_printed_at_once_are_told_apart() -> None:
    lines = [
        (0, "Traceback (most recent call last):"),
        (1, "Traceback (most recent call last):"),
        (1, '  File "/home/u/a.py", line 7, in load'),
        (0, '  File "/home/u/a.py", line 3, in step'),
        (0, "    x = 1 / 0"),
        (1, "    return table[key]"),
        (0, "ZeroDivisionError: division by zero"),
        (1, "KeyError: 'x'"),
    ]
    for prefix in ("[rank{}]: ", "{}: ", "[default{}]:", "{0}: [rank{0}]: "):
        text = "\n".join(prefix.format(rank) + line for rank, line in lines)
        found = {sign.rank: sign.details for sign in read_signs(text)}
        assert found[0]["type"] == "ZeroDivisionError"
        assert found[0]["frames_tail"] == [["/home/u/a.py", 3, "step"]]
        assert found[1]["type"] == "KeyError"
        assert found[1]["frames_tail"] == [["/home/u/a.py", 7, "load"]]


def test_colours_and_progress_bars_hide_nothing() -> None:
    text = (
        "  1%|#   | 1/99\r  2%|##  | 2/99\r\x1b[31mTraceback (most recent call last):\x1b[0m\r\n"
        '  File "\x1b[36m/home/u/a.py\x1b[0m", line 3, in step\r\n'
        "\x1b[1mValueError\x1b[0m: \x1b[35mbad\x1b[0m\r\n"
    )
    (sign,) = read_signs(text)
    assert (sign.details["type"], sign.details["message"], sign.line) == ("ValueError", "bad", 3)


NEEDLES = sorted({row.needle for row in PATTERNS})
WORDS = [
    *NEEDLES,
    *("Traceback (most recent call last):\n", '  File "a", line 1, in b\n', "ValueError: x\n"),
    *("Killed", "Fatal Python error: ", "\r", "\n", "\x1b[0m", "[rank1]: ", "0: ", "\udc80", "é"),
    *("Root Cause (first observed failure):\n", "  rank      : 1 (local_rank: 1)\n", "  time: \n"),
    *("srun: error: n1: task ", "*** JOB 1 ON n CANCELLED AT x ***", "+ Exception Group "),
]


@given(st.lists(st.one_of(st.sampled_from(WORDS), st.text(max_size=30)), max_size=40))
@settings(max_examples=150, deadline=None)
def test_no_text_is_too_much(parts: list[str]) -> None:
    text = "".join(parts)
    signs = read_signs(text)
    culprits_of(signs)
    for sign in signs:
        assert 1 <= sign.line <= text.count("\n") + 1
        assert sign.details["from_end"] >= 0


@pytest.mark.parametrize("many", ["log", "tracebacks", "one line"])
def test_ten_megabytes_take_less_than_two_seconds(many: str) -> None:
    line = {
        "log": "2026-11-16 02:44:19 INFO step 1234 loss=0.1234 lr=0.001\n",
        "tracebacks": read("torchrun_segfault"),
        "one line": "gloo Connection reset Killed CUDA error: ",
    }[many]
    text = line * (10_000_000 // len(line))
    began = time.process_time()  # not by the clock: other tests run beside this one
    signs = read_signs(text)
    assert time.process_time() - began < 2
    assert len(signs) < 2000


@given(st.text("ab :1é\n", max_size=40), st.text("ab :1", min_size=1, max_size=6))
@settings(deadline=None)
def test_a_search_that_is_skipped_would_have_found_nothing(text: str, needle: str) -> None:
    assert bool(list(Text(text).hits(needle))) == (needle in text)


def test_a_hundred_thousand_random_letters_are_no_sign() -> None:
    letters = random.Random(1).choices("abc \n:[]()0123456789'\"", k=100_000)
    assert read_signs("".join(letters)) == []
