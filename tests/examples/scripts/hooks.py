"""As mnist.py of Opacus: the default mode, three values."""

import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(64, 1, 8, 8), torch.randint(10, (64,)))
model = nn.Sequential(
    nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(4 * 3 * 3, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
privacy_engine = PrivacyEngine(secure_mode=False, accountant="rdp")
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=DataLoader(data, batch_size=16, shuffle=True),
    noise_multiplier=1.1,
    max_grad_norm=1.0,
)
criterion = nn.CrossEntropyLoss()
for _ in range(2):
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        loss.backward()
        optimizer.step()
    epsilon = privacy_engine.accountant.get_epsilon(delta=1e-5)
    print(f"Loss: {loss.item():.4f}, (ε = {epsilon:.2f}, δ = 1e-5)")
torch.save(model.state_dict(), "hooks.pt")
model.load_state_dict(torch.load("hooks.pt"))
