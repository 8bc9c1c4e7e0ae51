"""Whole scripts: nothing is said of the good ones, and each bad one says itself what is.

The scripts are in `sbatch/good` and `sbatch/bad`; a bad one ends with lines like
`# expect: 8 error signal-never-arrives`.
"""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast._tools.lint.finding import Surroundings
from holdfast._tools.lint.lint import fix, lint

SCRIPTS = Path(__file__).parents[1] / "sbatch"
GOOD = sorted((SCRIPTS / "good").glob("*.sbatch"))
BAD = sorted((SCRIPTS / "bad").glob("*.sbatch"))
TEXTS = [path.read_bytes().decode() for path in (*GOOD, *BAD)]


def around(tmp_path: Path, script: Path) -> Surroundings:
    return Surroundings(script.parent, tmp_path)


def is_shell(text: str) -> bool:
    return "python" not in text.partition("\n")[0]


@pytest.mark.parametrize("path", GOOD, ids=lambda path: path.stem)
def test_nothing_is_said_of_a_good_script(path, tmp_path):
    found = lint(path.read_text(), around(tmp_path, path))
    assert [each for each in found if each.severity != "hint"] == []
    assert fix(path.read_text(), around(tmp_path, path)) == path.read_text()


@pytest.mark.parametrize("path", [*GOOD, *BAD], ids=lambda path: path.stem)
def test_bash_can_read_the_script(path):
    text = path.read_bytes().decode()
    if is_shell(text):
        subprocess.run(["bash", "-n", path], check=True, timeout=20)


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_a_bad_script_is_found_out(path, tmp_path):
    text = path.read_bytes().decode()
    expected = re.findall(r"^# expect: (\d+) (\w+) (\S+)", text, re.MULTILINE)
    assert expected
    found = lint(text, around(tmp_path, path))
    assert sorted((f.line, f.severity, f.rule) for f in found) == sorted(
        (int(line), severity, rule) for line, severity, rule in expected
    )
    for each in found:
        assert each.message.endswith(".")
        assert each.corrected


@pytest.mark.parametrize("path", BAD, ids=lambda path: path.stem)
def test_what_can_be_fixed_is_fixed_at_once_and_for_good(path, tmp_path):
    text = path.read_bytes().decode()
    corrected = fix(text, around(tmp_path, path))
    left = lint(corrected, around(tmp_path, path))
    assert [each for each in left if each.edits and each.severity != "hint"] == []
    # A change must not bring up what was not there before, but for a hint on what is new.
    before = {each.rule for each in lint(text, around(tmp_path, path))}
    assert {each.rule for each in left if each.severity != "hint"} <= before
    assert fix(corrected, around(tmp_path, path)) == corrected
    if is_shell(text):
        subprocess.run(["bash", "-n"], input=corrected, text=True, check=True, timeout=20)


@settings(suppress_health_check=[HealthCheck.too_slow], max_examples=150, deadline=None)
@given(data=st.data())
def test_a_script_with_lines_left_out_or_cut_is_judged_without_a_fault(data):
    text = data.draw(st.sampled_from(TEXTS))
    lines = text.splitlines(keepends=True)
    kept = [line for line in lines if data.draw(st.integers(0, 5))]
    broken = "".join(kept)
    cut = data.draw(st.integers(0, len(broken)))
    broken = broken[:cut] + data.draw(st.text("'\"$(){}`\\;&|<>#\n a", max_size=4)) + broken[cut:]
    nowhere = Surroundings(SCRIPTS, SCRIPTS)
    lint(broken, nowhere)
    corrected = fix(broken, nowhere)
    assert fix(corrected, nowhere) == corrected


def test_a_backtick_that_is_not_closed_is_fixed_once():
    script = """#!/bin/bash
#SBATCH --signal=B:USR2@60
trap 'echo "nearly over"' USR2
srun python `train.py &
"""
    corrected = fix(script, Surroundings(SCRIPTS, SCRIPTS))
    assert fix(corrected, Surroundings(SCRIPTS, SCRIPTS)) == corrected
    assert corrected.count("wait") == 0


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=80))
def test_any_text_is_judged_without_a_fault(text):
    nowhere = Surroundings(SCRIPTS, SCRIPTS)
    for script in (text, f"#!/bin/bash\n#SBATCH {text}\npython train.py {text}\n"):
        lint(script, nowhere)
        fix(script, nowhere)
