"""The trainings of all frameworks, and how a life of one is started."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast._prove.life import Process, Starter
from tests.data.lives import Life, Zygote
from tests.support import environment

if TYPE_CHECKING:
    from _pytest.mark import ParameterSet

TRAININGS = Path(__file__).parent / "trainings"
#: The trainings, and the framework that each is forked from.
FRAMEWORK_OF = {
    "numpy_loop": "numpy",
    "torch_loop": "torch",
    "jax_loop": "jax",
    "tensorflow_loop": "tensorflow",
    "keras_fit": "tensorflow",
    "transformers_trainer": "transformers",
    "lightning_fit": "lightning",
}
#: The layer of tests/tiers.toml that each is proven in.
LAYER_OF = {**FRAMEWORK_OF, "numpy_loop": "test", "torch_loop": "test", "keras_fit": "keras"}


def of_layers(trainings: Iterable[str]) -> list[ParameterSet]:
    """One parameter for each training, in its layer."""
    return [pytest.param(name, marks=pytest.mark.layer(LAYER_OF[name])) for name in trainings]


class Frameworks:
    """Of each framework one process that has imported it, and forks lives."""

    def __init__(self) -> None:
        self._zygotes: dict[str, Zygote] = {}

    def starter(self, framework: str) -> Starter:
        """Starts the lives of a proof."""

        def start(
            command: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
        ) -> Process:
            assert command[0] == "python", command
            fields = {"folder": str(folder), "environment": dict(environment)}
            return self._zygote(framework).start(output, *command[1:], **fields)

        return start

    def live(self, framework: str, folder: Path, output: Path, *argv: str) -> Life:
        """One life to its end, beside of any proof."""
        fields = {"folder": str(folder), "environment": environment()}
        life = self._zygote(framework).start(output, *argv, **fields)
        life.wait()
        return life

    def end(self) -> None:
        for zygote in self._zygotes.values():
            zygote.end()

    def _zygote(self, framework: str) -> Zygote:
        if framework != "nothing" and importlib.util.find_spec(framework) is None:
            pytest.skip(f"pip install {framework}")
        if framework not in self._zygotes:
            self._zygotes[framework] = Zygote("tests.everywhere.zygote", framework)
        return self._zygotes[framework]


def make_project(folder: Path, training: str) -> Path:
    """A folder with a training as train.py, and what it learns beside it."""
    folder.mkdir()
    shutil.copy(TRAININGS / f"{training}.py", folder / "train.py")
    shutil.copy(TRAININGS / "task.py", folder)
    return folder
