"""A training as one writes it down: an interruption loses all of it."""

import hashlib

import torch

torch.manual_seed(0)
torch.set_num_threads(1)
data = torch.utils.data.TensorDataset(torch.randn(6400, 64), torch.randint(10, (6400,)))
loader = torch.utils.data.DataLoader(data, batch_size=32, shuffle=True)
model = torch.nn.Sequential(
    torch.nn.Linear(64, 512), torch.nn.ReLU(), torch.nn.Dropout(), torch.nn.Linear(512, 10)
)
optimizer = torch.optim.AdamW(model.parameters())

for _ in range(10):
    for inputs, labels in loader:
        loss = torch.nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

weights = torch.cat([parameter.detach().flatten() for parameter in model.parameters()])
print("sha256 of the weights:", hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:24])
