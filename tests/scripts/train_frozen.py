"""A frozen base of 12 MB under a small trained part; from a step on, the base is trained too.

Step 100 waits for a file.
"""

from __future__ import annotations

import hashlib
import json
import sys
import time
from pathlib import Path

import torch
from light import wait_for

import holdfast

folder, total, unfreeze_at, sleep, settings, gate = sys.argv[1:]
torch.manual_seed(7)
torch.set_num_threads(1)
model = torch.nn.ParameterDict(
    {
        "base": torch.nn.Parameter(torch.randn(3_000_000), requires_grad=False),
        "adapter": torch.nn.Parameter(torch.randn(1000)),
    }
)
run = holdfast.Run(folder, settings=holdfast.Settings(**json.loads(settings)), model=model)
with run:
    print("ready", run.step, run.resumed_from, run.attempt, flush=True)
    for step in run.steps(int(total)):
        with torch.no_grad():
            model["adapter"].mul_(0.999).add_(torch.randn(1000))
            if step >= int(unfreeze_at):
                model["base"][step::1000] *= 0.5
        if step == 100:
            wait_for(Path(gate))
        time.sleep(float(sleep))
digest = hashlib.sha256()
for parameter in model.values():
    digest.update(parameter.detach().numpy().tobytes())
print("hash", digest.hexdigest(), flush=True)
