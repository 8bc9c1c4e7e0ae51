"""The kept output: the beginning and the end, whatever the middle was."""

from __future__ import annotations

import errno
import json
import resource

from holdfast._supervise import record
from holdfast._supervise.record import _FIRST_BYTES, _LAST_BYTES, OutputLog, SupervisionRecord


def test_little_is_kept_as_it_is(tmp_path):
    log = OutputLog(tmp_path / "log")
    log.add(b"one\n")
    log.add(b"two\n")
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"  # at once, not at the end
    log.close()
    assert (tmp_path / "log").read_bytes() == b"one\ntwo\n"


def test_of_much_the_beginning_and_the_end_are_kept(tmp_path):
    log = OutputLog(tmp_path / "log")
    lines = [b"%07d\n" % number for number in range(2_000_000)]
    for start in range(0, len(lines), 10_000):
        log.add(b"".join(lines[start : start + 10_000]))
    log.close()
    kept = (tmp_path / "log").read_bytes()
    whole = b"".join(lines)
    assert kept[:_FIRST_BYTES] == whole[:_FIRST_BYTES]
    assert kept[-_LAST_BYTES:] == whole[-_LAST_BYTES:]
    assert b"bytes are left out here]" in kept[_FIRST_BYTES : _FIRST_BYTES + 100]
    assert len(kept) < _FIRST_BYTES + _LAST_BYTES + 100


def test_a_log_that_cannot_be_written_is_given_up(tmp_path):
    log = OutputLog(tmp_path / "log")
    log.close()
    log.add(b"more")
    log.close()


def test_on_a_full_disk_the_last_words_take_the_place_of_earlier_ones(tmp_path):
    log = OutputLog(tmp_path / "log")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, before[1]))
    try:
        for number in range(100):
            log.add(b"%03d" % number * 30 + b"\n")
        log.add(b"OSError: No space left on device\n")
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    kept = (tmp_path / "log").read_bytes()
    assert len(kept) == 5000
    assert kept.endswith(b"099\nOSError: No space left on device\n")


def test_on_a_full_disk_the_end_is_noted_where_the_beginning_was(tmp_path, monkeypatch):
    def fail(*_args):
        raise OSError(errno.ENOSPC, "No space left on device")

    book = SupervisionRecord(tmp_path, 1, ["true"])
    book.write(child_pid=4711)
    monkeypatch.setattr(record.supervised, "write_led", fail)
    book.write_end(-9, 100, {"memory": [{"t": 1.0}] * 1000, "processes": []})
    noted = json.loads((tmp_path / "life-0001" / "led.json").read_text())
    assert (noted["child_pid"], noted["status"], noted["memory"]) == (4711, -9, [])
