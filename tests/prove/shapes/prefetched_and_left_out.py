"""As nanoGPT, with the generator restored first: the batch drawn in advance is left out."""

import os
from pathlib import Path

import torch
from torch import nn

STEPS, EVERY, CHECKPOINT = 40, 5, "ckpt.pt"

torch.set_num_threads(1)
torch.manual_seed(1337)
text = torch.randint(0, 20, (400,))


def get_batch():
    at = torch.randint(len(text) - 9, (6,))
    return torch.stack([text[i : i + 8] for i in at]), torch.stack(
        [text[i + 1 : i + 9] for i in at]
    )


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 8), nn.Linear(8, 20)

    def forward(self, idx, targets):
        logits = self.head(self.embed(idx))
        return logits, nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


model = Model()
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
iter_num = 0
saved = torch.load(CHECKPOINT) if Path(CHECKPOINT).exists() else None
if saved is not None:
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    iter_num = saved["iter_num"]
    torch.set_rng_state(saved["random"])

X, Y = get_batch()
local_iter_num = 0
while iter_num < STEPS:
    if iter_num % EVERY == 0 and local_iter_num > 0:
        state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
        state |= {"iter_num": iter_num, "random": torch.get_rng_state()}
        torch.save(state, "ckpt.tmp")
        os.replace("ckpt.tmp", CHECKPOINT)
    logits, loss = model(X, Y)
    X, Y = get_batch()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    iter_num += 1
    local_iter_num += 1
