"""A proof in plain words, as JSON, and as a page: every verdict."""

from __future__ import annotations

import dataclasses
import json
import re

import pytest

from holdfast._tools.cli.prove import ProgressWatcher, follow, show_proof
from holdfast._tools.prove import report
from holdfast._tools.prove.proof import (
    DIFFERS,
    EQUAL,
    EXIT_STATUSES,
    UNREPEATABLE,
    UNTRIED,
    Interruption,
)
from tests.prove.made_up import LOST, PROOFS, interruptions, make

every_verdict = pytest.mark.parametrize("verdict", PROOFS)


def said(text):
    """Lines that were broken somewhere, as one."""
    return " ".join(text.split())


def test_equal_says_what_was_compared_how_often_and_how_long():
    shown = report.plain_text(PROOFS[EQUAL])
    assert shown.startswith("Equal to the bit: interrupted 5 times and started again")
    assert "12 tensors of weights, the loss" in shown
    assert "100 steps, 5 interruptions, 5 starts, in 12 s (seed 7)" in shown
    assert "The budget was used up after 5 of 20." in shown
    assert "replay" not in shown


def test_a_row_says_where_the_next_start_went_on():
    lived_on, restarted, over, begun = interruptions()[:4]
    for each, status, step in (
        *((lived_on, None, None), (restarted, -9, 7), (over, -9, None), (begun, -9, 0)),
    ):
        each.status, each.resumed_at = status, step
    proof = make(EQUAL, interruptions=[lived_on, restarted, over, begun])
    rows = report.table(proof)[1:]
    assert [row[-1] for row in rows] == ["", "step 7", "the end", "the beginning"]


def test_a_difference_is_named_with_its_cause_its_remedy_and_the_way_to_see_it_again():
    shown = report.plain_text(PROOFS[DIFFERS])
    assert shown.startswith(
        "NOT equal: after interruption 2 (KILL, optimizer's update, at step 41)"
    )
    rows = dict(report.details(PROOFS[DIFFERS]))
    assert rows["first difference"] == LOST.item
    assert (rows["at step"], rows["on rank"]) == ("42", "1")
    assert (rows["expected"], rows["found"]) == ("0.05", "0.1")
    assert rows["at the end"] == "weights differ by up to 3%"
    assert rows["likely cause"] == f"scheduler-not-saved: {LOST.why}"
    assert rows["what to do"] == LOST.remedy
    assert rows["kept in"] == "kept"
    assert "2 ranks" in rows["made"]
    replay = "holdfast prove --seed 7 --kills 5 --signals TERM,KILL --only 2 -- python train.py"
    assert rows["to replay"].startswith(replay)


def test_a_difference_that_came_in_a_later_epoch_says_so():
    proof = make(DIFFERS, difference=dataclasses.replace(LOST, is_in_later_epoch=True))
    assert dict(report.details(proof))["at step"] == "42, of a later epoch than the restart"
    assert report.from_json(json.loads(json.dumps(proof.to_json()))) == proof


def test_a_difference_after_no_interruption_in_particular_is_told_too():
    lost = dataclasses.replace(LOST, after=None, step=None, rank=None, at_the_end=None)
    proof = make(DIFFERS, difference=lost)
    assert report.headline(proof).startswith("NOT equal: after it was interrupted")
    assert {"at step", "on rank", "at the end", "to replay"}.isdisjoint(dict(report.details(proof)))
    gone = make(DIFFERS, difference=LOST, interruptions=[])
    assert "after interruption 2 the script" in report.headline(gone)


@pytest.mark.parametrize(
    ("within", "words"),
    [(True, "no further from"), (False, "further from"), (None, "not compared")],
)
def test_a_script_that_is_not_repeatable_is_compared_within_its_spread(within, words):
    proof = dataclasses.replace(PROOFS[UNREPEATABLE], within_spread=within, difference=LOST)
    assert report.headline(proof).endswith("differ from each other, from step 1 on.")
    rows = report.details(proof)
    assert dict(rows)["interrupted"].startswith(words)
    assert ("likely cause", "unseeded-generator: " + proof.unrepeatable.why) in rows
    # Within the spread, a difference of the interrupted run says nothing.
    assert (("first difference", LOST.item) in rows) == (within is not True)


def test_what_could_not_be_tried_is_its_own_two_lines():
    assert report.plain_text(PROOFS[UNTRIED]).splitlines() == [
        "Nothing is proved: the script, undisturbed, ends with exit status 1.",
        "    Run it yourself first.",
    ]


def test_every_interruption_has_its_row():
    assert report.table(PROOFS[EQUAL])[1:] == [
        ("1", "TERM", "start-up", "0", "SIGTERM", "the beginning"),
        ("2", "KILL", "optimizer's update", "41", "SIGKILL", "step 40"),
        ("3", "STOP", "evaluation", "50", "lived on", ""),
        ("4", "INT", "between two steps", "60", "status 130", "step 60"),
        ("5", "USR2", "saving a checkpoint", "70", "SIGUSR2", "step 70"),
    ]
    odd = Interruption(1, "KILL", "some day", 3, -250, 2)
    assert (report.moment(odd), report.ended_with(odd)) == ("some day", "signal 250")


@every_verdict
def test_json_has_all_of_it_and_comes_back_the_same(verdict):
    tree = json.loads(json.dumps(PROOFS[verdict].to_json()))
    assert tree["exit_status"] == EXIT_STATUSES[verdict]
    assert tree["verdict"] == verdict
    assert (tree["replay"] is not None) == (verdict == DIFFERS)
    tree["of a later version"] = 1
    assert report.from_json(tree) == PROOFS[verdict]


@every_verdict
def test_a_page_of_ci_has_the_verdict_the_details_and_the_table(verdict, tmp_path, capsys):
    proof = PROOFS[verdict]
    (tmp_path / "proof.json").write_text(json.dumps({"proofs": [proof.to_json()] * 2}))
    report.main([str(tmp_path / "proof.json")])
    shown = capsys.readouterr().out
    assert shown == f"{report.markdown(proof)}\n" * 2
    assert f"**{report.headline(proof)}**" in shown
    assert ("| 2 | KILL | optimizer's update | 41 | SIGKILL | step 40 |" in shown) == (
        verdict != UNTRIED
    )
    for label, text in report.details(proof):
        assert f"- {label}: " in shown or f"- {text}" in shown


def test_names_that_a_page_would_take_as_its_own_stay_as_they_are():
    proof = make(DIFFERS, difference=dataclasses.replace(LOST, item="<b>__w__[0]|x"))
    assert r"first difference: \<b\>\_\_w\_\_\[0\]\|x" in report.markdown(proof)


@pytest.mark.parametrize("verdict", [EQUAL, DIFFERS, UNREPEATABLE])
def test_a_pipe_gets_the_table_and_then_the_verdict_without_a_colour(verdict, capsys, monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)  # set for the workers of pytest-xdist
    show_proof(PROOFS[verdict])
    out, err = capsys.readouterr()
    assert err == ""
    assert "\x1b" not in out
    assert re.match(r"no\. +signal +moment +at step +ended with +went on from\n", out)
    rest = out.partition(report.headline(PROOFS[verdict]))[2]
    for label, text in report.details(PROOFS[verdict]):
        assert f"{label} {text}" in said(rest) or f"To replay: {text}" in rest


def test_each_number_of_ranks_has_its_heading(capsys):
    show_proof(PROOFS[DIFFERS], with_ranks=True)
    assert capsys.readouterr().out.startswith("2 ranks:\n")


def test_what_could_not_be_tried_goes_to_standard_error(capsys):
    show_proof(PROOFS[UNTRIED])
    out, err = capsys.readouterr()
    assert out == ""
    assert err == report.plain_text(PROOFS[UNTRIED]) + "\n"


def test_a_log_gets_a_line_for_each_stage_and_interruption(capsys):
    with follow() as watcher:
        watcher.stage("undisturbed", 0, 5)
        watcher.step(1, None)
        watcher.stage("undisturbed", 0, 5)  # said already
        watcher.stage("started again", 1, 5)
        watcher.interruption(interruptions()[1])
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "holdfast: undisturbed",
        "holdfast: started again (1 of 5 interruptions are behind it)",
        "holdfast: interruption 2 of 5: KILL, optimizer's update, at step 41",
    ]


class Told:
    """What a line on a terminal would show, as it changes."""

    def __init__(self):
        self.lines = []

    def update(self, text):
        self.lines.append(text.plain)


def test_a_terminal_gets_one_line_with_the_stage_the_step_and_the_interruption():
    told = Told()
    watcher = ProgressWatcher(told)
    watcher.stage("undisturbed", 0, 5)
    watcher.stage("interrupted", 1, 5)
    watcher.interruption(interruptions()[1])
    watcher._drawn = 0.0  # as if some time had passed
    watcher.step(41, 100)
    watcher.step(42, 100)
    assert told.lines == [
        "undisturbed",
        "interrupted  1 of 5 interruptions",
        "interrupted  interruption 2 of 5: KILL, optimizer's update, at step 41",
        "interrupted  step 41 of 100  interruption 2 of 5: KILL, optimizer's update, at step 41",
    ]


def test_all_that_may_be_the_cause_is_listed_and_very_many_are_counted():
    others = tuple(f"variable n{number}" for number in range(15))
    proof = dataclasses.replace(
        PROOFS[DIFFERS], difference=dataclasses.replace(LOST, others=others)
    )
    shown = report.plain_text(proof)
    assert "differs as well   variable n0, variable n1, " in shown
    assert "variable n11 and 3 more" in shown
