"""Mixed precision: autocast and a GradScaler, in fp16 on a GPU and in bf16 without one.

    python examples/mixed_precision.py

Press Ctrl-C, or kill it with -9 from another terminal (`holdfast status runs` shows its pid), and
start the same command again: the scaler goes on with its scale and its count of good steps,
without which a resumed run would scale, and round, in another way. The last line has a hash of
the weights, the same however often you interrupt it.
"""

import argparse
import hashlib
import os

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast


def make_data(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Points in six dimensions, and a smooth function of them with some noise."""
    points = torch.rand(size, 6) * 2 - 1
    waves = torch.sin(3 * points[:, :2]) * torch.cos(2 * points[:, 2:4])
    values = waves.sum(dim=1) + points[:, 4:].square().sum(dim=1)
    return points, values[:, None] + torch.randn(size, 1) * 0.05


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/mixed-precision", help="where the run is kept")
    parser.add_argument("--epochs", type=int, default=12)
    parser.add_argument("--size", type=int, default=12_000, help="points in an epoch")
    options = parser.parse_args()

    # A GPU gives the same bits twice only if it is asked to; cuBLAS reads this when it starts.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    torch.set_num_threads(1)  # quicker for so small a model
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    half = torch.float16 if device == "cuda" else torch.bfloat16
    data = TensorDataset(*make_data(options.size))
    loader = DataLoader(data, batch_size=100, shuffle=True, pin_memory=device == "cuda")
    test_points, test_values = (part.to(device) for part in make_data(2000))
    model = nn.Sequential(
        *(nn.Linear(6, 128), nn.GELU(), nn.Dropout(0.02)),
        *(nn.Linear(128, 128), nn.GELU(), nn.Linear(128, 1)),
    ).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=options.epochs)
    scaler = torch.amp.GradScaler(device, growth_interval=200)

    def error_of(points: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        with torch.autocast(device, dtype=half):
            return nn.functional.mse_loss(model(points).float(), values)

    @torch.no_grad()
    def evaluate() -> float:
        model.eval()
        error = error_of(test_points, test_values).item()
        model.train()
        return error

    settings = holdfast.Settings(keep_best="min:val_error")
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "scaler": scaler}
    with holdfast.Run(options.folder, settings=settings, **state) as run:
        for _ in run.epochs(options.epochs):
            for points, values in run.batches(loader):
                error = error_of(points.to(device), values.to(device))
                optimizer.zero_grad()
                scaler.scale(error).backward()
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                run.log(error=error)
            scheduler.step()
            with run.phase("eval"):
                run.log(val_error=evaluate(), scale=scaler.get_scale())

    weights = nn.utils.parameters_to_vector(model.parameters()).detach().cpu()
    digest = hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]
    scale = scaler.get_scale()
    print(f"error {evaluate():.4f} on {device} in {half}, scale {scale:.0f}, weights {digest}")


if __name__ == "__main__":
    main()
