"""Loops like those of Opacus' example scripts and tutorials, with the one change that the migration
page promises: the engine's name, and one more name on the left of ``make_private``.

Each loop is run by Opacus and by this library, on the same drawn data, batches and noise, and must
leave the same parameters. Data sets are drawn; models are small ones of the scripts' families.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from opacus import PrivacyEngine
from opacus.layers import DPGRU, DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from opacus.validators import ModuleValidator
from torch import Tensor, nn, optim
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, TensorDataset

from flash_clipping import FlashPrivacyEngine
from tests.support.opacus_randomness import use_randomness_of_opacus

DELTA = 1e-3


class Migration:
    """The change: how a script's lines with the engine read.

    Args:
        to_flash: whether they are changed.
        takes_criterion: whether the script uses the returned criterion, too.
        options: of the engine.
    """

    def __init__(self, to_flash: bool, takes_criterion: bool = False, **options: Any):
        self.to_flash, self.takes_criterion = to_flash, takes_criterion
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self.engine = (FlashPrivacyEngine if to_flash else PrivacyEngine)(**options)

    def make_private(self, criterion: Any = None, **options: Any) -> Any:
        """Model, optimizer, criterion and loader."""
        name = "make_private_with_epsilon" if "target_epsilon" in options else "make_private"
        make = getattr(self.engine, name)
        if self.to_flash and self.takes_criterion:
            return make(criterion=criterion, **options)
        model, optimizer, loader = make(**options)
        return model, optimizer, criterion, loader


# -- images: mnist.py, cifar10.py, the tutorial on image classifiers -------------------------------


class Digits(nn.Module):
    """Convolutions, pooling, a view into one row a sample."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(1, 4, 5, 2, padding=2), nn.Conv2d(4, 6, 3, 2)
        self.fc1, self.fc2 = nn.Linear(6 * 2 * 2, 16), nn.Linear(16, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.conv1(x)), 2, 1)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2, 1)
        x = x.view(-1, 6 * 2 * 2)
        return self.fc2(F.relu(self.fc1(x)))


def images(channels: int, size: int, count: int = 40) -> TensorDataset:
    return TensorDataset(torch.randn(count, channels, size, size), torch.randint(10, (count,)))


def mnist(migration: Migration) -> nn.Module:
    model = Digits()
    loader = DataLoader(images(1, 16), batch_size=12, num_workers=0)
    model, optimizer, criterion, loader = migration.make_private(
        nn.CrossEntropyLoss(),
        module=model,
        optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    for _ in range(2):
        model.train()
        losses = []
        for data, target in loader:
            optimizer.zero_grad()
            loss = criterion(model(data), target)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        assert migration.engine.accountant.get_epsilon(delta=DELTA) > 0
        model.eval()
        with torch.no_grad():
            model(images(1, 16, 8).tensors[0])
    return model


class Block(nn.Module):
    def __init__(self, inplace: bool) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.relu = nn.ReLU(inplace=inplace)

    def forward(self, x: Tensor) -> Tensor:
        return self.relu(self.norm(self.conv(x)) + x)


def small_resnet(inplace: bool) -> nn.Module:
    stem = [nn.Conv2d(3, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(inplace=inplace)]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 10)]
    return nn.Sequential(*stem, Block(inplace), Block(inplace), *head)


def cifar10(migration: Migration) -> nn.Module:
    """Gradients are cleared after the step; ε and the accuracy are printed inside of the epoch."""
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.AvgPool2d(2, 2), nn.Conv2d(8, 8, 3, padding=1),
        nn.ReLU(), nn.AdaptiveAvgPool2d((1, 1)), nn.Flatten(start_dim=1), nn.Linear(8, 10),
    )  # fmt: skip
    model, optimizer, criterion, loader = migration.make_private(
        nn.CrossEntropyLoss(),
        module=model,
        optimizer=optim.RMSprop(model.parameters(), lr=0.01),
        data_loader=DataLoader(images(3, 8), batch_size=12, num_workers=1, pin_memory=False),
        noise_multiplier=1.5,
        max_grad_norm=[10.0 / 6**0.5] * 6,
        clipping="per_layer",
    )
    model.train()
    for i, (data, target) in enumerate(loader):
        output = model(data)
        loss = criterion(output, target)
        assert len(output.detach().cpu().numpy().argmax(1)) == len(target)
        loss.backward()
        assert loss.item() == loss.item() or not len(target)
        optimizer.step()
        optimizer.zero_grad()
        if i % 2 == 0:
            migration.engine.accountant.get_epsilon(delta=DELTA)
    return model


def image_classifier(migration: Migration) -> nn.Module:
    """A model that Opacus' validator mends, a target ε, physical batches."""
    model = small_resnet(inplace=migration.to_flash)  # Opacus' hooks do not stand it
    assert ModuleValidator.validate(model, strict=False)
    model = ModuleValidator.fix(model)
    assert not ModuleValidator.validate(model, strict=False)
    model, optimizer, criterion, loader = migration.make_private(
        nn.CrossEntropyLoss(),
        module=model,
        optimizer=optim.RMSprop(model.parameters(), lr=1e-3),
        data_loader=DataLoader(images(3, 8), batch_size=20),
        epochs=2,
        target_epsilon=50.0,
        target_delta=DELTA,
        max_grad_norm=1.2,
    )
    assert optimizer.noise_multiplier > 0
    for _ in range(2):
        model.train()
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=7, optimizer=optimizer
        ) as small:
            for data, target in small:
                optimizer.zero_grad()
                loss = criterion(model(data), target)
                loss.item()
                loss.backward()
                optimizer.step()
        assert migration.engine.get_epsilon(DELTA) <= 50.5
    return model


# -- texts: imdb.py, char-lstm-classification.py, the tutorials on names and on BERT ---------------


class Texts(Dataset[Any]):
    """Texts of all lengths."""

    def __init__(self, count: int = 40):
        self.texts = [torch.randint(1, 30, (3 + i % 7,)) for i in range(count)]
        self.labels = torch.randint(3, (count,))

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.texts[index], self.labels[index]


def padded(batch: list[Any]) -> tuple[Tensor, Tensor]:
    x = pad_sequence([text for text, _ in batch], batch_first=True, padding_value=0)
    return x, torch.stack([label for _, label in batch]).long()


class Characters(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 6)
        self.rnn = kind(6, 8, batch_first=True, **options)
        self.out_layer = nn.Linear(16 if options.get("bidirectional") else 8, 3)

    def forward(self, x: Tensor, hidden: Any = None) -> Tensor:
        x, _ = self.rnn(self.embedding(x), hidden)
        return self.out_layer(x[:, -1, :])


def of_texts(model: nn.Module, make: Callable[..., Any], **options: Any) -> Any:
    return make(
        nn.CrossEntropyLoss(),
        module=model,
        data_loader=DataLoader(Texts(), batch_size=12, num_workers=1, collate_fn=padded),
        max_grad_norm=1.5,
        **options,
    )


def char_lstm(migration: Migration, kind: Any = DPLSTM, **options: Any) -> nn.Module:
    """``zero_grad`` behind the step, and ``float(loss)``."""
    model: Any = Characters(kind, **options)
    sgd = torch.optim.SGD(model.parameters(), lr=2.0)
    model, optimizer, criterion, loader = of_texts(
        model, migration.make_private, optimizer=sgd, noise_multiplier=1.0
    )
    for _ in range(2):
        model.train()
        for x, y in loader:
            logits = model(x)
            loss = criterion(logits, y)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert isinstance(float(loss), float)
        model.eval()
        with torch.no_grad():
            model(torch.randint(1, 30, (4, 5))).argmax(-1)
    return model


def char_gru(migration: Migration) -> nn.Module:
    return char_lstm(migration, DPGRU, num_layers=2)


def name_classifier(migration: Migration) -> nn.Module:
    model: Any = Characters(DPLSTM)
    sgd = torch.optim.SGD(model.parameters(), lr=2.0)
    options = {"target_epsilon": 50.0, "target_delta": DELTA, "epochs": 1}
    model, optimizer, criterion, loader = of_texts(
        model, migration.make_private, optimizer=sgd, **options
    )
    for x, y in loader:
        criterion(model(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert migration.engine.get_epsilon(DELTA) <= 50.5
    return model


# -- a generator and a discriminator: dcgan.py -----------------------------------------------------


def dcgan(migration: Migration) -> nn.Module:
    """Two optimizers; the discriminator is private, and runs on both halves of a step."""
    nz, inplace = 5, migration.to_flash  # Opacus' hooks do not stand it
    generator = nn.Sequential(
        nn.ConvTranspose2d(nz, 8, 4, 1, 0, bias=False), nn.GroupNorm(4, 8), nn.ReLU(True),
        nn.ConvTranspose2d(8, 1, 4, 2, 1, bias=False), nn.Tanh(),
    )  # fmt: skip

    class Discriminator(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.main = nn.Sequential(
                nn.Conv2d(1, 6, 4, 2, 1, bias=False), nn.LeakyReLU(0.2, inplace=inplace),
                nn.Conv2d(6, 8, 3, 1, 1, bias=False), nn.GroupNorm(4, 8),
                nn.LeakyReLU(0.2, inplace=inplace),
                nn.Conv2d(8, 1, 4, 1, 0, bias=False), nn.Sigmoid(),
            )  # fmt: skip

        def forward(self, x: Tensor) -> Tensor:
            return self.main(x).view(-1, 1).squeeze(1)

    discriminator: Any = Discriminator()
    discriminator, optimizer_d, criterion, loader = migration.make_private(
        nn.BCELoss(),
        module=discriminator,
        optimizer=optim.Adam(discriminator.parameters(), lr=2e-3, betas=(0.5, 0.999)),
        data_loader=DataLoader(images(1, 8), batch_size=12),
        noise_multiplier=1.0,
        max_grad_norm=1.0,
    )
    optimizer_g = optim.SGD(generator.parameters(), lr=0.1)  # Adam would not see a factor
    for data in loader:
        optimizer_d.zero_grad(set_to_none=True)
        real = data[0]
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
        assert f"{loss.item():.3f} {loss_g.item():.3f}"
        migration.engine.accountant.get_epsilon(delta=DELTA)
    return nn.ModuleList([discriminator, generator])


LOOPS: list[Callable[[Migration], nn.Module]] = [
    mnist, cifar10, image_classifier, char_lstm, char_gru, name_classifier, dcgan,
]  # fmt: skip

#: Other accountants than the one that is there by default, which takes seconds to find a noise.
ACCOUNTANTS = {mnist: "prv", image_classifier: "rdp", name_classifier: "rdp"}


def trained(loop: Callable[[Migration], nn.Module], migration: Migration) -> list[Tensor]:
    torch.manual_seed(0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return [p.detach().clone() for p in loop(migration).parameters()]


@pytest.mark.parametrize(
    ("loop", "takes_criterion"),
    [
        pytest.param(
            loop,
            takes_criterion,
            id=f"{loop.__name__}-{'criterion' if takes_criterion else 'own loss'}",
            marks=[pytest.mark.slow] * (takes_criterion is bool(number % 2)),
        )
        for number, loop in enumerate(LOOPS)
        for takes_criterion in (False, True)
    ],
)
def test_a_loop_of_opacus_trains_the_same_parameters(
    loop: Any, takes_criterion: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_randomness_of_opacus(monkeypatch)
    options = {"accountant": ACCOUNTANTS.get(loop, "gdp")}
    expected = trained(loop, Migration(to_flash=False, **options))
    found = trained(loop, Migration(True, takes_criterion, **options))
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
