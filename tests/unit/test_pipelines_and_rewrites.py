"""Pipelines of models that rewrites pay for on one device."""

from pathlib import Path

from parloom import api
from parloom.candidates import candidates
from parloom.execute.machine import machine_for
from parloom.ir.factors import factorize
from parloom.search.pinned import resolve
from parloom.search.pins import NO_REWRITE, parse_pin
from parloom.search.request import Request

# One weight for two branches, which are faster on devices of their own than as one product.
BRANCHES = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.low, self.rank = nn.Linear(4, 4, bias=False), nn.Linear(4, 8, bias=False)
        self.one, self.other = nn.Embedding(16, 8), nn.Embedding(16, 8)
        self.head, self.shared = nn.Linear(8, 8, bias=False), nn.Linear(8, 12)
        self.last = nn.Linear(12, 24, bias=False)

    def forward(self, y, ids):
        rows = self.one(ids) + self.other(ids)
        left, right = self.shared(self.rank(self.low(y))), self.shared(rows)
        both = torch.cat([left, right], -1)
        loss = self.head(rows).square().mean() + both.square().mean()
        return loss + self.last(right).square().mean()

def factory():
    batch = {"y": torch.randn(8, 4), "ids": torch.randint(0, 16, (8,))}
    return Net(), batch
"""


def test_rewrites_hide_no_faster_pipeline_of_the_model_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "branches.py"
    path.write_text(BRANCHES)
    captured = api.capture(f"{path}:factory", optimizer="sgd")
    machine, graph = machine_for("1x4xH100", None), captured.graph
    request = Request(graph, machine, captured.optimizer, machine.cluster.device.memory_bytes)
    pins = [parse_pin(NO_REWRITE, forbidden=True)]
    pinned = Request(
        graph, machine, captured.optimizer, request.limit_bytes,
        pinned=resolve(pins, graph, factorize(graph)),
    )  # fmt: skip
    free, plain = (
        min(candidates(own, lambda text: None).found, key=lambda plan: plan.prediction.step_s)
        for own in (request, pinned)
    )
    assert len(plain.decisions.stages) > 1
    assert free.prediction.step_s <= plain.prediction.step_s * (1 + 1e-9)
