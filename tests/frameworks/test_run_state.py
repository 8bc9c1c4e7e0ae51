"""`run.state`, `run.update`, `run.log` and what is kept of it all."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import holdfast
from holdfast._run.saving import script_state
from holdfast._state.capture import capture
from holdfast._store.read.verify import read_manifest
from tests.frameworks.roundtrip import restore, round_trip, store


def manifests(folder):
    paths = sorted((folder / "checkpoints").glob("step-*"))
    return {found.step: found for found in map(read_manifest, paths)}


def test_values_that_cannot_change_in_place_are_handed_over_anew(tmp_path):
    with holdfast.Run(tmp_path / "run", best=9.0, name="none", beside={"a": 1}) as run:
        for step in run.steps(3):
            run.update(best=step / 2, name=f"step {step}")
        assert dict(run.state) == {"best": 1.0, "name": "step 2", "beside": {"a": 1}}
    assert restore(tmp_path / "run", best=0.0, name="", beside={}) == {
        "best": 1.0,
        "name": "step 2",
        "beside": {"a": 1},
    }


def test_the_state_can_be_read_but_not_changed_behind_the_runs_back(tmp_path):
    run = holdfast.Run(tmp_path / "run", best=9.0)
    with pytest.raises(TypeError):
        run.state["best"] = 1.0


def test_an_update_of_what_is_no_state_is_refused_with_what_there_is(tmp_path):
    run = holdfast.Run(tmp_path / "run", best=9.0, count=1)
    with pytest.raises(holdfast.HoldfastError, match="there is: best, count"):
        run.update(bets=1.0)
    assert run.state["best"] == 9.0


def test_a_tensor_may_be_handed_over_anew_with_another_shape(tmp_path):
    with holdfast.Run(tmp_path / "run", seen=None) as run:
        for step in run.steps(4):
            run.update(seen=torch.arange(step + 1))
    assert torch.equal(restore(tmp_path / "run", seen=None)["seen"], torch.arange(4))


def test_bytes_and_scalars_may_have_another_length_or_type(tmp_path):
    saved = [b"x" * 5000, np.float32(2)]
    assert round_trip(tmp_path / "run", saved, [b"y" * 3000, np.float64(1)]) == saved


def test_the_state_of_every_boundary_is_that_of_its_own_step(tmp_path):
    """Lists and tensors that are changed in place are copied, not referred to."""
    tensor, history = torch.zeros(3), []
    with holdfast.Run(tmp_path / "run", tensor=tensor, history=history) as run:
        for step in run.steps(5):
            tensor += 1
            history.append(step)
            if step == 2:
                handle = run.save()
        assert handle.wait() == 3
    steps = set(manifests(tmp_path / "run"))
    assert {3, 5} <= steps
    last = max(tmp_path.glob("run/checkpoints/step-*"))
    for file in last.iterdir():
        file.unlink()
    live = torch.zeros(3)
    state = restore(tmp_path / "run", tensor=live, history=[])
    assert live.tolist() == [3, 3, 3]
    assert state["history"] == [0, 1, 2]


def test_a_state_that_grows_beyond_its_room_is_still_saved(tmp_path):
    history: list[str] = []
    with holdfast.Run(tmp_path / "run", history=history) as run:
        for step in run.steps(6):
            history.append("x" * 10 ** (step + 1))  # from a line to a megabyte
            run.save()
    assert restore(tmp_path / "run", history=[])["history"] == history


LOSSES = [0.9, 0.5, 0.2, 0.6, 0.7, 0.4, 0.8, 0.3, 0.95, 0.99]


@pytest.mark.parametrize(("mode", "best"), [("min", 3), ("max", 10)])
def test_the_best_checkpoint_is_kept_beside_the_last(tmp_path, mode, best):
    settings = holdfast.Settings(
        keep_last=2, keep_best=f"{mode}:val_loss", checkpoint_every=1, max_overhead=1
    )
    weights = torch.zeros(2)
    for total in (6, 10):
        with holdfast.Run(tmp_path / "run", settings=settings, weights=weights) as run:
            for step in run.steps(total):
                weights.fill_(step + 1)
                run.log(val_loss=torch.tensor(LOSSES[step], dtype=torch.float64), loss=float("nan"))
    kept = manifests(tmp_path / "run")
    assert 10 in kept
    assert best in kept
    assert len(kept) <= 3
    assert kept[best].metrics == {"val_loss": LOSSES[best - 1], "loss": None}


def test_metrics_are_those_of_the_last_log_after_a_resume_too(tmp_path):
    with holdfast.Run(tmp_path / "run") as run:
        for _ in run.steps(1):
            run.log(loss=0.5, accuracy=np.float32(0.25))
    store(tmp_path / "run")
    assert manifests(tmp_path / "run")[2].metrics == {"loss": 0.5, "accuracy": 0.25}


@pytest.mark.parametrize("damage", [b"", b'{"attempt": 1', b'{"attempt": 1}'])
def test_a_lost_note_of_an_attempts_origin_hides_none_of_its_checkpoints(tmp_path, damage):
    for total in (20, 40):
        with holdfast.Run(tmp_path / "run", best=0.0) as run:
            for step in run.steps(total):
                run.update(best=float(step))
    (tmp_path / "run" / "attempts" / "0002" / "origin.json").write_bytes(damage)
    with holdfast.Run(tmp_path / "run", best=0.0) as run:
        assert (run.resumed_from, run.state["best"]) == (40, 39.0)


def test_an_update_that_cannot_be_stored_is_refused_at_once(tmp_path):
    run = holdfast.Run(tmp_path / "run", best=9.0)
    with pytest.raises(holdfast.UnstorableState, match="best"):
        run.update(best=object())
    assert run.state["best"] == 9.0


def test_a_loop_of_the_users_own_says_itself_that_it_is_finished(tmp_path):
    settings = holdfast.Settings(max_overhead=0, checkpoint_every="1h")
    values = np.zeros(3)
    with holdfast.Run(tmp_path / "run", settings=settings, values=values) as run:
        for _ in range(7):
            values += 1
            assert not run.boundary()
        run.finish()
    assert list(manifests(tmp_path / "run")) == [7]
    again = np.zeros(3)
    with holdfast.Run(tmp_path / "run", settings=settings, values=again) as run:
        assert run.step == 7
        assert again.tolist() == [7, 7, 7]


def test_an_update_inspects_a_value_only_if_its_types_or_keys_have_changed(tmp_path, monkeypatch):
    inspected = []

    def record(state):
        inspected.extend(state)
        return capture(state)

    monkeypatch.setattr(script_state, "capture", record)
    names = ("best", "net", "seen", "history", "sparse")
    with holdfast.Run(tmp_path / "run", **dict.fromkeys(names)) as run:
        for number in range(3):
            run.update(
                best=float(number),
                net={"weights": np.full(5, number), "layers": [torch.ones(number + 1)]},
                seen=torch.arange(number),
                history=(1.0, number),
                sparse=torch.ones(2),
            )
        assert inspected == list(names)
        inspected.clear()
        run.update(net={"weights": np.ones(5, np.float32), "layers": []}, best=1)
        run.update(net={"other": np.ones(5, np.float32), "layers": []}, best=2, seen=torch.ones(2))
        assert inspected == ["net", "best", "net", "seen"]


def test_a_list_that_has_got_what_cannot_be_stored_is_refused_at_its_next_update(tmp_path):
    seen = [1]
    with holdfast.Run(tmp_path / "run", seen=None, tensor=None) as run:
        run.update(seen=seen, tensor=torch.ones(2))
        for part in (object(), {"deep": [object()]}, np.array([None])):
            seen.append(part)
            with pytest.raises(holdfast.UnstorableState, match="seen"):
                run.update(seen=seen)
            seen.pop()
        seen.append(seen)
        with pytest.raises(holdfast.UnstorableState, match="seen"):
            run.update(seen=seen)
        seen.pop()
        with pytest.raises(holdfast.UnstorableState, match="tensor"):
            run.update(tensor=torch.ones(2).to_sparse())
        run.update(seen=seen)


def test_a_generator_that_is_gone_from_a_dict_of_tuples_is_told(tmp_path):
    with holdfast.Run(tmp_path / "run", of={(1, 2): np.random.default_rng(0)}) as run:
        for _ in run.steps(2):
            pass
    again = holdfast.Run(tmp_path / "run", of={})
    with pytest.raises(holdfast.StateMismatch, match="was a random generator, is a NoneType"):
        again.__enter__()
