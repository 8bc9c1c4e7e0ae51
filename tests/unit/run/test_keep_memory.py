"""How long the memory of a dead attempt waits: by the settings, the environment, and the job."""

from __future__ import annotations

import pytest

from holdfast._run.saving.keeper_client import keep_memory_of
from holdfast._settings import Settings

DEFAULT = 300.0


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch):
    for name in ("HOLDFAST_KEEP_MEMORY", "HOLDFAST_LEADER"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("chosen", "variable", "seconds"),
    [
        (None, "", DEFAULT),
        (0, "", 0.0),
        ("2min", "", 120.0),
        (None, "0", 0.0),
        (None, "45", 45.0),
        (None, "1h", 3600.0),
        (10, "1h", 10.0),
        (None, "soon", DEFAULT),
    ],
)
def test_the_setting_comes_before_the_variable(monkeypatch, chosen, variable, seconds):
    monkeypatch.setenv("HOLDFAST_KEEP_MEMORY", variable)
    assert keep_memory_of(Settings(keep_memory=chosen), in_job=False) == seconds


def test_a_variable_that_is_no_time_is_named(monkeypatch, capfd):
    monkeypatch.setenv("HOLDFAST_KEEP_MEMORY", "soon")
    keep_memory_of(Settings(), in_job=False)
    assert "HOLDFAST_KEEP_MEMORY='soon' is not a time" in capfd.readouterr().err


def test_in_a_job_it_waits_only_below_holdfast_run(monkeypatch):
    assert keep_memory_of(Settings(), in_job=True) == 0.0
    monkeypatch.setenv("HOLDFAST_LEADER", "7")
    assert keep_memory_of(Settings(), in_job=True) == DEFAULT
