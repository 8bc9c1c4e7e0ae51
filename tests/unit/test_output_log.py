"""The kept output: the beginning and the end, whatever the middle was."""

from __future__ import annotations

from holdfast._supervise.record import _FIRST_BYTES, _LAST_BYTES, OutputLog


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
