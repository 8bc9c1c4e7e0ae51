"""Forgotten: that a kill can come amid a save, which here writes over the only checkpoint."""

import argparse
import hashlib
from pathlib import Path

import torch
from torch import nn


class Words(nn.Module):
    def __init__(self, words, width):
        super().__init__()
        self.table = nn.Embedding(words, width)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, 3)

    def forward(self, sentences):
        return self.out(self.drop(self.table(sentences).mean(dim=1)))


def run(steps, every, path):
    model = Words(words=3000, width=24)
    sentences = torch.randint(3000, (steps, 10, 7))
    labels = sentences.sum(dim=2) % 3
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    done = 0
    if path.exists():
        state = torch.load(path)
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["rng"])
        done = state["done"]
    for step in range(done, steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(sentences[step]), labels[step])
        loss.backward()
        optimizer.step()
        if (step + 1) % every == 0 or step + 1 == steps:
            state = {
                "model": model.state_dict(),
                "optimizer": optimizer.state_dict(),
                "rng": torch.get_rng_state(),
                "done": step + 1,
            }
            torch.save(state, path)
    return model


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Learns to label sentences.")
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--every", type=int, default=3)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(17)
    trained = run(arguments.steps, arguments.every, Path("words.pt"))
    weights = nn.utils.parameters_to_vector(trained.parameters()).detach().numpy()
    print("weights", hashlib.sha256(weights.tobytes()).hexdigest()[:16])
