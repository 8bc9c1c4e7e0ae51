"""What is logged from a GPU: every value as it was, and no step that waits for one."""

from __future__ import annotations

import collections
import time

import pytest

import holdfast
from holdfast.loggers import _logger

torch = pytest.importorskip("torch")
pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.timeout(300),
]


class Rows:
    """In place of the process: the rows stay here."""

    is_gone = False

    def __init__(self, label, plan, log, rows: collections.deque):
        self._rows = rows

    def send(self):
        pass

    def begin_end(self, status):
        pass

    def wait_for_end(self, seconds, is_hurried):
        return 0


@pytest.fixture
def log_to_rows(monkeypatch):
    monkeypatch.setattr(_logger, "_require", lambda *_: None)
    monkeypatch.setattr(_logger, "Writer", Rows)


def test_a_number_that_is_added_up_in_place_is_logged_as_it_was(tmp_path, log_to_rows):
    total = torch.zeros((), device="cuda")
    with holdfast.Run(tmp_path / "run", total=total) as run:
        logger = holdfast.loggers.TensorBoard(run, tmp_path / "tb")
        for step in run.steps(500):
            total += 1
            run.log(total=total, step=step)
        logger.hand_over()
    assert [row[4] for row in logger._rows] == [
        {"total": float(step + 1), "step": float(step)} for step in range(500)
    ]


def test_a_log_does_not_wait_for_the_device(tmp_path, log_to_rows):
    value = torch.ones((), device="cuda")
    with holdfast.Run(tmp_path / "run", value=value) as run:
        logger = holdfast.loggers.TensorBoard(run, tmp_path / "tb")
        run.log(value=value)  # makes what is kept for the next ones
        logger.hand_over()
        torch.cuda.synchronize()
        torch.cuda._sleep(2_000_000_000)  # about a second of work
        began = time.perf_counter()
        for _ in range(50):
            run.log(value=value)
        seconds = time.perf_counter() - began
        assert len(logger._rows) == 1
        logger.hand_over()
        assert len(logger._rows) == 51
    print(f"{seconds / 50 * 1e6:.1f} us for each")
    assert seconds < 0.3
