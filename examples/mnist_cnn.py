"""A CNN learns digits, with all that an ordinary training has: shuffling, two workers, random
augmentation, a scheduler, an evaluation after each epoch, and the best checkpoint kept.

    python examples/mnist_cnn.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: it goes on with the next batch of the same epoch. However often you
interrupt it, it ends with the same hash of the weights.
"""

import argparse
import hashlib

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

import holdfast

# Digits as a pocket calculator draws them: seven strokes in an image of 28 by 28.
STROKES = {
    **{"a": np.s_[4:6, 9:19], "g": np.s_[13:15, 9:19], "d": np.s_[22:24, 9:19]},
    **{"f": np.s_[4:14, 9:11], "b": np.s_[4:14, 17:19]},
    **{"e": np.s_[14:24, 9:11], "c": np.s_[14:24, 17:19]},
}
DIGITS = ["abcdef", "bc", "abdeg", "abcdg", "bcfg", "acdfg", "acdefg", "abc", "abcdefg", "abcdfg"]


class Digits(Dataset):
    """Each digit moved, faded and made noisy, in another way each time it is asked for."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.drawn = torch.zeros(10, 28, 28)
        for digit, names in enumerate(DIGITS):
            for name in names:
                self.drawn[digit][STROKES[name]] = 1.0

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        digit = index % 10
        moved = torch.roll(self.drawn[digit], torch.randint(-5, 6, (2,)).tolist(), (0, 1))
        return (moved * (0.4 + 0.6 * torch.rand(())) + 0.3 * torch.randn(28, 28))[None], digit


@torch.no_grad()
def evaluate(model: nn.Module, loader: DataLoader) -> float:
    model.eval()
    right = sum((model(x).argmax(1) == y).sum().item() for x, y in loader)
    model.train()
    return right / len(loader.dataset)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/mnist-cnn", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--size", type=int, default=4000, help="images in an epoch")
    options = parser.parse_args()

    torch.set_num_threads(1)  # quicker for so small a model, and the workers want a core too
    torch.manual_seed(0)
    test_loader = DataLoader([Digits(1000)[i] for i in range(1000)], batch_size=250)
    train_loader = DataLoader(Digits(options.size), batch_size=50, shuffle=True, num_workers=2)
    model = nn.Sequential(
        *(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(8, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Flatten(), nn.Dropout(0.2), nn.Linear(16 * 7 * 7, 10)),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    settings = holdfast.Settings(keep_best="max:accuracy")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler}
    with holdfast.Run(options.folder, settings=settings, **state) as run:
        for _ in run.epochs(options.epochs):
            for images, labels in run.batches(train_loader):
                loss = F.cross_entropy(model(images), labels)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                run.log(loss=loss)
            scheduler.step()
            with run.phase("eval"):
                run.log(accuracy=evaluate(model, test_loader))

    weights = nn.utils.parameters_to_vector(model.parameters()).detach()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    print(f"accuracy {evaluate(model, test_loader):.1%}, weights {digest}")


if __name__ == "__main__":
    main()
