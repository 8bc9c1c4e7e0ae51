"""What a proof can be asked: another command to resume, one interruption alone, a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._prove.report import plain_text

HERE = Path(__file__).parent
BEST = """
import os, torch
torch.set_num_threads(1)
torch.manual_seed(2)
data = torch.randn(40, 6, 4)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.3)
best, first = float("inf"), 0
if os.path.exists("last.pt"):
    kept = torch.load("last.pt")
    net.load_state_dict(kept["net"])
    first = kept["step"]
    RECALL
for step in range(first, 40):
    loss = (net(data[step]) - data[step].sum(1, keepdim=True)).abs().mean() * (1 + step)
    opt.zero_grad(); loss.backward(); opt.step()
    if loss.item() < best:
        best = loss.item()
        torch.save(net.state_dict(), "best.pt")
    torch.save({"net": net.state_dict(), "step": step + 1, "best": best}, "tmp.pt")
    os.replace("tmp.pt", "last.pt")
"""


def test_another_command_may_resume(prove):
    resume = ("python", "train.py", "--resume", "latest.pt")
    script = HERE / "good" / "resume_option.py"
    proof = prove(script, kills=5, seed=7, resume_command=resume)
    assert proof.verdict == "equal", plain_text(proof)
    assert any(each.resumed_at for each in proof.interruptions)
    assert "--resume-cmd" in proof.more


def test_a_result_that_is_overwritten_by_a_worse_one_is_found_unasked(prove):
    proof = prove(BEST.replace("RECALL", "pass"), kills=6, seed=7)
    assert proof.verdict == "differs", plain_text(proof)
    assert proof.difference is not None
    assert proof.difference.cause == "result-differs"
    assert "best.pt" in proof.difference.item


def test_the_same_script_is_equal_when_it_knows_its_best(prove):
    proof = prove(BEST.replace("RECALL", 'best = kept["best"]'), kills=6, seed=7)
    assert proof.verdict == "equal", plain_text(proof)


def test_one_interruption_can_be_repeated_alone(prove, tmp_path):
    script = HERE / "faults" / "scheduler_not_saved.py"
    whole = prove(script, kills=8, seed=7)
    assert whole.difference is not None
    number = whole.difference.after
    assert f"--only {number}" in str(whole.replay)
    (tmp_path / "project").rename(tmp_path / "first")
    alone = prove(script, kills=8, seed=7, only=number)
    assert [each.number for each in alone.interruptions] == [number]
    again, before = alone.interruptions[0], whole.interruptions[-1]
    assert (again.signal, again.moment) == (before.signal, before.moment)
    assert alone.difference is not None, plain_text(alone)
    assert alone.difference.cause == whole.difference.cause


@pytest.mark.nightly  # twelve seconds of budget pass
def test_a_budget_ends_the_interruptions_and_not_the_comparison(prove):
    proof = prove(HERE / "good" / "plain_loop.py", kills=500, seed=7, budget_seconds=12.0)
    assert proof.verdict == "equal", plain_text(proof)
    assert 0 < len(proof.interruptions) < 500
    assert any("time was up" in note for note in proof.notes)


def test_a_script_that_fails_by_itself_is_not_tried(prove):
    proof = prove("import torch\nraise SystemExit('no data')\n", kills=2)
    assert proof.verdict == "not tried"
    assert proof.exit_status == 2
    assert "exit status 1" in str(proof.trouble)


def test_a_script_that_trains_nothing_is_not_tried(prove):
    proof = prove("import torch\n", kills=2)
    assert proof.verdict == "not tried"
    assert "without a training step" in str(proof.trouble)
