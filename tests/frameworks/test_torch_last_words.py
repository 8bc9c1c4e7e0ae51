"""What fills a device, by name; and graphs that somebody keeps."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from pathlib import Path

import pytest

from holdfast._run.exit import leaving
from holdfast._run.exit.leaving import (
    ErrorContext,
    frames_of,
    look_for_graphs,
    record_exception,
    view,
)
from holdfast._store.folder.attempts import read_json, write_json
from holdfast._store.folder.layout import RunLayout
from tests.support import SCRIPTS, wait_until

torch = pytest.importorskip("torch", reason="pip install torch")
last_words = pytest.importorskip("holdfast.torch.memory_report")

MESSAGE = (
    "CUDA out of memory. Tried to allocate 20.00 MiB. GPU 3 has a total capacity of 79.15 GiB of "
    "which 14.62 MiB is free. Including non-PyTorch memory, this process has 79.12 GiB memory in "
    "use. Of the allocated memory 70.50 GiB is allocated by PyTorch, and 8.25 GiB is reserved by "
    "PyTorch but unallocated. If reserved but unallocated memory is large try setting …"
)
MIB, GIB = 1 << 20, 1 << 30


def caught(work):
    try:
        work()
    except Exception as error:  # noqa: BLE001  whatever it raises is what is looked at
        return error
    raise AssertionError("it raised nothing")


@pytest.fixture
def seen(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.attempt(1).mkdir(parents=True)

    def look(work, **scene):
        return record_exception(caught(work), ErrorContext(layout, 1, **scene))

    return look


def test_the_sizes_in_a_message_are_read():
    assert last_words.said_sizes(MESSAGE) == {
        "tried": 20 * MIB,
        "total": int(79.15 * GIB),
        "free": int(14.62 * MIB),
        "allocated": int(70.5 * GIB),
        "cached_free": int(8.25 * GIB),
        "reserved": int(78.75 * GIB),
    }


def test_a_message_without_a_device_here_still_has_its_sizes(seen):
    def work():
        raise torch.OutOfMemoryError(MESSAGE)

    found = seen(work)
    if not torch.cuda.is_initialized():
        assert found["gpu"]["device"] == 3
        assert found["gpu"]["tried"] == 20 * MIB


def test_losses_in_a_list_are_found_with_name_and_place(seen):
    def train():
        losses = []
        weight = torch.ones(3, requires_grad=True)
        for _ in range(20):
            losses.append((weight * 2).sum())  # here
        raise RuntimeError("out of memory")

    (found,) = seen(train)["graphs"]
    place = _line_of("losses.append(")
    assert found == {
        "holder": "losses",
        "where": f"test_torch_last_words.py:{place} in train",
        "count": 20,
        "freed": False,
    }


def test_a_sum_that_was_never_detached_is_found(seen):
    def train():
        weight = torch.ones(3, requires_grad=True)
        total = 0
        for _ in range(1500):
            total += (weight * 2).sum()
        raise RuntimeError("out of memory")

    (found,) = seen(train)["graphs"]
    assert (found["holder"], found["count"]) == ("total", 1500)
    assert found["where"] == f"test_torch_last_words.py:{_line_of('total += (weight')} in train"


def test_a_sum_with_a_term_for_each_step_is_found_early(seen):
    def train():
        weight = torch.ones(3, requires_grad=True)
        total = torch.zeros(())
        for _ in range(30):
            total = (weight * 2).sum() + total
        raise RuntimeError("out of memory")

    assert [each["holder"] for each in seen(train, steps=30)["graphs"]] == ["total"]
    assert seen(train, steps=500)["graphs"] == []  # one step may well add up as many


def test_what_a_backward_pass_has_freed_is_told_apart(seen):
    def train():
        weight = torch.ones(3, requires_grad=True)
        losses = []
        for _ in range(20):
            loss = (weight * weight).sum()
            loss.backward()
            losses.append(loss)
        raise RuntimeError("out of memory")

    (found,) = seen(train)["graphs"]
    assert (found["count"], found["freed"]) == (20, True)


class Meter:
    def __init__(self) -> None:
        self.seen: deque = deque()
        self.rows: dict = {}


METER = Meter()


def test_holders_in_attributes_globals_and_rows_are_found(seen):
    def train():
        meter = Meter()
        weight = torch.ones(3, requires_grad=True)
        for step in range(20):
            meter.seen.append({"loss": (weight * 2).sum(), "step": step})
            METER.rows[step] = (weight * 3).sum()
        raise RuntimeError("out of memory")

    found = {each["holder"]: each["count"] for each in seen(train)["graphs"]}
    METER.rows.clear()
    assert found == {"meter.seen": 20, "METER.rows": 20}


def test_what_keeps_no_graphs_is_no_suspect(seen):
    def train():
        model = torch.nn.Sequential(*[torch.nn.Linear(2, 2) for _ in range(20)])
        optimizer = torch.optim.Adam(model.parameters())
        losses = [model(torch.ones(2)).sum().item() for _ in range(20)]
        few = [model(torch.ones(2)).sum() for _ in range(4)]
        model(torch.ones(2)).sum().backward()
        optimizer.step()
        raise RuntimeError(f"out of memory, {len(losses)} {len(few)}")

    assert seen(train)["graphs"] == []


def test_the_largest_tensors_have_the_names_that_the_user_knows():
    model = torch.nn.Sequential(torch.nn.Linear(300, 200), torch.nn.Linear(200, 100))
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(300)).sum().backward()
    optimizer.step()

    def work():
        cache = [torch.zeros(1000, 1000) for _ in range(3)]
        view = torch.zeros(2000, 1000)[:10]
        raise RuntimeError(len(cache) + len(view))

    error = caught(work)
    state = {"model": model, "optimizer": optimizer}
    cpu = torch.device("cpu")
    largest, seen = last_words.largest_tensors(
        cpu, view(frames_of(error)), state, time.monotonic() + 10
    )
    line = _line_of("raise RuntimeError(len(cache)")
    by_name = {each["name"]: each for each in largest}
    place = f"(test_torch_last_words.py:{line} in work)"
    assert by_name[f"cache[…] {place}"]["bytes"] == 12_000_000
    assert by_name[f"cache[…] {place}"]["count"] == 3
    assert by_name[f"view {place}"]["bytes"] == 8_000_000  # all of what the view keeps
    parameters = by_name["parameters of model, the largest model.0.weight"]
    assert (parameters["count"], parameters["shape"]) == (4, [200, 300])
    assert by_name["gradients of model, the largest model.0.weight.grad"]["count"] == 4
    assert by_name["optimizer exp_avg"]["bytes"] == parameters["bytes"]
    assert [each["bytes"] for each in largest] == sorted(
        (each["bytes"] for each in largest), reverse=True
    )
    assert seen >= sum(each["bytes"] for each in largest)


def test_graphs_are_looked_for_while_the_training_runs(tmp_path, capsys):
    layout = RunLayout(tmp_path / "run")
    layout.attempt(1).mkdir(parents=True)
    grown, over = threading.Event(), threading.Event()

    def train():
        history = []
        weight = torch.ones(3, requires_grad=True)
        while not over.is_set():
            history.append((weight * 2).sum())
            if len(history) == 50:
                grown.set()
                over.wait(30)

    thread = threading.Thread(target=train)
    thread.start()
    assert grown.wait(30)
    look_for_graphs(ErrorContext(layout, 1, steps=50), thread.ident)
    found = wait_until(lambda: read_json(layout.error(1)).get("graphs"), what="the record")
    over.set()
    thread.join()
    place = f"test_torch_last_words.py:{_line_of('history.append(')} in train"
    assert [(each["holder"], each["where"], each["count"]) for each in found] == [
        ("history", place, 50)
    ]
    assert f"holdfast: history ({place}) keeps 50 losses" in capsys.readouterr().err


def look_at_losses(layout, *, are_freed):
    """While a thread keeps many losses."""
    grown, over = threading.Event(), threading.Event()

    def train():
        weight = torch.ones(3, requires_grad=True)
        history = [(weight * weight).sum() for _ in range(50)]
        for loss in history if are_freed else ():
            loss.backward()
        grown.set()
        over.wait(30)

    thread = threading.Thread(target=train)
    thread.start()
    assert grown.wait(30)
    leaving._find_suspects(ErrorContext(layout, 1, steps=50), thread.ident)
    over.set()
    thread.join()


def test_losses_whose_memory_is_given_back_are_not_suspected(tmp_path, capsys):
    layout = RunLayout(tmp_path / "run")
    layout.attempt(1).mkdir(parents=True)
    look_at_losses(layout, are_freed=True)
    assert not layout.error(1).exists()
    assert "keeps" not in capsys.readouterr().err


def test_an_exception_that_came_meanwhile_is_not_overwritten(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.attempt(1).mkdir(parents=True)
    look_at_losses(layout, are_freed=False)
    assert read_json(layout.error(1))["graphs"]
    write_json(layout.error(1), {"type": "ValueError"})
    look_at_losses(layout, are_freed=False)
    assert read_json(layout.error(1)) == {"type": "ValueError"}


def test_what_only_a_graph_holds_is_told_so():
    weight = torch.ones(997, 1003, requires_grad=True)

    def work():
        kept = (torch.full((997, 1003), 2.0) * weight).sum()
        raise RuntimeError(kept)

    error = caught(work)
    until = time.monotonic() + 10
    views = view(frames_of(error))
    largest, _ = last_words.largest_tensors(torch.device("cpu"), views, {"weight": weight}, until)
    by_name = {each["name"]: each["bytes"] for each in largest if each["shape"] == [997, 1003]}
    assert by_name == {"weight": 4 * 997 * 1003, "held by graphs of autograd": 4 * 997 * 1003}


def test_millions_of_objects_are_not_all_looked_at():
    crowd = [[] for _ in range(500_000)]
    began = time.process_time()  # a machine that is busy takes longer
    last_words._live_tensors(time.monotonic() + 0.05)
    assert time.process_time() - began < 2  # most of it goes into listing them
    del crowd


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for it"
)
def test_a_gpu_that_is_full_is_told_by_names(folder, start):
    trainer = start(folder, script=SCRIPTS / "cuda_oom.py")
    assert trainer.wait() == 1
    assert "torch.OutOfMemoryError: CUDA out of memory" in trainer.output
    found = json.loads(RunLayout(folder).error(1).read_text())
    gpu = found["gpu"]
    assert found["qualified"] == "torch.OutOfMemoryError"
    assert 0 < gpu["tried"] < gpu["total"]
    assert gpu["allocated"] <= gpu["reserved"] <= gpu["total"]
    assert gpu["largest"][0]["name"].startswith("ballast[…] (cuda_oom.py:")
    assert gpu["largest"][0]["count"] == 8
    names = [str(each["name"]) for each in gpu["largest"]]
    assert any(name.startswith("parameters of model, the largest model.0.weight") for name in names)
    assert "optimizer exp_avg" in names
    (graphs,) = found["graphs"]
    assert (graphs["holder"], graphs["freed"]) == ("losses", False)
    assert graphs["where"].endswith(" in keep_graphs")
    assert "held by graphs of autograd" in names


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for it"
)
def test_a_gpu_whose_memory_is_in_pieces_is_told(folder, start):
    trainer = start(folder, "--cut", script=SCRIPTS / "cuda_oom.py")
    assert trainer.wait() == 1
    gpu = json.loads(RunLayout(folder).error(1).read_text())["gpu"]
    assert gpu["cached_free"] > 1 << 30
    assert gpu["split"] > 1 << 30
    assert gpu["tried"] < gpu["cached_free"]


def _line_of(text: str) -> int:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    return next(number for number, line in enumerate(lines, 1) if text in line)
