"""A run that is stopped and goes on from Opacus' checkpoint."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))


def private():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    engine = PrivacyEngine(accountant="rdp")
    loader = DataLoader(data, batch_size=16)
    return engine, *engine.make_private(
        module=model,
        optimizer=optimizer,
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )


def train(model, optimizer, loader):
    for x, y in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()


engine, model, optimizer, loader = private()
train(model, optimizer, loader)
engine.save_checkpoint(path="run.pt", module=model, optimizer=optimizer)
engine, model, optimizer, loader = private()
engine.load_checkpoint(path="run.pt", module=model, optimizer=optimizer)
train(model, optimizer, loader)
epsilon = engine.get_epsilon(delta=1e-5)
