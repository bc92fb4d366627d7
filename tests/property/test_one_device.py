"""Costs of rewritten functions, put together operator by operator, are those of the whole graph."""

from random import Random

import pytest

from parloom.comparators.fixed_form import work_ps
from parloom.ir.graph import Graph
from parloom.rewrite.substitutions import applied, directions, substitutions, with_function
from parloom.search.one_device import FunctionCosts, OneDevice
from tests.property.test_bodies import random_graph
from tests.unit.graphs import stack
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
