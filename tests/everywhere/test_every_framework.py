"""One list of cases for every framework: what is true of one is true of all of them.

The prove engine runs each training twice undisturbed, makes the same interruptions in it, and
compares all state at every boundary. What is left on disk is then damaged, and asked to go into
a net of another shape.
"""

from __future__ import annotations

import re
import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from holdfast._store.folder.layout import RunLayout, rank_file
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._tools.prove.proof import Planned, ProofRequest, Watcher
from holdfast._tools.prove.prove import prove
from holdfast._tools.prove.report import plain_text
from holdfast._tools.prove.results import compare_runs
from tests.everywhere.lives import FRAMEWORK_OF, make_project, of_layers
from tests.everywhere.trainings import task
from tests.support import journal_events

PER_EPOCH = task.SAMPLES // task.BATCH
TOTAL = task.EPOCHS * PER_EPOCH


@dataclass(frozen=True)
class Case:
    """An interruption, and the expected result."""

    signal: str
    moment: str
    at_epoch: float
    status: int
    loses_nothing: bool = True


# In the order in which they come: each in the middle of an epoch, unless it is an evaluation.
CASES = (
    Case("INT", "boundary", 0.2, 130),
    Case("KILL", "step", 0.4, -9, loses_nothing=False),
    Case("TERM", "step", 0.6, 143),
    Case("INT", "phase", 0.9, 130),
    Case("USR1", "boundary", 1.3, 75),
    Case("KILL", "commit", 1.5, -9, loses_nothing=False),
    Case("QUIT", "boundary", 1.7, -3, loses_nothing=False),
    Case("USR2", "step", 2.4, 75),
)


# Over 5 s: twelve lives of one training.
@pytest.mark.timeout(300)  # twelve lives, each of which compiles its step
@pytest.mark.parametrize("training", of_layers(FRAMEWORK_OF))
def test_a_training_bears_every_case(training, frameworks, tmp_path, subtests):
    project = make_project(tmp_path / "project", training)
    plan = tuple(
        Planned(number, case.signal, case.moment, case.at_epoch / task.EPOCHS, delay=0.5)
        for number, case in enumerate(CASES, start=1)
    )
    wishes = ProofRequest(
        ("python", "train.py"), kills=len(plan), plan=plan, folder=project, keep=tmp_path / "kept"
    )
    proof = prove(wishes, Watcher(), frameworks.starter(FRAMEWORK_OF[training]))
    # All state, metrics, batches and generators, at every boundary of every life.
    assert proof.verdict == "equal", plain_text(proof)
    courses = Path(str(proof.kept))
    undisturbed, interrupted = (
        courses / name / "work" / task.FOLDER for name in ("reference", "interrupted-1")
    )
    assert [i.number for i in proof.interruptions] == [each.number for each in plan]
    resumed_at = [e["step"] for e in journal_events(interrupted, "start")[1:]]
    for case, met, went_on in zip(CASES, proof.interruptions, resumed_at, strict=True):
        with subtests.test(interrupted=f"{case.signal}, {case.moment}"):
            assert met.status == case.status, plain_text(proof)
            if case.moment == "phase":
                assert went_on == PER_EPOCH
            elif case.loses_nothing:
                assert went_on >= case.at_epoch * PER_EPOCH, plain_text(proof)
                assert went_on % PER_EPOCH, plain_text(proof)  # in the middle of an epoch
    with subtests.test("keep_last and keep_best"):
        for folder in (undisturbed, interrupted):
            # By name: a stop at the last step leaves two of that step, one from each attempt.
            made = journal_events(folder, "checkpoint")
            there = sorted(each.name for each in (folder / "checkpoints").glob("step-*"))
            best = next(each for each in made if each["name"] == there[0])
            assert (best["step"], made[-1]["step"]) == (PER_EPOCH, TOTAL)
            # On a slow disk only two are made: the best is one of the last two then.
            assert there == sorted({best["name"], *(each["name"] for each in made[-2:])})
        assert stored_first(undisturbed) == stored_first(interrupted)
    shutil.copytree(undisturbed, project / task.FOLDER)
    framework = FRAMEWORK_OF[training]
    with subtests.test("damaged checkpoint"):
        newest, before = flip_a_bit(project / task.FOLDER)
        life = frameworks.live(framework, project, tmp_path / "damaged.txt", "train.py")
        assert life.returncode == 0, life.output
        assert journal_events(project / task.FOLDER, "start")[-1]["step"] == before, life.output
        assert (RunLayout(project / task.FOLDER).set_aside / newest).is_dir()
        assert newest in life.output
        assert compare_runs(undisturbed, project / task.FOLDER) is None
    with subtests.test("wrong shape"):
        before_it = all_files(project / task.FOLDER / "checkpoints")
        life = frameworks.live(framework, project, tmp_path / "wide.txt", "train.py", "--wide")
        assert life.returncode == 1, life.output
        assert "the checkpoint does not fit the state that Run was given:" in life.output
        was_and_is = rf"changed: \w+.*\b{task.HIDDEN}\b.*→.*\b{task.HIDDEN + 1}\b"
        assert re.search(was_and_is, life.output), life.output
        assert "Traceback" not in life.output
        assert all_files(project / task.FOLDER / "checkpoints") == before_it


# What is left out of the state: how the text of a training changes, and what the proof then names.
# Those of torch, NumPy and TensorFlow are in tests/prove.
FORGOTTEN = {
    "jax_loop": (
        {
            '"opt_state": jax.jit(optimizer.init)(params), ': "",
            'opt_state, key = (run.state[name] for name in ("params", "opt_state", "key"))': (
                'key = (run.state[name] for name in ("params", "key"))\n'
                "    opt_state = jax.jit(optimizer.init)(params)"
            ),
            "opt_state=opt_state, key=key)": "key=key)",
        },
        "state params",
    ),
}


@pytest.mark.parametrize("training", of_layers(FORGOTTEN))
def test_what_is_left_out_of_the_state_is_found(training, frameworks, tmp_path):
    project = make_project(tmp_path / "project", training)
    changes, item = FORGOTTEN[training]
    text = (project / "train.py").read_text()
    for there, here in changes.items():
        assert there in text
        text = text.replace(there, here)
    (project / "train.py").write_text(text)
    plan = (Planned(1, "TERM", "boundary", 0.4, delay=0.5),)
    wishes = ProofRequest(("python", "train.py"), kills=1, plan=plan, folder=project)
    proof = prove(wishes, Watcher(), frameworks.starter(FRAMEWORK_OF[training]))
    assert proof.difference is not None, plain_text(proof)
    assert proof.difference.item.startswith(item), plain_text(proof)


def stored_first(folder: Path) -> dict[str, bytes]:
    """The state in the oldest checkpoint that is kept: the best one, here."""
    _, _, path = RunLayout(folder).checkpoint_folders()[0]
    loaded = read_checkpoint(path, 0)
    return {
        spec.name: bytes(loaded.data(number))
        for number, spec in enumerate(loaded.plan.specs)
        if spec.size_bytes and not spec.name.startswith("holdfast.")
    }


def flip_a_bit(folder: Path) -> tuple[str, int]:
    """Damage the newest checkpoint; its name, and the step of the one before."""
    (before, _, _), (_, _, newest) = RunLayout(folder).checkpoint_folders()[-2:]
    path = newest / rank_file(0)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1  # among the tensors, which are behind the header
    path.write_bytes(data)
    return newest.name, before


def all_files(folder: Path) -> dict[str, bytes]:
    return {str(p): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
