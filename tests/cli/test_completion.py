"""`holdfast completion`: the scripts, in a real shell."""

from __future__ import annotations

import os
import shutil
import subprocess

import pytest

from tests.cli.command import PROGRAM, environment, holdfast, succeed
from tests.cli.screen import TerminalScreen
from tests.support import wait_until

bash = pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")


@pytest.fixture
def place(tmp_path):
    """Run folders at several depths, and others."""
    for name in ("runs/first", "runs/second", "deep/er/third", "runs/with-ümlaut"):
        (tmp_path / name).mkdir(parents=True)
        (tmp_path / name / "run.json").write_text('{"run_id": "0"}')
    (tmp_path / "data").mkdir()
    return tmp_path


def with_program(**extra):
    path = f"{PROGRAM.parent}{os.pathsep}{os.environ['PATH']}"
    return environment(PATH=path, **extra)


def complete(place, *asked):
    """What bash would offer for the last word of each of these, one after the other."""
    script = 'eval "$(holdfast completion bash)"; compopt() { printf "%s " compopt "$@"; }; '
    for words in asked:
        typed = " ".join(f"'{word}'" for word in words)
        script += (
            f"COMP_WORDS=(holdfast {typed}); COMP_CWORD={len(words)}; COMPREPLY=(); "
            '_holdfast_completion holdfast; echo "${COMPREPLY[@]}"; '
        )
    done = subprocess.run(
        ["bash", "--norc", "-c", script],
        cwd=place,
        env=with_program(),
        capture_output=True,
        text=True,
        timeout=30,
    )
    assert (done.returncode, done.stderr) == (0, ""), done.stderr
    return [line.split() for line in done.stdout.splitlines()]


def answers(place, *words):
    """What holdfast answers the script of bash, as bash would then have it."""
    asked = {
        "_HOLDFAST_COMPLETE": "bash_complete",
        "COMP_WORDS": " ".join(["holdfast", *words]),
        "COMP_CWORD": str(len(words)),
    }
    found = []
    for line in succeed(cwd=place, env=environment(**asked)).splitlines():
        kind, word = line.split(",", 1)
        found += ["compopt", "-o", "dirnames"] if kind == "dir" else [word]
    return found


def test_bash_completes_commands_options_and_run_folders(place):
    assert answers(place, "st") == ["status", "stacks", "stop"]
    assert answers(place, "export", "--s") == ["--step", "--strip"]
    assert answers(place, "ls", "runs/f") == ["runs/first"]
    everything = ["deep/er/third", "runs/first", "runs/second", "runs/with-ümlaut"]
    for command in ("status", "export", "clean"):
        assert sorted(answers(place, command, "")) == everything
    assert answers(place, "ls", "./runs/s") == ["./runs/second"]
    assert answers(place, "ls", f"{place}/runs/s") == [f"{place}/runs/second"]
    assert answers(place / "data", "ls", "../runs/s") == ["../runs/second"]
    assert answers(place, "completion", "") == ["bash", "zsh", "fish"]


def test_where_there_is_no_run_bash_is_asked_for_folders(place):
    assert answers(place, "ls", "da") == ["compopt", "-o", "dirnames"]
    assert answers(place, "ls", "/nowhere/at/all") == ["compopt", "-o", "dirnames"]


@bash
def test_the_script_in_bash_takes_the_answers_as_they_are_meant(place):
    asked = [("export", "--s"), ("ls", "../runs/w"), ("ls", "../dat")]
    expected = [["--step", "--strip"], ["../runs/with-ümlaut"], ["compopt", "-o", "dirnames"]]
    assert complete(place / "data", *asked) == expected
    assert [answers(place / "data", *words) for words in asked] == expected


@bash
def test_the_tab_key_works_in_a_shell(place):
    screen = TerminalScreen(
        "bash", "--norc", "-i", cwd=place, env=with_program(PS1="$ ", TERM="xterm"), columns=120
    )
    try:
        screen.press('eval "$(holdfast completion bash)"; echo rea""dy\n')
        screen.wait_for("ready")
        screen.press("holdfast ver\t")
        screen.wait_for("holdfast verify")
        screen.press("deep\t")
        wait_until(lambda: any("verify deep/er/third" in line for line in screen.lines))
    finally:
        screen.end()


@pytest.mark.parametrize(
    ("shell", "words", "current", "expected"),
    [
        ("zsh", "holdfast ls runs/f", "2", "plain\nruns/first\n_\n"),
        ("fish", "holdfast ls runs/f", "runs/f", "plain,runs/first\n"),
    ],
)
def test_the_other_shells_have_scripts_and_get_the_same_answers(
    place, shell, words, current, expected
):
    script = succeed("completion", shell)
    assert "_HOLDFAST_COMPLETE" in script
    assert f"{shell}_complete" in script
    asked = {"_HOLDFAST_COMPLETE": f"{shell}_complete", "COMP_WORDS": words, "COMP_CWORD": current}
    assert succeed(cwd=place, env=environment(**asked)) == expected
    if shutil.which(shell):
        subprocess.run([shell, "-n"], input=script, text=True, check=True)


def test_an_unknown_shell_names_the_known_ones():
    done = holdfast("completion", "csh")
    assert done.returncode == 2
    assert "'bash', 'zsh', 'fish'" in done.stderr
