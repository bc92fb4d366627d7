"""Bounds hold for layouts that a form has and the graph of all forms has not."""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom import api

torch.set_num_threads(1)
CLUSTER = """\
name: slow4
device: {name: core, memory: 2GiB, memory_bandwidth: 5GB/s, rates: {fp32: 1GFLOP/s}}
backend: gloo
levels:
  - {name: network, size: 4, bandwidth: 30MB/s, latency: 3us}
"""


class Beside(nn.Module):
    """Attention beside a feed-forward layer: merged, their products are not cut by heads."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.qkv, self.out = nn.Linear(64, 192, bias=False), nn.Linear(64, 64, bias=False)
        self.up, self.down = nn.Linear(64, 256, bias=False), nn.Linear(256, 64, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(x)
        q, k, v = (t.unflatten(-1, (4, -1)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        heads = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        loss: Tensor = (self.out(heads) + self.down(F.gelu(self.up(x)))).square().mean()
        return loss


def beside() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Beside(), {"x": torch.randn(4, 8, 64)}


def test_the_form_with_the_best_plan_is_in_the_bound(tmp_path: Path) -> None:
    (tmp_path / "slow4.yaml").write_text(CLUSTER, encoding="utf-8")
    captured = api.capture(f"{__file__}:beside", optimizer="sgd")
    plan = api.search(captured, cluster=str(tmp_path / "slow4.yaml"), pin=["mesh=4"], devices=4)
    assert not [line for line in plan.notes if "below its bound" in line]
    assert plan.solver_gap is not None
    (heads,) = (n for n in plan.decisions.nodes if "scaled_dot_product" in n.key)
    assert "d1" in dict(heads.factors), "over heads: else the graph of all forms has it, too"
