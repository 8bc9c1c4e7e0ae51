"""Bytes to a file: whatever lies where in memory, and whatever the file system allows."""

from __future__ import annotations

import mmap
import os
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._store.commit import direct_io
from holdfast._store.commit.chunks import CommitThreads, WorkQueue
from holdfast._store.commit.direct_io import write_file
from holdfast._store.commit.write_queue import Superseded
from tests.support import wait_until

SIZES = st.lists(st.sampled_from([0, 1, 100, 4095, 4096, 4097, 8192, 20_000]), min_size=1)


@pytest.fixture(params=["/var/tmp", "/dev/shm"], scope="module")
def place(request):
    """A folder on a disk, and one on a file system that refuses direct writes."""
    with tempfile.TemporaryDirectory(dir=request.param) as folder:
        yield Path(folder)


@pytest.fixture(scope="module", autouse=True)
def _small_pieces():
    """Many pieces of little data."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(direct_io, "_CHUNK_BYTES", 8192)
        patch.setattr(direct_io, "_BUFFER_BYTES", 8192)
        yield


@given(SIZES, st.booleans())
def test_a_file_has_the_views_one_after_another(place, sizes, is_background):
    path = place / "file"
    data = [os.urandom(size) for size in sizes]
    threads = CommitThreads(is_background=is_background)
    try:
        size = write_file(path, [*map(memoryview, data)], threads)
        assert path.read_bytes() == b"".join(data)
        assert size == sum(sizes)
    finally:
        threads.over()
        path.unlink(missing_ok=True)


def test_whole_pages_go_straight_from_memory(place):
    image = memoryview(mmap.mmap(-1, 10 * 4096))
    image[:] = os.urandom(len(image))
    path = place / "file"
    write_file(path, [image], CommitThreads(is_background=False))
    assert path.read_bytes() == bytes(image)
    path.unlink()


def test_a_file_that_is_there_stays(tmp_path):
    (tmp_path / "file").write_bytes(b"old")
    with pytest.raises(FileExistsError):
        write_file(tmp_path / "file", [memoryview(b"new")], CommitThreads(is_background=False))
    assert (tmp_path / "file").read_bytes() == b"old"


class _Counting(WorkQueue[int]):
    """Pieces that are handed back as often as they say, and fail at a negative one."""

    def __init__(self, pieces):
        super().__init__(pieces)
        self.done: list[int] = []
        self.began: list[tuple[int, int]] = []  # thread and priority, per piece
        self.may_go_on = threading.Event()

    def do(self, piece):
        number = threading.get_native_id()
        self.began.append((number, os.getpriority(os.PRIO_PROCESS, number)))
        self.may_go_on.wait(30)
        if piece < 0:
            raise ValueError(f"piece {piece}")
        self.done.append(piece)
        return piece - 1 if piece else None


@pytest.fixture
def in_background():
    threads = CommitThreads(is_background=True)
    yield threads
    threads.over()  # its timer would raise the threads of other tests


def test_what_is_handed_back_is_done_to_its_end(in_background):
    work = _Counting([3, 1, 0])
    work.may_go_on.set()
    in_background.put_to(work, 3)
    work.finish()
    assert sorted(work.done) == [0, 0, 0, 1, 1, 2, 3]


def test_the_first_error_ends_it_and_is_raised_once():
    work = _Counting([-1, *[0] * 1000])
    work.may_go_on.set()
    work.work()
    with pytest.raises(ValueError, match="piece -1"):
        work.finish()
    assert work.is_done
    assert work.has_failed
    assert work.done == []
    with pytest.raises(RuntimeError):
        work.finish()


def test_who_begins_to_wait_gets_threads_of_full_priority(in_background):
    work = _Counting([0, 0])
    in_background.put_to(work, 1)
    wait_until(lambda: work.began, 10, "the thread in the background")
    in_background.hurry()
    wait_until(lambda: len(work.began) == 2, 10, "the second thread")
    work.may_go_on.set()
    work.finish()
    assert [nice for _, nice in work.began] == [19, os.getpriority(os.PRIO_PROCESS, 0)]


@pytest.mark.skipif(sys.platform != "linux" or os.geteuid() != 0, reason="only root may raise one")
def test_a_thread_of_low_priority_is_raised_when_somebody_begins_to_wait(in_background):
    """One that holds a piece on a crowded machine would hold up the write for seconds."""
    work = _Counting([0])
    in_background.put_to(work, 1)
    ((number, nice),) = wait_until(lambda: work.began, 10, "the thread")
    assert nice == 19
    in_background.hurry()
    assert os.getpriority(os.PRIO_PROCESS, number) == os.getpriority(os.PRIO_PROCESS, 0)
    work.may_go_on.set()
    work.finish()


def test_what_is_given_up_is_not_finished_unless_all_of_it_is_done():
    work = _Counting([0] * 1000)
    threads = CommitThreads(is_background=False)
    threads.put_to(work, 1)
    threads.give_up()
    work.may_go_on.set()
    with pytest.raises(Superseded):
        work.finish()
    with pytest.raises(Superseded):
        threads.put_to(_Counting([0]), 1)
    done = _Counting([0])
    done.may_go_on.set()
    threads = CommitThreads(is_background=False)
    threads.put_to(done, 1)
    done.finish()
    threads.give_up()
    done.finish()


def test_what_is_given_up_before_a_thread_has_begun_is_over_for_the_one_that_waits():
    """No thread holds a piece then, so none would wake it."""
    work = _Counting([0])
    ended = []

    def wait() -> None:
        with pytest.raises(Superseded):
            work.finish()
        ended.append(True)

    waiting = threading.Thread(target=wait, daemon=True)
    waiting.start()
    wait_until(lambda: work._change._waiters, 10, "the wait")
    work.give_up(Superseded("a newer one"))
    waiting.join(10)
    assert ended == [True]


class _SlowToLetGo(threading.Condition):
    """A lock after which others come first."""

    def __exit__(self, *exception):
        super().__exit__(*exception)
        time.sleep(0.001)  # wide enough for another thread to pass


class _Together(WorkQueue[int]):
    """Two pieces that are done at the same moment."""

    def __init__(self):
        super().__init__([1, 2])
        self._change = _SlowToLetGo()
        self._both = threading.Barrier(2)
        self.ends = 0

    def do(self, piece):
        self._both.wait(30)

    def end(self):
        self.ends += 1


def test_of_two_that_end_together_one_is_the_last():
    for _ in range(20):
        work = _Together()
        threads = [threading.Thread(target=work.work) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert work.ends == 1


@pytest.mark.parametrize("allowed", [0, 1])
def test_where_the_system_has_no_more_threads_those_that_are_there_do_it(
    allowed, tmp_path, monkeypatch
):
    start, started = threading.Thread.start, []

    def refuse(thread):
        if len(started) >= allowed:
            raise RuntimeError("can't start new thread")
        started.append(thread)
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    data = os.urandom(30_000)
    if allowed:
        write_file(tmp_path / "file", [memoryview(data)], CommitThreads(is_background=False))
        assert (tmp_path / "file").read_bytes() == data
    else:
        with pytest.raises(RuntimeError):
            write_file(tmp_path / "file", [memoryview(data)], CommitThreads(is_background=False))
