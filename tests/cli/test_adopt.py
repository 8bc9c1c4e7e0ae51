"""`holdfast adopt`: a run that begins with what tf.train.CheckpointManager has left."""

from __future__ import annotations

import importlib.util
import json
import re
import subprocess
import sys

import pytest

from tests.cli.command import environment
from tests.support import SCRIPTS

CASES = SCRIPTS / "adopt_cases.py"
NAMES = re.findall(r"^def (case_\w+)", CASES.read_text(), re.MULTILINE)
HAS_KERAS = all(importlib.util.find_spec(name) for name in ("tensorflow", "keras"))
WITHOUT = """
import sys
sys.modules["tensorflow"] = None
sys.argv = ["holdfast", *sys.argv[1:]]
from holdfast._cli import main
main()
"""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """What came of all cases, which one process went through."""
    if not HAS_KERAS:
        pytest.skip("pip install tensorflow")
    folder = tmp_path_factory.mktemp("adopt")
    done = subprocess.run(
        [sys.executable, CASES, folder],
        capture_output=True,
        text=True,
        timeout=400,
        env=environment(KERAS_BACKEND="tensorflow", CUDA_VISIBLE_DEVICES=""),
        check=False,
    )
    assert (folder / "results.json").exists(), done.stdout + done.stderr
    return json.loads((folder / "results.json").read_text())


@pytest.mark.slow
@pytest.mark.timeout(420)  # of the first, which waits for all of them
@pytest.mark.parametrize("name", NAMES)
def test_in_one_process(results, name):
    assert results[name] == "ok", results[name]


@pytest.mark.parametrize("command", ["adopt", "export"])
def test_without_tensorflow_it_says_how_to_install_it(folder, tmp_path, command):
    from holdfast import Run

    if command == "export":
        with Run(folder, weights=[1.0]) as run:
            run.finish()
        words = ["export", folder, tmp_path / "out", "--to", "tensorflow"]
    else:
        words = ["adopt", folder, "--from", tmp_path]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT, *map(str, words)],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment(),
        check=False,
    )
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert "pip install 'holdfast[tensorflow]'" in done.stderr
    assert command == "export" or not folder.exists()
