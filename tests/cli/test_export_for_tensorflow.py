"""What `holdfast export --to tensorflow` writes, by commands as a person calls them.

That TensorFlow takes it, with nothing left over, is in `adopt_cases.py`.
"""

from __future__ import annotations

import importlib.util

import pytest

from tests.cli.command import holdfast, holdfast_process, output_of, status_of, succeed
from tests.support import SCRIPTS, wait_for_keeper_gone

pytestmark = [
    pytest.mark.timeout(300),
    pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in ("tensorflow", "keras", "safetensors")),
        reason="pip install tensorflow safetensors",
    ),
]


def tensors(path):
    from safetensors.numpy import load_file

    return {(value.dtype.name, value.shape, value.tobytes()) for value in load_file(path).values()}


def test_of_a_killed_run_to_tensorflow_and_back_to_a_run(start, folder, tmp_path):
    trainer = start(folder, 20, 7, script=SCRIPTS / "train_keras.py")
    assert trainer.wait(120) == -9, trainer.output
    wait_for_keeper_gone(folder)  # until then a newer step may become durable
    out, back = tmp_path / "out", tmp_path / "back"
    step = status_of(folder)["disk_step"]
    assert 0 < step <= 7
    # In processes: TensorFlow leaves threads, and the tests' own process must be able to fork.
    shown = output_of(holdfast_process("export", folder, out, "--to", "tensorflow"))
    assert shown.startswith(f"{out}: step {step} (attempt 1) of {folder}, 14 tensors")
    assert sorted(file.name for file in out.iterdir()) == [
        "checkpoint",
        "ckpt-1.data-00000-of-00001",
        "ckpt-1.index",
    ]
    shown = output_of(holdfast_process("adopt", back, "--from", out))
    assert shown.startswith(f"{back}: step {step} (by optimizer/_iterations), adopted from {out}")
    for number, run in enumerate((folder, back)):
        succeed("export", run, tmp_path / f"{number}.safetensors")
    found = tensors(tmp_path / "1.safetensors")
    # By values: an optimizer of TensorFlow has the weights as well, under names of its own.
    assert found == tensors(tmp_path / "0.safetensors")
    assert len(found) == 14
    assert status_of(back)["state"] == "closed"
    assert "adopted" in holdfast("ls", back, "--json").stdout
