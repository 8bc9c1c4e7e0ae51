"""A training that knows nothing of its end."""

import argparse

import torch
from torch import nn

model = nn.Linear(2, 1)
model.eval()
print(torch.sigmoid(model(torch.ones(2))), argparse.Namespace())
