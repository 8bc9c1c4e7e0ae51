"""Forgotten: of two optimizers only one is among the keywords of the run."""

import hashlib

import torch
from torch import nn

import holdfast


class Autoencoder:
    def __init__(self):
        self.encoder = nn.Sequential(nn.Linear(12, 16), nn.ReLU(), nn.Linear(16, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 16), nn.ReLU(), nn.Linear(16, 12))
        self.encoder_optimizer = torch.optim.Adam(self.encoder.parameters(), lr=2e-3)
        self.decoder_optimizer = torch.optim.Adam(self.decoder.parameters(), lr=1e-2)

    def learn(self, points):
        error = nn.functional.mse_loss(self.decoder(self.encoder(points)), points)
        self.encoder_optimizer.zero_grad()
        self.decoder_optimizer.zero_grad()
        error.backward()
        self.encoder_optimizer.step()
        self.decoder_optimizer.step()
        return error


torch.set_num_threads(1)
torch.manual_seed(3)
both = Autoencoder()
run = holdfast.Run(
    "runs/two",
    encoder=both.encoder,
    decoder=both.decoder,
    encoder_optimizer=both.encoder_optimizer,
)
with run:
    for _ in run.steps(40):
        run.log(error=both.learn(torch.randn(20, 2) @ torch.eye(2, 12)))

digest = hashlib.sha256()
for weight in [*both.encoder.parameters(), *both.decoder.parameters()]:
    digest.update(weight.detach().numpy().tobytes())
print("weights", digest.hexdigest()[:16])
