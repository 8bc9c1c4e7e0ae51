"""A GAN: two models, two optimizers, and a ring of eight clouds of points to imitate.

    python examples/gan.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: both models, both optimizers and the noise go on where they were. A
step counts when both have stepped: a kill between the two takes the whole step back. The last
line has a hash of both models' weights, the same however often you interrupt it.
"""

import argparse
import hashlib
import math
from itertools import pairwise

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast

CLOUDS, SPREAD, NOISE = 8, 0.05, 8


def make_ring(points: int) -> torch.Tensor:
    angle = torch.randint(CLOUDS, (points,)) * (2 * math.pi / CLOUDS)
    centres = torch.stack([angle.cos(), angle.sin()], dim=1)
    return centres + torch.randn(points, 2) * SPREAD


def layers(*widths: int) -> nn.Sequential:
    parts = [part for a, b in pairwise(widths) for part in (nn.Linear(a, b), nn.LeakyReLU(0.2))]
    return nn.Sequential(*parts[:-1])


@torch.no_grad()
def evaluate(generator: nn.Module) -> tuple[int, float]:
    """The clouds that it has found, and the share of its points that lie in one."""
    points = generator(torch.randn(2000, NOISE))
    turns = torch.atan2(points[:, 1], points[:, 0]) * (CLOUDS / (2 * math.pi))
    nearest = turns.round() * (2 * math.pi / CLOUDS)
    away = (points - torch.stack([nearest.cos(), nearest.sin()], dim=1)).norm(dim=1)
    inside = away < 4 * SPREAD
    found = (turns[inside].round().long() % CLOUDS).bincount(minlength=CLOUDS) > 20
    return int(found.sum()), inside.float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/gan", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=30)
    parser.add_argument("--size", type=int, default=20_000, help="points in an epoch")
    options = parser.parse_args()

    torch.set_num_threads(1)  # quicker for such small models
    torch.manual_seed(0)
    loader = DataLoader(TensorDataset(make_ring(options.size)), batch_size=200, shuffle=True)
    generator, critic = layers(NOISE, 64, 64, 2), layers(2, 64, 64, 1)
    generator_optimizer = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    critic_optimizer = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    run = holdfast.Run(
        options.folder,
        generator=generator,
        critic=critic,
        generator_optimizer=generator_optimizer,
        critic_optimizer=critic_optimizer,
    )
    with run:
        for _ in run.epochs(options.epochs):
            for (real,) in run.batches(loader):
                fake = generator(torch.randn(len(real), NOISE))
                of_real, of_fake = critic(real), critic(fake.detach())
                critic_loss = F.softplus(-of_real).mean() + F.softplus(of_fake).mean()
                critic_optimizer.zero_grad()
                critic_loss.backward()
                critic_optimizer.step()

                generator_loss = F.softplus(-critic(fake)).mean()
                generator_optimizer.zero_grad()
                generator_loss.backward()
                generator_optimizer.step()
                run.log(critic_loss=critic_loss, generator_loss=generator_loss)
            with run.phase("eval"):
                found, inside = evaluate(generator)
                run.log(clouds=found, inside=inside)

    torch.manual_seed(1)
    found, inside = evaluate(generator)
    both = [*generator.parameters(), *critic.parameters()]
    weights = nn.utils.parameters_to_vector(both).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"{found} of {CLOUDS} clouds, {inside:.0%} of the points in one, weights {digest}")


if __name__ == "__main__":
    main()
