"""`holdfast adopt`: a run that begins with what other libraries have left, and back to these.

The cases are in scripts, one process for each library: these take seconds to import, and threads
of theirs in the tests' own process would make every fork there unsafe.
"""

from __future__ import annotations

import functools
import json
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest

from tests.cli.command import environment, succeed
from tests.cli.without import holdfast_without
from tests.support import SCRIPTS

# The packages that each script imports; what it installs them with is the reason of a skip.
NEEDED = {
    "adopt_cases.py": {"tensorflow": "tensorflow", "keras": "keras"},
    "adopt_torch_cases.py": {"torch": "torch", "safetensors": "safetensors"},
    "adopt_trainer_cases.py": {
        "torch": "torch",
        "lightning": "lightning",
        "transformers": "transformers accelerate",
    },
    "adopt_orbax_cases.py": {
        "jax": "jax",
        "flax": "flax",
        "optax": "optax",
        "orbax": "orbax-checkpoint",
    },
}
LAYERS = {
    "adopt_cases.py": "tensorflow",
    "adopt_torch_cases.py": "test",
    "adopt_trainer_cases.py": "transformers",
    "adopt_orbax_cases.py": "jax",
}
CASES = [
    pytest.param(script, name, id=name, marks=pytest.mark.layer(LAYERS[script]))
    for script in NEEDED
    for name in re.findall(r"^def (case_\w+)", (SCRIPTS / script).read_text(), re.MULTILINE)
]
# What each command needs, and the line that installs it.
LACKING = {
    "export": "pip install 'tensorflow>=2.16'",
    "adopt": "pip install 'tensorflow>=2.16'",
    "model.safetensors": "pip install 'torch>=2.4'",
    "all.pt": "pip install 'torch>=2.4'",
    "_CHECKPOINT_METADATA": "pip install 'jax>=0.4.30' 'orbax-checkpoint>=0.6'",
}


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """A function that gives what came of all cases of a script, which one process went through."""

    @functools.cache
    def run(script: str) -> dict[str, str]:
        lacking = [line for name, line in NEEDED[script].items() if not find_spec(name)]
        if lacking:
            pytest.skip(f"pip install {' '.join(lacking)}")
        folder = tmp_path_factory.mktemp("adopt")
        done = subprocess.run(
            [sys.executable, SCRIPTS / script, folder],
            capture_output=True,
            text=True,
            timeout=400,
            env=environment(
                KERAS_BACKEND="tensorflow",
                CUDA_VISIBLE_DEVICES="",
                JAX_PLATFORMS="cpu",
                PYTHONPATH=str(SCRIPTS.parents[1]),
            ),
            check=False,
        )
        assert (folder / "results.json").exists(), done.stdout + done.stderr
        return json.loads((folder / "results.json").read_text())

    return run


# Over 5 s for the first case: it imports torch, and runs them all.
@pytest.mark.timeout(420)  # of the first of a script, which waits for all of them
@pytest.mark.parametrize(("script", "name"), CASES)
def test_in_one_process(results, script, name):
    assert results(script)[name] == "ok", results(script)[name]


@pytest.fixture(scope="module")
def refusals(tmp_path_factory):
    """How each command of LACKING ends where no framework is there, and the run it would make."""
    from holdfast import Run

    place = tmp_path_factory.mktemp("without")
    with Run(place / "trained", weights=[1.0]) as run:
        run.finish()
    commands = {"export": ["export", place / "trained", place / "out", "--to", "tensorflow"]}
    for name in LACKING.keys() - {"export"}:
        (place / name).mkdir()
        # By a file of this name the folders of TensorFlow are known, and those of orbax by theirs.
        source = place / name / ("checkpoint" if name == "adopt" else name)
        source.touch()
        is_file = source.suffix in (".safetensors", ".pt")
        commands[name] = [
            "adopt",
            place / f"of-{name}",
            "--from",
            source if is_file else source.parent,
        ]
    ended = holdfast_without(["tensorflow", "torch", "orbax"], list(commands.values()))
    return {name: (done, place / f"of-{name}") for name, done in zip(commands, ended, strict=True)}


def check_refusal(done, line):
    assert (done.returncode, done.stdout) == (1, "")
    assert len(done.stderr.splitlines()) == 2, done.stderr
    assert line in done.stderr


@pytest.mark.parametrize("command", ["adopt", "export"])
def test_without_tensorflow_it_says_how_to_install_it(refusals, command):
    done, folder = refusals[command]
    check_refusal(done, LACKING[command])
    assert not folder.exists()


@pytest.mark.parametrize("name", ["model.safetensors", "all.pt", "_CHECKPOINT_METADATA"])
def test_what_reads_a_format_is_named_where_it_is_missing(refusals, name):
    done, folder = refusals[name]
    check_refusal(done, LACKING[name])
    assert not folder.exists()


@pytest.mark.nightly  # above: one process; tests/ranks/test_examples.py: ranks that store parts
def test_what_two_ranks_stored_in_parts_is_adopted_whole_and_taken_in_parts_again(tmp_path):
    if not find_spec("torch"):
        pytest.skip("pip install torch")

    def ranks(act: str) -> None:
        launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
        done = subprocess.run(
            [sys.executable, *launcher, SCRIPTS / "adopt_ranks.py", act, tmp_path],
            capture_output=True,
            text=True,
            timeout=200,
            env=environment(CUDA_VISIBLE_DEVICES="", OMP_NUM_THREADS="1"),
            check=False,
        )
        assert done.returncode == 0, done.stdout + done.stderr

    ranks("store")
    for kind in ("named", "numbered"):
        shown = succeed("adopt", tmp_path / f"run-{kind}", "--from", tmp_path / kind)
        assert "step 3 (by optimizer.state)" in shown
    ranks("resume")
