"""`holdfast --help`: what a newcomer reads first."""

from __future__ import annotations

import pytest

from tests.cli.command import environment, holdfast, succeed

GROUPS = {
    "Look": [
        "status",
        "ui",
        "report",
        "compare",
        "ls",
        "verify",
        "why",
        "stacks",
        "doctor",
        "metrics",
    ],
    "Ask": ["stop", "save", "resume"],
    "Use": ["export", "adopt", "mirror", "clean"],
    "Cluster": ["plan", "submit", "run", "lint"],
    "Try": ["demo", "prove", "completion"],
}
COMMANDS = [name for names in GROUPS.values() for name in names]


def test_the_commands_stand_in_groups_each_with_its_example():
    shown = succeed("--help", env=environment(COLUMNS="80"))
    rest = shown.split("\nLook:\n")[1]
    for title, names in GROUPS.items():
        part = rest.partition(f"{title}:\n")[2] if title != "Look" else rest
        part = part.split("\n\n")[0]
        listed = [line.split()[0] for line in part.splitlines() if line[2] != " "]
        assert listed == names
        examples = [line.strip() for line in part.splitlines() if line.strip().startswith("$ ")]
        assert len(examples) == len(names)
        for name, example in zip(names, examples, strict=True):
            assert f"holdfast {name}" in example


def test_it_says_what_it_is_and_how_to_have_completion():
    shown = succeed("--help")
    assert "impossible to lose" in shown
    assert "RUN is the folder that holdfast.Run was given" in shown
    assert 'eval "$(holdfast completion bash)"' in shown
    assert "~/.bashrc" in shown
    assert holdfast().stderr == shown  # without a command, the same


@pytest.mark.parametrize("columns", ["80", "200"])
def test_no_help_is_wider_than_80_columns(columns):
    for arguments in ([], *([name] for name in COMMANDS)):
        shown = succeed(*arguments, "--help", env=environment(COLUMNS=columns))
        assert max(map(len, shown.splitlines())) <= 80, shown
