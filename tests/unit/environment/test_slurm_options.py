"""Options as sbatch 22.05 was seen to take them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._environment.slurm.options import (
    WarningSignal,
    batch_options,
    options_end,
    parse_signal,
    parse_time_limit,
    read_options,
)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("USR2@60", WarningSignal("USR2", 60, False)),
        ("SIGusr2@10", WarningSignal("USR2", 10, False)),
        ("12@60", WarningSignal("USR2", 60, False)),
        ("B:USR2@60", WarningSignal("USR2", 60, True)),
        ("BR:10@5", WarningSignal("USR1", 5, True)),
        ("RB:USR1@5", WarningSignal("USR1", 5, True)),
        ("R:USR1@5", WarningSignal("USR1", 5, False)),
        ("USR2", WarningSignal("USR2", 60, False)),
        ("99@10", WarningSignal("99", 10, False)),
    ],
)
def test_a_signal_is_read(text, expected):
    assert parse_signal(text) == expected


@pytest.mark.parametrize(
    "text", ["", "B:@60", "USR2@99999", "WINCH@10", "USR9@1", "B:R:USR2@60", "USR2@1m", "RTMIN@3"]
)
def test_what_sbatch_refuses_is_no_signal(text):
    assert parse_signal(text) is None


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("10", 600), ("10:30", 630), ("1:2:3", 3723), ("1-2", 93600), ("1-2:3", 93780),
        ("1-2:3:4", 93784), ("0", None), ("infinite", None), ("UNLIMITED", None), ("1h", None),
        ("90s", None), ("", None), ("-1", None),
    ],
)  # fmt: skip
def test_a_time_limit_is_read(text, seconds):
    assert parse_time_limit(text) == seconds


def test_only_the_lines_before_the_first_command_count():
    text = (
        "#!/bin/bash\n#SBATCH -o out -t 9 # comment\n\n# SBATCH --mem=1\n##SBATCH --mem=2\n"
        "  #SBATCH --mem=3\n#SBATCH\t--comment='a b' --open-mode append\n#SBATCH --nice -Jx\n"
        "set -e\n#SBATCH --requeue\n"
    )
    assert batch_options(text) == {
        "output": "out",
        "time": "9",
        "comment": "a b",
        "open-mode": "append",
        "nice": "",
        "job-name": "x",
    }
    assert text[options_end(text) :].startswith("set -e")


def test_the_last_of_two_holds_and_a_beginning_is_enough_for_a_name():
    assert batch_options("#SBATCH --out=a\n#SBATCH --output b\n") == {"output": "b"}


def test_a_mixed_job_has_the_options_of_its_first_part():
    text = "#!/bin/sh\n#SBATCH -n1\n#SBATCH hetjob\n#SBATCH -n8\ntrue\n"
    assert batch_options(text) == {"ntasks": "1"}
    assert [option.component for option in read_options(text)] == [0, 1]


def test_places_are_those_of_the_text():
    text = "#!/bin/sh\n#SBATCH --signal=B:USR2@60 -t '5'\n"
    signal, time = read_options(text)
    assert text[signal.start : signal.end] == "--signal=B:USR2@60"
    assert text[signal.value_start : signal.end] == "B:USR2@60"
    assert text[time.value_start : time.end] == "'5'"
    assert (signal.line, time.value) == (2, "5")


@given(st.text(max_size=60))
def test_any_text_is_read_without_a_fault(text):
    parse_signal(text)
    parse_time_limit(text)
    for option in read_options(f"#!/bin/bash\n#SBATCH {text}\n#SBATCH --{text}\n"):
        assert 0 <= option.start <= option.value_start <= option.end
