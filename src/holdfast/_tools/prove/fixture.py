"""The pytest fixture `holdfast_prove`: a test fails if an interruption changes the training.

pytest loads this module wherever holdfast is installed. So it imports nothing but pytest; the
first call imports the prover.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from holdfast._tools.prove.proof import Proof


@pytest.fixture
def holdfast_prove() -> Callable[..., Proof]:
    """Prove that a script can be interrupted anywhere; takes the options of `holdfast prove`.

    def test_training_survives(holdfast_prove):
        holdfast_prove("python", "train.py", "--epochs", "1", kills=5, seed=1)
    """
    return prove_command


def prove_command(*command: str | Sequence[str], **options: Any) -> Proof:
    """The proof if all is equal, else ProofError with the report."""
    from holdfast._errors import ProofError
    from holdfast._tools.prove.proof import EQUAL, Watcher, make_request
    from holdfast._tools.prove.prove import prove
    from holdfast._tools.prove.report import plain_text

    __tracebackhide__ = True  # the report says all
    proof = prove(make_request(words_of(*command), **options), Watcher())
    if proof.verdict != EQUAL:
        raise ProofError(plain_text(proof), proof=proof)
    return proof


def words_of(*command: str | Sequence[str]) -> tuple[str, ...]:
    """A command that was given as words, as one list, or as one line."""
    from holdfast._tools.prove.proof import split_command

    words: tuple[str, ...]
    if len(command) == 1 and not isinstance(command[0], str):
        words = tuple(map(str, command[0]))
    elif len(command) == 1:
        words = split_command(str(command[0]), "The command")
    else:
        words = tuple(map(str, command))
    # The shell's python may be another environment than that of the tests.
    if words and words[0] in ("python", "python3"):
        return (sys.executable, *words[1:])
    return words
