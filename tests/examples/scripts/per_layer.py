"""As cifar10.py: a bound for each parameter, schedulers of the noise and of the bound."""

import torch
from opacus import PrivacyEngine
from opacus.schedulers import ExponentialNoise
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
n_layers = len([p for p in model.parameters() if p.requires_grad])
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
    data_loader=DataLoader(data, batch_size=16),
    noise_multiplier=1.5,
    max_grad_norm=[1.0 / n_layers**0.5] * n_layers,
    clipping="per_layer",
)
scheduler = ExponentialNoise(optimizer, gamma=0.99)
for _ in range(2):
    for x, y in loader:
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    scheduler.step()
epsilon = privacy_engine.accountant.get_epsilon(delta=1e-5)
