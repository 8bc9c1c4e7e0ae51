"""`holdfast compare`: the table, the page and the JSON."""

from __future__ import annotations

import json

from tests.cli.command import holdfast, succeed
from tests.many_runs import make_sweep
from tests.unit.report_folder import killed_and_resumed


def test_the_best_run_stands_first_with_what_differs(tmp_path):
    make_sweep(tmp_path / "runs", 4)
    lines = succeed("compare", "runs", cwd=tmp_path).splitlines()
    assert lines[0].split() == [
        *("run", "state", "step", "loss,", "best", "loss", "accuracy", "lr", "seed", "model.width")
    ]
    assert [line.split()[0] for line in lines[1:5]] == [f"runs/sweep-000{n}" for n in (3, 2, 1, 0)]
    assert lines[5].startswith("Best so far: runs/sweep-0003, lowest loss 1.0")
    assert lines[6] == "1 setting the same in all runs; --all shows them too."


def test_all_shows_what_is_the_same_too(tmp_path):
    make_sweep(tmp_path, 2)
    shown = succeed("compare", tmp_path / "sweep-0000", tmp_path / "sweep-0001", "--all")
    assert " data" in shown.splitlines()[0]
    assert "the same in all runs" not in shown


def test_a_metric_says_by_its_name_which_end_is_the_best(tmp_path):
    make_sweep(tmp_path, 3)
    assert "highest accuracy" in succeed("compare", tmp_path, "--metric", "accuracy")
    assert "lowest accuracy" in succeed("compare", tmp_path, "--metric", "accuracy", "--lowest")


def test_the_page_is_one_file_with_the_curves_of_all_metrics(tmp_path):
    make_sweep(tmp_path / "runs", 3)
    shown = succeed("compare", "runs", "-o", "c.html", cwd=tmp_path)
    assert shown.startswith("3 runs side by side, written to c.html (")
    page = (tmp_path / "c.html").read_text()
    data = json.loads(page.partition('id="holdfast-view">')[2].partition("</script>")[0])
    assert set(data["curves"]) == {"loss", "accuracy"}
    assert "connect-src" not in page


def test_scripts_get_json(tmp_path):
    make_sweep(tmp_path, 2)
    found = json.loads(succeed("compare", tmp_path, "--json"))
    assert [run["config"]["seed"] for run in found["runs"]] == [0, 1]
    assert found["schema"] == 1


def test_runs_without_hyperparameters_are_compared_and_told_how_to_record_them(folder):
    killed_and_resumed(folder)
    shown = succeed("compare", folder)
    assert "No hyperparameters were recorded" in shown


def test_what_cannot_be_compared_is_told(tmp_path):
    make_sweep(tmp_path / "runs", 1)
    for arguments, said in (
        (("--metric", "nope"), "No run has a metric 'nope'.\nThere are: loss, accuracy\n"),
        (("--highest", "--lowest"), "--highest and --lowest: choose one of them.\n"),
    ):
        done = holdfast("compare", tmp_path / "runs", *arguments)
        assert (done.returncode, done.stderr) == (2, said)
    assert holdfast("compare", tmp_path / "nothing").returncode == 2
    assert holdfast("compare").returncode == 2
