"""What may happen in the life of a run beside the straight way through its loop."""

from __future__ import annotations

import os
import shutil
import signal
import threading
from types import SimpleNamespace

import numpy as np
import pytest

import holdfast
from holdfast._run.driver import session_of
from holdfast._state.fit import name_all
from holdfast._store.format import manifest
from tests.support import arena_files, checkpoint_steps, journal_events, keepers, wait_until

NO_SNAPSHOTS = holdfast.Settings(max_overhead=0, checkpoint_every="1h")


class Counter:
    """An object with a state of its own."""

    def __init__(self) -> None:
        self.count = np.zeros(4)

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state) -> None:
        self.count = state["count"]


def train(folder, total, settings=NO_SNAPSHOTS):
    counter = Counter()
    with holdfast.Run(folder, settings=settings, counter=counter) as run:
        for _ in run.steps(total):
            counter.count += 1
        return run.resumed_from, counter.count[0]


def test_a_state_that_never_keeps_its_layout_is_still_checkpointed(tmp_path):
    settings = holdfast.Settings(checkpoint_every=10)
    large, growing = np.zeros(2_000_000), {"log": b""}
    folder = tmp_path / "run"
    with holdfast.Run(folder, settings=settings, large=large, growing=growing) as run:
        session = session_of(run)
        for step in run.steps(100_000):
            if session.saver.newest is not None:  # it stays in memory, and grows old
                growing["log"] = bytes(2000 + step)
            threading.Event().wait(0.005)
            if step % 50 == 49 and len(journal_events(folder, "checkpoint")) > 5:
                run.finish()
                break
    made = [e["step"] for e in journal_events(folder, "checkpoint")]
    assert max(made) == step  # the keeper may record its first one after those of the trainer
    again = {"log": b""}
    with holdfast.Run(folder, settings=settings, large=large, growing=again) as run:
        assert run.step == step
        assert again == growing


def test_a_ctrl_c_in_the_last_save_loses_nothing_of_a_finished_training(tmp_path, monkeypatch):
    from holdfast._run.saving.saver import Saver

    real = Saver.save_and_wait

    def interrupted(self, step, reason, **options):
        if reason == "finished":
            os.kill(os.getpid(), signal.SIGINT)
        return real(self, step, reason, **options)

    monkeypatch.setattr(Saver, "save_and_wait", interrupted)
    assert train(tmp_path / "run", 30) == (None, 30)
    assert checkpoint_steps(tmp_path / "run") == [30]


def test_checkpoints_that_were_out_of_sight_once_are_not_hidden_for_ever(tmp_path):
    folder = tmp_path / "run"
    train(folder, 50)
    shutil.move(folder / "checkpoints", tmp_path / "away")
    with holdfast.Run(folder, settings=NO_SNAPSHOTS, counter=Counter()) as run:
        assert run.resumed_from is None
    shutil.rmtree(folder / "checkpoints")
    shutil.move(tmp_path / "away", folder / "checkpoints")
    assert train(folder, 60) == (50, 60)


def test_lost_notes_of_all_attempts_hide_no_checkpoint(tmp_path):
    folder = tmp_path / "run"
    train(folder, 50)
    train(folder, 70)
    shutil.rmtree(folder / "attempts")
    assert train(folder, 80) == (70, 80)


def test_another_histories_checkpoints_are_not_overlooked_in_silence(tmp_path):
    folder = tmp_path / "run"
    train(folder, 50)
    (only,) = (folder / "checkpoints").iterdir()
    # As if attempt 2 had come from step 40 of attempt 1, and step 40 were gone.
    (folder / "attempts" / "0002").mkdir()
    (folder / "attempts" / "0002" / "origin.json").write_text('{"attempt": 1, "step": 40}')
    with pytest.raises(holdfast.NoGoodCheckpoint, match="own line"):
        train(folder, 60)
    assert only.is_dir()


def test_a_checkpoint_of_another_version_is_left_where_it_is(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    train(folder, 20)
    monkeypatch.setattr(manifest, "FORMAT", 99)
    for _ in range(2):
        with pytest.raises(holdfast.UnreadableCheckpoint, match="another version"):
            train(folder, 30)
    monkeypatch.undo()
    assert train(folder, 30) == (20, 30)


def test_whoever_catches_stopped_and_goes_on_is_left_alone(tmp_path):
    settings = holdfast.Settings(grace_seconds=0.3)
    caught = None
    try:
        with holdfast.Run(tmp_path / "run", settings=settings, counter=Counter()) as run:
            for _ in run.steps(100):
                run.stop("enough")
    except holdfast.Stopped as stopped:
        caught = stopped  # and kept, which must not matter
    # The thread that bounds the leaving sees that nobody leaves, and dismisses the keeper.
    wait_until(lambda: not keepers(tmp_path / "run"), 20, "the keeper's goodbye")
    assert (caught.status, caught.reason) == (130, "enough")
    assert arena_files(tmp_path / "run") == []


def test_waiting_for_a_checkpoint_outlives_the_keepers_death(tmp_path):
    counter = Counter()
    with holdfast.Run(tmp_path / "run", settings=NO_SNAPSHOTS, counter=counter) as run:
        for step in run.steps(3):
            counter.count += 1
            if step == 1:
                os.kill(session_of(run).keeper.keeper_pid, signal.SIGSTOP)
                handle = run.save()
            if step == 2:
                os.kill(session_of(run).keeper.keeper_pid, signal.SIGKILL)
                assert handle.wait(30) == 2
    assert 2 in checkpoint_steps(tmp_path / "run")


class Forgetful(Counter):
    """Gives two tensors and takes one of them back, changed."""

    def __init__(self) -> None:
        super().__init__()
        self.other = np.ones(4)
        self.forgets = False

    def state_dict(self):
        return {"count": self.count, **({} if self.forgets else {"other": self.other})}

    def load_state_dict(self, state) -> None:
        self.count, self.forgets = state["count"] + 7, True


def test_a_tensor_that_is_lost_in_loading_is_named_as_is_one_that_is_spoilt(tmp_path):
    with holdfast.Run(tmp_path / "run", thing=Forgetful()) as run:
        for _ in run.steps(2):
            pass
    with (
        pytest.raises(holdfast.RestoreDiffers, match=r"thing\.other \(lost\)") as raised,
        holdfast.Run(tmp_path / "run", thing=Forgetful()),
    ):
        pass
    assert "thing.count (other values)" in str(raised.value)


def test_a_stop_is_answered_even_if_the_loop_is_left_before_a_boundary(tmp_path):
    with (
        pytest.raises(holdfast.Stopped) as stopped,
        holdfast.Run(tmp_path / "run", counter=Counter()) as run,
    ):
        for step in run.steps(100):
            if step == 5:
                run.stop("loss is nan")
                break
    assert (stopped.value.status, stopped.value.reason) == (130, "loss is nan")


def test_a_stop_counts_in_a_loop_after_the_first_one(tmp_path):
    with (
        pytest.raises(holdfast.Stopped),
        holdfast.Run(tmp_path / "run", counter=Counter()) as run,
    ):
        for _ in run.steps(3):
            pass
        run.stop("now")
        while not run.boundary():
            assert run.step < 100
    assert checkpoint_steps(tmp_path / "run")[-1] == 4


def test_a_run_may_be_opened_in_the_main_thread_and_trained_in_another(tmp_path):
    counter, errors = Counter(), []
    with holdfast.Run(tmp_path / "run", counter=counter) as run:

        def work():
            try:
                for _ in run.steps(50):
                    counter.count += 1
                    threading.Event().wait(0.005)
            except BaseException as error:  # noqa: BLE001  asserted on below
                errors.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    assert errors == []
    assert checkpoint_steps(tmp_path / "run")[-1] == 50


def test_a_forked_child_that_leaves_the_loop_leaves_the_run_alone(tmp_path):
    counter = Counter()
    with holdfast.Run(tmp_path / "run", counter=counter) as run:
        for step in run.steps(20):
            if step == 5:
                child = os.fork()
                if child == 0:
                    steps = session_of(run).boundary.words[2]
                    session_of(run).loops.leave()
                    os._exit(0 if session_of(run).boundary.words[2] == steps == 1 else 1)
                assert os.waitpid(child, 0)[1] == 0
            counter.count += 1
        assert session_of(run).boundary.words[2] == 0
    assert checkpoint_steps(tmp_path / "run")[-1] == 20


def test_a_run_inside_another_gives_the_signals_back_to_it(tmp_path):
    from holdfast._run.signals import handlers

    with holdfast.Run(tmp_path / "outer", counter=Counter()):
        outer = handlers._installed
        with holdfast.Run(tmp_path / "inner", counter=Counter()):
            assert handlers._installed is not outer
        assert handlers._installed is outer
    assert handlers._installed is None


def test_a_reason_may_be_anything_of_any_length(tmp_path):
    with (
        pytest.raises(holdfast.Stopped),
        holdfast.Run(tmp_path / "run", counter=Counter()) as run,
    ):
        for _ in run.steps(10):
            run.stop(ValueError("x" * 100_000))
    assert len(journal_events(tmp_path / "run", "stop")[0]["reason"]) <= 600


def test_without_a_keeper_the_run_still_hears_requests_and_saves(tmp_path, monkeypatch, capfd):
    from holdfast._run.saving import keeper_client

    monkeypatch.setattr(keeper_client.sys, "platform", "darwin")
    counter = Counter()
    with (
        pytest.raises(holdfast.Stopped) as stopped,
        holdfast.Run(tmp_path / "run", counter=counter) as run,
    ):
        assert not session_of(run).keeper.has_keeper
        for step in run.steps(100_000):
            counter.count += 1
            threading.Event().wait(0.002)
            if step == 20:
                holdfast.stop(tmp_path / "run", "please")
    assert "please" in stopped.value.reason
    assert checkpoint_steps(tmp_path / "run") == [run.step]
    assert "need Linux" in capfd.readouterr().err
    monkeypatch.undo()
    again = Counter()
    with holdfast.Run(tmp_path / "run", counter=again) as resumed:
        assert again.count[0] == resumed.step == run.step


def test_a_deleted_newest_checkpoint_is_told_in_one_line(folder, capfd):
    settings = holdfast.Settings(keep_last=5)
    for total in (4, 6):
        train(folder, total, settings)
    newest = sorted(folder.glob("checkpoints/step-*"))[-1]
    shutil.rmtree(newest)
    capfd.readouterr()
    resumed_from, _ = train(folder, 8, settings)
    assert resumed_from is not None
    assert resumed_from < 6
    told = [line for line in capfd.readouterr().err.splitlines() if "was deleted" in line]
    assert told == [
        f"holdfast: {folder}: the checkpoint of step 6 was deleted; the run goes on at step "
        f"{resumed_from}, the newest left."
    ]
    train(folder, 10, settings)  # and once only
    assert "was deleted" not in capfd.readouterr().err


def test_fewer_epochs_than_were_made_are_told_as_they_are(folder, capfd):
    for epochs in (3, 2):
        with holdfast.Run(folder, settings=NO_SNAPSHOTS, counter=Counter()) as run:
            for _ in run.epochs(epochs):
                for _ in run.batches(range(2)):
                    pass
    assert "finished after 3 epochs (2 were asked for), at step 6" in capfd.readouterr().err


def test_what_does_not_fit_is_told_one_a_line_by_module(folder):
    def train_layers(sizes):
        state = {name: {"weight": np.zeros(n), "bias": np.zeros(n)} for name, n in sizes.items()}
        with holdfast.Run(folder, settings=NO_SNAPSHOTS, **state) as run:
            for _ in run.steps(2):
                pass

    train_layers({"head": 3, "body": 2})
    with pytest.raises(holdfast.StateMismatch) as error:
        train_layers({"head": 4, "body": 2, "tail": 1})
    lines = str(error.value).splitlines()
    assert lines[1:4] == [
        "  not in the checkpoint: tail",
        "  changed: head.weight (<f8 [3] → <f8 [4])",
        "  changed: head.bias (<f8 [3] → <f8 [4])",
    ]
    assert "To keep what fits: holdfast export" in lines[-1]


def test_very_many_that_do_not_fit_are_counted_by_module():
    names = [f"model.{layer}.{n}" for layer in ("a", "b") for n in range(30)]
    assert name_all("changed", names) == ["  changed: model.a (30)", "  changed: model.b (30)"]


def test_a_fit_of_keras_without_its_callback_is_told_of_it(folder, capfd):
    # A stand-in: what counts is where its class comes from, and what its optimizer has counted.
    def fit(self):
        self.optimizer.iterations += 3

    model = type("Model", (Counter,), {"fit": fit, "__module__": "keras.src.models.model"})()
    model.optimizer = SimpleNamespace(iterations=0)
    for trains in (False, True):
        with holdfast.Run(folder / str(trains), settings=NO_SNAPSHOTS, model=model):
            if trains:
                model.fit()
        told = "callbacks=[holdfast.keras.Callback(run)]" in capfd.readouterr().err
        assert told is trains
