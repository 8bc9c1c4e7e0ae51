"""Scripts in TensorFlow and Keras: seen without any word of theirs, with holdfast and without."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from holdfast._tools.prove.proof import Planned, Proof, ProofRequest, Watcher
from holdfast._tools.prove.prove import prove as prove_wishes
from holdfast._tools.prove.report import plain_text

SCRIPTS = Path(__file__).parent / "in_tensorflow"
AMID = Planned(1, "KILL", "update", share=0.5, delay=0.0)
EACH = (
    Planned(1, "KILL", "save", share=0.2, delay=0.0),
    Planned(2, "TERM", "update", share=0.5, delay=0.0),
    Planned(3, "KILL", "step", share=0.8, delay=0.5),
)
ProveScript = Callable[..., Proof]
pytestmark = [
    pytest.mark.skipif(
        importlib.util.find_spec("tensorflow") is None, reason="pip install tensorflow"
    ),
]


@pytest.fixture
def prove_script(prove: ProveScript) -> ProveScript:
    def begin(name: str, *words: str, plan: Sequence[Planned] = (AMID,)) -> Proof:
        script = SCRIPTS / f"{name}.py"
        return prove(script, *words, framework="tensorflow", kills=len(plan), plan=tuple(plan))

    return begin


def test_checkpoints_that_have_everything_are_called_right(prove_script):
    proof = prove_script("loop", "nothing", plan=EACH)
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.steps == 24
    assert len(proof.interruptions) == 3
    for words in ("4 tensors of weights", "9 of optimizer state", "24 batches"):
        assert words in proof.compared, plain_text(proof)


@pytest.mark.parametrize(
    ("word", "cause"),
    [
        ("optimizer", "optimizer-state-lost"),
        ("batches", "data-position-lost"),
        ("dropout", "generator-not-restored"),  # a Checkpoint does not know of it
    ],
)
def test_what_checkpoints_lack_is_named(word, cause, prove_script):
    proof = prove_script("loop", word)
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.cause == cause, plain_text(proof)


def test_what_fit_goes_on_with_is_compared_batch_by_batch(prove_script):
    proof = prove_script("fit")
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.steps == 25
    assert "25 batches" in proof.compared, plain_text(proof)
    assert proof.interruptions[0].resumed_at == 10, plain_text(proof)


@pytest.mark.nightly  # with a stand-in for Keras: tests/unit/tools/test_arrive.py
@pytest.mark.timeout(400)
def test_keras_is_seen_where_tensorflow_is_imported_first(tmp_path, monkeypatch):
    """By real processes: a forked one has imported both."""
    monkeypatch.setenv("TF_CPP_MIN_LOG_LEVEL", "3")
    script = (SCRIPTS / "fit.py").read_text()
    (tmp_path / "train.py").write_text(
        f"import tensorflow as tf\n{script}\nprint(tf.__version__)\n"
    )
    command = (sys.executable, "train.py")
    proof = prove_wishes(ProofRequest(command, folder=tmp_path, kills=1, plan=(AMID,)), Watcher())
    assert (proof.verdict, proof.steps) == ("equal", 25), plain_text(proof)
    assert "25 batches" in proof.compared, plain_text(proof)


def test_a_file_of_keras_that_is_cut_short_is_named(prove_script):
    proof = prove_script("fit", plan=EACH[:1])
    assert proof.difference is not None, plain_text(proof)
    assert proof.difference.cause == "torn-checkpoint", plain_text(proof)


def test_a_run_that_was_told_of_all_is_equal(prove_script):
    proof = prove_script("run", "nothing", plan=EACH[1:])
    assert proof.verdict == "equal", plain_text(proof)
    assert proof.steps == 20
    assert any("20 boundaries" in words for words in proof.compared), plain_text(proof)


def test_what_a_run_was_not_told_of_is_named(prove_script):
    proof = prove_script("run", "optimizer")
    assert proof.difference is not None, plain_text(proof)
    assert proof.difference.cause == "state-not-named", plain_text(proof)
    assert "optimizer" in proof.difference.item, plain_text(proof)
