"""A framework is watched once it is imported, however often it was looked for before."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import pytest

from holdfast._tools.prove.witness.bootstrap import _AfterImport


def test_a_module_that_was_only_looked_for_is_watched_when_it_is_imported(tmp_path, monkeypatch):
    (tmp_path / "stand_in_keras.py").write_text("is_done = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    watched = []
    finder = _AfterImport("stand_in_keras", lambda: watched.append("stand_in_keras" in sys.modules))
    monkeypatch.setattr(sys, "meta_path", [finder, *sys.meta_path])
    for _ in range(2):  # as tensorflow does while it is imported
        assert importlib.util.find_spec("stand_in_keras") is not None
    assert watched == []
    assert importlib.import_module("stand_in_keras").is_done
    assert watched == [True]
    assert finder not in sys.meta_path
    del sys.modules["stand_in_keras"]


def test_a_module_that_is_not_there_is_not_found(monkeypatch):
    monkeypatch.setattr(sys, "meta_path", [_AfterImport("no_such_thing", list), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("no_such_thing")
