"""Wrong input is found before anything starts: what it is, then what to write, and status 2."""

from __future__ import annotations

import shlex
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast._errors import HoldfastError
from holdfast._tools.cli import main
from holdfast._tools.prove.proof import (
    SIGNALS,
    make_request,
    parse_budget,
    parse_ranks,
    parse_signals,
    set_ranks,
)

COMMAND = "-- python3 train.py"
TORCHRUN = ("torchrun", "--nnodes=1", "--nproc-per-node=8", "train.py")

# What is written, the first line that comes back, and the beginning of the second.
WRONG = [
    ("--kills many", "--kills many is not a whole number.", "Valid: 1 or more."),
    ("--kills 0", "--kills 0 is too few.", "Valid: 1 or more."),
    ("--kills=-3", "--kills -3 is not a whole number.", "Valid: 1 or more."),
    ("--seed 1.5", "--seed 1.5 is not a whole number.", "Valid: 0 or more."),
    ("--only 0", "--only 0 is too few.", "Valid: 1 or more."),
    ("--kills 5 --only 6", "--only 6: there are 5 interruptions.", "Valid: 1 to 5; or give"),
    (
        "--signals INT,WINCH",
        "--signals INT,WINCH: WINCH cannot be used to interrupt.",
        "Valid: some of INT,TERM,",
    ),
    ("--signals ,", "--signals ,: no signal is named.", "Valid: some of INT,TERM,"),
    ("--budget soon", "--budget='soon' is not a duration.", "Write a number and a unit"),
    ("--budget nan", "--budget='nan' is not a duration.", "Write a number and a unit"),
    ("--budget 0", "--budget 0 leaves no time.", "Valid: for example 2min, 90s or 1h."),
    ("--ranks two", "--ranks two is not a whole number.", "Valid: 1 or more."),
    ("--ranks 0,1", "--ranks 0 is too few.", "Valid: 1 or more."),
    ("--ranks ,", "--ranks names no number.", "Valid: for example --ranks 1,2,4."),
    (
        "--ranks 1,2",
        "--ranks cannot change the number of ranks of this command.",
        "Write {ranks} where the number belongs, for example: holdfast prove --ranks 1,2,4 -- ",
    ),
    (
        "--resume-cmd 'python3 \"train.py'",
        "--resume-cmd 'python3 \"train.py': no closing quotation.",
        "Close every quote",
    ),
    ("--resume-cmd ''", "--resume-cmd is empty.", "Write the command, for example: holdfast"),
    (
        "--resume-cmd no-such-program",
        "no-such-program: there is no such program.",
        "Write the command as you would in a shell",
    ),
    (
        "--compare /etc/passwd",
        "--compare /etc/passwd: is not a file below the current folder.",
        "Each run has a copy of that folder: name a file that the script writes there",
    ),
    (
        "--compare ../out.pt",
        "--compare ../out.pt: is not a file below the current folder.",
        "Each run has a copy",
    ),
    ("--reference nowhere", "nowhere: there is no run here.", "A run folder is what holdfast.Run"),
    ("--keep full", "full: exists already.", "Choose a folder that does not exist yet."),
    ("-- train.py", "train.py: there is no such program.", "Write the command as you would in"),
    (
        "-- torchrun --nproc-per-node={ranks} train.py",
        "The command has {ranks} in it, and no number to put there.",
        "Give one, or some to grow by: --ranks 1,2,4",
    ),
]


@pytest.fixture
def where(tmp_path, monkeypatch):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "something").touch()
    (tmp_path / "train.py").touch()
    monkeypatch.chdir(tmp_path)
    return tmp_path


def call(monkeypatch, text):
    """The command line in this process; returns its status."""
    monkeypatch.setattr(sys, "argv", ["holdfast", "prove", *shlex.split(text)])
    with pytest.raises(SystemExit) as left:
        main()
    return left.value.code


@pytest.mark.parametrize(("text", "what", "remedy"), WRONG, ids=[each[0] for each in WRONG])
def test_wrong_input_is_two_lines_and_status_2(text, what, remedy, where, monkeypatch, capsys):
    status = call(monkeypatch, text if "--" in text.split() else f"{text} {COMMAND}")
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert (first, second[: len(remedy)]) == (what, remedy)
    assert (status, out) == (2, "")


@pytest.mark.parametrize("text", ["", "--kills 3", "--", "--nonsense -- python3 x.py"])
def test_without_a_command_it_says_how_it_is_used(text, where, monkeypatch, capsys):
    assert call(monkeypatch, text) == 2
    assert capsys.readouterr().err.startswith("Usage: holdfast prove [OPTIONS] -- COMMAND...\n")


def test_without_anything_the_wishes_are_the_usual_ones(where):
    wishes = make_request(["python3", "train.py"])
    assert wishes.command == ("python3", "train.py")
    assert (wishes.kills, wishes.signals, wishes.seed) == (20, SIGNALS, 7)
    assert (wishes.only, wishes.budget_seconds, wishes.ranks) == (None, None, None)
    assert wishes.folder == where


def test_all_options_become_wishes(where):
    (where / "script").touch()
    wishes = make_request(
        ["./script", "{dir}"],
        kills="5",
        signals="SIGINT,kill,int",
        seed="0",
        only="5",
        budget="1.5 h",
        resume_cmd="./script --resume 'my run'",
        compare=["out.pt", str(where / "more" / "a.safetensors"), "{dir}/b.pt"],
        keep="kept",
    )
    assert (wishes.kills, wishes.signals, wishes.seed) == (5, ("INT", "KILL"), 0)
    assert (wishes.only, wishes.budget_seconds) == (5, 5400.0)
    assert wishes.resume_command == ("./script", "--resume", "my run")
    assert wishes.compare == ("out.pt", "more/a.safetensors", "{dir}/b.pt")
    assert wishes.keep == where / "kept"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("2min", 120), ("90s", 90), ("1h", 3600), ("45", 45), ("0.5", 0.5), (30, 30), (2.5, 2.5)],
)
def test_a_budget_is_a_duration_or_seconds(text, seconds):
    assert parse_budget(text) == seconds


def test_ranks_grow_whatever_their_order():
    assert parse_ranks("4,1, 2,2") == (1, 2, 4)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("torchrun --nproc-per-node=8 a.py", "torchrun --nproc-per-node=3 a.py"),
        ("torchrun --nproc_per_node 8 a.py", "torchrun --nproc_per_node 3 a.py"),
        ("torchrun --nproc-per-node gpu a.py", "torchrun --nproc-per-node 3 a.py"),
        ("srun -n {ranks} a.py --world={ranks}", "srun -n 3 a.py --world=3"),
    ],
)
def test_the_number_of_ranks_goes_where_it_belongs(before, after):
    assert set_ranks(tuple(before.split()), 3) == tuple(after.split())


def test_a_command_that_resumes_may_know_its_ranks_by_itself(where):
    wishes = make_request(["python3", "{ranks}"], resume_cmd="python3 a.py --resume", ranks=2)
    assert wishes.resume_command == ("python3", "a.py", "--resume")
    assert wishes.command == ("python3", "2")


def test_a_folder_that_is_none_is_refused(where):
    with pytest.raises(HoldfastError, match=r"train\.py: is not a folder\.\nName the one"):
        make_request(["python3"], folder="train.py")
    with pytest.raises(HoldfastError, match=r"There is no command to prove\.\nFor example"):
        make_request([])


@given(st.text())
def test_whatever_is_written_as_a_budget_is_seconds_or_two_lines(text):
    refused = None
    try:
        assert parse_budget(text) > 0
    except HoldfastError as error:
        refused = str(error)
    assert refused is None or len(refused.split("\n")) == 2


@given(st.lists(st.sampled_from(SIGNALS), min_size=1))
def test_signals_keep_their_order_and_come_once(names):
    assert parse_signals(",".join(names)) == tuple(dict.fromkeys(names))
