"""As the tutorial on fast gradient clipping: Opacus' mode "ghost", four values."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
model = nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, criterion, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.Adam(model.parameters()),
    criterion=nn.CrossEntropyLoss(reduction="mean"),
    data_loader=DataLoader(data, batch_size=16),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
    grad_sample_mode="ghost",
)
for x, y in loader:
    loss = criterion(model(x), y)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
epsilon = privacy_engine.get_epsilon(1e-5)
