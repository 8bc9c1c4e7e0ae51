"""For which commands there is a spare, and what it may import."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from holdfast._environment import variables
from holdfast._store.folder.supervised import led_modules, tell_leader_of_modules
from holdfast._supervise.spare_process import SpareRefused, import_packages, is_installed
from holdfast._supervise.warm_spare import PythonCommand, SpareProcess, parse_command
from holdfast._tools.cli import _led_command


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("")
    return str(path)


@pytest.mark.parametrize("interpreter", ["python", "/usr/bin/python3", "python3.12", "python3.14t"])
def test_a_script_and_its_arguments(interpreter, script):
    found = parse_command([interpreter, "-u", "-X", "dev", "-Werror", script, "-m", "--lr", "1"])
    options = ("-u", "-X", "dev", "-Werror")
    assert found == PythonCommand(interpreter, options, (script, "-m", "--lr", "1"))
    assert found.running("x.py", "3") == [
        *(interpreter, *options, "x.py", "3", script, "-m", "--lr", "1")
    ]


@pytest.mark.parametrize("words", [["-m"], ["-um"], ["-u", "-m"]])
def test_a_module(words):
    found = parse_command(["python", *words, "package.train", "-x"])
    options = () if words == ["-m"] else ("-u",)
    assert found == PythonCommand("python", options, ("-m", "package.train", "-x"))


@pytest.mark.parametrize(
    ("command", "why"),
    [
        (["torchrun", "train.py"], "the command is 'torchrun'"),
        (["./train.sh"], "the command is 'train.sh'"),
        (["python", "-c", "pass"], "option -c"),
        (["python", "-i", "train.py"], "option -i"),
        (["python", "-m"], "option -m"),
        (["python"], "it runs no script"),
        (["python", "-"], "it runs no script"),
        (["python", "no/such/script.py"], "is no file"),
        (["python", "/"], "is no file"),
    ],
)
def test_other_commands_have_none_and_it_is_said_why(command, why):
    found = parse_command(command)
    assert isinstance(found, str)
    assert why in found


def test_what_is_installed(tmp_path):
    assert is_installed(json.__file__)
    assert is_installed(pytest.__file__)
    assert is_installed(variables.__file__)
    assert not is_installed(str(tmp_path / "model.py"))


@pytest.fixture
def package(tmp_path, monkeypatch):
    """An installed package, which another file can hide."""
    path = tmp_path / "site-packages" / "holdfast_test_package"
    path.mkdir(parents=True)
    (path / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(path.parent))
    monkeypatch.setattr(sys, "addaudithook", lambda _: None)
    yield path / "__init__.py"
    sys.modules.pop(path.name, None)


def _listed(path: Path, **environment: int) -> dict[str, Any]:
    name = path.parent.name
    return {"modules": [name], "files": {name: str(path)}, "environment": environment}


def test_what_is_installed_is_imported(package, monkeypatch):
    monkeypatch.setattr(variables, "changed_since_start", dict)
    import_packages(_listed(package))
    assert "holdfast_test_package" in sys.modules


@pytest.mark.parametrize("hides", [True, False])
def test_what_the_script_has_from_elsewhere_is_not_imported(package, tmp_path, hides, monkeypatch):
    """It may have changed sys.path; and its own modules may act at their import."""
    monkeypatch.setattr(variables, "changed_since_start", dict)
    own = tmp_path / "holdfast_test_package" / "__init__.py"
    own.parent.mkdir()
    own.write_text("")
    if hides:
        monkeypatch.syspath_prepend(str(tmp_path))
    import_packages(_listed(package if hides else own))
    assert "holdfast_test_package" not in sys.modules


def test_a_variable_that_the_script_sets_is_a_reason_against_it(package, monkeypatch):
    monkeypatch.setattr(variables, "changed_since_start", lambda: {"CUDA_VISIBLE_DEVICES": 1})
    import_packages(_listed(package))
    with pytest.raises(SpareRefused, match="the script sets SOME_SETTING: set that before"):
        import_packages(_listed(package, SOME_SETTING=1))


def test_a_run_lists_what_it_has_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_TEST_VARIABLE", "secret value")
    tell_leader_of_modules(tmp_path)
    text = led_modules(tmp_path).read_text()
    found = json.loads(text)
    assert "json.decoder" in found["modules"]
    assert found["files"]["json"] == json.__file__
    assert "json.decoder" not in found["files"]
    assert "os.path" in sys.modules
    assert "os.path" not in found["modules"]  # an alias
    assert isinstance(found["environment"]["HOLDFAST_TEST_VARIABLE"], int)
    assert "secret value" not in text


def test_the_variables_that_a_process_has_changed(monkeypatch):
    before = variables.changed_since_start()
    monkeypatch.setenv("HOLDFAST_TEST_VARIABLE", "1")
    monkeypatch.delenv("PATH")
    changed = variables.changed_since_start()
    assert set(changed) - set(before) == {"HOLDFAST_TEST_VARIABLE", "PATH"}
    assert changed["PATH"] is None


def test_the_option_on_the_command_line():
    assert _led_command(["run", "--spare", "--", "a"]) == (["a"], {"--spare": ""})
    words = ["run", "--spare", "--max-restarts=2", "a", "--spare"]
    assert _led_command(words) == (["a", "--spare"], {"--spare": "", "--max-restarts": "2"})
    assert _led_command(["run", "--spare=yes", "--", "a"]) == ([], {})


def test_what_is_no_text_of_python_has_no_spare_and_a_dead_one_takes_no_order(tmp_path):
    """A zip file runs as a script too, but a spare could not run it."""
    script, modules = tmp_path / "train.pyz", tmp_path / "modules"
    script.write_bytes(b"PK\x03\x04\0\0")
    modules.write_text(json.dumps({"modules": [], "files": {}, "environment": {}}))
    command = PythonCommand(sys.executable, (), (str(script),))
    spare = SpareProcess(command, os.environ, {}, set(), modules)
    os.waitpid(spare.pid, 0)
    answer = spare.receive()
    assert answer is not None
    assert "null bytes" in answer["refused"]
    record: Any = None
    assert not spare.run_script(record)
    spare.close()


def test_after_an_update_of_a_package_it_begins_anew(package, tmp_path):
    script, modules, out = (tmp_path / name for name in ("train.py", "modules", "out"))
    package.write_text("word = 'old'")
    act = f"import pathlib, sys, {package.parent.name} as package"
    script.write_text(f"{act}\npathlib.Path(sys.argv[1]).write_text(package.word)")
    modules.write_text(json.dumps(_listed(package)))
    command = PythonCommand(sys.executable, ("-B",), (str(script), str(out)))
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, sys.path))}
    record: Any = None
    spare = SpareProcess(command, given, {}, set(), modules)
    while (answer := spare.receive()) is None:
        time.sleep(0.01)
    assert "ready" in answer
    package.write_text("word = 'updated'")
    assert spare.run_script(record)
    os.waitpid(spare.pid, 0)
    spare.close()
    assert out.read_text() == "updated"
