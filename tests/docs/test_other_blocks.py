"""Batch scripts pass the lint or are wrong on purpose, diffs lead where they say, YAML is YAML."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from holdfast._tools.cli.group import cli
from tests.docs.pages import ROOT, Block, all_blocks, pages, words_of
from tests.docs.pages import blocks_of as blocks

LANGUAGES = {"", "bash", "console", "diff", "json", "python", "yaml"}


def _blocks(language: str) -> list[Block]:
    return [block for block in all_blocks() if block.language == language]


def test_every_block_is_of_a_kind_that_is_checked():
    unknown = {block.name: block.language for block in all_blocks()}
    assert {name: kind for name, kind in unknown.items() if kind not in LANGUAGES} == {}


@pytest.mark.parametrize("block", _blocks("bash"), ids=lambda block: block.name)
def test_a_script_is_one_that_bash_reads_and_lint_passes(block: Block, tmp_path: Path):
    checked = subprocess.run(["bash", "-n"], input=block.text, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stderr
    if "#SBATCH" not in block.text:
        return
    (tmp_path / "logs").mkdir()
    script = tmp_path / "job.sbatch"
    # A page may show the lines that matter; sbatch wants the first one as well.
    head = "" if block.text.startswith("#!") else "#!/bin/bash\n#SBATCH --time=8:00:00\n"
    script.write_text(head + block.text)
    result = CliRunner().invoke(cli, ["lint", "--json", str(script)])
    found = json.loads(result.output)
    wrong = [each for each in found if each["severity"] in ("error", "warning")]
    if "lint" in block.marks:
        assert wrong, "it is said to be wrong, and is not"
    else:
        assert not wrong, result.output


def test_yaml_and_json_can_be_read():
    for block in _blocks("yaml") + _blocks("json"):
        assert yaml.safe_load(block.text), block.name


@pytest.mark.parametrize("block", _blocks("diff"), ids=lambda block: block.name)
def test_a_diff_leads_from_the_one_script_to_the_other(block: Block):
    old, new = (ROOT / name for name in block.marks["diff"].split())
    lines = _stripped(old)
    at = 0
    for hunk in block.text.split("@@\n"):
        changes = [(line[:1], line[1:].strip()) for line in hunk.splitlines()]
        before = [text for sign, text in changes if sign in " -"]
        after = [text for sign, text in changes if sign in " +"]
        at = _find(lines, before, at)
        lines[at : at + len(before)] = after
    # The first line says what the script is, and what the new lines enclose is indented.
    assert lines[1:] == _stripped(new)[1:]


def _stripped(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines()]


def _find(lines: list[str], wanted: list[str], start: int) -> int:
    for at in range(start, len(lines) - len(wanted) + 1):
        if lines[at : at + len(wanted)] == wanted:
            return at
    raise AssertionError(f"the script has no {wanted}")


def _exact() -> list[tuple[Block, dict[str, str]]]:
    """Blocks with their commands' true output, each with the files that its page has made."""
    found = []
    for page in pages():
        files: dict[str, str] = {}
        for block in blocks(page):
            if "file" in block.marks:
                files[block.marks["file"]] = block.text
            if "output" in block.marks:
                found.append((block, dict(files)))
    return found


@pytest.mark.parametrize(
    ("block", "files"), _exact(), ids=lambda value: getattr(value, "name", "files")
)
def test_what_a_command_prints_is_what_the_page_shows(
    block: Block, files: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    shown, printed = "", ""
    for command in block.commands:
        printed += CliRunner().invoke(cli, words_of(command)[1:]).output
    is_command = False
    for line in block.text.splitlines():
        if line.startswith("$ ") or is_command:
            is_command = line.endswith("\\")
        else:
            shown += f"{line}\n"
    told = printed.split()
    if block.marks["output"] == "begins":
        told = told[: len(shown.split())]
    assert shown.split() == told


def test_readme_shows_what_a_command_prints():
    assert any(block.page == "README.md" for block, _ in _exact())
