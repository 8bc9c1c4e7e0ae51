"""Loggers, as far as no process is needed: what is remembered, what is refused, what is dropped."""

from __future__ import annotations

import collections
import json
import os
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._adapters.metrics import Metrics
from holdfast._errors import install_command
from holdfast._run.driver import LoopDriver
from holdfast._run.metric_log import MetricLog
from holdfast.loggers import _logger
from holdfast.loggers._child import Memory
from holdfast.loggers._logger import Logger
from holdfast.rules._judge import Judge, begin_reading


def row(mark, _between=False, **values):
    found = {"m": mark, "s": mark // 2, "t": 0.0, "v": values}
    return {**found, "b": 1} if _between else found


def memory_at(path, target="here"):
    return Memory(path / "known.json", target)


def log(memory, *rows):
    """What a process does with rows that come; what it logs."""
    fresh = [r for r in map(memory.without_known, rows) if r["v"]]
    memory.record(fresh)
    return [(r["m"], r["v"]) for r in fresh]


def test_what_an_earlier_life_has_logged_is_known(tmp_path):
    first = memory_at(tmp_path)
    log(first, *(row(2 * step, loss=step) for step in range(5)))
    first.save(whole=True)
    second = memory_at(tmp_path)
    assert second.is_whole
    again = [row(2 * step, loss=step) for step in range(3, 7)]
    assert log(second, *again) == [(10, {"loss": 5}), (12, {"loss": 6})]


def test_a_metric_that_is_new_is_logged_though_its_step_is_known(tmp_path):
    first = memory_at(tmp_path)
    log(first, row(8, loss=1))
    first.save()
    assert log(memory_at(tmp_path), row(8, loss=1, rate=2)) == [(8, {"rate": 2})]


def test_several_values_of_one_step_are_counted(tmp_path):
    first = memory_at(tmp_path)
    log(first, row(8, loss=1), row(8, loss=2))
    first.save()
    again = (row(8, loss=1), row(8, loss=2), row(8, loss=3))
    assert log(memory_at(tmp_path), *again) == [(8, {"loss": 3})]


def test_logged_elsewhere_nothing_is_known(tmp_path):
    first = memory_at(tmp_path)
    first.id = "one"
    log(first, row(8, loss=1))
    first.save()
    second = memory_at(tmp_path, "there")
    assert second.id == ""
    assert log(second, row(8, loss=1)) == [(8, {"loss": 1})]


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"target": "here"}', "null"])
def test_a_file_that_is_not_whole_is_as_good_as_none(tmp_path, text):
    (tmp_path / "known.json").write_text(text)
    assert log(memory_at(tmp_path), row(2, loss=1)) == [(2, {"loss": 1})]


def test_a_fifo_is_as_good_as_none_and_is_not_waited_for(tmp_path):
    os.mkfifo(tmp_path / "known.json")
    assert log(memory_at(tmp_path), row(2, loss=1)) == [(2, {"loss": 1})]


def test_rows_before_a_turn_come_again_and_those_behind_it_do_not(tmp_path):
    memory = memory_at(tmp_path)
    log(memory, row(100, _between=True, validated=1), row(101, loss=1), row(102, loss=2))
    memory.save()
    assert [r["v"] for r in memory_at(tmp_path).rewind(101)] == [{"validated": 1}]
    assert memory_at(tmp_path).rewind(100) == []
    assert memory_at(tmp_path).rewind(102) == []


lives = st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=6)


@given(lives, st.booleans())
def test_over_any_lives_every_step_is_there_once(tmp_path_factory, lives, rewinds):
    place = tmp_path_factory.mktemp("memory")
    there: list[int] = []
    furthest = 0
    for begins, ends in [*lives, (0, 50)]:
        begins = min(begins, furthest)  # nobody resumes from where nobody was
        memory = memory_at(place)
        if rewinds:
            memory.rewind(2 * begins)
            there = [step for step in there if step < begins]
        steps = range(begins, max(begins, ends))
        there += [mark // 2 for mark, _ in log(memory, *(row(2 * s, loss=s) for s in steps))]
        memory.save()
        furthest = max(begins, ends) if rewinds else max(furthest, begins, ends)
    assert there == list(range(50))


# -- in the trainer --------------------------------------------------------------------


@pytest.fixture
def logger():
    """One that sends nowhere."""
    made = Logger.__new__(Logger)
    made._label, made._lost, made._next_poll = "TensorBoard", 0, 0.0
    made._rows, made._waiting = collections.deque(), collections.deque()
    words = memoryview(bytearray(8 * 64)).cast("q")
    log = MetricLog(Metrics(None), Judge(None))
    made._driver = SimpleNamespace(words=words, loops=[], log=log)
    return made


class OnADevice:
    """A number that comes when the test says so."""

    device = "gpu:0"

    def __init__(self):
        self.has_come = False

    def is_ready(self):
        return self.has_come

    def copy_to_host_async(self):
        pass

    def __float__(self):
        return 0.5


def test_nobody_listens_for_a_logger_whose_process_is_gone(logger):
    logger._writer = SimpleNamespace(send=lambda: None, is_gone=True)
    logger._listens = logger._listener()
    log = logger._driver.log
    log.add(logger, logger._listens)
    logger.hand_over()
    assert log._listeners == []
    assert log.sinks == ()
    logger.close()


def test_a_value_on_a_device_is_not_waited_for_and_the_order_stays(logger, monkeypatch):
    monkeypatch.setattr(_logger, "_POLL_SECONDS", -1.0)
    note, value = logger._listener(), OnADevice()
    note(1, {"loss": value})
    note(2, {"loss": 0.25})
    assert not logger._rows
    value.has_come = True
    note(3, {"loss": 0.125})
    assert [(r[1], r[4]) for r in logger._rows] == [
        (1, {"loss": 0.5}),
        (2, {"loss": 0.25}),
        (3, {"loss": 0.125}),
    ]


def test_before_a_snapshot_all_values_are_waited_for(logger):
    logger._writer = SimpleNamespace(send=lambda: None, is_gone=False)
    logger._listener()(1, {"loss": OnADevice()})
    logger.hand_over()
    assert [r[4] for r in logger._rows] == [{"loss": 0.5}]


def test_what_does_not_fit_is_lost_and_said_once(logger, monkeypatch, capsys):
    monkeypatch.setattr(_logger, "_MOST_ROWS", 3)
    note = logger._listener()
    for step in range(10):
        note(step, {"loss": 0.5})
    assert [r[1] for r in logger._rows] == [0, 1, 2]
    assert logger._lost == 7
    assert capsys.readouterr().err.count("more slowly than they come") == 1


@pytest.mark.parametrize("value", [1, True, 0.5])
def test_numbers_are_read_at_once(value):
    assert begin_reading(value, for_rule=False) == float(value)


def test_a_number_of_numpy_is_read_at_once():
    numpy = pytest.importorskip("numpy")
    assert type(begin_reading(numpy.float32(0.5), for_rule=False)) is float


# -- what is refused -------------------------------------------------------------------


def test_a_logger_needs_an_open_run(tmp_path):
    run = holdfast.Run(tmp_path / "run", x=1)
    with pytest.raises(holdfast.HoldfastError, match=r"the run is not open\.\nMake it inside"):
        holdfast.loggers.TensorBoard(run, tmp_path / "tb")


LOGGERS = {
    "tensorboard": lambda run: holdfast.loggers.TensorBoard(run, "tb"),
    "wandb": lambda run: holdfast.loggers.WandB(run, project="x"),
    "mlflow": lambda run: holdfast.loggers.MLflow(run),
}


@pytest.fixture
def open_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = holdfast.Run("run", x=1)
    monkeypatch.setattr(LoopDriver, "is_open", True)
    monkeypatch.setattr(LoopDriver, "rank", 0)
    return run


@pytest.mark.parametrize("package", LOGGERS)
def test_a_missing_package_gives_the_line_that_installs_it(open_run, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match="which is not installed here") as error:
        LOGGERS[package](open_run)
    assert str(error.value).splitlines()[1] == f"Install it: {install_command(package)}"


def test_the_folder_that_wandb_leaves_behind_is_not_wandb(open_run, tmp_path, monkeypatch):
    (tmp_path / "wandb" / "run-1").mkdir(parents=True)
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(ImportError, match="which is not installed here"):
        LOGGERS["wandb"](open_run)


def test_what_cannot_go_to_another_process_is_refused(open_run, monkeypatch):
    monkeypatch.setattr(_logger, "_require", lambda *_: None)
    with pytest.raises(holdfast.SettingsError, match=r"cannot be written as JSON .*\nIt goes to"):
        holdfast.loggers.WandB(open_run, config={"model": object()})


@pytest.mark.parametrize("name", ["resume", "resume_from", "reinit", "fork_from"])
def test_what_holdfast_chooses_is_refused(open_run, name):
    with pytest.raises(holdfast.SettingsError, match=rf"WandB\(run, {name}=…\): holdfast sets"):
        holdfast.loggers.WandB(open_run, **{name: "must"})


def test_a_bucket_is_refused(open_run):
    with pytest.raises(holdfast.SettingsError, match="only folders of this machine"):
        holdfast.loggers.TensorBoard(open_run, "gs://bucket/tb")


def test_only_the_first_rank_logs(open_run, monkeypatch):
    monkeypatch.setattr(_logger, "_require", lambda *_: None)
    monkeypatch.setattr(LoopDriver, "rank", 1)
    log = MetricLog(Metrics(None), Judge(None))
    monkeypatch.setattr(LoopDriver, "log", log)
    with holdfast.loggers.TensorBoard(open_run, "tb") as logger:
        logger.hand_over()
    assert log.sinks == ()
    assert log._listeners == []


# -- event files -----------------------------------------------------------------------


@pytest.mark.layer("loggers")
def test_a_record_that_a_full_disk_cuts_short_is_cut_off_again(tmp_path, monkeypatch):
    pytest.importorskip("tensorboard", reason="pip install 'holdfast[tensorboard]'")
    from holdfast.loggers._child import EventFiles

    plan = {"options": {"folder": str(tmp_path / "tb")}, "attempt": 1, "mark": 0}
    files = EventFiles(plan, memory_at(tmp_path))
    files.open([])
    files.write([row(0, loss=1.0)])
    [path] = (tmp_path / "tb").iterdir()
    whole = path.read_bytes()
    good = files._file

    class Full:
        def write(self, data):
            good.write(bytes(data[:5]))
            raise OSError(28, "No space left on device")

        def fileno(self):
            return good.fileno()

    monkeypatch.setattr(files, "_file", Full())
    with pytest.raises(OSError, match="No space"):
        files.write([row(2, loss=2.0)])
    assert path.read_bytes() == whole
    good.close()


@pytest.mark.layer("loggers")
def test_a_later_file_has_a_later_name_whatever_the_clock_says(tmp_path):
    pytest.importorskip("tensorboard", reason="pip install 'holdfast[tensorboard]'")
    from holdfast.loggers._child import EventFiles

    memory = memory_at(tmp_path)
    memory.stamp = 9_000_000_000  # another machine's clock is far ahead
    plan = {"options": {"folder": str(tmp_path / "tb")}, "attempt": 2, "mark": 0}
    files = EventFiles(plan, memory)
    files.open([])
    files.finish(0)
    [path] = (tmp_path / "tb").iterdir()
    assert path.name.startswith("events.out.tfevents.9000000001.")
    memory.save()
    assert json.loads((tmp_path / "known.json").read_text())["stamp"] == 9_000_000_001
