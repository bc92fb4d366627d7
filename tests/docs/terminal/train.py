import os

import torch
from torch.utils.data import DataLoader, TensorDataset

import parloom
from parloom.zoo.mlp import build

torch.manual_seed(0)
model, _ = build()  # the model that was planned, built alike on every rank
data = TensorDataset(torch.randn(256, 256), torch.randint(0, 16, (256,)))

trainer = parloom.parallelize(
    model,
    os.environ["PARLOOM_PLAN"],  # set by `parloom run`
    optimizer=lambda named: torch.optim.AdamW(named, lr=1e-3),
    clip_norm=1.0,
)
for x, labels in DataLoader(data, batch_size=64, drop_last=True):  # the global batch, on every rank
    trainer.step({"x": x, "labels": labels})
trainer.save("runs/mlp/checkpoint")  # loads under any other plan of the model
