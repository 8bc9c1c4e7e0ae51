"""Forged files with right checksums: a result or a sentence, never a traceback.

`python -m tests.fuzz_files --minutes 60` does the same for as long as it is told to.
"""

from __future__ import annotations

import pytest

from holdfast._resume.damage import find_damage
from holdfast._resume.joined import read_checkpoint
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
