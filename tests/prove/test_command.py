"""`holdfast prove` around the prover: what it prints where, what it leaves with, how ranks grow."""

from __future__ import annotations

import json
import sys
import types

import pytest

from holdfast._errors import ProofError
from holdfast._tools.prove.fixture import prove_command, words_of
from holdfast._tools.prove.proof import DIFFERS, EQUAL, EXIT_STATUSES, Proof
from tests.prove.made_up import LOST, PROOFS, interruptions
from tests.prove.test_options import call


@pytest.fixture
def prover(monkeypatch, tmp_path):
    """A prover that knows the outcome; what it was asked is kept."""
    monkeypatch.chdir(tmp_path)
    asked = []
    outcomes = {}

    def prove(wishes, watcher):
        asked.append(wishes)
        watcher.stage("undisturbed", 0, wishes.kills)
        watcher.interruption(interruptions()[0])
        outcome = outcomes.get(wishes.ranks, PROOFS[EQUAL])
        if isinstance(outcome, BaseException):
            raise outcome
        return outcome

    module = types.SimpleNamespace(prove=prove, asked=asked, outcomes=outcomes)
    monkeypatch.setitem(sys.modules, "holdfast._tools.prove.prove", module)
    return module


@pytest.mark.parametrize("verdict", PROOFS)
def test_the_status_is_the_verdicts(verdict, prover, monkeypatch, capsys):
    prover.outcomes[None] = PROOFS[verdict]
    assert call(monkeypatch, "-- python3 train.py") == EXIT_STATUSES[verdict]
    out, err = capsys.readouterr()
    assert err.startswith(
        "holdfast: undisturbed\nholdfast: interruption 1 of 20: TERM, start-up, at step 0\n"
    )
    assert "holdfast:" not in out


@pytest.mark.parametrize("verdict", PROOFS)
def test_json_is_all_that_standard_output_has(verdict, prover, monkeypatch, capsys):
    prover.outcomes[None] = PROOFS[verdict]
    assert call(monkeypatch, "--json -- python3 train.py") == EXIT_STATUSES[verdict]
    out, err = capsys.readouterr()
    assert json.loads(out)["verdict"] == verdict
    assert all(line.startswith("holdfast: ") for line in err.splitlines())


def test_what_stands_behind_the_command_is_the_scripts(prover, monkeypatch):
    assert call(monkeypatch, "--kills 3 python3 train.py --kills 5 --json -h") == 0
    assert prover.asked[0].command == ("python3", "train.py", "--kills", "5", "--json", "-h")
    assert prover.asked[0].kills == 3


def test_ranks_grow_until_one_is_not_equal(prover, monkeypatch, capsys):
    prover.outcomes[2] = Proof(("x",), 7, 5, ("INT",), DIFFERS, difference=LOST, ranks=2)
    text = "--ranks 4,2,1 --keep kept --json -- python3 a.py {ranks}"
    assert call(monkeypatch, text) == 1
    assert [wishes.ranks for wishes in prover.asked] == [1, 2]
    assert [wishes.command[-1] for wishes in prover.asked] == ["1", "2"]
    assert [wishes.keep.name for wishes in prover.asked] == ["ranks-1", "ranks-2"]
    proofs = json.loads(capsys.readouterr().out)["proofs"]
    assert [proof["verdict"] for proof in proofs] == [EQUAL, DIFFERS]


def test_each_of_the_ranks_is_told_as_it_comes(prover, monkeypatch, capsys):
    assert call(monkeypatch, "--ranks 1,2 --budget 60 -- python3 a.py {ranks}") == 0
    assert capsys.readouterr().out.count("1 rank:\n") == 2  # made-up proofs are all of one
    first, second = (wishes.budget_seconds for wishes in prover.asked)
    assert first == pytest.approx(30, abs=1)
    assert second == pytest.approx(60, abs=1)  # what the first has left over


def test_ctrl_c_is_one_sentence_and_status_130(prover, monkeypatch, capsys):
    prover.outcomes[None] = KeyboardInterrupt()
    assert call(monkeypatch, "-- python3 train.py") == 130
    out, err = capsys.readouterr()
    assert out == ""
    said = "Interrupted: the proof is given up, and nothing of it is left."
    assert err.splitlines()[-1] == said


def test_the_fixture_returns_a_proof_that_is_equal(prover):
    assert prove_command("python", "train.py", kills=5, budget="1min") is PROOFS[EQUAL]
    (wishes,) = prover.asked
    assert wishes.command == (sys.executable, "train.py")
    assert (wishes.kills, wishes.budget_seconds) == (5, 60.0)


@pytest.mark.parametrize("verdict", [verdict for verdict in PROOFS if verdict != EQUAL])
def test_the_fixture_fails_with_the_report(verdict, prover):
    prover.outcomes[None] = PROOFS[verdict]
    with pytest.raises(ProofError, match=r"NOT equal|Not repeatable|Nothing is proved") as failed:
        prove_command(["python", "train.py"])
    assert failed.value.proof is PROOFS[verdict]


def test_a_command_is_words_a_list_or_a_line():
    expected = (sys.executable, "train.py", "a b")
    assert words_of("python", "train.py", "a b") == expected
    assert words_of(["python3", "train.py", "a b"]) == expected
    assert words_of("python train.py 'a b'") == expected
    assert words_of("torchrun", "train.py") == ("torchrun", "train.py")
