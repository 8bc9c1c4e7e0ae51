"""What a proof can be asked: another command to resume, one interruption alone, a budget."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast._tools.prove.proof import Planned
from holdfast._tools.prove.report import plain_text

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


@pytest.mark.nightly
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


NEEDS_ITS_FILE = """
import os, sys, torch
torch.set_num_threads(1)
torch.manual_seed(2)
data = torch.randn(24, 6, 4)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
first = 0
if "--resume" in sys.argv:
    kept = torch.load("last.pt")
    net.load_state_dict(kept["net"])
    first = kept["step"]
for step in range(first, 24):
    loss = (net(data[step]) - 1).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    if step % 6 == 5:
        torch.save({"net": net.state_dict(), "step": step + 1}, "tmp.pt")
        os.replace("tmp.pt", "last.pt")
"""


def test_the_command_to_resume_waits_for_something_that_was_saved(prove):
    plan = (Planned(1, "KILL", "gradient", 0.1, 0.0), Planned(2, "KILL", "gradient", 0.5, 0.0))
    resume = ("python", "train.py", "--resume")
    proof = prove(NEEDS_ITS_FILE, kills=2, plan=plan, resume_command=resume)
    assert proof.verdict == "equal", plain_text(proof)
    first, second = (each.resumed_at for each in proof.interruptions)
    assert first == 0
    assert second in (6, 12)


LEAVES_WITH_STATUS_0 = """
import os, signal, sys, numpy, torch
torch.set_num_threads(1)
torch.manual_seed(2)
data = torch.randn(24, 6, 4)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
first, asked = 0, []
signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
if os.path.exists("last.npz"):
    kept = numpy.load("last.npz")
    net.load_state_dict({n: torch.from_numpy(kept[n]) for n in ("weight", "bias")})
    first = int(kept["step"])
for step in range(first, 24):
    loss = (net(data[step]) - 1).square().mean()
    opt.zero_grad(); loss.backward(); opt.step()
    if step % 6 == 5:
        arrays = {n: v.detach().numpy() for n, v in net.state_dict().items()}
        numpy.savez("tmp.npz", step=step + 1, **arrays)
        os.replace("tmp.npz", "last.npz")
    if asked:
        sys.exit(0)
torch.save(net.state_dict(), "result.pt")
"""


def test_an_unfinished_end_with_status_0_is_noted_and_an_own_way_to_resume_is_seen(prove):
    plan = (Planned(1, "TERM", "gradient", 0.7, 0.0),)
    proof = prove(LEAVES_WITH_STATUS_0, kills=1, plan=plan)
    assert proof.verdict == "equal", plain_text(proof)
    assert not any("loads nothing" in note for note in proof.notes), plain_text(proof)
    assert any("status 0 though it was not complete" in note for note in proof.notes)


LEAVES_ITS_LOOP = """
import torch, holdfast
torch.set_num_threads(1)
torch.manual_seed(2)
data = torch.randn(24, 6, 4)
net = torch.nn.Linear(4, 1)
opt = torch.optim.SGD(net.parameters(), lr=0.1)
with holdfast.Run("runs/a", model=net, optimizer=opt) as run:
    for batch in run.batches(data):
        if run.step == 12:
            LEAVE
        loss = (net(batch) - 1).square().mean()
        opt.zero_grad(); loss.backward(); opt.step()
"""


@pytest.mark.parametrize("leave", ["break", "run.finish(); break"])
def test_a_run_that_is_left_unfinished_is_noted_with_the_line_to_write(prove, leave):
    plan = (Planned(1, "KILL", "gradient", 0.5, 0.0),)
    proof = prove(LEAVES_ITS_LOOP.replace("LEAVE", leave), kills=1, plan=plan)
    assert proof.verdict == "equal", plain_text(proof)
    noted = [note for note in proof.notes if "run.finish()" in note]
    if leave == "break":
        assert len(noted) == 1, plain_text(proof)
        assert noted[0].startswith("runs/a is left at step 12 and is not finished")
    else:
        assert noted == []


def test_a_file_that_the_script_has_just_written_is_no_finished_training(prove):
    proof = prove('import torch\ntorch.save({"a": 1}, "x.pt")\ntorch.load("x.pt")\n', kills=1)
    assert proof.trouble is not None
    assert "no update by torch or Keras" in proof.trouble
