"""A run on a machine without its framework: the line that installs it, and all that needs none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import environment

pytest.importorskip("jax", reason="pip install jax")

TRAIN = """
import sys
folder, total, has_jax = sys.argv[1], int(sys.argv[2]), sys.argv[3] == "with"
if has_jax:
    import jax.numpy as jnp
    weights = jnp.zeros(3)
else:
    import numpy as np
    sys.modules["jax"] = None  # what an installation without it does
    weights = np.zeros(3, np.float32)
import holdfast
with holdfast.Run(folder, weights=weights) as run:
    for _ in run.steps(total):
        run.update(weights=run.state["weights"] + 1)
"""
COMMAND = """
import sys
sys.modules["jax"] = None
from holdfast._tools.cli import main
main()
"""


def python(program: str, *words: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *map(str, words)]
    env = environment(JAX_PLATFORMS="cpu")
    return subprocess.run(command, capture_output=True, text=True, env=env, timeout=100)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("jax") / "run"
    found = python(TRAIN, folder, 3, "with")
    assert found.returncode == 0, found.stderr
    return folder


def test_resuming_says_how_to_install_it_and_leaves_the_checkpoint_alone(trained):
    before = {path: path.read_bytes() for path in trained.glob("checkpoints/*/*")}
    found = python(TRAIN, trained, 5, "without")
    assert found.returncode == 1
    assert "weights: stored as float32 of jax, and holdfast.jax needs JAX" in found.stderr
    assert "pip install 'jax>=0.4.30'" in found.stderr
    assert "Traceback" not in found.stderr
    assert {path: path.read_bytes() for path in trained.glob("checkpoints/*/*")} == before


def test_looking_at_it_and_exporting_it_need_no_framework(trained, tmp_path):
    for words in (("verify", trained), ("ls", trained), ("status", trained)):
        found = python(COMMAND, *words)
        assert found.returncode == 0, found.stderr
    file = tmp_path / "weights.safetensors"
    found = python(COMMAND, "export", trained, file)
    assert found.returncode == 0, found.stderr
    load_file = pytest.importorskip("safetensors.numpy", reason="pip install safetensors").load_file
    assert load_file(file)["weights"].tolist() == [3.0, 3.0, 3.0]
