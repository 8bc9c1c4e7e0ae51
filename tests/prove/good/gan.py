"""Two models with an optimizer each; a step is one of both, and nothing is saved in between."""

import hashlib
import math
import os
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

STEPS, NOISE = 30, 4


class Gan:
    def __init__(self):
        self.maker = nn.Sequential(nn.Linear(NOISE, 24), nn.LeakyReLU(0.2), nn.Linear(24, 2))
        self.critic = nn.Sequential(nn.Linear(2, 24), nn.LeakyReLU(0.2), nn.Linear(24, 1))
        self.maker_optimizer = torch.optim.Adam(self.maker.parameters(), lr=2e-3, betas=(0.5, 0.9))
        self.critic_optimizer = torch.optim.Adam(self.critic.parameters(), lr=2e-3)
        self.rounds = 0

    def parts(self):
        return [self.maker, self.critic, self.maker_optimizer, self.critic_optimizer]

    def play(self):
        angle = torch.rand(32) * (2 * math.pi)
        real = torch.stack([angle.cos(), angle.sin()], dim=1)
        fake = self.maker(torch.randn(32, NOISE))
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        self.critic_optimizer.zero_grad()
        loss.backward()
        self.critic_optimizer.step()
        loss = F.softplus(-self.critic(fake)).mean()
        self.maker_optimizer.zero_grad()
        loss.backward()
        self.maker_optimizer.step()
        self.rounds += 1


torch.set_num_threads(1)
torch.manual_seed(66)
gan = Gan()
if Path("gan.pt").exists():
    saved = torch.load("gan.pt")
    for part, state in zip(gan.parts(), saved["parts"], strict=True):
        part.load_state_dict(state)
    torch.set_rng_state(saved["random"])
    gan.rounds = saved["rounds"]
while gan.rounds < STEPS:
    gan.play()
    if gan.rounds % 4 == 0 or gan.rounds == STEPS:
        saved = {"rounds": gan.rounds, "random": torch.get_rng_state()}
        saved["parts"] = [part.state_dict() for part in gan.parts()]
        torch.save(saved, "gan.tmp")
        os.replace("gan.tmp", "gan.pt")
both = [*gan.maker.parameters(), *gan.critic.parameters()]
weights = nn.utils.parameters_to_vector(both).detach()
print("weights", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16])
