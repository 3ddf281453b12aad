"""A loop over a model of transformers, whose forward returns the loss."""

import torch
from opacus import PrivacyEngine
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification

config = BertConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=12,
)
model = BertForSequenceClassification(config)
for name, parameter in model.named_parameters():
    parameter.requires_grad = "classifier" in name or "encoder.layer.0.output" in name
model.train()
texts = [{"input_ids": torch.randint(40, (8,)), "labels": i % 2} for i in range(48)]
privacy_engine = PrivacyEngine(accountant="rdp")
model, optimizer, loader = privacy_engine.make_private(
    module=model,
    optimizer=torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-3),
    data_loader=DataLoader(texts, batch_size=12),
    noise_multiplier=1.0,
    max_grad_norm=0.1,
)
for batch in loader:
    optimizer.zero_grad()
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
epsilon = privacy_engine.get_epsilon(delta=1e-5)
