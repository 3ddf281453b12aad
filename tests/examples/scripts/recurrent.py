"""As char-lstm-classification.py: one of Opacus' own layers, padded texts."""

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader


class Characters(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(20, 8)
        self.lstm = DPLSTM(8, 8, batch_first=True)
        self.out_layer = nn.Linear(8, 3)

    def forward(self, x):
        x, _ = self.lstm(self.embedding(x))
        return self.out_layer(x[:, -1, :])


def padded_collate(batch):
    return pad_sequence([x for x, _ in batch], batch_first=True), torch.tensor(
        [y for _, y in batch]
    )


names = [(torch.randint(20, (int(n),)), int(n) % 3) for n in torch.randint(3, 9, (48,))]
model = Characters()
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.SGD(model.parameters(), lr=2.0),
    data_loader=DataLoader(names, batch_size=12, collate_fn=padded_collate),
    noise_multiplier=1.0,
    max_grad_norm=1.5,
)
for x, y in loader:
    optimizer.zero_grad()
    nn.CrossEntropyLoss()(model(x), y).backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(delta=1e-5)
