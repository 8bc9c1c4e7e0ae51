"""Proofs whose lives are forked from a process that has imported torch: as real, and quick."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from holdfast._tools.prove.proof import Proof, ProofRequest, Watcher
from holdfast._tools.prove.prove import prove as prove_wishes
from tests.everywhere.lives import Frameworks

HERE = Path(__file__).parent
Prove = Callable[..., Proof]


@pytest.fixture
def prove(frameworks: Frameworks, tmp_path: Path) -> Prove:
    """Prove a script, given by its file or its text, in a folder of its own."""

    def begin(
        script: Path | str, *arguments: str, framework: str = "torch", **wishes: Any
    ) -> Proof:
        folder = tmp_path / "project"
        folder.mkdir()
        if isinstance(script, Path):
            shutil.copy(script, folder / "train.py")
        else:
            (folder / "train.py").write_text(script)
        command = ("python", "train.py", *arguments)
        start = frameworks.starter(framework)
        return prove_wishes(ProofRequest(command, folder=folder, **wishes), Watcher(), start)

    return begin
