"""The reference has every command, option, setting, variable and error, and no other."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import click
import pytest

import holdfast
from holdfast import _errors
from holdfast._report import openmetrics
from holdfast._tools.cli.group import cli
from tests.docs.pages import DOCS, ROOT

TEXT = (DOCS / "reference.md").read_text(encoding="utf-8")
COMMANDS = {name: cli.get_command(None, name) for name in cli.list_commands(None)}


def _section(title: str) -> str:
    """A part of the page: from its heading to the next one of the same rank."""
    rank = "#" * (len(title) - len(title.lstrip("#")))
    body = TEXT.partition(f"\n{title}\n")[2]
    assert body, f"no {title}"
    return re.split(rf"^{rank} ", body, maxsplit=1, flags=re.MULTILINE)[0]


def test_the_reference_has_the_commands_that_there_are():
    named = re.findall(r"^### `holdfast (\w+)`$", TEXT, re.MULTILINE)
    assert sorted(named) == sorted(COMMANDS)


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_a_command_has_the_options_that_there_are(name: str):
    own = [each for each in COMMANDS[name].params if isinstance(each, click.Option)]
    known = {word for option in own for word in option.opts + option.secondary_opts}
    rows = re.findall(
        r"^\| (`-(?:\\\||[^|])*) \|", _section(f"### `holdfast {name}`"), re.MULTILINE
    )
    told = {word for row in rows for word in re.findall(r"`(--?[\w-]+)`", row)}
    assert told == known


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_an_option_is_told_as_its_help_tells_it(name: str):
    rows = re.findall(
        r"^\| (`-(?:\\\||[^|])*) \| (.*) \|$", _section(f"### `holdfast {name}`"), re.MULTILINE
    )
    told = {re.findall(r"`(--?[\w-]+)`", option)[-1]: words for option, words in rows}
    for option in (each for each in COMMANDS[name].params if isinstance(each, click.Option)):
        assert told[option.opts[-1]] == " ".join((option.help or "").split()).removesuffix(".")


def test_the_reference_has_the_settings_that_there_are():
    rows = dict(re.findall(r"^\| `(\w+)` \| ([^|]*) \|", _section("## Settings"), re.MULTILINE))
    fields = {field.name: field.default for field in dataclasses.fields(holdfast.Settings)}
    assert list(rows) == list(fields)
    for name, default in fields.items():
        told = rows[name].strip().strip("`").strip('"')
        meant = ", ".join(default) if isinstance(default, tuple) else str(default)
        assert told == meant, name


def test_the_reference_has_the_variables_that_there_are():
    used = set()
    for path in (ROOT / "src").rglob("*.py"):
        used |= set(re.findall(r"\bHOLDFAST_[A-Z_]*[A-Z]\b", path.read_text(encoding="utf-8")))
    told = set(re.findall(r"`(HOLDFAST_[A-Z_]+)`", _section("## Environment variables")))
    assert told == used


def test_the_reference_has_the_statuses_that_there_are():
    kept = {v for n, v in vars(_errors).items() if n.isupper() and isinstance(v, int)}
    told = {int(number) for number in re.findall(r"\b(\d{1,3})\b", _section("## Exit statuses"))}
    told |= {int(n) for n in re.findall(r"\| (\d+) \|$", _section("## What happens when"), re.M)}
    assert kept <= told


def test_the_reference_has_the_errors_that_there_are():
    public = {
        name
        for name in holdfast.__all__
        if isinstance(getattr(holdfast, name), type)
        and issubclass(getattr(holdfast, name), holdfast.HoldfastError)
    }
    told = set(re.findall(r"(\w+(?:Error|Run|Live|State|Mismatch|Differs|Checkpoint|Failed))\b",
                          _section("## Errors")))  # fmt: skip
    assert public <= told


def test_the_run_s_methods_are_in_the_reference():
    section = _section("## A run")
    public = [name for name in vars(holdfast.Run) if not name.startswith("_")]
    for name in [*public, "log", "save", "over", "step", "attempt", "resumed_from"]:
        assert f"`run.{name}" in section, name


def test_the_report_s_page_has_the_gauges_that_there_are():
    made = set(openmetrics._GAUGES) | {"info", "state"}
    table = (DOCS / "report.md").read_text(encoding="utf-8").partition("`holdfast_run_…`")[2]
    rows = re.findall(r"^\| (`[^|]*) \|", table, re.MULTILINE)
    assert {name for row in rows for name in re.findall(r"`([a-z_]+)`", row)} == made


def test_pages_name_no_setting_that_there_is_not():
    fields = {field.name for field in dataclasses.fields(holdfast.Settings)}
    for page in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for given in re.findall(r"Settings\(([^)]*)\)", _text(page)):
            assert set(re.findall(r"(\w+)=", given)) <= fields, f"{page.name}: {given}"


def test_figures_that_a_page_takes_from_another_are_there():
    before, after, of = re.findall(
        r"(\d+) of (\d+) before, (\d+) after", _text(DOCS / "before-and-after.md")
    )[0]
    said = (
        f"In {after} proofs of six common scripts, "
        f"{before} were equal without holdfast and [all {of} "
    )
    assert said in _text(ROOT / "README.md")
    measured = _text(DOCS / "benchmarks.md")
    compared = _text(DOCS / "compare.md")
    ours = re.search(r"measured: ([\d.]+) times", compared)
    warm = re.search(r"Reading back from a warm disk(?:.|\n(?!\* ))*", compared)
    assert ours is not None
    assert warm is not None
    assert f"| **holdfast** | **{ours[1]}** |" in measured
    figures = re.findall(r"([\d.]+) ms", warm[0])
    assert len(figures) == 4
    for figure in figures:
        assert f"| {figure} ms |" in measured


def _text(page: Path) -> str:
    return page.read_text(encoding="utf-8")
