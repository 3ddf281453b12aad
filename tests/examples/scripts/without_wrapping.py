"""The model stays what it is: wrap_model=False."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
privacy_engine = PrivacyEngine(accountant="gdp")
hooks, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.AdamW(model.parameters()),
    data_loader=DataLoader(data, batch_size=16),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    wrap_model=False,
)
for x, y in loader:
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(x), y).backward()
    optimizer.step()
hooks.cleanup()
model.eval()
epsilon = privacy_engine.get_epsilon(delta=1e-5)
