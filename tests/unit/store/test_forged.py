"""Forged files with right checksums: a result or a sentence, never a traceback.

`python -m tests.fuzz_files --minutes 60` does the same for as long as it is told to.
"""

from __future__ import annotations

import json

import pytest

from holdfast._errors import DamagedCheckpoint, HoldfastError
from holdfast._store.format import manifest
from holdfast._store.read.damage import find_damage
from holdfast._store.read.merge_ranks import read_checkpoint
from tests import fuzz_files


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
