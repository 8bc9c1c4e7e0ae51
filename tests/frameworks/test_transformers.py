"""A Trainer of Transformers goes on to the same bits, and its own ways of resuming yield."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import holdfast
from tests.fork_server import ForkServer
from tests.support import environment

pytest.importorskip("accelerate", reason="pip install accelerate")
transformers = pytest.importorskip("transformers", reason="pip install transformers")

from hypothesis import given
from hypothesis import strategies as st

from holdfast.transformers.training import LogHistory, without_times

ROOT = Path(__file__).parents[2]
CASES = [
    pytest.param(["accumulated", "evaluated"]),
    pytest.param(
        ["plain", "of-unknown-length", "max-steps", "epoch-stopped", "theirs"],
        marks=pytest.mark.nightly,
    ),
]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("cases", CASES, ids=lambda cases: cases[0])
def test_a_training_goes_on_to_the_same_bits(
    cases: list[str], fork_server: ForkServer, tmp_path: Path
) -> None:
    done = fork_server.start(
        *(Path(__file__).with_name("transformers_lives.py"), tmp_path, *cases),
        output=tmp_path / "output",
        env=environment(TOKENIZERS_PARALLELISM="false"),
        framework="transformers",
    )
    assert done.wait(580) == 0, done.output
    for case in cases:
        assert f"{case}: nothing\n" in done.output
        assert f"{case} again: nothing\n" in done.output


# -- who yields, and what is refused: in one process, which trains next to nothing ---------------


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a process of its own has found: Transformers takes seconds to import."""
    folder = tmp_path_factory.mktemp("yielding")
    done = subprocess.run(
        [sys.executable, "-m", "tests.frameworks.transformers_yielding", str(folder)],
        cwd=ROOT,
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return {**found, "said": done.stderr}


@pytest.mark.parametrize(
    ("what", "sentence"),
    [
        ("two", "two holdfast.transformers.Callback in one Trainer"),
        ("late", "was added to a Trainer that was made already"),
        ("taken", "Callback(model=…): this is kept by itself"),
        ("search", "all trials would be one run"),
        ("older", "pip install 'transformers>=5.4'"),
        ("counts", "has no _loss_of_another_time"),
        ("deepspeed", "DeepSpeed holds model and optimizer in its own way"),
    ],
)
def test_what_cannot_be_exact_is_refused(script, what, sentence):
    kind, text = script[what]
    assert kind == "HoldfastError"
    assert sentence in text
    assert "\n" in text  # and what to do


def test_the_trainers_own_handler_of_sigterm_yields(script):
    assert "enable_jit_checkpoint: the Trainer's own handler" in script["said"]
    assert script["handler_after"] == str(signal.SIG_DFL)
    assert "JITCheckpointCallback" not in script["callbacks"]


def test_which_of_two_states_counts_is_said_and_no_step_is_logged_twice(script):
    (begun, steps_begun), (resumed, steps_resumed) = script["resumed"]
    assert "the run begins with what the Trainer has loaded from" in begun
    assert "the run goes on with what its own folder has" in resumed
    assert "checkpoint-2" in resumed
    assert steps_begun == [1, 2, 3, 4]
    assert steps_resumed == [1, 2, 3, 4, 5]


def test_the_trainer_is_its_own_again_afterwards(script):
    assert script["left"] == ["_inner_training_loop"]
    assert script["is_skip_put_back"]
    assert script["run_afterwards"] is None


def test_a_callback_that_fails_leaves_a_trainer_that_can_train(script):
    left, steps = script["failed"]
    assert left == ["_inner_training_loop"]
    assert steps == 12


def test_a_run_that_begins_in_their_checkpoint_trains_what_the_trainer_would(script):
    assert script["from_theirs"] == {"4": True, "6": True}


def test_a_rule_ends_the_training_well(script):
    steps, over, again = script["rule"]
    assert steps < 12
    assert over == 1
    assert again == steps


# -- the log ---------------------------------------------------------------------------------------

NUMBERS = st.one_of(st.integers(-(2**60), 2**60), st.floats(), st.booleans(), st.text(max_size=5))
ENTRIES = st.lists(st.dictionaries(st.text(max_size=8), NUMBERS, max_size=4), max_size=30)


@given(ENTRIES, st.integers(0, 30))
def test_a_history_comes_back_whatever_was_logged(entries, at):
    history = LogHistory()
    history.follow(entries[:at])
    history.follow(entries)
    other = LogHistory()
    other.load(history.state())
    assert same(other.entries(), [without_times(entry) for entry in entries])


def test_a_history_that_grows_seldom_changes_its_place():
    history, sizes, entries = LogHistory(), [], []
    for step in range(2000):
        entries.append({"loss": step / 7, "eval_runtime": 3.1, "step": step})
        history.follow(entries)
        sizes.append(len(history.state()["text"]))
    assert len(set(sizes)) <= 5
    assert history.entries()[-1] == {"loss": 1999 / 7, "step": 1999}


def test_a_metric_may_be_an_array():
    history = LogHistory()
    history.follow([{"eval_confusion": np.eye(2), "eval_loss": np.float32(0.5)}])
    assert history.entries() == [{"eval_confusion": [[1.0, 0.0], [0.0, 1.0]], "eval_loss": 0.5}]


def test_a_history_that_became_shorter_is_written_anew():
    history = LogHistory()
    history.follow([{"loss": 1.0}, {"loss": 2.0}])
    history.follow([{"loss": 3.0}])
    assert history.entries() == [{"loss": 3.0}]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float) and math.isnan(one):
        return math.isnan(other)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return type(one) is type(other) and one == other


def test_the_module_is_found_by_its_name():
    assert holdfast.transformers.__all__ == ["Callback"]
