"""The trainings of all frameworks, and how a life of one is started."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from holdfast._tools.prove.script_run import Process, Starter
from tests.fork_server import Forked, ForkServer
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
    """Starts trainings, each from a process that has imported its framework."""

    def __init__(self, fork_server: ForkServer) -> None:
        self._fork_server = fork_server

    def starter(self, framework: str) -> Starter:
        """Starts the lives of a proof."""

        def start(
            command: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
        ) -> Process:
            assert command[0] == "python", command
            return self._start(framework, command[1:], folder, environment, output)

        return start

    def live(self, framework: str, folder: Path, output: Path, *argv: str) -> Forked:
        """One life to its end, without a proof."""
        life = self._start(framework, argv, folder, environment(), output)
        life.wait()
        return life

    def _start(
        self,
        framework: str,
        argv: Sequence[str],
        folder: Path,
        environment: Mapping[str, str],
        output: Path,
    ) -> Forked:
        if framework != "nothing" and importlib.util.find_spec(framework) is None:
            pytest.skip(f"pip install {framework}")
        return self._fork_server.start(
            *argv,
            output=output,
            cwd=folder,
            env=environment,
            framework=framework,
            start_new_session=True,
        )


def make_project(folder: Path, training: str) -> Path:
    """A folder with a training as train.py, and what it learns beside it."""
    folder.mkdir()
    shutil.copy(TRAININGS / f"{training}.py", folder / "train.py")
    shutil.copy(TRAININGS / "task.py", folder)
    return folder
