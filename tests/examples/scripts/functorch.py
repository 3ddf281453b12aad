"""Opacus' mode "functorch", with a target; batches in parts."""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 6), torch.randn(64, 1))
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9),
    data_loader=DataLoader(data, batch_size=16),
    epochs=1,
    target_epsilon=10.0,
    target_delta=1e-5,
    max_grad_norm=1.0,
    grad_sample_mode="functorch",
)
with BatchMemoryManager(
    data_loader=train_loader, max_physical_batch_size=8, optimizer=optimizer
) as loader:
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-5)
