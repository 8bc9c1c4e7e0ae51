"""The GitHub Action: its steps in a bash as a runner starts it."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.cli.command import environment
from tests.prove.made_up import PROOFS
from tests.prove.test_fixture import SCRIPT

ROOT = Path(__file__).resolve().parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
STEPS = {step["id"]: step for step in ACTION["runs"]["steps"]}


class Runner:
    """What GitHub gives a step: its inputs as variables, and files to write to."""

    def __init__(self, folder, programs):
        self.folder = folder
        self.programs = programs
        self.summary = folder / "summary.md"
        self.output = folder / "output"

    def run(self, **inputs):
        (self.folder / "work").mkdir(exist_ok=True)
        given = {name: each.get("default") for name, each in ACTION["inputs"].items()}
        given |= {name.replace("_", "-"): value for name, value in inputs.items()}
        step = STEPS["prove"]
        variables = {
            name: re.sub(r"\$\{\{ inputs\.([a-z-]+) \}\}", lambda found: given[found[1]], text)
            for name, text in step["env"].items()
        }
        script = self.folder / "step.sh"
        script.write_text(step["run"])
        env = environment(
            **variables,
            GITHUB_STEP_SUMMARY=str(self.summary),
            GITHUB_OUTPUT=str(self.output),
            RUNNER_TEMP=str(self.folder),
        )
        env["PATH"] = f"{self.programs}:{Path(sys.executable).parent}:{env['PATH']}"
        return subprocess.run(
            ["bash", "--noprofile", "--norc", "-eo", "pipefail", str(script)],
            cwd=self.folder / "work",
            env=env,
            capture_output=True,
            text=True,
            timeout=100,
        )


@pytest.fixture
def runner(tmp_path):
    programs = tmp_path / "bin"
    programs.mkdir()
    return Runner(tmp_path, programs)


def pretend(runner, proof, status):
    """A holdfast that says this, and notes how it was called."""
    (runner.folder / "said.json").write_text("" if proof is None else json.dumps(proof.to_json()))
    program = runner.programs / "holdfast"
    program.write_text(
        f'#!/bin/sh\nprintf "%s\\n" "$@" > {runner.folder}/called\n'
        f"cat {runner.folder}/said.json\nexit {status}\n"
    )
    program.chmod(0o755)


def test_no_input_is_part_of_the_text_of_a_script():
    for step in STEPS.values():
        assert "${{" not in step["run"]
        assert step["shell"] == "bash"
    used = set(re.findall(r"inputs\.([a-z-]+)", str(ACTION["runs"])))
    assert used == set(ACTION["inputs"])


def test_our_own_ci_uses_it_with_inputs_that_it_has():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text())["jobs"]
    (step,) = (step for step in jobs["prove"]["steps"] if step.get("uses") == "./")
    assert set(step["with"]) <= set(ACTION["inputs"])
    script = step["with"]["command"].split()[1]
    assert (ROOT / script).is_file()


@pytest.mark.parametrize("verdict", PROOFS)
def test_the_status_is_holdfasts_and_the_report_is_in_the_summary(verdict, runner):
    proof = PROOFS[verdict]
    pretend(runner, proof, proof.exit_status)
    done = runner.run(command="python train.py", python=sys.executable)
    assert done.returncode == proof.exit_status, done.stderr
    from holdfast._tools.prove.report import markdown

    assert runner.summary.read_text() == markdown(proof) + "\n"
    report = Path(runner.output.read_text().strip().removeprefix("report="))
    assert json.loads(report.read_text())["verdict"] == verdict


def test_the_command_is_taken_apart_as_a_shell_would_and_runs_nothing_else(runner):
    pretend(runner, PROOFS["equal"], 0)
    done = runner.run(
        command="python train.py --name 'my run' $(touch hacked) *",
        resume_cmd="python train.py --resume",
        kills="5",
        budget="2min",
    )
    assert done.returncode == 0, done.stderr
    called = (runner.folder / "called").read_text().splitlines()
    assert called[:4] == ["prove", "--json", "--kills", "5"]
    assert called[called.index("--budget") + 1] == "2min"
    assert called[called.index("--resume-cmd") + 1] == "python train.py --resume"
    words = ["python", "train.py", "--name", "my run", "$(touch", "hacked)", "*"]
    assert called[called.index("--") + 1 :] == words
    assert list((runner.folder / "work").iterdir()) == []


def test_what_could_not_even_begin_is_said_in_the_summary(runner):
    done = runner.run(command="python train.py", kills="none")
    assert done.returncode == 2
    assert "--kills none is not a whole number." in done.stderr
    assert "Nothing is proved" in runner.summary.read_text()


def test_a_tiny_training_is_proved(runner):
    (runner.folder / "work").mkdir()
    (runner.folder / "work" / "train.py").write_text(SCRIPT)
    done = runner.run(command="python train.py", kills="2", signals="INT,KILL")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "**Equal to the bit: interrupted" in runner.summary.read_text()
