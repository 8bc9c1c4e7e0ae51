"""Every Python block of the documentation runs, with small things under the names it needs."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.docs.pages import ROOT, Block, all_blocks, blocks_of
from tests.support import environment

# A block that cannot be run is one that nobody checks: there are to be few, each with its reason.
_MOST_NOT_RUN = 2
_CLASS = {"tensorboard": "TensorBoard", "wandb": "WandB", "mlflow": "MLflow"}


def _stories() -> list[list[Block]]:
    """Blocks that go on with what the one before has made are one story."""
    stories: list[list[Block]] = []
    for block in all_blocks():
        if "not run" in block.marks:
            continue
        if "joined" in block.marks:
            stories[-1].append(block)
        elif block.language == "python" or "ckpts" in block.marks:
            stories.append([block])
    return stories


def _framework(story: list[Block]) -> str:
    frameworks = {block.framework for block in story} - {"torch"}
    if any("ckpts" in block.marks for block in story):
        frameworks.add("tensorflow")
    # TensorFlow, Keras and JAX share a process: the first import of TensorFlow is most of it.
    return "others" if frameworks else "torch"


# The plain script and the one that cannot be lost end with the same weights. Once as the picture
# of the README was made from them, once as the README shows them, both for one epoch.
_SAME_WEIGHTS = """
def weights_of(text, epochs):
    names = {{}}
    exec(text.replace(epochs, "(1)"), names)
    return [each.detach().clone() for each in names["model"].parameters()]

before, after = (weights_of(text, {epochs!r}) for text in {texts!r})
assert all(bool((a == b).all()) for a, b in zip(before, after, strict=True))
"""


def _same_weights() -> list[list[Block]]:
    first = ROOT / "docs" / "first_minute"
    files = [(first / name).read_text() for name in ("plain.py", "train.py")]
    shown = [block.text for block in blocks_of(ROOT / "README.md") if "script" in block.marks]
    assert len(shown) == 2
    return [
        [Block(name, 1, "python", _SAME_WEIGHTS.format(epochs=epochs, texts=texts))]
        for name, epochs, texts in (
            ("docs/first_minute", "(10)", files),
            ("README's scripts", "(20)", shown),
        )
    ]


def _missing(story: list[Block]) -> list[str]:
    """The packages that it takes and that are not here; found without importing them."""
    names = {block.framework for block in story}
    names |= {"tensorflow"} if any("ckpts" in block.marks for block in story) else set()
    text = "".join(block.text for block in story)
    names |= {
        each for each in ("tensorboard", "wandb", "mlflow") if f"loggers.{_CLASS[each]}" in text
    }
    return sorted(name for name in names if importlib.util.find_spec(name) is None)


_LAYERS = ("jax", "tensorflow", "keras", "lightning", "transformers", "loggers")


def _layer(story: list[Block]) -> str:
    """The layer of tests/tiers.toml that has all that a story takes."""
    names = {block.framework for block in story}
    names |= {"tensorflow"} if any("ckpts" in block.marks for block in story) else set()
    text = "".join(block.text for block in story)
    if any(f"loggers.{name}" in text for name in _CLASS.values()):
        return "loggers"
    if "accelerate" in text or "transformers" in names:
        return "transformers"
    if "keras" in names or len(names & {"jax", "tensorflow", "torch"}) > 1:
        return "keras"
    return next((name for name in _LAYERS if name in names), "test")


STORIES = [*_stories(), *_same_weights()]
MISSING = {block.name: _missing(story) for story in STORIES for block in story}
IN_STORIES = [block for story in STORIES for block in story]
LAYER = {block.name: _layer(story) for story in STORIES for block in story}


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What became of each block: nothing if it is right. Two processes, side by side."""
    folder = tmp_path_factory.mktemp("blocks")
    kinds = {
        kind: [story for story in STORIES if _framework(story) == kind and not _missing(story)]
        for kind in ("torch", "others")
    }
    started = {}
    for kind, stories in kinds.items():
        (folder / f"{kind}.json").write_text(
            json.dumps([[asdict(block) for block in story] for story in stories])
        )
        started[kind] = _start(folder, kind)
    found: dict[str, str] = {}
    for kind, process in started.items():
        said, _ = process.communicate(timeout=240)
        told = folder / f"{kind}.told"
        lines = told.read_text().splitlines() if told.exists() else []
        found |= {line["name"]: line["wrong"] for line in map(json.loads, lines)}
        for block in (block for story in kinds[kind] for block in story):
            found.setdefault(block.name, f"it was not reached:\n{said}")
    return found


def _start(folder: Path, kind: str) -> subprocess.Popen[str]:
    orders, told = folder / f"{kind}.json", folder / f"{kind}.told"
    return subprocess.Popen(
        [sys.executable, "-m", "tests.docs.run_blocks", str(orders), str(told)],
        cwd=ROOT,
        env=environment(
            KERAS_BACKEND="tensorflow",
            JAX_PLATFORMS="cpu",
            TF_CPP_MIN_LOG_LEVEL="3",
            OMP_NUM_THREADS="1",
            PYTHONPATH=os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]),
        ),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.nightly  # the part `blocks` runs them, and those of a framework its own part
@pytest.mark.parametrize(
    "block",
    [pytest.param(b, id=b.name, marks=pytest.mark.layer(LAYER[b.name])) for b in IN_STORIES],
)
def test_a_block_runs(block: Block, request: pytest.FixtureRequest):
    if missing := MISSING[block.name]:
        pytest.skip(f"pip install 'holdfast[{','.join(missing)}]'")
    results = request.getfixturevalue("results")
    assert not results[block.name], results[block.name]


def test_few_blocks_are_not_run_and_each_says_why():
    left_out = [block for block in all_blocks() if "not run" in block.marks]
    python = [block for block in left_out if block.language == "python"]
    assert len(python) <= _MOST_NOT_RUN, [block.name for block in python]
    for block in left_out:
        assert len(block.marks["not run"].split()) >= 3, f"{block.name}: no reason"


def test_a_joined_block_follows_one_that_runs():
    before: Block | None = None
    for block in all_blocks():
        if "joined" in block.marks:
            assert before is not None, block.name
            assert before.page == block.page, block.name
            assert before in IN_STORIES, f"{block.name}: {before.name} is not run"
        if block.language in ("python", "console"):
            before = block
