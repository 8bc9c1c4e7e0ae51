"""A real compilation in the middle of a training takes a minute, and is no hang."""

from __future__ import annotations

import os
import shutil

import pytest

from tests.support import Trainer, environment, journal_events

pytest.importorskip("torch")

SCRIPT = """
import sys, time

import torch

import holdfast

torch.manual_seed(0)
layers = [m for _ in range(8) for m in (torch.nn.Linear(32, 32), torch.nn.GELU())]
model = torch.nn.Sequential(*layers)
optimizer = torch.optim.Adam(model.parameters())
compiled = torch.compile(model)
settings = holdfast.Settings(hang_timeout=2)
with holdfast.Run(sys.argv[1], model=model, optimizer=optimizer, settings=settings) as run:
    for step in run.steps(100):
        began = time.monotonic()
        loss = (compiled if step >= 60 else model)(torch.randn(8, 32)).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(0.04)
        if step == 60:
            print(f"compiled in {time.monotonic() - began:.1f} s", flush=True)
"""


@pytest.mark.nightly  # what moves is slow: tests/unit/keeper/test_hang_judge.py
@pytest.mark.timeout(400)
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler of C++")
def test_a_compilation_amid_steps_of_50_ms_is_slow_and_no_hang(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    folder = tmp_path / "run"
    env = environment(OMP_NUM_THREADS="1", TORCHINDUCTOR_CACHE_DIR=os.fspath(tmp_path / "cache"))
    trainer = Trainer(folder, script=tmp_path / "train.py", env=env)
    assert trainer.wait(300) == 0, trainer.output
    seconds = float(trainer.output.split("compiled in ")[1].split()[0])
    assert seconds > 4, "too quick to show anything: twice what was given"
    assert journal_events(folder, "hang") == []
