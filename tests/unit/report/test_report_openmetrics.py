"""What monitoring reads, as its own parsers see it."""

from __future__ import annotations

import pytest

from holdfast._report import openmetrics
from holdfast._report.model import RunModel
from tests.unit.report_folder import killed_and_resumed

parsers = pytest.importorskip(
    "prometheus_client.openmetrics.parser", reason="pip install prometheus-client"
)


@pytest.fixture
def summary(folder):
    killed_and_resumed(folder)
    return RunModel(folder).summary()


def read(text: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
    from prometheus_client import parser as older

    families = list(parsers.text_string_to_metric_families(text))
    assert families
    assert len(list(older.text_string_to_metric_families(text))) == len(families)
    return {
        family.name: {tuple(s.labels.items()): s.value for s in family.samples}
        for family in families
    }


def test_both_formats_read_it(summary):
    found = read(openmetrics.render([summary]))
    run = ("run", summary.folder)
    assert found["holdfast_run_step"] == {(run,): 200.0}
    assert found["holdfast_run_attempt"] == {(run,): 2.0}
    assert found["holdfast_run_is_live"] == {(run,): 0.0}
    assert found["holdfast_run_exit_status"] == {(run,): 0.0}
    states = found["holdfast_run_state"]
    assert sum(states.values()) == 1
    assert states[run, ("state", "finished")] == 1.0
    assert "holdfast_run_memory_step" not in found  # there is none


def test_no_runs_are_no_metrics():
    assert openmetrics.render([]) == "# EOF\n"


def test_a_hostile_name_stays_one_label(summary):
    import dataclasses

    name = 'a"b\\c\nd} 1\n# EOF\n\r\udcff'
    found = read(openmetrics.render([dataclasses.replace(summary, folder=name), summary]))
    labels = [dict(key)["run"] for key in found["holdfast_run_step"]]
    assert labels == ['a"b\\c\nd} 1\n# EOF\n ?', summary.folder]
