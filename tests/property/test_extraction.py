"""Functions that are extracted from e-graphs: they compute the same, and none that one substitution
makes is cheaper.
"""

from random import Random

import pytest

from parloom.comparators import tensat
from parloom.ir.verify import verify_graph
from parloom.rewrite.bodies import Body
from parloom.rewrite.substitutions import applied, directions, substitutions, with_function
from parloom.rewrite.take import ends_of
from parloom.search.extraction import cheapest
from parloom.search.one_device import FunctionCosts, OneDevice
from parloom.search.pinned import NONE
from tests.property.test_bodies import computed, random_graph
from tests.unit.test_fixed_form import request_of

CALLS, ROUNDS, SAME = 200, 2, 1.001


@pytest.mark.parametrize("seed", range(6))
def test_the_cheapest_function_is_extracted(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tensat, "ROUNDS", ROUNDS)
    graph = random_graph(Random(seed))
    costs = FunctionCosts(OneDevice(request_of(graph)), graph.main.name)
    body = Body(graph.main, CALLS)
    tensat.saturate(body, NONE)
    found = cheapest(body, ends_of(graph, graph.main), costs)
    verify_graph(with_function(graph, found))
    if "parloom.linears" not in {getattr(item, "op", "") for item in found.body}:
        assert (computed(found)["loss"] == computed(graph.main)["loss"]).all()
    least = costs.of(found)
    assert least <= costs.of(graph.main) * SAME
    if body.graph.num_nodes <= CALLS:
        for one in substitutions(graph, graph.main, directions(graph.main)):
            other = applied(graph, graph.main, one)
            assert other is None or least <= costs.of(other) * SAME
