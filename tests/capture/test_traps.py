"""What export gets wrong or refuses: regions without gradients, slices written to, branches."""

import re

import pytest
import torch
from torch import Tensor, nn

from parloom.capture import capture
from parloom.errors import CaptureError, InputError
from parloom.execute.reference import evaluate
from parloom.ir.text import parse_graph, print_graph
from tests.capture.models import Perceptron, assert_equal, perceptron


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)


class Trap(nn.Module):
    """A linear layer and what a subclass does with it."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(4))
        self.table = torch.arange(4.0)


class Teacher(Trap):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            target = self.a(h) * 2
            scale = x.mean()
        loss: Tensor = ((h - target) ** 2).mean() * scale
        return loss


class MovingAverage(Trap):
    seen: Tensor

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        with torch.no_grad():
            self.seen.mul_(0.9).add_(h.mean(0), alpha=0.1)
        loss: Tensor = ((h - self.seen) ** 2).mean()
        return loss


class Detached(Trap):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        fixed = self.table + torch.tensor([1.0, 2.0, 3.0, 4.0])
        loss: Tensor = (h * h.detach() + fixed).sum()
        return loss


class Written(Trap):
    def forward(self, x: Tensor) -> Tensor:
        out = torch.zeros(4, 4, dtype=torch.float64)
        out[1:3] = self.a(x)[:1]
        out[0] = 1.0
        return (out * out).sum()


class Mixed(Trap):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.a(x)
        loss: Tensor = self.a(h.float()).sum()
        return loss


class Logits(Trap):
    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.a(x)
        return h


def test_what_forward_does_not_take_is_for_the_loss() -> None:
    batch = {"x": torch.randn(3, 4), "y": torch.randint(4, (3,))}

    def loss(output: Tensor, batch: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(output, batch["y"])

    model = Logits()
    graph = capture(model, batch, loss=loss)
    assert [i.target for i in graph.of_kind("batch")] == ["x", "y"]
    values = {i.value.name: batch[i.target] for i in graph.of_kind("batch")}
    values |= {i.value.name: model.get_parameter(i.target) for i in graph.of_kind("parameter")}
    values |= {i.value.name: model.get_buffer(i.target) for i in graph.of_kind("buffer")}
    found = evaluate(graph, values)["loss"]
    assert found is not None
    assert torch.equal(found, loss(model(batch["x"]), batch))


def test_the_contract_of_a_loss_function_is_named() -> None:
    batch = {"x": torch.randn(3, 4), "y": torch.randint(4, (3,))}
    place = r"cannot capture Logits \(test_traps\.py:\d+\): the loss has shape \(3, 4\)"
    with pytest.raises(CaptureError, match=place + r".*loss\(output, batch\)"):
        capture(Logits(), {"x": batch["x"]})
    with pytest.raises(CaptureError, match=r"called as loss\(output, batch\)") as caught:
        capture(Logits(), batch, loss=nn.CrossEntropyLoss())
    assert "torch.export" not in str(caught.value)


def test_products_of_two_dtypes_are_refused() -> None:
    with pytest.raises(CaptureError, match="linear takes tensors of one dtype, and gets") as caught:
        capture(Twice().double(), {"x": torch.randn(3, 4)})
    text = str(caught.value)
    assert re.match(r"cannot capture Twice\.a \(test_traps\.py:\d+\): ", text)
    assert "float32 (x), float64 (a.weight)" in text
    assert "--dtype" in text


class Checked(Trap):
    """A number of the batch's values that only a check reads."""

    def forward(self, x: Tensor) -> Tensor:
        largest = x.argmax().item()
        torch._check(largest <= 12)  # type: ignore[no-untyped-call]
        loss: Tensor = self.a(x).sum()
        return loss


class Twice(Trap):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.a(self.a(x)).relu().sum()
        return loss


class Hidden(Trap):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        loss: Tensor = (h - h.data).square().sum()
        return loss


KINDS = [Teacher, MovingAverage, Detached, Written, Mixed, Checked, Twice, Hidden]


@pytest.mark.parametrize("kind", KINDS)
def test_traps_are_equal(kind: type[Trap]) -> None:
    model, batch = kind(), {"x": torch.randn(3, 4)}
    graph = capture(model, batch)
    assert_equal(graph, model, batch)
    assert parse_graph(print_graph(graph)) == graph


def test_no_grad_regions_detach_only_what_would_have_a_gradient() -> None:
    graph = capture(Teacher(), {"x": torch.randn(3, 4)})
    assert [node.op for _, node in graph.unfolded()].count("detach") == 1
    evaluated = capture(Teacher(), {"x": torch.randn(3, 4)}, training=False)
    assert "detach" not in print_graph(evaluated)


def test_a_module_called_again_has_the_ordinal_of_the_call() -> None:
    keys = [key for key, _ in capture(Twice(), {"x": torch.randn(3, 4)}).unfolded()]
    assert keys == ["a:linear#0", "a@1:linear#0", ":relu#0", ":sum#0"]


def test_nodes_in_autocast_know_their_module_and_line() -> None:
    graph = capture(Mixed(), {"x": torch.randn(3, 4)})
    first = next(node for _, node in graph.unfolded() if node.op == "linear")
    assert (first.path, first.source.split(":")[0]) == ("a", "test_traps.py")


class Branch(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            return x
        return -x


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(4, 4), Branch())

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.inner(x).sum()
        return loss


def test_data_dependent_branch_names_module_line_and_ways_on() -> None:
    with pytest.raises(CaptureError) as caught:
        capture(Branching(), {"x": torch.randn(3, 4)})
    text = str(caught.value)
    assert caught.value.exit_code == 4
    assert re.match(r"cannot capture Branching\.inner\.1 \(test_traps\.py:\d+\): ", text)
    assert "depends on the values of a tensor" in text
    assert "torch.where" in text
    assert "\n" not in text


class Writer(Trap):
    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        loss: Tensor = self.a(x).sum()
        return loss


class Vector(Trap):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.a(x).sum(1)
        return loss


class Huge(Trap):
    def __init__(self) -> None:
        super().__init__()
        self.positions = torch.randn(3, 5000)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.a(x).sum() + self.positions.sum()
        return loss


class Item(Trap):
    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.a(x).sum() * x.max().item()
        return loss


class Chosen(Trap):
    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x)
        loss: Tensor = h[h > 0].sum()
        return loss


class LayerDrop(Trap):
    def forward(self, x: Tensor) -> Tensor:
        drop = torch.rand([])
        loss: Tensor = self.a(x).sum()
        if drop < 0.1:
            loss = loss * 0
        return loss


class Conditional(Trap):
    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cond(x.sum() > 0, lambda z: z.sum(), lambda z: z.mean(), (self.a(x),))
        assert isinstance(chosen, Tensor)
        return chosen


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Writer, r"writes to 'x' in forward"),
        (Vector, r"the loss has shape \(3,\)"),
        (Huge, r"'positions' of 15000 elements .*register_buffer"),
        (Item, r"cannot capture Item \(test_traps\.py:\d+\): it takes a Python number .*where"),
        (LayerDrop, r"LayerDrop \(test_traps\.py:\d+\): .*\(if drop < 0\.1:\).*layer drop to 0"),
        (Chosen, r"cannot capture Chosen \(test_traps\.py:\d+\): a shape, \[\?\], depends on"),
        pytest.param(
            Conditional,
            r"cannot capture Conditional .*: cond is not a plain tensor operator",
            # torch.cond's own tracer looks at the gradient of an activation
            marks=pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
        ),
    ],
)
def test_refusals_say_why(kind: type[Trap], reason: str) -> None:
    with pytest.raises(CaptureError, match=reason) as caught:
        capture(kind(), {"x": torch.randn(3, 4)})
    assert "\n" not in str(caught.value)


def test_a_batch_that_forward_does_not_take_names_the_rule() -> None:
    model, batch = perceptron()
    place = r"cannot capture Perceptron \(models\.py:\d+\): "
    with pytest.raises(
        CaptureError, match=place + r"forward takes .* the batch has 'z' too; .*loss\("
    ):
        capture(model, {**batch, "z": batch["x"]})
    with pytest.raises(CaptureError, match=place + r"forward needs '\w+', and the batch has"):
        capture(model, dict([*batch.items()][1:]))
    with pytest.raises(InputError, match="batch entry 'x' is a list"):
        capture(model, {"x": [1.0]})  # type: ignore[dict-item]
    nothing = {name: tensor[:0] for name, tensor in batch.items()}
    with pytest.raises(InputError, match=r"the batch has no samples \(x \[0, "):
        capture(model, nothing)
    with pytest.raises(InputError, match="the batch is empty"):
        capture(model, {})


def test_modes_are_restored() -> None:
    model = Perceptron()
    model.layers[0].eval()
    capture(model, perceptron()[1], training=False)
    assert [m.training for m in (model, model.layers[0], model.layers[1])] == [True, False, True]


class Numpy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = torch.from_numpy(self.a(x).detach().numpy()).mean() + self.a(x).mean()
        return loss


def test_numpy_in_forward_is_named() -> None:
    with pytest.raises(
        CaptureError, match=r"Numpy \(test_traps.py:\d+\): it leaves torch for numpy"
    ):
        capture(Numpy(), {"x": torch.randn(2, 4)})
