"""Parts of sums are added where that sends less, and where pins say so."""

import pytest
import torch
from torch import Tensor, nn

from parloom.capture import capture
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.pcg import Movement
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.contexts import SimulatedPlan
from parloom.search.optimize import search
from parloom.search.pinned import resolve
from parloom.search.pins import parse_pin
from parloom.search.request import Request

torch.set_num_threads(1)
CLUSTER = load_cluster("2xV100")


class Towers(nn.Module):
    """Three towers, added by Python's `sum`."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.ModuleList(nn.Linear(1024, 4096) for _ in range(3))
        self.down = nn.ModuleList(nn.Linear(4096, 1024) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        made = (down(torch.relu(up(x))) for up, down in zip(self.up, self.down, strict=True))
        loss: Tensor = torch.tanh(torch.as_tensor(sum(made))).square().mean()
        return loss


def towers() -> tuple[nn.Module, dict[str, Tensor]]:
    torch.manual_seed(0)
    return Towers(), {"x": torch.randn(8, 1024)}


def plan(*pins: str, forbidden: str = "") -> SimulatedPlan:
    graph = capture(*towers())
    asked = [parse_pin(pin) for pin in ("mesh=2", *pins)]
    asked += [parse_pin(forbidden, forbidden=True)] if forbidden else []
    pinned = resolve(asked, graph, factorize(graph))
    memory = CLUSTER.device.memory_bytes
    request = Request(graph, DataSheets(CLUSTER), Optimizer("sgd", 0), memory, pinned=pinned)
    return search(request, Decisions(), lambda text: None).proposals[0]


def added(found: SimulatedPlan) -> int:
    """How many operators make parts of sums of parts."""
    return sum("sums" in dict(node.factors) for node in found.decisions.nodes)


def reductions(found: SimulatedPlan) -> int:
    items = lower(capture(*towers()), found.decisions).main.body
    return sum(isinstance(item, Movement) and "reduce" in item.step.row for item in items)


def test_one_sum_over_devices_is_left_of_three() -> None:
    found, other = plan(), plan(forbidden=":add#*=sums")
    assert (added(found), reductions(found)) == (3, 1)
    assert (added(other), reductions(other)) == (0, 3)
    assert found.step_ps < other.step_ps


def test_pins_say_where() -> None:
    (node,) = (n for n in plan(":add#2=sums:x").decisions.nodes if n.key == ":add#2")
    assert dict(node.factors) == {"sums": ("x",)}
    assert added(plan(":add#*=replicated")) == 0
    with pytest.raises(InputError, match=r"no factor or dim sums: :tanh#0 has d0 \(8\)"):
        plan(":tanh#0=sums:x")
