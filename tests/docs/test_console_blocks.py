"""Every command of the documentation is one that exists; those that only look are run."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import click
import numpy as np
import pytest
from click.testing import CliRunner

import holdfast
from holdfast._tools.cli.group import cli
from tests.docs.pages import ROOT, Block, all_blocks, words_of

# What looks, and neither waits for anybody nor changes what is outside of the folder.
_LOOKS = {"status", "ls", "verify", "why", "export", "clean", "completion", "plan", "report"}
_LOOKS |= {"metrics"}
# With these it waits, or wants what is not here: a script, a live run, TensorFlow, a job.
_NOT_WITH = {"--watch", "--yes", "--open", "--to", "--proof", "--job", "--pid", "--attempt"}
_PLACES = {"runs/", "runs", "runs/first", "runs/a", "train.log"}

COMMANDS = [
    pytest.param(block, command, id=f"{block.name} {command[:60]}")
    for block in all_blocks()
    for command in block.commands
]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as the pages have it: two runs that are complete, and a log."""
    folder = tmp_path_factory.mktemp("pages")
    with holdfast.Run(folder / "runs" / "first", model=np.zeros(4)) as run:
        for step in run.steps(3):
            run.log(loss=1.0 / (step + 1))
    shutil.copytree(folder / "runs" / "first", folder / "runs" / "a")
    (folder / "train.log").write_text("Traceback (most recent call last):\nValueError: no\n")
    return folder


@pytest.mark.parametrize(("block", "command"), COMMANDS)
def test_a_command_is_right(
    block: Block, command: str, place: Path, monkeypatch: pytest.MonkeyPatch
):
    checked = subprocess.run(["bash", "-n", "-c", command], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    words = _plain_words(command)
    if "holdfast" in words:
        arguments = words[words.index("holdfast") + 1 :]
        _parse(arguments)
        if _only_looks(words, arguments):
            monkeypatch.chdir(place)
            result = CliRunner().invoke(cli, arguments)
            assert result.exit_code in (0, 1), result.output
            assert result.exception is None or isinstance(result.exception, SystemExit)
    elif words[0] == "make":
        assert f"\n{words[1]}:" in (ROOT / "Makefile").read_text()
    elif words[:2] == ["pip", "install"]:
        _check_extras(command)


def test_torchrun_knows_the_options_that_the_pages_give_it():
    run = pytest.importorskip("torch.distributed.run", reason="pip install 'holdfast[torch]'")
    parser = run.get_args_parser()
    commands = [words_of(command) for block in all_blocks() for command in block.commands]
    given = [words[words.index("torchrun") + 1 :] for words in commands if "torchrun" in words]
    assert given
    for words in given:
        options = [word for word in words[: _script_at(words)] if word.startswith("-")]
        known, unknown = parser.parse_known_args([*options, "train.py"])
        assert known is not None
        assert not unknown, f"torchrun {' '.join(words)}: it does not know {unknown}"


def _script_at(words: list[str]) -> int:
    return next((n for n, word in enumerate(words) if word.endswith(".py")), len(words))


def _plain_words(command: str) -> list[str]:
    """The words of a command, also of one that is inside of another's."""
    inner = re.search(r"\$\((holdfast [^)]*)\)", command)
    return words_of(inner[1] if inner else command.split("|")[0].split(" < ")[0])


def _parse(arguments: list[str]) -> None:
    """The command exists, and knows every option that it is given."""
    if not arguments or arguments[0].startswith("-") or arguments[0] == "COMMAND":
        return
    command = cli.get_command(None, arguments[0])
    assert command is not None, f"holdfast has no command {arguments[0]}"
    rest = arguments[1:]
    if arguments[0] == "submit":  # all that it does not know is for sbatch
        rest = [word for word in rest if word in ("--print", "--to", "--lead")]
        assert all(any(word in p.opts for p in command.params) for word in rest)
        return
    context = click.Context(command, info_name=arguments[0])
    given, _, _ = command.make_parser(context).parse_args(list(rest))
    for option in (each for each in command.params if isinstance(each, click.Option)):
        if option.name in given and not isinstance(option.type, click.Path):
            option.type_cast_value(context, given[option.name])


def _only_looks(words: list[str], arguments: list[str]) -> bool:
    """Whether it can be run here and now."""
    if words[0] != "holdfast" or not arguments or arguments[0] not in _LOOKS:
        return False
    if any(word.split("=")[0] in _NOT_WITH or "…" in word for word in arguments):
        return False
    places = [word for word in arguments[1:] if not word.startswith("-") and "/" in word]
    return all(word in _PLACES for word in places) and "JOBID" not in arguments


def _check_extras(command: str) -> None:
    known = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    for extras in re.findall(r"\[([a-z,]+)\]", command):
        for extra in extras.split(","):
            assert extra in known["optional-dependencies"], f"no extra {extra}"
