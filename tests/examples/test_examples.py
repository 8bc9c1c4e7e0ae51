"""Every example, started as its docstring says, and interrupted in the middle of its training.

Each is run undisturbed, and beside it with one Ctrl-C, one SIGTERM and one kill -9 at random
steps; both end with the same line, which has a hash of the weights.
"""

from __future__ import annotations

import ast
import contextlib
import random
import re
import shlex
import signal
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast._save.control import IN_LOOP, STEP
from tests.support import Trainer, environment, wait_for_keeper_gone, wait_until

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
LIMIT_LINES = 100
STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}


@dataclass(frozen=True)
class Size:
    """An example in small: its arguments, and the steps of each run it makes."""

    arguments: str
    steps: dict[str, int]  # by folder below the one it is given


SIZES = {
    "mnist_cnn": Size("--epochs 3 --size 1000", {".": 60}),
    "small_gpt": Size("--steps 100 --eval-every 30", {".": 100}),
    "gan": Size("--epochs 4 --size 10000", {".": 200}),
    "reinforce": Size("--steps 200", {".": 200}),
    "mixed_precision": Size("--epochs 4 --size 5000", {".": 200}),
    "accumulation": Size("--epochs 4", {".": 64}),
    "finetune": Size("--body-epochs 1 --epochs 6", {"body": 80, "head": 180}),
}


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


def choose_instants(size: Size, rng: random.Random) -> list[tuple[str, int]]:
    """Three steps, one in each part of the training: the folder of the run, and how far it is."""
    total = sum(size.steps.values())
    found = []
    for first, last in ((0.1, 0.25), (0.35, 0.5), (0.6, 0.75)):
        step = round(total * rng.uniform(first, last))
        for folder, steps in size.steps.items():
            if step < steps:
                found.append((folder, step))
                break
            step -= steps
    return found


def last_line(trainer: Trainer) -> str:
    """What an example says at its end."""
    assert trainer.wait(60) == 0, trainer.output
    said = [line for line in trainer.lines if not line.startswith("holdfast: ")]
    assert re.search(r"weights [0-9a-f]{16}$", said[-1]), trainer.output
    return said[-1]


@pytest.fixture
def start_example(start) -> Callable[[str, Path], Trainer]:
    def begin(name: str, folder: Path) -> Trainer:
        return start(
            *("--folder", folder, *SIZES[name].arguments.split()),
            script=EXAMPLES / f"{name}.py",
            env=environment(OMP_NUM_THREADS="1"),
        )

    return begin


def completed_steps(pid: int) -> int:
    """The steps of the run whose loop this process is in, from the page that its keeper reads."""
    for link in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            if str(link.readlink()).startswith("/memfd:holdfast-control"):
                words = struct.unpack_from("=16Q", link.read_bytes())
                return words[STEP] if words[IN_LOOP] else -1
    return -1


def interrupt(trainer: Trainer, folder: Path, step: int, number: int) -> None:
    """Send a signal when the run in this folder has come to this step."""

    def has_come() -> bool:
        assert trainer.process.poll() is None, f"ended before step {step}:\n{trainer.output}"
        return (folder / "run.json").exists() and completed_steps(trainer.pid) >= step

    wait_until(has_come, 60, f"step {step}")
    trainer.send(number)
    assert trainer.wait(60) == STATUS[number], trainer.output


@pytest.mark.slow
@pytest.mark.parametrize("name", SIZES)
def test_an_interrupted_example_ends_like_an_undisturbed_one(name, tmp_path, start_example):
    undisturbed, interrupted = tmp_path / "undisturbed", tmp_path / "interrupted"

    def run_twice() -> tuple[str, str, str]:
        ended = last_line(start_example(name, undisturbed))
        again = start_example(name, undisturbed)
        return ended, last_line(again), again.output

    rng = random.Random(name)
    signals = rng.sample([signal.SIGINT, signal.SIGTERM, signal.SIGKILL], 3)
    with ThreadPoolExecutor(1) as beside:
        reference = beside.submit(run_twice)
        for number, (run, step) in zip(signals, choose_instants(SIZES[name], rng), strict=True):
            interrupt(start_example(name, interrupted), interrupted / run, step, number)
        ended = last_line(start_example(name, interrupted))
        expected, repeated, said = reference.result()
    assert ended == expected
    assert repeated == expected, "a second start changed the weights"
    assert said.count("nothing left to train") == len(SIZES[name].steps), said
    for run in SIZES[name].steps:
        wait_for_keeper_gone(interrupted / run)


def test_every_example_is_run_here():
    assert {path.stem for path in EXAMPLES.glob("*.py")} == set(SIZES)


@pytest.mark.parametrize("name", SIZES)
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
    assert sorted(linked) == sorted(SIZES)
