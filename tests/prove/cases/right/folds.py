"""One short training per fold, begun anew when cut off; only finished folds are written down."""

import json
import os
from pathlib import Path

import torch
from torch import nn

FOLDS, STEPS = 4, 10
FINISHED = Path("finished.json")

torch.set_num_threads(1)
torch.manual_seed(0)
points = torch.randn(200, 6)
values = points.cos().prod(dim=1, keepdim=True)
errors = json.loads(FINISHED.read_text()) if FINISHED.exists() else {}
for fold in range(FOLDS):
    if str(fold) in errors:
        continue
    torch.manual_seed(fold)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
    others = torch.tensor([row for row in range(200) if row % FOLDS != fold])
    for _ in range(STEPS):
        chosen = others[torch.randint(len(others), (32,))]
        optimizer.zero_grad()
        nn.functional.mse_loss(model(points[chosen]), values[chosen]).backward()
        optimizer.step()
        scheduler.step()
    held_out = slice(fold, None, FOLDS)
    errors[str(fold)] = nn.functional.mse_loss(model(points[held_out]), values[held_out]).item()
    Path("finished.tmp").write_text(json.dumps(errors))
    os.replace("finished.tmp", FINISHED)
print(errors)
