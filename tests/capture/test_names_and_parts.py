"""Losses that are modules, lazy modules, and names that are no Python."""

import json

import pytest
import torch
from torch import Tensor, nn

from parloom.capture import capture
from parloom.errors import InputError


class Weighted(nn.Module):
    """A loss with a buffer."""

    w: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("w", torch.arange(1.0, 9.0))

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return (output.square() * self.w).mean()


class Learned(nn.Module):
    """A loss with weights."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 1)

    def forward(self, output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        loss: Tensor = self.head(output).square().mean()
        return loss


class Keyed(nn.Module):
    """Modules and parameters by keys."""

    def __init__(self, *keys: str) -> None:
        super().__init__()
        self.parts = nn.ModuleDict({key: nn.Linear(8, 8) for key in keys})
        self.scales = nn.ParameterDict({key: nn.Parameter(torch.ones(8)) for key in keys})

    def forward(self, input: Tensor) -> Tensor:
        for key, part in self.parts.items():
            input = part(input).relu() * self.scales[key]
        return input.square().mean()


BATCH = {"input": torch.randn(4, 8)}


def test_buffers_of_a_loss_are_constants() -> None:
    graph = capture(nn.Linear(8, 8), BATCH, loss=Weighted())
    constants = [i for i in graph.inputs if i.kind == "constant"]
    assert [i.data for i in constants] == [tuple(float(n) for n in range(1, 9))]
    weighted = nn.CrossEntropyLoss(weight=torch.ones(8))
    labels = {"labels": torch.zeros(4, dtype=torch.int64)}
    capture(nn.Linear(8, 8), BATCH | labels, loss=lambda o, b: weighted(o, b["labels"]))


def test_weights_of_a_loss_are_refused_unless_frozen() -> None:
    with pytest.raises(InputError, match=r"Learned has weights of its own \(head.weight, head.bia"):
        capture(nn.Linear(8, 8), BATCH, loss=Learned())
    capture(nn.Linear(8, 8), BATCH, loss=Learned().requires_grad_(False))


@pytest.mark.parametrize("kind", [nn.LazyLinear, nn.LazyBatchNorm1d])
def test_a_lazy_module_is_named(kind: type[nn.Module]) -> None:
    lazy = kind(8) if kind is nn.LazyLinear else kind()
    model = nn.Sequential(nn.Linear(8, 8), lazy)
    with pytest.raises(InputError, match=r"Sequential\.1 is a Lazy.*call the model once"):
        capture(model, BATCH)
    model(BATCH["input"])
    capture(model, BATCH, loss=lambda output, batch: output.square().mean())


@pytest.mark.parametrize(
    "keys",
    [("class", "for", "if"), ("a b", "a-b"), ("a'b", 'c"d'), ("é", "日本"), ("1", "self", "a/b:c")],
)
def test_any_key_is_a_name(keys: tuple[str, ...]) -> None:
    graph = capture(Keyed(*keys), BATCH)
    names = {i.target for i in graph.inputs if i.kind == "parameter"}
    assert {f"parts.{key}.weight" for key in keys} <= names, json.dumps(sorted(names))


@pytest.mark.parametrize("name", [3, "a.b", ""])
def test_a_name_that_torch_would_not_take_is_told(name: object) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    model[0]._parameters[name] = nn.Parameter(torch.ones(8))  # type: ignore[index]
    with pytest.raises(InputError, match=r"a Linear has a part under the name"):
        capture(model, BATCH)
