"""`holdfast report` and `holdfast metrics`: on real runs, and on what is none."""

from __future__ import annotations

import json
import os
import re
import subprocess
import time

import pytest

from tests.cli.command import TRAIN_NUMPY, holdfast, succeed
from tests.support import checkpoint_steps, journal_events, wait_for_keeper_gone, wait_until
from tests.unit.report_folder import BEGIN, killed_and_resumed

# Without snapshots in memory, a kill costs what was made since the last checkpoint.
NO_SNAPSHOTS = json.dumps({"max_overhead": 0, "checkpoint_every": "10h"})
STEP_SECONDS = 0.02


def refused(*arguments, cwd=None):
    """Two lines: the thing and the fact, and what to do."""
    done = holdfast(*arguments, cwd=cwd)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.splitlines()) == 2, done.stderr
    return done.stderr


def test_the_report_is_written_here_and_says_where(folder, tmp_path):
    killed_and_resumed(folder)
    shown = succeed("report", folder, cwd=tmp_path)
    page = (tmp_path / "run-report.html").read_text()
    assert page.startswith("<!doctype html>")
    assert '"name":"run"' in page
    first, second, third = shown.splitlines()
    assert first == f"{folder}: Finished at step 200 of 200 (100%)."
    assert second.startswith("2 attempts in 5 min: 62% of it made progress; lost 2 min: 79% down, ")
    assert re.fullmatch(r"Written to run-report\.html \(\d+ kB\); it needs no network\.", third)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run", "run-report.html"]


def test_it_goes_where_it_is_told_to(folder, tmp_path):
    killed_and_resumed(folder)
    succeed("report", folder, "-o", tmp_path / "x.html")
    assert (tmp_path / "x.html").exists()
    (tmp_path / "pages").mkdir()
    succeed("report", folder, "-o", tmp_path / "pages")
    assert (tmp_path / "pages" / "run-report.html").exists()
    assert succeed("report", folder, "-o", "-").startswith("<!doctype html>")


def test_a_pipe_and_a_link_stay_what_they_are(folder, tmp_path):
    killed_and_resumed(folder)
    pipe, link = tmp_path / "pipe", tmp_path / "link.html"
    os.mkfifo(pipe)
    with (tmp_path / "read").open("wb") as read, subprocess.Popen(["cat", pipe], stdout=read):
        succeed("report", folder, "-o", pipe)
    assert (tmp_path / "read").read_text().startswith("<!doctype html>")
    assert pipe.is_fifo()
    link.symlink_to("target.html")
    succeed("report", folder, "-o", link)
    assert link.is_symlink()
    assert (tmp_path / "target.html").read_text().startswith("<!doctype html>")


def test_json_is_the_view(folder):
    killed_and_resumed(folder)
    view = json.loads(succeed("report", folder, "--json"))
    assert view["schema"] == 1
    assert [each["outcome"] for each in view["attempts"]] == ["killed", "finished"]
    assert view["time"]["start"] == BEGIN


def test_the_only_run_below_a_folder_is_meant(folder, tmp_path):
    killed_and_resumed(folder)
    assert "Written to run-report.html" in succeed("report", tmp_path, cwd=tmp_path)


def test_wrong_input_is_two_lines(folder, tmp_path):
    killed_and_resumed(folder)
    (tmp_path / "file").write_text("")
    (tmp_path / "empty").mkdir()
    for name in ("none", "file", "empty"):
        told = refused("report", tmp_path / name)
        assert told.startswith(f"{tmp_path}/{name}: there is no run here")
    assert "cannot be written (No such file" in refused("report", folder, "-o", "no/x.html")
    told = refused("report", folder, "--proof", tmp_path / "file")
    assert "is not the output of `holdfast prove --json`" in told
    assert "cannot be read" in refused("report", folder, "--proof", tmp_path / "none")
    killed_and_resumed(tmp_path / "other")
    told = holdfast("report", tmp_path).stderr
    assert "there are 2 runs below. Name one of them." in told
    assert told.splitlines()[1:] == [f"  {tmp_path}/other", f"  {tmp_path}/run"]


def test_a_proof_is_shown_with_its_interruptions(folder, tmp_path):
    killed_and_resumed(folder)
    struck = {"number": 1, "signal": "KILL", "moment": "step", "step": 7, "status": -9}
    proof = {
        **{"command": ["python", "train.py"], "seed": 7, "kills": 1, "signals": ["KILL"]},
        **{"verdict": "equal", "steps": 20, "lives": 2},
        "interruptions": [{**struck, "resumed_at": 6, "struck": True}],
    }
    (tmp_path / "proof.json").write_text(json.dumps(proof))
    view = json.loads(succeed("report", folder, "--json", "--proof", tmp_path / "proof.json"))
    (found,) = view["proofs"]
    assert found["verdict"] == "equal"
    assert found["sentence"].startswith("Equal to the bit: interrupted once")
    assert found["interruptions"] == [
        {"step": 7, "kind": "KILL, in a step", "result": "SIGKILL, went on from step 6"}
    ]


def test_metrics_are_printed_or_written_whole(folder, tmp_path):
    killed_and_resumed(folder)
    text = succeed("metrics", tmp_path)
    assert f'holdfast_run_step{{run="{folder}"}} 200\n' in text
    assert text.endswith("# EOF\n")
    path = tmp_path / "holdfast.prom"
    assert succeed("metrics", folder, "-o", path) == f"{path}: the state of 1 run.\n"
    assert 'state="finished"} 1\n' in path.read_text()
    assert "is a folder." in refused("metrics", folder, "-o", tmp_path)
    (tmp_path / "empty").mkdir()
    assert "there is no run here" in refused("metrics", tmp_path / "empty")


def trained_to(folder, step):
    found = [json.loads(line) for line in _series(folder).splitlines()]
    return bool(found) and found[-1]["s"] >= step


def logged_to(folder, step):
    """Whether a row has a loss of this step or a later one; metrics come after the steps."""
    rows = [json.loads(line).get("m", {}) for line in _series(folder).splitlines()]
    return any(row["loss"][5] >= step for row in rows if "loss" in row)


def _series(folder) -> str:
    newest = sorted(folder.glob("attempts/*/series.jsonl"))
    return newest[-1].read_text().rpartition("\n")[0] if newest else ""


# Over 5 s: three lives, long enough to have a series.
def test_a_real_run_that_was_killed_resumed_stopped_and_resumed(folder, start):
    options = ("--sleep", STEP_SECONDS, "--settings", NO_SNAPSHOTS)
    trainer = start(folder, *options, script=TRAIN_NUMPY)
    trainer.ready()
    wait_until(lambda: trained_to(folder, 80), what="step 80")
    succeed("save", folder, "--wait")
    (saved,) = checkpoint_steps(folder)
    wait_until(
        lambda: trained_to(folder, saved + 40) and logged_to(folder, saved + 5),
        what="40 steps more",
    )
    trainer.kill()
    killed_at = time.time()
    trainer.wait()
    wait_for_keeper_gone(folder)
    again = start(folder, *options, script=TRAIN_NUMPY)
    assert again.ready() == saved
    back_at = journal_events(folder, "start")[-1]["time"]
    wait_until(lambda: trained_to(folder, saved + 150), what="150 steps more")
    succeed("stop", folder, "--wait", "--reason", "the node is needed")
    assert again.wait() == 130
    total = checkpoint_steps(folder)[-1] + 150
    assert start(folder, *options, "--total", total, script=TRAIN_NUMPY).wait() == 0
    wait_for_keeper_gone(folder)
    view = json.loads(succeed("report", folder, "--json"))
    first, second, third = view["attempts"]
    assert [each["outcome"] for each in view["attempts"]] == ["killed", "stopped", "finished"]
    assert "SIGKILL" in first["how"]
    assert "the node is needed" in second["how"]
    assert (second["first_step"], third["last_step"]) == (saved, total)
    assert third["origin"]["step"] == second["last_step"]
    # What the run says of itself is what was seen from outside.
    parts = {part["kind"]: part["seconds"] for part in view["goodput"]["parts"]}
    gap = [each for each in view["segments"] if killed_at - 0.5 < each["start"] < back_at]
    away = sum(each["end"] - each["start"] for each in gap if each["kind"] in ("down", "starting"))
    assert away == pytest.approx(back_at - killed_at, abs=0.5)
    lost = first["last_step"] - saved
    pace = view["step_time"]["percentiles"]["p50"]
    assert pace > STEP_SECONDS
    assert parts["lost"] == pytest.approx(lost * pace, rel=0.3, abs=0.3)
    assert view["goodput"]["wall_seconds"] == pytest.approx(third["end"] - first["start"], abs=0.01)
    assert sum(parts.values()) == pytest.approx(view["goodput"]["wall_seconds"])
    made = total * pace
    assert view["goodput"]["progress_seconds"] == pytest.approx(made, rel=0.3)
    (metric,) = [each for each in view["metrics"] if each["name"] == "loss"]
    assert metric["step"] == sorted(metric["step"])
    assert metric["step"][-1] >= total - 5
    assert all(saved <= step <= first["last_step"] for step in metric["lost"]["step"])
    assert metric["lost"]["step"]
    (death,) = view["deaths"]
    assert (death["attempt"], death["cause"]) == (1, "killed")
