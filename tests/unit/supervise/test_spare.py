"""For which commands there is a spare, and which statements of a script it may run."""

from __future__ import annotations

import ast
import json
import sys
from pathlib import Path

import pytest

from holdfast._environment import variables
from holdfast._store.folder.supervised import led_modules, tell_leader_of_modules
from holdfast._supervise.spare_program import count_leading, is_installed, later_import, signature
from holdfast._supervise.warm_spare import PythonCommand, parse_command
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


@pytest.mark.parametrize(
    "statement",
    [
        "'a docstring'",
        "import os, torch.nn as nn",
        "from . import model",
        "SEED: int",
        "NAME = OTHER = 3",
        "os.environ['OMP_NUM_THREADS'] = '1'",
        "os.environ.setdefault('A', str(Path(__file__).parent))",
        "sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))",
        "sys.path.append(str(Path(__file__).resolve().parent / 'src'))",
        "warnings.filterwarnings('ignore', category=FutureWarning)",
        "try:\n  import apex\nexcept ImportError:\n  apex = None",
        "if TYPE_CHECKING:\n  open('x', 'w')",
    ],
)
def test_what_a_spare_runs(statement):
    is_run = statement != "SEED: int"  # an annotation evaluates whatever it names
    assert count_leading(ast.parse(statement).body) == is_run


@pytest.mark.parametrize(
    "statement",
    [
        "print('x')",
        "torch.manual_seed(0)",
        "args = parser.parse_args()",
        "RUN = time.time()",
        "os.environ['A'] = subprocess.check_output('x')",
        "os.environ[name()] = 'x'",
        "sys.path.insert(0, download())",
        "os.chdir('x')",
        "def main(): pass",
        "try:\n  import apex\nexcept ImportError:\n  install('apex')",
        "if __name__ == '__main__':\n  import x",
    ],
)
def test_what_it_does_not_run(statement):
    assert count_leading(ast.parse(statement).body) == 0


def test_an_import_below_other_statements_is_found():
    body = ast.parse("import os\nos.chdir('x')\nimport torch\n").body
    assert count_leading(body) == 1
    later = later_import(body)
    assert later is not None
    assert later.lineno == 3
    assert later_import(ast.parse("import os\nos.chdir('x')\n").body) is None


def test_what_is_installed(tmp_path):
    assert is_installed(json.__file__)
    assert is_installed(pytest.__file__)
    assert is_installed(variables.__file__)
    assert not is_installed(str(tmp_path / "model.py"))


def test_a_signature_changes_with_the_file(tmp_path):
    path = tmp_path / "x.py"
    assert signature(str(path)) is None
    path.write_text("a = 1")
    before = signature(str(path))
    assert signature(str(path)) == before is not None
    path.write_text("a = 12")
    assert signature(str(path)) != before


def test_a_run_lists_what_it_has_imported(tmp_path, monkeypatch):
    monkeypatch.setenv("HOLDFAST_TEST_VARIABLE", "secret value")
    tell_leader_of_modules(tmp_path)
    text = led_modules(tmp_path).read_text()
    found = json.loads(text)
    assert "json.decoder" in found["modules"]
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
