"""As the tutorial on image classifiers: a target, a fixed model, batches in parts."""

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

data = TensorDataset(torch.randn(48, 3, 6, 6), torch.randint(4, (48,)))
model = nn.Sequential(
    nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 4 * 4, 4)
)
if ModuleValidator.validate(model, strict=False):
    model = ModuleValidator.fix(model)
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=torch.optim.RMSprop(model.parameters(), lr=1e-3),
    data_loader=DataLoader(data, batch_size=12),
    epochs=1,
    target_epsilon=8.0,
    target_delta=1e-5,
    max_grad_norm=1.2,
)
print(f"Using sigma={optimizer.noise_multiplier} and C={1.2}")
model.train()
with BatchMemoryManager(
    data_loader=train_loader, max_physical_batch_size=4, optimizer=optimizer
) as loader:
    for images, target in loader:
        optimizer.zero_grad()
        output = model(images)
        loss = nn.CrossEntropyLoss()(output, target)
        loss.backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(1e-5)
