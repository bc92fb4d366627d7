"""Products of one operand as one: equal to the model as it was, under any layout."""

from dataclasses import replace
from functools import cache
from itertools import product

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from parloom.comparators.baselines import random_plan
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph, Node
from parloom.ir.lower import lower
from parloom.ir.ops.joined import CONVS, LINEARS
from parloom.ir.verify import verify_graph
from parloom.rewrite.merge import merges, merges_of_fewer
from parloom.rewrite.rewrites import derived, rewritten
from parloom.rewrite.take import Take, parse_take
from parloom.rewrite.terms import Name, Term
from parloom.runtime.operators import linears
from tests.dist import lowered
from tests.dist.lowered import MESHES, Model
from tests.equality import TOLERANCE, difference, parallel

torch.set_num_threads(1)
pytestmark = pytest.mark.filterwarnings("ignore:Using padding='same'")


class Biased(nn.Module):
    """Products of one operand with biases, of different widths and one of them twice, and one of
    another operand.
    """

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 24), nn.Linear(12, 12), nn.Linear(12, 36)
        self.last = nn.Linear(24, 12)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.tanh(self.a(x)) * torch.cat((self.b(x), self.b(x)), -1)
        loss: Tensor = self.last(wide).square().sum() + self.c(x).sigmoid().sum()
        return loss


class Branches(nn.Module):
    """Convolutions of one operand: two of one geometry, one of another, one in groups."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(6, 12, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.c = nn.Conv2d(6, 12, 1)
        self.d = nn.Conv2d(6, 6, 3, padding=1, groups=2)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat((self.a(x).tanh(), self.b(x)), 1)
        loss: Tensor = wide.square().sum() + self.c(x).sigmoid().sum() + self.d(x).tanh().sum()
        return loss


class Dilated(nn.Module):
    """Convolutions of one operand with padding by name: two of one geometry, one of another."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = (nn.Conv2d(6, n, (4, 3), padding="same", dilation=(1, 2)) for n in (12, 6))
        self.c = nn.Conv2d(6, 12, (4, 3), padding="same", dilation=2)

    def forward(self, x: Tensor) -> Tensor:
        wide = torch.cat((self.a(x).tanh(), self.b(x)), 1)
        loss: Tensor = wide.square().sum() + self.c(x).sigmoid().sum()
        return loss


class Towers(nn.Module):
    """Two products put beside each other, and a product of both."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(12, 8), nn.Linear(12, 4)
        self.last = nn.Linear(12, 12, bias=False)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        loss: Tensor = self.last(torch.cat((self.a(x), self.b(y)), -1)).tanh().square().sum()
        return loss


@cache
def model(name: str) -> Model:
    torch.manual_seed(0)
    if name == "towers":
        return lowered.of(Towers(), {"x": torch.randn(12, 12), "y": torch.randn(12, 12)})
    if name == "biased":
        return lowered.of(Biased(), {"x": torch.randn(12, 4, 12)})
    if name == "dilated":
        return lowered.of(Dilated(), {"x": torch.randn(12, 6, 12, 12)})
    if name == "branches":
        return lowered.of(Branches(), {"x": torch.randn(12, 6, 12, 12)})
    return lowered.model(name)


@cache
def merged_graph(name: str) -> Graph:
    graph = model(name).graph
    found = rewritten(graph, tuple(map(str, merges(graph))))
    verify_graph(found)
    return found


def error(name: str, mesh: str, steps: int, seed: int, graph: Graph | None = None) -> float:
    """How far a random plan of the merged model is from the model as it was."""
    graph = graph or merged_graph(name)
    factored = factorize(graph)
    plan = random_plan(graph, factored, MESHES[mesh], seed, steps)
    found = parallel(lower(graph, plan, factored=factored), model(name).tensors, model(name).batch)
    return difference(model(name).expected, found)[0]


@pytest.mark.sample(25)
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("steps", [1, 2])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("name", ["biased", "branches", "dilated", "llama", "hf_llama"])
def test_a_merged_model_equals_the_model(name: str, mesh: str, steps: int, seed: int) -> None:
    ops = [node.op for _, node in merged_graph(name).unfolded()]
    assert ops.count(LINEARS) == {"biased": 1, "llama": 4, "hf_llama": 4}.get(name, 0)
    assert ops.count(CONVS) == (name in ("branches", "dilated"))
    assert error(name, mesh, steps, seed) <= TOLERANCE


@pytest.mark.parametrize("name", ["biased", "branches", "llama"])
def test_plans_differ_in_which_weights_lie_together(name: str) -> None:
    """Those above have weights that are copied, and weights that are read where they lie."""
    graph = merged_graph(name)
    joined = sum(node.op in (LINEARS, CONVS) for _, node in graph.unfolded())
    found = []
    for mesh, steps, seed in product(MESHES.values(), (1, 2), range(3)):
        plan = random_plan(graph, factorize(graph), mesh, seed, steps)
        groups = lower(graph, plan).adjacent
        found.append(sum(not group[0].endswith("bias") for group in groups))
    assert min(found) < joined
    assert max(found) > 0


def test_outputs_in_another_order_would_be_seen() -> None:
    graph = merged_graph("biased")
    wide = [n for n in graph.main.body if isinstance(n, Node) and n.op == LINEARS]
    (node,) = wide
    x, weights, biases = node.args
    assert isinstance(weights, tuple)
    assert isinstance(biases, tuple)
    turned = replace(node, args=(x, weights, (biases[1], biases[0], *biases[2:])))
    body = tuple(turned if item is node else item for item in graph.main.body)
    wrong = replace(graph, main=replace(graph.main, body=body))
    assert error("biased", "2x2", 1, 0) <= TOLERANCE
    assert error("biased", "2x2", 1, 0, wrong) > 1e-3


def test_what_reads_what_comes_later_is_not_merged() -> None:
    class Later(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            first = self.a(x)
            other = F.linear(x, self.b.weight * first.mean())
            loss: Tensor = (first + other).sum()
            return loss

    graph = lowered.of(Later(), {"x": torch.randn(4, 4)}).graph
    assert list(merges(graph)) == []
    found = [node for _, node in graph.unfolded() if node.op == "linear"]
    x, one, other = found[0].refs[0], found[0].refs[1], found[1].refs[1]
    call = Term(LINEARS, (Name(x), (Name(one), Name(other))))
    values = tuple(node.results[0].name for node in found)
    with pytest.raises(InputError, match="would be made after it is read"):
        rewritten(graph, [str(Take("main", values, call, ("merge_linear",)))])


def test_all_but_the_last_of_several_products_are_one_way_more() -> None:
    class Several(nn.Module):
        def __init__(self, number: int) -> None:
            super().__init__()
            self.all = nn.ModuleList(nn.Linear(4, 4 + i, bias=False) for i in range(number))

        def forward(self, x: Tensor) -> Tensor:
            loss: Tensor = sum((own(x).sum() for own in self.all), torch.zeros(()))
            return loss

    for number in (2, 3, 4):
        graph = lowered.of(Several(number), {"x": torch.randn(4, 4)}).graph
        (whole,) = merges(graph)
        fewer = list(merges_of_fewer(graph.main))
        assert [take.values for take in fewer] == ([whole.values[:-1]] if number > 2 else [])
        for take in fewer:
            derived(graph, [str(take)])


def test_takes_are_read_as_they_are_written() -> None:
    graph = model("biased").graph
    (found,) = merges(graph)
    assert parse_take(str(found)) == found
    assert parse_take("take a in b") is None
    for wrong, said in (
        (replace(found, function="nothing"), "has no function nothing"),
        (replace(found, values=("_", "_", "x")), "no operator of main makes x"),
        (replace(found, values=found.values[::-1]), r"result 0 is .*, not"),
        (replace(found, call=Term("parloom.linears", (Name("y"), ()))), "has no value y"),
        (replace(found, call=Term("nothing", ())), "nothing says not what it computes"),
    ):
        with pytest.raises(InputError, match=said):
            rewritten(graph, [str(wrong)])
    with pytest.raises(InputError, match="is taken twice"):
        rewritten(graph, [str(found), str(found)])


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_of_products_is_the_product_of_what_is_joined(seed: int) -> None:
    """Calls inside of a call, made once for two values."""
    own = model("towers")
    graph = own.graph
    node = next(n for _, n in graph.unfolded() if n.op == "linear" and n.path == "last")
    (joined,) = (n for _, n in graph.unfolded() if n.op == "cat")
    one, other = joined.refs
    weight = node.refs[1]
    parts = Term("split_with_sizes", (Name(weight), (8, 4), -1))
    sums = [
        Term("linear", (Name(name), replace(parts, result=i)))
        for i, name in enumerate((one, other))
    ]
    take = Take("main", (node.results[0].name,), Term("add", tuple(sums)), ("sum",))
    found = rewritten(graph, [str(take)])
    verify_graph(found)
    ops = [n.op for _, n in found.unfolded()]
    assert "cat" not in ops
    assert ops.count("split_with_sizes") == 1
    assert error("towers", "2x2", 1, seed, found) <= TOLERANCE


@pytest.mark.parametrize("beside", [False, True])
def test_weights_that_lie_beside_each_other_are_read_in_place(beside: bool) -> None:
    """And copied where nobody says that they do."""
    torch.manual_seed(0)
    x = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    whole = torch.randn(10, 4, dtype=torch.float64)
    parts = [whole[:3], whole[3:4], whole[4:]]
    leaves = [nn.Parameter(part if beside else part.clone()) for part in parts]
    bias = torch.randn(10, dtype=torch.float64)
    biases = [nn.Parameter(part.clone()) for part in torch.split(bias, [3, 1, 6])]
    seen: list[int] = []
    product = torch.nn.functional.linear

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        seen.append(weight.data_ptr())
        return product(x, weight, bias)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("parloom.runtime.operators.F.linear", linear)
        in_place = ("weights",) if beside else ()
        found = linears(x, tuple(leaves), tuple(biases), in_place=in_place)
    assert (seen[0] == whole.data_ptr()) is beside
    alone = [product(x, w, b) for w, b in zip(leaves, biases, strict=True)]
    for one, other in zip(found, alone, strict=True):
        torch.testing.assert_close(one, other)
    given = [x, *leaves, *biases]
    losses = [sum(part.square().sum() for part in some) for some in (found, alone)]
    gradients = [torch.autograd.grad(loss, given) for loss in losses]  # type: ignore[arg-type]
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("trained", [False, True])
def test_weights_are_read_as_one_under_a_compiler_without_gradients(trained: bool) -> None:
    """A function of autograd would be traced without its context: of fixed weights, and of trained
    ones in a forward pass alone.
    """
    torch.manual_seed(0)
    x, whole = torch.randn(5, 4), torch.randn(10, 4)
    parts = tuple(part.requires_grad_(trained) for part in (whole[:3], whole[3:]))

    def merged(x: Tensor) -> tuple[Tensor, ...]:
        return linears(x, parts, in_place=("weights",))

    with torch.no_grad():
        found = torch.compile(merged, backend="eager", fullgraph=True)(x)
    for one, part in zip(found, parts, strict=True):
        torch.testing.assert_close(one, torch.nn.functional.linear(x, part))
