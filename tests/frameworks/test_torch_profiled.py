"""Whatever torch has for looking into a training is seen while it looks, and not afterwards."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.support import environment

_TRAINING = """
import json, sys, time
import torch
from torch.utils.tensorboard import SummaryWriter
import holdfast
from holdfast._run.driver import session_of
from holdfast._run.saving import pulse
from holdfast._store.memory.control import COMPILES, DISTURBANCES, DISTURBED, PULSE_NS

pulse._BEAT_SECONDS = 0.05
seen = {}

def train(name):
    words, beats, last = session_of(run).boundary.words, 0, 0
    until = time.monotonic() + 20
    while beats < 4 and time.monotonic() < until:
        model(torch.ones(2, 4)).sum().backward()
        time.sleep(0.06)
        run.boundary()
        beats, last = beats + (words[PULSE_NS] != last), words[PULSE_NS]
    seen[name] = [each for n, each in enumerate(DISTURBANCES) if words[DISTURBED] >> n & 1]
    seen[name + ": compiles"] = words[COMPILES]

model = torch.nn.Linear(4, 4)
with holdfast.Run(sys.argv[1], model=model) as run:
    train("plain")
    with torch.profiler.profile():
        train("profile")
    train("after it")
    with torch.autograd.profiler.profile():
        train("autograd's own")
    with torch.autograd.detect_anomaly(check_nan=False):
        train("anomaly")
    writer = SummaryWriter(sys.argv[1] + ".board")
    writer.add_scalar("loss", 1.0, 1)
    train("writer")
    writer.close()
    train("after the writer")
    compiled = torch.compile(lambda x: x * 2, backend="eager", dynamic=False)
    for size in (1, 2, 3):
        compiled(torch.ones(size, 5))
    train("compiled")
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    compiled(torch.ones(4, 5))
    train("compiled anew")
print(json.dumps(seen))
"""


@pytest.mark.nightly
def test_tools_of_torch_are_seen_while_they_work(folder):
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _TRAINING, str(folder)],
        env=environment(OMP_NUM_THREADS="1"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["plain"] == []
    assert seen["profile"] == ["torch.profiler"]
    assert seen["after it"] == []
    assert seen["autograd's own"] == ["torch.profiler"]
    assert seen["anomaly"] == ["anomaly detection"]
    assert seen["writer"] == ["a TensorBoard writer"]
    assert seen["after the writer"] == []
    assert seen["plain: compiles"] == 0
    assert seen["compiled: compiles"] == 3
    assert seen["compiled anew: compiles"] == 4
