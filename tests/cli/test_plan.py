"""`holdfast plan`: what it prints, draws and refuses."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree

import pytest

from tests.cli.command import PROGRAM, holdfast, succeed
from tests.cli.screen import TerminalScreen

LLAMA_3 = (
    "--gpus", "16384", "--interruptions", "419", "--over", "54d", "--state-size", "5.7TB",
    "--write-bandwidth", "2TB/s", "--restart-time", "10min",
)  # fmt: skip
SPOT = (
    "--state-size", "3GB", "--interruptions", "6", "--over", "1d", "--notice-share", "80%",
    "--queue-wait", "10min",
)  # fmt: skip


def test_without_any_option_it_is_of_use_and_says_what_it_assumes():
    shown = succeed("plan")
    lines = shown.splitlines()
    assert lines[0].startswith('Settings(checkpoint_every="')
    assert lines[2] == "1 GPU in 1 host: an interruption every 1 d."
    (best,) = [line for line in lines if line.strip().startswith(">")]
    assert best.endswith(" best")
    assert "Young (1974): " in shown
    assert "Daly (2006): " in shown
    assert "The simulation: " in shown
    assumed = shown.partition("Assumed, because you did not say it:\n")[2]
    for option in ("--state-size", "--write-bandwidth", "--mtbf-per-gpu", "--restart-time"):
        assert f"  {option}" in assumed
    assert max(map(len, lines)) < 240


def test_it_says_where_the_rest_goes_and_what_snapshots_change():
    shown = succeed("plan", *SPOT)
    assert "waiting for the queue " in shown
    assert "repeated work " in shown
    assert "training stands still while it writes" in shown
    assert "1% of the time for snapshots in memory" in shown
    assert "--queue-wait" not in shown  # only what was not said is assumed


def test_llama_3_is_more_than_nine_tenths_effective():
    found = json.loads(succeed("plan", *LLAMA_3, "--json"))
    assert found["goodput"] > 0.9
    assert found["goodput"] + sum(found["parts"].values()) == pytest.approx(1)
    assert found["setting"] == 'Settings(checkpoint_every="1min")'
    assert found["model"]["mtbf"] == pytest.approx(54 * 86_400 / 419)
    best = [row for row in found["rows"] if "best" in row["marks"]]
    assert [row["interval"] for row in best] == [found["checkpoint_every_seconds"]] == [60.0]


def test_the_picture_is_good_xml_for_light_and_dark(tmp_path):
    path = tmp_path / "plan.svg"
    shown = succeed("plan", *SPOT, "-o", path)
    assert shown.endswith(f"Drawn: {path}\n")
    text = path.read_text()
    root = ElementTree.fromstring(text)
    assert root.tag.endswith("}svg")
    assert "prefers-color-scheme: dark" in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
    words = " ".join(root.itertext())
    assert "goodput" in words
    assert "waiting for the queue" in words


def test_what_never_loses_anything_still_gets_an_interval(tmp_path):
    path = tmp_path / "plan.svg"
    found = json.loads(succeed("plan", "--notice-share", "1", "--json", "-o", path))
    assert found["young_seconds"] is None  # there is no such interval
    assert found["setting"] == 'Settings(checkpoint_every="4h")'
    ElementTree.parse(path)


def test_a_run_that_gets_nowhere_is_told_so(tmp_path):
    path = tmp_path / "plan.svg"
    shown = succeed("plan", "--gpus", "16384", "--mtbf-per-gpu", "10min", "-o", path)
    assert "Such a run gets nowhere" in shown
    ElementTree.parse(path)


@pytest.mark.parametrize(
    ("arguments", "fact"),
    [
        (["--gpus", "0"], "--gpus 0: this must be 1 or more."),
        (["--gpus", "many"], "--gpus 'many': this is not a whole number."),
        (["--state-size", "20"], "--state-size 20: the unit is missing."),
        (["--state-size", "20XB"], "--state-size 20XB: the unit 'XB' is unknown."),
        (["--state-size", "-1GB"], "--state-size -1GB: this must be more than 0."),
        (["--mtbf-per-gpu", "5 moons"], "--mtbf-per-gpu 5 moons: the unit 'moons' is unknown."),
        (["--write-time", "0s"], "--write-time 0s: this must be more than 0."),
        (["--queue-wait", "-1h"], "--queue-wait -1h: this must be 0 or more."),
        (["--notice-share", "2"], "--notice-share 2: this is not a share of all."),
        (["--interruptions", "3"], "--interruptions needs --over: "),
        (["--over", "3d"], "--over needs --interruptions: "),
        (["--interruptions", "0", "--over", "3d"], "--interruptions 0: this must be a number"),
        (
            ["--interruptions", "3", "--over", "3d", "--mtbf-per-gpu", "5y"],
            "--mtbf-per-gpu and --interruptions say the same thing twice.",
        ),
        (
            ["--write-time", "3s", "--write-bandwidth", "1GB/s"],
            "--write-bandwidth and --write-time say the same thing twice.",
        ),
        (["--seed", "-1"], "--seed -1: this must be 0 or more."),
        (["-o", "plan.png"], "plan.png: a plan is drawn as SVG only."),
        (["-o", "there/is/no/plan.svg"], "there/is/no/plan.svg: cannot be written"),
    ],
)
def test_wrong_input_gives_two_lines(arguments, fact, tmp_path):
    done = holdfast("plan", *arguments, cwd=tmp_path)
    assert done.returncode == 2
    assert done.stdout == ""
    first, _ = done.stderr.splitlines()
    assert first.startswith(fact)
    assert list(tmp_path.iterdir()) == []


def test_a_terminal_of_80_columns_shows_the_table_whole():
    screen = TerminalScreen(PROGRAM, "plan", *SPOT, columns=80, rows=60)
    try:
        screen.wait_for("Assumed")
        (best,) = [line for line in screen.lines if line.strip().startswith(">")]
        assert best.endswith("best")
        head = next(line for line in screen.lines if "goodput" in line)
        for name in ("every", "checkpoints", "snapshots", "repeated", "restarts", "queue"):
            assert name in head
        assert best.count("%") == 6
    finally:
        screen.end()
