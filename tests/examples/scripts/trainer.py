"""A script of transformers' Trainer."""

import torch
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    Trainer,
    TrainingArguments,
)

config = BertConfig(
    vocab_size=40,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=16,
    max_position_embeddings=12,
)
texts = [{"input_ids": torch.randint(40, (8,)), "labels": i % 2} for i in range(48)]
trainer = Trainer(
    model=BertForSequenceClassification(config),
    args=TrainingArguments(
        output_dir="run", per_device_train_batch_size=12, num_train_epochs=1, report_to=[]
    ),
    train_dataset=texts,
)
trainer.train()
