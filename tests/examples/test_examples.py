"""Every example is short and says how to start it. tests/prove interrupts them."""

from __future__ import annotations

import ast
import re
import shlex
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
}
OF_RANKS = ("fsdp",)  # only in tests/ranks: a proof does not see into sharded tensors


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
