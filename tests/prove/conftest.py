"""Proofs whose lives are forked from a process that has imported torch: as real, and quick."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from holdfast._prove.life import Process
from holdfast._prove.proof import Proof, Watcher, Wishes
from holdfast._prove.prove import prove as prove_wishes
from tests.data.lives import Zygote

HERE = Path(__file__).parent
Prove = Callable[..., Proof]


@pytest.fixture(scope="session")
def zygote() -> Iterator[Zygote]:
    pytest.importorskip("torch", reason="pip install torch")
    zygote = Zygote("tests.prove.zygote")
    yield zygote
    zygote.end()


@pytest.fixture
def prove(zygote: Zygote, tmp_path: Path) -> Prove:
    """Prove a script, given by its file or its text, in a folder of its own."""

    def start(
        command: Sequence[str], folder: Path, environment: Mapping[str, str], output: Path
    ) -> Process:
        assert command[0] == "python", command
        fields = {"folder": str(folder), "environment": dict(environment)}
        return zygote.start(output, *command[1:], **fields)

    def begin(script: Path | str, *arguments: str, **wishes: Any) -> Proof:
        folder = tmp_path / "project"
        folder.mkdir()
        if isinstance(script, Path):
            shutil.copy(script, folder / "train.py")
        else:
            (folder / "train.py").write_text(script)
        command = ("python", "train.py", *arguments)
        return prove_wishes(Wishes(command, folder=folder, **wishes), Watcher(), start)

    return begin
