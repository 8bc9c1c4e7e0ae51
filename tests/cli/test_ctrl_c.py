"""Ctrl-C ends a command, also where Python would lose it."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from holdfast._tools import cli


class Object:
    pass


def test_an_interrupt_that_a_weakref_callback_swallows_comes_again(monkeypatch):
    def interrupt(_reference):
        raise KeyboardInterrupt

    def command():
        watched = Object()
        reference = weakref.ref(watched, interrupt)
        del watched
        gc.collect()
        assert reference() is None
        deadline = time.monotonic() + 10
        while time.monotonic() < deadline:
            pass
        return 0

    monkeypatch.setattr(cli, "_run", command)
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 130
