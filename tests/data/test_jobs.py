"""How workers are started, and what a scheduler sends to all processes of a job."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import holdfast
from tests.often import few
from tests.support import SCRIPTS, checkpoint_steps, wait_until


def test_a_sigterm_to_the_whole_job_ends_the_step_and_loses_nothing(folder, start):
    for life in range(2):
        trainer = start(folder, script=SCRIPTS / "train_with_workers.py", start_new_session=True)
        begun = trainer.ready()
        wait_until(lambda t=trainer: sum(line.startswith("at ") for line in t.lines) > 20)
        time.sleep(0.006 * life)  # at another moment of the step
        os.killpg(trainer.pid, signal.SIGTERM)
        assert trainer.wait() == 143, trainer.output
        assert "Traceback" not in trainer.output
        last = max(int(line.split()[1]) for line in trainer.lines if line.startswith("at "))
        assert max(checkpoint_steps(folder)) == last + 1 > begun


@pytest.mark.parametrize("method", few(["fork", "spawn", "forkserver"], ["fork"]))
def test_workers_may_be_started_in_every_way(tmp_path, method):
    data = TensorDataset(torch.arange(8))
    loader = DataLoader(data, batch_size=4, num_workers=1, multiprocessing_context=method)
    with holdfast.Run(tmp_path / "run", weights=torch.zeros(1)) as run:
        assert [b.tolist() for (b,) in run.batches(loader)] == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_an_error_of_a_sample_does_not_let_the_trainer_wait_for_its_workers(folder, start):
    trainer = start(folder, "--bad-sample", script=SCRIPTS / "train_with_workers.py")
    trainer.wait_for("ValueError: on purpose")
    began = time.monotonic()
    assert trainer.wait() == 1
    assert time.monotonic() - began < 9, trainer.output  # they answer a SIGTERM after twelve
