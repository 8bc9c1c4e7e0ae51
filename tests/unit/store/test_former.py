"""What a checkpoint shares with the one before it: by the checksums, and never by chance."""

from __future__ import annotations

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from holdfast._errors import DamagedCheckpoint
from holdfast._run.saving.saver import write_direct
from holdfast._state.capture import capture
from holdfast._store.commit import dedup as former_module
from holdfast._store.commit.write import Policy
from holdfast._store.folder.layout import MANIFEST, RunLayout, rank_file
from holdfast._store.format import manifest
from holdfast._store.format.image import (
    TensorSpec,
    decode_head,
    decode_scalars,
    encode_scalars,
    parse_header,
    plan_image,
    read_extents,
)
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._store.read.verify import find_damage

HEAD = {"metrics": {}, "world": 1, "common": ""}
LINKED = "rank-00000.step-000000000001-a0001.safetensors"


@pytest.fixture
def policy(tmp_path):
    layout = RunLayout(tmp_path / "run")
    layout.attempt(1).mkdir(parents=True)
    layout.checkpoints.mkdir()
    return Policy(layout, "a" * 32, 1, {1: None}, keep_last=3, best=None, version="0")


class Training:
    """A state that is saved step by step."""

    def __init__(self, policy):
        self.policy = policy
        random = np.random.default_rng(1)
        self.state = {f"w{number}": random.random(5000) for number in range(8)}
        self.step = 0

    def save(self, *changed: str):
        self.step += 1
        for name in changed:
            self.state[name] += 1
        write_direct(self.policy, capture({"state": self.state}), dict(HEAD), self.step, "save")
        return self.policy.layout.checkpoint(self.step, 1)

    def check(self, folder):
        """It loads, to the bit."""
        loaded = read_checkpoint(folder)
        for index, spec in enumerate(loaded.plan.specs):
            if spec.name.startswith("state."):
                expected = self.state[spec.name.removeprefix("state.")].tobytes()
                assert bytes(loaded.data(index)) == expected


@pytest.fixture
def training(policy):
    return Training(policy)


def file_of(folder):
    return manifest.parse((folder / MANIFEST).read_bytes(), "").files[0]


def test_only_what_has_changed_is_written_again(training):
    first, second = training.save(), training.save("w3")
    file = file_of(second)
    own = {part.name for part in file.parts if not part.file}
    assert own == {"header", "state.w3", "holdfast.scalars"}
    assert [each.name for each in file.linked] == [LINKED]
    assert (second / LINKED).samefile(first / rank_file(0))
    assert file.size_bytes < 0.3 * file.image_bytes
    training.check(second)


def test_a_chain_links_the_file_that_has_the_bytes_and_not_one_after_the_other(training):
    training.save()
    for _ in range(3):
        folder = training.save("w0")
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            [MANIFEST, rank_file(0), LINKED]
        )
        training.check(folder)


def test_any_reader_of_safetensors_opens_what_was_written(training):
    training.save()
    folder = training.save("w3", "w5")
    with safe_open(folder / rank_file(0), "numpy") as opened:
        names = {"holdfast.header", "state.w3", "state.w5", "holdfast.scalars"}
        assert set(opened.keys()) == names
        assert (opened.get_tensor("state.w5") == training.state["w5"]).all()


def test_where_most_has_changed_all_of_it_is_written(training):
    training.save()
    folder = training.save(*(f"w{number}" for number in range(6)))
    assert file_of(folder).linked == ()
    training.check(folder)


def test_a_file_of_which_little_is_needed_is_not_linked_any_more(training):
    training.save()
    training.save("w0", "w1")
    folder = training.save("w2", "w3", "w4")  # three of eight are still in the first one
    assert LINKED not in {each.name for each in file_of(folder).linked}
    training.check(folder)


def test_what_is_removed_takes_nothing_from_what_is_kept(training):
    for _ in range(6):
        last = training.save("w1")
    folders = [path for _, _, path in training.policy.layout.checkpoint_folders()]
    assert len(folders) == 3
    assert not training.policy.layout.checkpoint(1, 1).exists()
    for folder in folders:
        read_checkpoint(folder)
    training.check(last)


def test_without_hard_links_all_of_it_is_written(training, monkeypatch):
    def refuse(*_args):
        raise PermissionError("not here")

    training.save()
    monkeypatch.setattr(os, "link", refuse)
    folder = training.save("w1")
    assert file_of(folder).linked == ()
    assert sorted(path.name for path in folder.iterdir()) == [MANIFEST, rank_file(0)]
    training.check(folder)


def test_a_file_that_is_another_one_by_now_is_not_linked(training, monkeypatch):
    first = training.save()
    found = former_module.PreviousCheckpoint.read(first, 0)
    shutil.copy(first / rank_file(0), first / "copy")
    (first / "copy").replace(first / rank_file(0))
    monkeypatch.setattr("holdfast._run.saving.saver.newest_former", lambda *_: found)
    folder = training.save("w1")
    assert file_of(folder).linked == ()
    training.check(folder)


def test_damage_in_a_shared_file_is_found_in_each_that_has_it(training):
    folders = [training.save("w1") for _ in range(3)]
    part = next(part for part in file_of(folders[2]).parts if part.name == "state.w6")
    with (folders[0] / rank_file(0)).open("r+b") as file:
        file.seek(part.offset)
        file.write(b"\xff" * 8)
    for folder in folders:
        with pytest.raises(DamagedCheckpoint, match=r"state\.w6"):
            read_checkpoint(folder)


def test_damage_where_nobody_needs_it_any_more_does_no_harm(training):
    first, folder = training.save(), training.save("w1")
    part = next(part for part in file_of(first).parts if part.name == "state.w1")
    with (first / rank_file(0)).open("r+b") as file:
        file.seek(part.offset)
        file.write(b"\xff" * 8)
    training.check(folder)
    with pytest.raises(DamagedCheckpoint, match=r"state\.w1"):
        read_checkpoint(first)


def test_where_a_little_of_everything_changes_it_is_soon_left_be(training, monkeypatch):
    asked = []
    share = former_module.PreviousCheckpoint.share_with
    monkeypatch.setattr(
        former_module.PreviousCheckpoint,
        "share_with",
        lambda *args: asked.append(1) or share(*args),
    )
    formers = []

    def keep(*_args):
        return formers[-1] if formers else None

    monkeypatch.setattr("holdfast._run.saving.saver.newest_former", keep)
    written = former_module.PreviousCheckpoint.written
    monkeypatch.setattr(
        former_module.PreviousCheckpoint,
        "written",
        lambda *args: formers.append(written(*args)) or formers[-1],
    )
    for _ in range(5):
        training.step += 1
        for value in training.state.values():
            value[0] += 1
        write_direct(
            training.policy, capture({"state": training.state}), dict(HEAD), training.step, "save"
        )
    assert len(asked) == 1


@given(st.sets(st.text(min_size=1, max_size=8)), st.integers(0, 3))
def test_extents_are_read_from_a_header_as_they_were_planned(names, scalars):
    names -= {"holdfast.scalars", "__metadata__"}
    specs = [
        TensorSpec(name, "numpy", "uint8", "U8", (size,), None, 1, size)
        for size, name in enumerate(sorted(names))
    ]
    plan = plan_image(specs, scalars)
    assert read_extents(plan.header) == parse_header(plan.header).extents() == plan.extents()


JSON = st.recursive(
    st.none() | st.integers() | st.text(),
    lambda inner: (
        st.lists(inner) | st.dictionaries(st.sampled_from(["tree", "a", ',"tree":']), inner)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.sampled_from(["metrics", "tree", "x", ',"tree":']), JSON), JSON)
def test_the_head_is_all_but_the_tree(head, tree):
    data = encode_scalars({**head, "tree": tree}).ljust(3000)
    expected = decode_scalars(data)
    del expected["tree"]
    found = decode_head(data)
    if "tree" not in head:  # it is always the last
        assert found == expected
    assert json.dumps(found)


def test_tensors_that_are_empty_are_told_apart(training):
    for number, dtype in enumerate((np.int8, np.float64, np.int16, np.float32)):
        training.state[f"empty{number}"] = np.zeros(0, dtype)
    for changed in ("w0", "w1"):
        folder = training.save(changed)
        assert find_damage(folder) == []
        training.check(folder)
    assert file_of(folder).linked


def test_what_has_the_same_bytes_in_another_shape_is_shared_and_keeps_its_shape(training):
    training.save()
    training.state["w0"] = training.state["w0"].reshape(50, 100)
    training.state["w1"] = training.state["w1"].view(np.int64)
    w2, w3 = training.state["w2"], training.state["w3"]
    training.state["w2"], training.state["w3"] = w3, w2
    folder = training.save()
    training.check(folder)
    specs = {spec.name: (spec.dtype, spec.shape) for spec in read_checkpoint(folder).plan.specs}
    assert specs["state.w0"] == ("<f8", (50, 100))
    assert specs["state.w1"] == ("<i8", (5000,))
    shared = {part.name for part in file_of(folder).parts if part.file}
    assert shared == {f"state.w{number}" for number in (0, 1, 4, 5, 6, 7)}


def test_what_changes_back_is_right_at_each_step(training):
    first = training.save()
    before = training.state["w0"].copy()
    second = training.save("w0")
    assert find_damage(second) == []
    training.state["w0"] = before
    third = training.save()
    training.check(third)
    shutil.rmtree(first)
    shutil.rmtree(second)
    training.check(third)


def test_a_manifest_is_read_without_its_parts(training):
    data = (training.save() / MANIFEST).read_bytes()
    whole, head = manifest.parse(data, ""), manifest.parse_head(data, "")
    assert head.files == ()
    assert (head.step, head.metrics, head.reason) == (whole.step, whole.metrics, whole.reason)
    with pytest.raises(DamagedCheckpoint):
        manifest.parse_head(data.replace(b"save", b"sawe"), "")
