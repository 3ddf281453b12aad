"""As Opacus' dcgan: a private discriminator sees both halves of a step, and trains a generator."""

import torch
from opacus import PrivacyEngine
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

nz = 5
generator = nn.Sequential(
    nn.ConvTranspose2d(nz, 8, 4, bias=False),
    nn.GroupNorm(4, 8),
    nn.ReLU(True),
    nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False),
    nn.Tanh(),
)
discriminator = nn.Sequential(
    nn.Conv2d(1, 6, 4, 2, 1, bias=False),
    nn.LeakyReLU(0.2),
    nn.Conv2d(6, 8, 4, bias=False),
    nn.Flatten(),
    nn.Linear(8, 1),
    nn.Sigmoid(),
    nn.Flatten(0),
)
criterion = nn.BCELoss()
privacy_engine = PrivacyEngine(accountant="rdp")
discriminator, optimizer_d, loader = privacy_engine.make_private(
    module=discriminator,
    optimizer=optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
    data_loader=DataLoader(TensorDataset(torch.randn(40, 1, 8, 8)), batch_size=12),
    noise_multiplier=1.0,
    max_grad_norm=1.0,
)
optimizer_g = optim.SGD(generator.parameters(), lr=0.1)
for (real,) in loader:
    optimizer_d.zero_grad(set_to_none=True)
    count = real.size(0)
    loss_real = criterion(discriminator(real), torch.full((count,), 1.0))
    fake = generator(torch.randn(count, nz, 1, 1))
    loss_fake = criterion(discriminator(fake.detach()), torch.full((count,), 0.0))
    loss = loss_real + loss_fake
    loss.backward()
    optimizer_d.step()
    optimizer_d.zero_grad(set_to_none=True)
    optimizer_g.zero_grad()
    loss_g = criterion(discriminator(fake), torch.full((count,), 1.0))
    loss_g.backward()
    optimizer_g.step()
    print(f"{loss.item():.3f} {loss_g.item():.3f}")
model = nn.ModuleList([discriminator, generator])
epsilon = privacy_engine.get_epsilon(delta=1e-3)
