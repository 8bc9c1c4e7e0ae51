"""The variables of a script, as `holdfast prove` reads them."""

import sys
from types import ModuleType

from holdfast._tools.prove.witness.recorder import StateReader


def test_a_script_that_multiprocessing_names_twice_is_read_once(monkeypatch):
    script = ModuleType("__main__")
    script.total = 3
    monkeypatch.setitem(sys.modules, "__main__", script)
    script.__file__ = __file__
    monkeypatch.setitem(sys.modules, "__mp_main__", script)

    reader = StateReader(None, is_leaf=lambda _: False, is_closed=lambda _: False)

    assert [path for path in reader.find([]) if path.endswith("total")] == ["total"]
