"""Forged files with right checksums: a result or a sentence, never a traceback.

`python -m tests.fuzz_files --minutes 60` does the same for as long as it is told to.
"""

from __future__ import annotations

import json
import sys

import pytest

from holdfast._errors import DamagedCheckpoint, HoldfastError
from holdfast._report.status.parts import keepers_of
from holdfast._store.format import manifest
from holdfast._store.read.merge_ranks import read_checkpoint
from holdfast._store.read.verify import find_damage
from tests import fuzz_files
from tests.cli.command import holdfast


@pytest.fixture(scope="module")
def shop():
    with fuzz_files.workshop() as made:
        yield made


def test_what_the_forged_ones_differ_from_is_whole(shop):
    shop.begin()
    assert find_damage(shop.checkpoint) == []
    shop.restore(read_checkpoint(shop.checkpoint))


@pytest.mark.parametrize("name", fuzz_files.TARGETS)
def test_no_forged_file_ends_in_a_traceback(shop, name):
    fuzz_files.examples(shop, name, 12, 1)


FORGED_VALUES = {
    "a part of a pytree that looks like a shard": {"$node": {"$shard": None}},
    "a set that holds a dict": {"$set": [{".": None}]},
    "a dict with a dict as its key": {"$dict": [[{".": None}, 1]]},
    "a device that there is none of": {"$torch.device": "nonsense"},
    "a type without a name": {"$torch.dtype": None},
    "a generator with a state that no generator has": {
        "$generator": {
            "bit_generator": "PCG64",
            "state": {"state": -1, "inc": 1},
            "has_uint32": 0,
            "uinteger": 0,
        }
    },
}


@pytest.mark.parametrize("value", FORGED_VALUES.values(), ids=FORGED_VALUES)
def test_a_forged_value_is_refused_in_a_sentence(shop, value):
    shop.begin()
    head = {"attempt": 1, "world": 1, "step": 8, "tree": {**shop.captured.tree}}
    head["tree"]["state"] = {**head["tree"]["state"], "rng": value}
    shop.forge_image(scalars=fuzz_files.dumps(head))
    with pytest.raises(HoldfastError):
        shop.restore(read_checkpoint(shop.checkpoint))


@pytest.mark.parametrize("dtype", ["", "F64", "nonsense"])
def test_a_header_with_the_type_of_another_tensor_is_damage(shop, dtype):
    shop.begin()
    (file,) = manifest.read(shop.checkpoint).files
    header = (shop.checkpoint / file.name).read_bytes()[: file.parts[0].size_bytes]
    table = json.loads(header[8:])
    table["model.bias"]["dtype"] = dtype
    shop.forge_image(header=header[:8] + fuzz_files.dumps(table))
    with pytest.raises(DamagedCheckpoint, match="does not fit its items"):
        read_checkpoint(shop.checkpoint)


FORGED_STARTS = {
    "a NUL in the command": {"start": {"command": [sys.executable, "\0"]}},
    "half a character in the command": {"start": {"command": [sys.executable, "\ud800"]}},
    "a number for the command": {"start": {"command": 7}},
    "a number for what was left out of it": {"start": {"left_out": 7}},
    "a number for the secrets": {"left_out": 7},
    "a NUL in a variable": {"environment": {"TZ": "\0"}},
    "a variable that no process can have": {"environment": {"A=B": "c", "": "d"}},
    "a NUL in the folder": {"folder": "\0"},
    "half a character in the folder": {"folder": "\ud800"},
    "a NUL in the job": {"job": "\0"},
    "a NUL in the script's path": {"batch": {"path": "\0", "script": None}},
    "a number for the options": {"batch": {"options": 7, "folder": "/"}},
}


@pytest.mark.parametrize("change", FORGED_STARTS.values(), ids=FORGED_STARTS)
def test_a_forged_start_is_resumed_or_refused_in_a_sentence(shop, change):
    layout = shop.begin()
    record = {**shop.start, **change}
    if "start" in change:
        record["start"] = {**shop.start["start"], **change["start"]}
    layout.start(1).write_bytes(fuzz_files.dumps(record))
    with fuzz_files.not_starting():
        done = holdfast("resume", shop.run, cwd=shop.place)
    assert str(shop.run) in done.stderr


@pytest.mark.parametrize("pid", [[], "7", True])
def test_a_rank_whose_record_names_no_process_is_passed_over(shop, pid):
    layout = shop.begin()
    layout.ranks(1).mkdir()
    process = json.loads(layout.lease(1).read_text())["process"]
    layout.rank(1, 1).write_bytes(fuzz_files.dumps({"keeper": {**process, "pid": pid}}))
    assert keepers_of(layout, 1) == []
    assert holdfast("clean", shop.run).returncode == 0
