"""As mnist_lightning.py: the engine is the module's own."""

import lightning as L
import torch
from opacus import PrivacyEngine
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.layers = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        self.privacy_engine = PrivacyEngine(accountant="rdp")

    def setup(self, stage):
        data = TensorDataset(torch.randn(64, 6), torch.randint(3, (64,)))
        self.layers, self.private, self.loader = self.privacy_engine.make_private(
            module=self.layers,
            optimizer=torch.optim.SGD(self.layers.parameters(), lr=0.1),
            data_loader=DataLoader(data, batch_size=16),
            noise_multiplier=1.0,
            max_grad_norm=1.0,
        )

    def train_dataloader(self):
        return self.loader

    def configure_optimizers(self):
        return None

    def training_step(self, batch, batch_idx):
        x, y = batch
        self.private.zero_grad()
        loss = nn.functional.cross_entropy(self.layers(x), y)
        self.manual_backward(loss)
        self.private.step()


model = Classifier()
L.Trainer(
    max_epochs=1,
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
).fit(model)
epsilon = model.privacy_engine.get_epsilon(delta=1e-5)
