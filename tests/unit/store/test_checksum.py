"""Work spread over threads is done once each, and an error is not lost."""

from __future__ import annotations

import threading
from collections import Counter

import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.format import checksum

sizes = st.lists(
    st.one_of(st.integers(0, 100), st.sampled_from([1 << 16, 8 << 20, 64 << 20])), max_size=600
)


@given(sizes)
def test_every_piece_of_work_is_done_exactly_once(wanted):
    done = Counter()
    lock = threading.Lock()

    def work(index):
        with lock:
            done[index] += 1

    checksum.for_each(work, wanted)
    assert done == Counter(range(len(wanted)))


@given(sizes.filter(len), st.data())
def test_the_first_error_is_raised_where_it_was_asked_for(wanted, data):
    bad = data.draw(st.integers(0, len(wanted) - 1))

    def work(index):
        if index == bad:
            raise LookupError(index)

    with pytest.raises(LookupError, match=str(bad)):
        checksum.for_each(work, wanted)


def test_large_work_is_spread_over_threads(monkeypatch):
    monkeypatch.setattr(checksum.os, "cpu_count", lambda: 4)
    meeting = threading.Barrier(4, timeout=10)
    checksum.for_each(lambda _: meeting.wait(), [64 << 20] * 4)  # breaks if one does it all


def test_small_work_starts_no_thread():
    seen = set()
    checksum.for_each(lambda _: seen.add(threading.current_thread()), [10] * 1000)
    assert seen == {threading.current_thread()}


@given(st.lists(st.binary(max_size=100), max_size=20))
def test_digests_are_those_of_each_view_in_order(pieces):
    found = checksum.digest_all([memoryview(piece) for piece in pieces])
    assert found == [xxhash.xxh3_128_digest(piece) for piece in pieces]
    assert all(len(digest) == 16 for digest in found)
