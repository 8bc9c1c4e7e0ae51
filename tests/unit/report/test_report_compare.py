"""Runs side by side: what differs, which is best, and curves that can be laid over each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast._report import html
from holdfast._report.attempts import flatten, read_config
from holdfast._report.compare import (
    ComparedFacts,
    RunComparison,
    assemble_comparison,
    differing_keys,
    gather_facts,
)
from holdfast._report.model import RunModel
from holdfast._store.folder.layout import RunLayout
from tests.many_runs import make_one
from tests.report_runs import SCRIPTS
from tests.unit.report_folder import Book, killed_and_resumed


def facts_of(folder: Path, key: str = "k") -> ComparedFacts:
    model = RunModel(folder)
    model.update()
    return gather_facts(model, key, folder.name)


def compared(tmp_path: Path, count: int = 4) -> RunComparison:
    for number in range(count):
        make_one(tmp_path / f"r{number}", number)
    folders = [tmp_path / f"r{number}" for number in range(count)]
    return assemble_comparison([facts_of(each, each.name) for each in folders])


def test_a_run_has_its_hyperparameters_and_its_results(tmp_path):
    found = compared(tmp_path)
    first = found["runs"][0]
    assert first["config"] == {"lr": 1e-4, "seed": 0, "model.width": 64, "data": "c4"}
    assert RunModel(tmp_path / "r0").view()["run"]["config"] == first["config"]
    assert found["differing"] == ["lr", "seed", "model.width"]
    assert found["higher"] == ["accuracy"]
    assert found["metrics"] == ["loss", "accuracy"]
    assert found["metric"] == "loss"
    result = first["results"]["loss"]
    assert result["low"] is not None
    assert result["high"] is not None
    assert result["low"] <= result["last"] <= result["high"]


def test_a_run_without_a_record_of_its_start_is_compared_too(tmp_path):
    killed_and_resumed(tmp_path / "old")
    make_one(tmp_path / "new", 1)
    found = assemble_comparison([facts_of(tmp_path / "old"), facts_of(tmp_path / "new")])
    assert found["runs"][0]["config"] == {}
    assert set(found["differing"]) == {"lr", "seed", "model.width", "data"}
    assert found["curves"]["accuracy"][0] is None


@pytest.mark.parametrize(
    "text", ["", "{", "[1]", '{"config": 7}', '{"config": null}', '{"command": ["x"]}']
)
def test_a_record_of_the_start_that_is_no_such_record_has_no_hyperparameters(folder, text):
    book = Book(folder)
    book.begin(1, 0)
    book.layout.start(1).write_text(text)
    assert read_config(RunLayout(folder), 1) == {}


def test_hyperparameters_are_flat_and_bounded():
    deep = {"a": {"b": {"c": {"d": {"e": 1}}}}, "list": [1, {"x": 2}], "none": None, "empty": {}}
    found = flatten(deep)
    assert found["a.b.c.d"] == '{"e": 1}'
    assert (found["list"], found["none"], found["empty"]) == ('[1, {"x": 2}]', None, "{}")
    assert len(flatten({str(number): number for number in range(10_000)})) == 200
    assert len(str(flatten({"k": "x" * 10_000})["k"])) == 200


def test_one_and_true_are_not_the_same():
    assert differing_keys([{"a": 1}, {"a": True}]) == ["a"]
    assert differing_keys([{"a": 1}, {"a": 1.0}]) == []
    assert differing_keys([]) == []


def test_repeated_work_is_not_in_a_curve_and_takes_time(folder):
    killed_and_resumed(folder)
    facts = facts_of(folder)
    curve = facts.curves["loss"]
    assert curve["step"] == sorted(set(curve["step"]))
    by_step = dict(zip(curve["step"], curve["seconds"], strict=True))
    # Attempt 1 lived for 103 s. Step 81 was made again 3 s after attempt 2 had begun, and the
    # 97 s between the two are not the run's.
    assert by_step[79] == pytest.approx(81, abs=1.1)
    assert by_step[81] == pytest.approx(103 + 3, abs=1.1)
    assert facts.run["seconds"] == pytest.approx(103 + 123)


def test_a_long_curve_is_thinned_and_keeps_its_end(folder):
    book = Book(folder)
    book.begin(1, 0)
    book.rows(1, 2, 0, 3000)
    book.checkpoint(1, 3003, 3000)
    book.end(1, 3004, status=130, how="Ctrl-C", step=3000, durable_step=3000)
    curve = facts_of(folder).curves["loss"]
    assert len(curve["step"]) <= 401
    assert curve["step"][-1] == 2999


def test_only_the_wanted_curves_are_sent(tmp_path):
    make_one(tmp_path / "a", 1)
    facts = [facts_of(tmp_path / "a")]
    one = assemble_comparison(facts, "accuracy", has_all_curves=False)
    assert list(one["curves"]) == ["accuracy"]
    unknown = assemble_comparison(facts, "no such metric", has_all_curves=False)
    assert list(unknown["curves"]) == ["loss"]
    assert assemble_comparison([])["metric"] is None


def test_a_page_of_hostile_runs_holds_nothing_that_ends_a_script(tmp_path):
    for number, script in enumerate(SCRIPTS):
        book = make_one(tmp_path / str(number), number)
        config = {script: script, "nested": {script: [script]}}
        book.layout.start(1).write_text(json.dumps({"config": config}))
        book.row(1, 300, 201, m={script: [1.0, 1.0, 1.0, 1, 0, 201]})
    folders = sorted(tmp_path.iterdir())
    found = assemble_comparison([facts_of(each, SCRIPTS[0]) for each in folders])
    page = html.render_comparison(found, SCRIPTS[0])
    data = page.partition('id="holdfast-view">')[2].partition("</script>")[0]
    assert json.loads(data)["runs"][0]["config"][SCRIPTS[0]] == SCRIPTS[0]
    assert SCRIPTS[0] not in page
