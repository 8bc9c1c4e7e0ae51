"""Settings are checked at once, and a refusal names what would be valid."""

from __future__ import annotations

import contextlib
import math
import signal

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._settings import Settings, parse_seconds

UNITS = {"ms": 0.001, "s": 1, "sec": 1, "min": 60, "m": 60, "h": 3600, "d": 86400}


@pytest.mark.parametrize(
    ("name", "value", "valid"),
    [
        ("keep_last", 0, "1 or more"),
        ("keep_last", -3, "1 or more"),
        ("keep_last", 2.0, "1 or more"),
        ("keep_last", True, "1 or more"),
        ("keep_last", "3", "1 or more"),
        ("keep_best", "val_loss", "'min:NAME' or 'max:NAME'"),
        ("keep_best", "avg:val_loss", "'min:NAME' or 'max:NAME'"),
        ("keep_best", "min:", "'min:NAME' or 'max:NAME'"),
        ("keep_best", "min:a b", "'min:NAME' or 'max:NAME'"),
        ("keep_best", ("min", "loss"), "'min:NAME' or 'max:NAME'"),
        ("checkpoint_every", "5", "ms, s, sec, min, m, h, d"),
        ("checkpoint_every", "5 weeks", "ms, s, sec, min, m, h, d"),
        ("checkpoint_every", "-5min", "ms, s, sec, min, m, h, d"),
        ("checkpoint_every", "", "ms, s, sec, min, m, h, d"),
        ("checkpoint_every", "0s", "'5min', or a number of steps, 1 or more"),
        ("checkpoint_every", 0, "'5min', or a number of steps, 1 or more"),
        ("checkpoint_every", 2.5, "'5min', or a number of steps, 1 or more"),
        ("checkpoint_every", True, "'5min', or a number of steps, 1 or more"),
        ("checkpoint_every", None, "'5min', or a number of steps, 1 or more"),
        ("max_overhead", -0.1, "from 0 (no snapshots) to 1"),
        ("max_overhead", 1.5, "from 0 (no snapshots) to 1"),
        ("max_overhead", math.nan, "from 0 (no snapshots) to 1"),
        ("max_overhead", math.inf, "from 0 (no snapshots) to 1"),
        ("max_overhead", "1%", "from 0 (no snapshots) to 1"),
        ("max_overhead", True, "from 0 (no snapshots) to 1"),
        ("memory", "much", "KB, MB, GB, TB"),
        ("memory", "-1GB", "KB, MB, GB, TB"),
        ("memory", "0GB", "a size such as '8GB'"),
        ("memory", 0, "a size such as '8GB'"),
        ("memory", 1.5, "a fraction such as 0.25"),
        ("memory", 0.0, "a fraction such as 0.25"),
        ("memory", math.nan, "a fraction such as 0.25"),
        ("memory", True, "a number of bytes"),
        ("grace_seconds", 0, "a number of seconds above 0"),
        ("grace_seconds", -1, "a number of seconds above 0"),
        ("grace_seconds", math.nan, "a number of seconds above 0"),
        ("grace_seconds", "10s", "a number of seconds above 0"),
        ("hang_timeout", 0, "seconds above 0"),
        ("notices", "nowhere", "'auto', 'aws', 'gcp', 'azure', 'off'"),
        ("hang_timeout", True, "seconds above 0"),
        ("hang_timeout", math.inf, "seconds above 0"),
        ("hang_timeout", "0s", "seconds above 0"),
        ("hang_timeout", "soon", "ms, s, sec, min, m, h, d"),
        ("keep_memory", -1, "0 (not at all)"),
        ("keep_memory", True, "0 (not at all)"),
        ("keep_memory", math.nan, "0 (not at all)"),
        ("keep_memory", "later", "ms, s, sec, min, m, h, d"),
        ("signals", "INT", "INT, TERM, HUP, USR1, USR2, QUIT, BREAK"),
        ("signals", ("INT", "KILL"), "INT, TERM, HUP, USR1, USR2, QUIT, BREAK"),
        ("signals", (2, 15), "INT, TERM, HUP, USR1, USR2, QUIT, BREAK"),
        ("signals", None, "INT, TERM, HUP, USR1, USR2, QUIT, BREAK"),
        ("signals", 15, "INT, TERM, HUP, USR1, USR2, QUIT, BREAK"),
    ],
)
def test_a_bad_value_is_refused_with_its_name_and_what_is_valid(name, value, valid):
    with pytest.raises(holdfast.SettingsError) as refused:
        Settings(**{name: value})
    assert f"{name}={value!r}" in str(refused.value)
    assert valid in str(refused.value)


def test_a_settings_error_is_a_value_error_too():
    with pytest.raises(ValueError, match="keep_last"):
        Settings(keep_last=0)


@pytest.mark.parametrize(
    "good",
    [
        {"keep_last": 1},
        {"keep_best": "min:val_loss"},
        {"keep_best": "max:eval/acc-1.top5"},
        {"checkpoint_every": 1},
        {"checkpoint_every": "10ms"},
        {"checkpoint_every": "auto"},
        {"max_overhead": 0},
        {"max_overhead": 1},
        {"memory": 1},
        {"memory": 1.0},
        {"memory": "0.5GiB"},
        {"grace_seconds": 0.5},
        {"hang_timeout": 90},
        {"notices": "aws"},
        {"hang_timeout": "2min"},
        {"keep_memory": 0},
        {"keep_memory": 90.5},
        {"keep_memory": "10min"},
        {"signals": ()},
        {"signals": ("INT",)},
    ],
)
def test_values_at_the_edge_of_what_is_valid_are_taken(good):
    settings = Settings(**good)
    (name,) = good
    assert getattr(settings, name) == good[name]


def test_settings_cannot_be_changed_later():
    with pytest.raises(AttributeError):
        Settings().keep_last = 5


@pytest.mark.parametrize(
    ("memory", "found"),
    [
        (None, None),
        (123, 123),
        (0.25, 250),
        ("8GB", 8 * 10**9),
        ("1.5 gb", 1_500_000_000),
        ("512MiB", 512 << 20),
        ("2T", 2 * 10**12),
        ("100", 100),
    ],
)
def test_a_bound_on_memory_is_a_size_or_a_part_of_all(memory, found):
    assert Settings(memory=memory).memory_bytes(lambda: 1000) == found


def test_checkpoints_are_counted_in_time_or_in_steps_but_never_in_both():
    timed, counted = Settings(checkpoint_every="1.5h"), Settings(checkpoint_every=100)
    assert (timed.checkpoint_seconds, timed.checkpoint_steps) == (5400.0, None)
    assert (counted.checkpoint_seconds, counted.checkpoint_steps) == (None, 100)
    assert not timed.is_auto
    assert not counted.is_auto


def test_or_the_run_finds_the_time_by_itself():
    found = Settings(checkpoint_every="Auto")
    assert found.is_auto
    assert (found.checkpoint_seconds, found.checkpoint_steps) == (None, None)
    with pytest.raises(holdfast.SettingsError, match="'automatic' is not a duration"):
        Settings(checkpoint_every="automatic")


def test_the_best_metric_is_split_into_mode_and_name():
    assert Settings(keep_best="max:a:b".replace(":b", "/b")).best_metric == ("max", "a/b")
    assert Settings().best_metric is None


def test_signals_may_be_written_in_any_case_and_with_their_prefix():
    settings = Settings(signals=("sigint", "Usr1", "SIGTERM"))
    assert settings.signals == ("INT", "USR1", "TERM")
    assert settings.signal_numbers == (signal.SIGINT, signal.SIGUSR1, signal.SIGTERM)


def test_a_signal_that_this_system_lacks_is_left_out_of_the_numbers():
    settings = Settings(signals=("INT", "BREAK"))
    assert settings.signals == ("INT", "BREAK")
    assert settings.signal_numbers == (signal.SIGINT,)


def test_run_refuses_settings_that_are_no_settings(tmp_path):
    with pytest.raises(holdfast.SettingsError, match="is a dict"):
        holdfast.Run(tmp_path / "run", settings={"keep_last": 3})
    assert not (tmp_path / "run").exists()


@given(
    number=st.decimals(0, 10**9, places=3, allow_nan=False),
    unit=st.sampled_from(sorted(UNITS)),
    gap=st.sampled_from(["", " ", "  "]),
    upper=st.booleans(),
)
def test_a_number_and_a_unit_are_that_many_seconds(number, unit, gap, upper):
    text = f"{number}{gap}{unit.upper() if upper else unit}"
    assert parse_seconds(text, "x") == pytest.approx(float(number) * UNITS[unit])


@given(st.text(max_size=12))
def test_any_text_is_a_finite_duration_or_refused(text):
    with contextlib.suppress(holdfast.SettingsError):
        seconds = parse_seconds(text, "checkpoint_every")
        assert seconds >= 0
        assert math.isfinite(seconds)
        assert any(unit in text.lower() for unit in UNITS)


def test_a_misspelled_setting_is_told_the_right_one():
    with pytest.raises(holdfast.SettingsError) as error:
        Settings(checkpoint_evry="5min")
    assert str(error.value).splitlines() == [
        "holdfast.Settings has no checkpoint_evry.",
        "Did you mean checkpoint_every?",
    ]
    with pytest.raises(holdfast.SettingsError, match="Valid: keep_last, keep_best, "):
        Settings(zzz=1)
