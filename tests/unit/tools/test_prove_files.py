"""Files of results are compared by what is in them, and any damage is told in words."""

from __future__ import annotations

import argparse
import json
import os
import struct
import zipfile

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._tools.prove.results import compare_files

torch = pytest.importorskip("torch", reason="pip install 'holdfast[torch]'")


@pytest.fixture
def pair(tmp_path):
    """Two places for a file of the same name, in folders of their own."""

    def make(name):
        folders = tmp_path / "expected", tmp_path / "found"
        for folder in folders:
            folder.mkdir(exist_ok=True)
        return tuple(folder / name for folder in folders)

    return make


def compare(paths):
    return compare_files(paths[0].name, *paths)


def checkpoint():
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    optimizer = torch.optim.Adam(net.parameters())
    net(torch.randn(4, 3)).sum().backward()
    optimizer.step()
    return {"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 3}


# -- torch ------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["a.pt", "a.pth", "a.bin", "a.ckpt", "last"])
@pytest.mark.parametrize("is_zip", [True, False])
def test_equal_checkpoints_are_equal_whatever_their_bytes(pair, name, is_zip):
    expected, found = pair(name)
    for path, folder in ((expected, "one"), (found, "two")):
        other = path.with_name(folder)  # the name is in the zip
        torch.save(checkpoint(), other, _use_new_zipfile_serialization=is_zip)
        other.rename(path)
    assert compare((expected, found)) is None


def test_the_first_tensor_that_differs_is_named(pair):
    expected, found = pair("last.pt")
    torch.save(checkpoint(), expected)
    state = checkpoint()
    state["optimizer"]["state"][0]["exp_avg"][1, 2] += 0.5
    state["epoch"] = 4
    torch.save(state, found)
    difference = compare((expected, found))
    assert difference.file == "last.pt"
    assert difference.item == "optimizer.state[0].exp_avg"
    assert difference.expected.endswith("at [1, 2]")
    assert difference.apart.startswith("up to 0.5, ")
    assert compare((found, expected)).item == "optimizer.state[0].exp_avg"


def test_the_first_array_of_numpy_that_differs_is_named(pair):
    values = {"weights": np.ones((2, 3)), "steps": np.arange(4), "names": np.array([{}, None])}
    for name, item in (("a.npz", "steps"), ("a.npy", "the whole file")):
        expected, found = pair(name)
        for path, step in ((expected, 3), (found, 7)):
            values["steps"][-1] = step
            if name == "a.npz":
                np.savez_compressed(path, **values)
            else:
                np.save(path, values["steps"])
        difference = compare((expected, found))
        words = (difference.item, difference.expected, difference.found, difference.apart)
        assert words == (item, "3 at [3]", "7 at [3]", "1 of 4 elements")


def test_files_of_numpy_are_equal_however_they_were_packed(pair):
    paths = pair("a.npz")
    np.savez(paths[0], weights=np.ones(1000))
    np.savez_compressed(paths[1], weights=np.ones(1000))
    assert compare(paths) is None


def test_objects_in_a_file_of_numpy_are_compared_as_bytes_and_not_loaded(pair):
    paths = pair("a.npz")
    for path, last in zip(paths, "ab", strict=True):
        np.savez(path, weights=np.ones(3), names=np.array([{}, last]))
    assert compare(paths).item == "names (compared as bytes: it holds objects)"
    paths = pair("a.npy")
    for path, last in zip(paths, "ab", strict=True):
        np.save(path, np.array([{}, last]))
    assert compare(paths).item == "the whole file"


@pytest.mark.parametrize(
    ("change", "item", "apart"),
    [
        (lambda s: s.update(epoch=5), "epoch", "by 2"),
        (lambda s: s.update(epoch=3.0), "epoch", "another kind of value"),
        (lambda s: s.pop("epoch"), "epoch", "it is missing"),
        (lambda s: s.update(more=1), "more", "it should not be there"),
        (
            lambda s: s["model"].update({"0.weight": torch.zeros(3, 3)}),
            "model.0.weight",
            "another shape",
        ),
        (
            lambda s: s["model"].update({"0.bias": torch.zeros(2, dtype=torch.float64)}),
            "model.0.bias",
            "another type of number",
        ),
        (
            lambda s: s["optimizer"]["param_groups"][0].update(lr=0.002),
            "optimizer.param_groups[0].lr",
            "up to 0.001, 100% of its norm",
        ),
        (
            lambda s: s["optimizer"]["param_groups"][0]["params"].append(9),
            "optimizer.param_groups[0].params",
            "another length",
        ),
        (
            lambda s: s["model"]["1.num_batches_tracked"].add_(1),
            "model.1.num_batches_tracked",
            "1 of 1 elements",
        ),
    ],
)
def test_every_kind_of_difference_has_its_place(pair, change, item, apart):
    expected, found = pair("last.pt")
    torch.save(checkpoint(), expected)
    state = checkpoint()
    change(state)
    torch.save(state, found)
    difference = compare((expected, found))
    assert (difference.item, difference.apart) == (item, apart)


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.complex64, torch.bool]
)
def test_every_dtype_is_compared(pair, dtype):
    expected, found = pair("last.pt")
    values = torch.ones(2, 3)
    torch.save(values.to(dtype), expected)
    values[1, 0] = 0
    torch.save(values.to(dtype), found)
    difference = compare((expected, found))
    assert difference.expected.endswith(" at [1, 0]")
    assert difference.apart in ("up to 1, 41% of its norm", "1 of 6 elements")


def test_settings_of_argparse_and_numbers_of_numpy_are_read(pair):
    expected, found = pair("last.pt")
    state = {"args": argparse.Namespace(lr=0.1, out=expected), "loss": np.float64(2.0)}
    torch.save({**state, "rng": np.arange(3)}, expected)
    torch.save({**state, "rng": np.arange(1, 4)}, found)
    difference = compare((expected, found))
    assert (difference.item, difference.apart) == ("rng", "3 of 3 elements")


class Mine:
    """What torch loads only by running code."""

    def __init__(self, value):
        self.value = value

    def __setstate__(self, state):
        raise AssertionError("the file's code was run")


def test_objects_are_compared_as_bytes_and_never_loaded(pair):
    expected, found = pair("last.pt")
    for path, weight in ((expected, 1.0), (found, 2.0)):
        torch.save({"mine": Mine(5), "w": torch.full((3,), weight)}, path)
    difference = compare((expected, found))
    assert difference.item == "data/0 (compared as bytes: it holds objects)"
    torch.save({"mine": Mine(5), "w": torch.full((3,), 1.0)}, found.with_name("other"))
    found.with_name("other").rename(found)
    assert compare((expected, found)) is None


def test_a_list_that_contains_itself_is_no_end(pair):
    expected, found = pair("last.pt")
    for path, number in ((expected, 1), (found, 2)):
        ring = [number]
        ring.append(ring)
        torch.save(ring, path)
    assert compare((expected, found)) is not None


# -- damage -----------------------------------------------------------------------


def written(path):
    """A file of results of the format that its name says."""
    if path.suffix == ".pt":
        torch.save(checkpoint(), path)
    else:
        write_safetensors(path, {"w": np.arange(6, dtype=np.float32)})
    return path.read_bytes()


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@pytest.mark.parametrize("part", [0.0, 0.3, 0.6, 0.99])
def test_a_truncated_file_cannot_be_read(pair, suffix, part):
    expected, found = pair(f"last{suffix}")
    data = written(expected)
    found.write_bytes(data[: int(len(data) * part)])
    difference = compare((expected, found))
    assert (difference.item, difference.found) == ("the whole file", "cannot be read")
    assert difference.apart
    assert compare((found, expected)) is not None


@pytest.mark.parametrize("suffix", [".pt", ".safetensors"])
@settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=15
)
@given(st.data())
def test_a_flipped_byte_never_ends_in_an_error(pair, suffix, data):
    expected, found = pair(f"last{suffix}")
    whole = bytearray(written(expected))
    whole[data.draw(st.integers(0, len(whole) - 1))] ^= data.draw(st.integers(1, 255))
    found.write_bytes(whole)
    compare((expected, found))
    compare((found, expected))


def test_a_file_that_is_missing_is_a_difference(pair):
    expected, found = pair("last.pt")
    assert compare((expected, found)) is None
    expected.write_bytes(b"x")
    assert compare((expected, found)).apart == "it is missing"
    assert compare((found, expected)).apart == "it should not be there"


def test_a_pipe_is_not_waited_for(pair):
    expected, found = pair("last.pt")
    expected.write_bytes(b"x")
    os.mkfifo(found)
    assert compare((expected, found)).found == "no file"


def test_a_folder_in_place_of_a_file_is_a_difference(pair):
    expected, found = pair("last.pt")
    expected.write_bytes(b"x")
    found.mkdir()
    assert compare((expected, found)).found == "cannot be read"


def test_folders_are_compared_file_by_file(pair):
    expected, found = pair("model")
    for folder in (expected, found):
        (folder / "sub").mkdir(parents=True)
        (folder / "sub" / "a.txt").write_text("a")
    assert compare((expected, found)) is None
    (found / "sub" / "a.txt").write_text("b")
    assert compare((expected, found)).file == "model/sub/a.txt"


# -- other formats ----------------------------------------------------------------


def write_safetensors(path, tensors, metadata=None, dtypes=None):
    header, data = {}, b""
    if metadata is not None:
        header["__metadata__"] = metadata
    for name, array in tensors.items():
        start, data = len(data), data + array.tobytes()
        kind = (dtypes or {}).get(name, "F32")
        header[name] = {"dtype": kind, "shape": array.shape, "data_offsets": [start, len(data)]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_safetensors_are_compared_by_name(pair):
    expected, found = pair("m.safetensors")
    tensors = {"a": np.ones(2, np.float32), "b": np.zeros((2, 2), np.float32)}
    write_safetensors(expected, tensors, {"format": "pt"})
    write_safetensors(found, dict(reversed(tensors.items())), {"format": "pt"})
    assert compare((expected, found)) is None
    write_safetensors(found, {**tensors, "b": np.eye(2, dtype=np.float32)}, {"format": "pt"})
    difference = compare((expected, found))
    assert (difference.item, difference.expected) == ("b", "0.0 at [0, 0]")
    assert difference.apart == "up to 1, and all of it should be zero"


def test_safetensors_of_bfloat16_have_a_distance_and_those_of_float8_a_count(pair):
    expected, found = pair("m.safetensors")
    words = np.array([0x3F80, 0x4000, 0x4040], np.uint16)  # 1, 2, 3
    write_safetensors(expected, {"a": words}, dtypes={"a": "BF16"})
    words[2] = 0x4080
    write_safetensors(found, {"a": words}, dtypes={"a": "BF16"})
    difference = compare((expected, found))
    assert (difference.expected, difference.found) == ("3.0 at [2]", "4.0 at [2]")
    assert difference.apart == "up to 1, 27% of its norm"
    write_safetensors(expected, {"a": np.array([1, 2], np.uint8)}, dtypes={"a": "F8_E4M3"})
    write_safetensors(found, {"a": np.array([1, 3], np.uint8)}, dtypes={"a": "F8_E4M3"})
    assert compare((expected, found)).expected == "0x02 at [1]"


def test_what_torch_writes_as_safetensors_is_read(pair):
    save_file = pytest.importorskip("safetensors.torch", reason="pip install safetensors").save_file
    expected, found = pair("m.safetensors")
    save_file({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.ones(1)}, expected)
    save_file({"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.zeros(1)}, found)
    assert compare((expected, found)).item == "b"


def test_an_exported_checkpoint_may_come_from_another_attempt(pair):
    expected, found = pair("m.safetensors")
    for path, attempt in ((expected, 1), (found, 4)):
        about = json.dumps({"step": 5, "attempt": attempt})
        write_safetensors(path, {"a": np.ones(2, np.float32)}, {"holdfast": about})
    assert compare((expected, found)) is None


def test_text_is_told_by_its_line(pair):
    expected, found = pair("log.csv")
    expected.write_text("step,loss\n1,0.5\n2,0.25\n")
    found.write_text("step,loss\n1,0.5\n2,0.26\n")
    difference = compare((expected, found))
    assert (difference.item, difference.expected, difference.found) == (
        "line 3",
        "2,0.25",
        "2,0.26",
    )
    found.write_text("step,loss\n1,0.5\n")
    assert compare((expected, found)).found == "the end of the file"


def test_other_files_are_compared_as_bytes(pair):
    expected, found = pair("m.dat")
    expected.write_bytes(b"\0\1\2\3")
    found.write_bytes(b"\0\1\2\4\5")
    difference = compare((expected, found))
    assert (difference.expected, difference.found) == ("4 bytes", "5 bytes")
    assert difference.apart == "from byte 3 on"


def test_a_zip_that_torch_did_not_write_is_bytes(pair):
    expected, found = pair("m.zip")
    for path, text in ((expected, "a"), (found, "b")):
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr("x", text)
    assert compare((expected, found)).item == "the whole file"


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_two_files_of_bytes_are_equal_if_their_bytes_are(pair, one, other):
    expected, found = pair("m.dat")
    expected.write_bytes(one)
    found.write_bytes(other)
    assert (compare((expected, found)) is None) == (one == other)


# -- trees and distances ------------------------------------------------------------
