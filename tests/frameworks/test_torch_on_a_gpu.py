"""The same promises with model, optimizer and generators on a GPU."""

from __future__ import annotations

import signal

import pytest

from tests.support import SCRIPTS, traced_steps, train_to_the_end, wait_for_keeper_gone, wait_until

torch = pytest.importorskip("torch")

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs an NVIDIA GPU and a torch built for it"
)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_training_on_a_gpu_goes_on_to_the_same_bits(folder, tmp_path, start, number):
    arguments = ["--total", 600, "--device", "cuda", "--size", 512]
    expected = train_to_the_end(tmp_path / "reference", *arguments)
    for life in range(3):
        trace = tmp_path / f"trace-{life}"
        trace.touch()
        trainer = start(folder, *arguments, "--sleep", 0.005, "--trace", trace)
        wait_until(lambda path=trace: len(traced_steps(path)) > 100, 90)
        trainer.send(number)
        trainer.wait()
        wait_for_keeper_gone(folder)
    last = start(folder, *arguments)
    assert last.ready() > 100
    assert last.state_hash() == expected


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_a_loader_with_pinned_memory_goes_on_in_mid_epoch(folder, tmp_path, start, number):
    script = SCRIPTS / "train_loader_on_gpu.py"
    trace = tmp_path / "trace"
    trace.touch()
    expected = train_to_the_end(tmp_path / "reference", 0, tmp_path / "unused", script=script)
    for life in range(3):
        before = len(trace.read_text().split())
        trainer = start(folder, 0.01, trace, script=script)
        wait_until(lambda n=before + 37 + life: len(trace.read_text().split()) > n, 90)
        trainer.send(number)
        trainer.wait()
        wait_for_keeper_gone(folder)
    last = start(folder, 0, trace, script=script)
    assert last.ready() > 60
    assert last.state_hash() == expected
