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


def complete(place, *words):
    """What bash would offer for the last of these words."""
    typed = " ".join(f"'{word}'" for word in words)
    script = (
        'eval "$(holdfast completion bash)"; '
        f"COMP_WORDS=(holdfast {typed}); COMP_CWORD={len(words)}; COMPREPLY=(); "
        'compopt() { echo "compopt $*"; }; '
        '_holdfast_completion holdfast; printf "%s\\n" "${COMPREPLY[@]}"'
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
    return done.stdout.split()


@bash
def test_bash_completes_commands_options_and_run_folders(place):
    assert complete(place, "st") == ["status", "stacks", "stop"]
    assert complete(place, "export", "--s") == ["--step", "--strip"]
    assert complete(place, "ls", "runs/f") == ["runs/first"]
    everything = ["deep/er/third", "runs/first", "runs/second", "runs/with-ümlaut"]
    for command in ("status", "export", "clean"):
        assert sorted(complete(place, command, "")) == everything
    assert complete(place, "ls", "./runs/s") == ["./runs/second"]
    assert complete(place, "ls", f"{place}/runs/s") == [f"{place}/runs/second"]
    assert complete(place / "data", "ls", "../runs/s") == ["../runs/second"]
    assert complete(place, "completion", "") == ["bash", "zsh", "fish"]


@bash
def test_where_there_is_no_run_bash_is_asked_for_folders(place):
    assert complete(place, "ls", "da") == ["compopt", "-o", "dirnames"]
    assert complete(place, "ls", "/nowhere/at/all") == ["compopt", "-o", "dirnames"]


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
