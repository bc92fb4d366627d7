"""Costs of rewritten functions, put together operator by operator, are those of the whole graph."""

from random import Random

import pytest

from parloom.comparators.fixed_form import work_ps
from parloom.ir.graph import Graph, Node
from parloom.rewrite.substitutions import applied, directions, substitutions, with_function
from parloom.search.one_device import FunctionCosts, OneDevice
from tests.property.test_bodies import random_graph
from tests.unit.graphs import graph as graph_of
from tests.unit.graphs import node, stack
from tests.unit.test_fixed_form import gated, request_of, summed


@pytest.mark.parametrize(
    "graph",
    [
        gated(),
        summed(),
        stack(2),
        stack(2, tied=True),
        *(random_graph(Random(i)) for i in range(3)),
    ],
)
def test_a_rewritten_function_costs_what_the_graph_does(graph: Graph) -> None:
    request = request_of(graph)
    whole = work_ps(request, ())
    for function in (*graph.functions, graph.main):
        costs = FunctionCosts(OneDevice(request), function.name)
        own = costs.of(function)
        assert own <= whole
        found = list(substitutions(graph, function, directions(function)))
        for one in found[:: 1 + len(found) // 6]:
            body = applied(graph, function, one)
            if body is not None:
                alone = request_of(with_function(graph, body))
                assert costs.of(body) - own == pytest.approx(work_ps(alone, ()) - whole, abs=1)


@pytest.mark.parametrize("samples", [64, 6])
def test_a_share_takes_as_long_as_the_operator_of_its_shape(samples: int) -> None:
    """Six samples are not shared by four devices, but their columns are."""

    def ps(rows: int, columns: int, share: int) -> int:
        shape = rows, columns
        made = graph_of(
            {}, {"x": (shape, "float32")}, node("relu", "x", to="y", shape=shape),
            node("sum", "y", to="loss", shape=()),
        )  # fmt: skip
        device = OneDevice(request_of(made, "4xV100"), share)
        item = made.main.body[0]
        assert isinstance(item, Node)
        return device.ps(item, [made.main.inputs[0].spec], (((True,), 1),))

    shared = (samples // 4, 256) if samples % 4 == 0 else (samples, 64)
    assert ps(samples, 256, 4) == ps(*shared, 1) < ps(samples, 256, 1)
    assert 4 * ps(samples, 256, 4) > ps(samples, 256, 1)
