"""Not repeatable: the data come in the order of a set of strings, which is another each time."""

import hashlib

import torch
from torch import nn

import holdfast

torch.set_num_threads(1)
torch.manual_seed(5)
words = {"ash", "birch", "cedar", "elm", "fir", "hazel", "larch", "maple", "oak", "pine", "yew"}
model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 1))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)

with holdfast.Run("runs/words", model=model, optimizer=optimizer) as run:
    for _ in run.epochs(4):
        for word in run.batches(list(words)):
            letters = torch.tensor([float(ord(letter) - 96) for letter in f"{word:`<8}"]) / 26
            loss = (model(letters) - len(word)).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()

weights = nn.utils.parameters_to_vector(model.parameters()).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
