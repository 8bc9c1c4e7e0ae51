"""Every example is short and says how to start it. tests/prove interrupts them."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_LINES = 100


SIZES = {
    "mnist_cnn": "--epochs 3 --size 1000",
    "small_gpt": "--steps 100 --eval-every 30",
    "gan": "--epochs 3 --size 5000",
    "reinforce": "--steps 120",
    "mixed_precision": "--epochs 3 --size 4000",
    "accumulation": "--epochs 4",
    "finetune": "--body-epochs 1 --epochs 4",
    "ddp": "--epochs 3 --size 3200",  # with one process; with several in tests/ranks
    "early_stopping": "--epochs 8 --size 160 --patience 2",
    "plain_protocol": "--steps 200",
    "jax_optax": "--epochs 3 --size 1024",
    "keras_fit": "--epochs 2 --samples 640",
    "accelerate_loop": "--epochs 3 --size 1000",  # with one process; with two in tests/ranks
    "transformers_trainer": "--epochs 2 --size 160 --width 32",
    "lightning_fit": "--epochs 2 --size 640",  # in one process; in two in tests/frameworks
    "tensorflow_loop": "--epochs 2 --size 1000",
    "tf_distributed": "--epochs 2 --size 640",  # on two devices; with two workers in tests/ranks
}
# Only in tests/ranks: a proof does not see into sharded tensors, nor into the workers of a Ray.
OF_RANKS = ("fsdp", "ray_train")


def framework_of(name: str) -> str:
    """What an example is forked from: the framework that it imports."""
    imported = re.findall(r"^(?:import|from) (\w+)", read_example(name)[1], re.MULTILINE)
    found = ["tensorflow" if each == "keras" else each for each in imported]
    known = ("tensorflow", "jax", "lightning", "transformers", "torch", "numpy")
    return next((each for each in known if each in found), "nothing")


def layer_of(name: str) -> str:
    """The layer of tests/tiers.toml in which an example can run."""
    text = read_example(name)[1]
    if "import keras" in text:
        return "keras"
    if "import accelerate" in text or "from accelerate" in text:
        return "transformers"
    framework = framework_of(name)
    return "test" if framework in ("nothing", "numpy", "torch") else framework


def commands(text: str) -> list[list[str]]:
    """The lines of a text that start an example, as a shell would split them."""
    found = re.findall(r"^(?:    |\$ )(python examples/.*)$", text, re.MULTILINE)
    return [shlex.split(command, comments=True) for command in found]


def read_example(name: str) -> tuple[str, str]:
    """The docstring of an example, and all of its text."""
    text = (EXAMPLES / f"{name}.py").read_text()
    docstring = ast.get_docstring(ast.parse(text), clean=False)
    assert docstring is not None
    return docstring, text


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == {*SIZES, *OF_RANKS}


@pytest.mark.parametrize("name", [*SIZES, *OF_RANKS])
def test_an_example_is_short_and_its_docstring_says_how_to_start_it(name):
    docstring, text = read_example(name)
    assert len(text.splitlines()) < LIMIT_LINES
    assert "Ctrl-C" in docstring
    assert "-9" in docstring
    assert commands(docstring), docstring
    for _, script, *arguments in commands(docstring):
        assert ROOT / script == EXAMPLES / f"{name}.py"
        for option in (word for word in arguments if word.startswith("--")):
            assert f'add_argument("{option}"' in text


def test_the_table_has_a_line_for_each_example():
    table = (EXAMPLES / "README.md").read_text()
    linked = re.findall(r"^\| \[`(\w+)\.py`\]\(\1\.py\) \| ", table, re.MULTILINE)
    assert sorted(linked) == sorted([*SIZES, *OF_RANKS])


def test_the_plain_one_imports_no_framework(tmp_path):
    program = (
        "import runpy, sys; script, *frameworks = sys.argv[1:]; sys.argv[1:] = ['--steps', '5']\n"
        "runpy.run_path(script, run_name='__main__')\n"
        "print('imported', *[name for name in frameworks if name in sys.modules])"
    )
    frameworks = ("numpy", "torch", "tensorflow", "keras", "jax")
    command = [sys.executable, "-c", program, str(EXAMPLES / "plain_protocol.py"), *frameworks]
    found = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 0, found.stderr
    assert found.stdout.splitlines()[-1] == "imported"
