"""Proofs that nobody made, one of every verdict."""

from __future__ import annotations

from typing import Any

from holdfast._tools.prove.proof import (
    DIFFERS,
    EQUAL,
    UNREPEATABLE,
    UNTRIED,
    Difference,
    Interruption,
    Proof,
)

COMMAND = ("python", "train.py", "--name", "a run")
LOST = Difference(
    item="learning rate of group 0 of the optimizer",
    step=42,
    after=2,
    expected="0.05",
    found="0.1",
    cause="scheduler-not-saved",
    why="The scheduler begins anew after each start.",
    remedy="Save and load scheduler.state_dict().",
    rank=1,
    at_the_end="weights differ by up to 3%",
)
UNSEEDED = Difference(
    item="weights of net.0.weight",
    step=1,
    after=None,
    expected="0.12",
    found="-0.3",
    cause="unseeded-generator",
    why="The generators begin at another place each time.",
    remedy="Call torch.manual_seed first.",
)


def interruptions() -> list[Interruption]:
    """One of each kind of end."""
    return [
        Interruption(1, "TERM", "start", 0, -15, 0),
        Interruption(2, "KILL", "update", 41, -9, 40),
        Interruption(3, "STOP", "phase", 50, None, None),
        Interruption(4, "INT", "boundary", 60, 130, 60),
        Interruption(5, "USR2", "commit", 70, -12, 70),
    ]


def make(verdict: str, **values: Any) -> Proof:
    """A proof, with what all of them have."""
    common: dict[str, Any] = {"steps": 100, "lives": 5, "seconds": 12.4}
    common |= {"interruptions": interruptions(), "compared": ["12 tensors of weights", "the loss"]}
    return Proof(COMMAND, 7, 5, ("TERM", "KILL"), verdict, **{**common, **values})


PROOFS = {
    EQUAL: make(EQUAL, notes=["The budget was used up after 5 of 20."]),
    DIFFERS: make(DIFFERS, difference=LOST, ranks=2, kept="kept"),
    UNREPEATABLE: make(UNREPEATABLE, unrepeatable=UNSEEDED, within_spread=True),
    UNTRIED: make(
        UNTRIED,
        interruptions=[],
        trouble="the script, undisturbed, ends with exit status 1.\nRun it yourself first.",
    ),
}
