"""What the registry does not know is refused with a way on, or spelled as what it does know."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from parloom.capture import capture
from parloom.codegen.source import _returns_tuple
from parloom.errors import CaptureError
from parloom.ir.factors import factorize
from parloom.ir.graph import Function, Graph, Input, Node, Ref, TensorSpec, Value
from parloom.ir.ops import OPS
from tests.capture.models import assert_equal

Map = Callable[[Tensor], Tensor]


class Layer(nn.Module):
    def __init__(self, function: Map) -> None:
        super().__init__()
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x)


class Net(nn.Module):
    def __init__(self, function: Map) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.inner = Layer(function)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(self.a(x)).sum()
        return loss


class Recurrent(nn.Module):
    def __init__(self, kind: Callable[..., nn.Module], dropout: float) -> None:
        super().__init__()
        self.layers = kind(4, 4, 2, dropout=dropout)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layers(x)[0].sum()
        return loss


def batch() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"x": torch.randn(4, 4)}


def captured(function: Map) -> Graph:
    model, example = Net(function), batch()
    graph = capture(model, example)
    assert_equal(graph, model, example)
    factorize(graph)
    return graph


def ops(graph: Graph) -> list[str]:
    return [node.op for _, node in graph.unfolded()]


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x * torch.empty_like(x).cauchy_(),
        lambda x: x * torch.binomial(torch.ones(4, 4), torch.full((4, 4), 0.5)),
        lambda x: F.rrelu(x, training=True),
        lambda x: x[:, torch.multinomial(x.softmax(-1), 2, True)[0]],
    ],
)
def test_random_operators_are_refused_at_capture(function: Map) -> None:
    where = r"cannot capture Net\.inner \(test_registry\.py:\d+\): operator \w+ draws random"
    with pytest.raises(CaptureError, match=where + ".*use torch.nn.functional.dropout"):
        capture(Net(function), batch())


@pytest.mark.filterwarnings("ignore:The tensor attributes self.model.layers")
def test_recurrent_layers_are_random_between_layers_only() -> None:
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        with pytest.raises(CaptureError, match="draws random numbers"):
            capture(Recurrent(kind, 0.5), batch())
        capture(Recurrent(kind, 0.0), batch())
        capture(Recurrent(kind, 0.5).eval(), batch(), training=False)


def test_fills_have_no_pattern() -> None:
    def fill(x: Tensor) -> Tensor:
        made = torch.zeros_like(x) + torch.ones_like(x) + torch.full_like(x, 2)
        return x * (made + x.new_full((4,), 3) + x.new_empty(4).fill_(4))

    found = ops(captured(fill))
    assert {"zeros", "ones", "full"} <= set(found)
    assert not {"zeros_like", "ones_like", "full_like", "new_full", "new_empty", "fill"} & {*found}


def test_bits_as_another_dtype() -> None:
    graph = captured(lambda x: x * (x.detach().view(torch.int32) > 0))
    assert "view_dtype" in ops(graph)


@pytest.mark.parametrize("equation", ["ij,jk", "...j,jk->...k", "ii->i"])
def test_any_einsum(equation: str) -> None:
    graph = captured(lambda x: torch.einsum(equation, [x, x][: equation.count(",") + 1]))
    assert all(node.op in OPS for _, node in graph.unfolded())


def test_a_list_of_one_tensor_is_unpacked() -> None:
    graph = captured(lambda x: x + torch.split(x, 4)[0])
    (node,) = (node for _, node in graph.unfolded() if node.op == "split")
    assert _returns_tuple(node)
    for op in ("tensor_split", "broadcast_tensors", "chunk", "batch_norm"):
        value = Value("y", TensorSpec((4,), "float32"))
        assert _returns_tuple(Node(op, (Ref("x"),), (), (value,))), op


def test_a_rule_that_does_not_fit_is_refused_with_module_and_line() -> None:
    source, mask = TensorSpec((4,), "float32"), TensorSpec((4,), "bool")
    inputs = (
        Input(Value("x", source), "parameter", "x", True),
        Input(Value("m", mask), "batch", "m"),
    )
    chosen = Value("y", TensorSpec((2,), "float32"))
    body = (
        Node("index", (Ref("x"), (Ref("m"),)), (), (chosen,), "block.1", 0, "net.py:7"),
        Node("sum", (Ref("y"),), (), (Value("loss", TensorSpec((), "float32")),)),
    )
    main = Function("main", tuple(i.value for i in inputs), body, ("loss",))
    with pytest.raises(CaptureError, match=r"module 'block\.1' \(net\.py:7\).*mask") as err:
        factorize(Graph("Net", (), main, inputs, "loss"))
    assert err.value.exit_code == 4
