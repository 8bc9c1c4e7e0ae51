"""What a person writes after an option, and how a refusal looks."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast._settings import parse_seconds
from holdfast._tools.plan import units


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("5y", 5 * 365 * 86_400), ("30d", 30 * 86_400), ("2 W", 14 * 86_400), ("1.5h", 5400),
     ("250ms", 0.25), ("1e3 s", 1000), ("3m", 180)],
)  # fmt: skip
def test_durations(text, seconds):
    assert units.parse_duration(text, "--x") == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("text", "size"), [("20GB", 20e9), ("1.5 TiB", 1.5 * 2**40), ("7b", 7), ("400mb", 4e8)]
)
def test_sizes(text, size):
    assert units.parse_size(text, "--x") == size
    assert units.parse_size(f"{text}/s", "--x", per_second=True) == size
    assert units.parse_size(text, "--x", per_second=True) == size


def test_shares():
    assert units.parse_share("80%", "--x") == 0.8
    assert units.parse_share("1", "--x") == 1.0
    assert units.parse_share("0", "--x") == 0.0


@pytest.mark.parametrize(
    ("parse", "text", "fact"),
    [
        (units.parse_duration, "5", "the unit is missing"),
        (units.parse_duration, "5 parsec", "the unit 'parsec' is unknown"),
        (units.parse_duration, "-5y", "must be more than 0"),
        (units.parse_duration, "0s", "must be more than 0"),
        (units.parse_duration, "soon", "not a number"),
        (units.parse_duration, "", "not a number"),
        (units.parse_duration, "1e999y", "must be more than 0"),
        (units.parse_size, "20", "the unit is missing"),
        (units.parse_size, "20GB/s", "the unit 'GB/s' is unknown"),
        (units.parse_size, "0GB", "must be more than 0"),
        (units.parse_size, "-1GB", "must be more than 0"),
        (units.parse_share, "120%", "not a share"),
        (units.parse_share, "-0.1", "not a share"),
        (units.parse_share, "0.5x", "the unit 'x' is unknown"),
        (units.parse_share, "nan", "not a number"),
    ],
)
def test_a_refusal_has_two_lines_the_fact_and_what_is_valid(parse, text, fact):
    with pytest.raises(holdfast.SettingsError) as refused:
        parse(text, "--some-option")
    first, second = str(refused.value).splitlines()
    assert first.startswith("--some-option ")
    assert fact in first
    assert second.startswith("Valid: ")


@given(st.floats(0.01, 1e6))
def test_what_is_proposed_can_be_written_as_a_setting_and_is_near(seconds):
    proposed = units.round_interval(seconds)
    text = units.as_setting(proposed)
    assert parse_seconds(text, "checkpoint_every") == proposed
    if 1 <= seconds <= 86_400:
        assert proposed / 1.5 <= seconds <= proposed * 1.5


@given(st.floats(1.0, 1e5), st.floats(1.0, 1e5))
def test_no_interval_is_proposed_in_which_the_disk_cannot_follow(seconds, least):
    assert units.round_interval(seconds, least) >= least


@given(st.floats(1e-4, 1e12))
def test_a_time_is_shown_in_few_letters(seconds):
    number, unit = units.shown(seconds).split()
    assert len(number) <= 8
    assert unit in ("ms", "s", "min", "h", "d", "years")


def test_a_time_is_shown_as_a_person_would_say_it():
    shown = [units.shown(s) for s in (60, 90, 3600, 5400, 86_400, 400 * 86_400, float("inf"))]
    assert shown == ["1 min", "90 s", "1 h", "90 min", "1 d", "400 d", "never"]
