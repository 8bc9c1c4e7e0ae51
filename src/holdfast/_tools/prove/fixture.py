"""The pytest fixture `holdfast_prove`: an interruption that costs something fails the test.

pytest loads this wherever holdfast is installed, also for suites that never ask for the
fixture. So it imports nothing but pytest; the prover comes with the first call.
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
    from holdfast._tools.prove.options import make_wishes
    from holdfast._tools.prove.proof import EQUAL, Watcher
    from holdfast._tools.prove.prove import prove
    from holdfast._tools.prove.report import plain_text

    __tracebackhide__ = True  # what a person wants to see is the report
    proof = prove(make_wishes(words_of(*command), **options), Watcher())
    if proof.verdict != EQUAL:
        raise ProofError(plain_text(proof), proof=proof)
    return proof


def words_of(*command: str | Sequence[str]) -> tuple[str, ...]:
    """A command that was given as words, as one list, or as one line."""
    from holdfast._tools.prove.options import split_command

    words: tuple[str, ...]
    if len(command) == 1 and not isinstance(command[0], str):
        words = tuple(map(str, command[0]))
    elif len(command) == 1:
        words = split_command(str(command[0]), "The command")
    else:
        words = tuple(map(str, command))
    # The python of a shell may be another one, without what the tests were given.
    if words and words[0] in ("python", "python3"):
        return (sys.executable, *words[1:])
    return words
