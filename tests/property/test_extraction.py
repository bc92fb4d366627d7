"""Functions that are extracted from e-graphs: they compute the same, and none that one substitution
makes is cheaper.
"""

from random import Random

import pytest

from parloom.comparators import tensat
from parloom.ir.verify import verify_graph
from parloom.rewrite.bodies import Body
from parloom.rewrite.egraph import Class
from parloom.rewrite.substitutions import applied, directions, substitutions, with_function
from parloom.rewrite.take import ends_of
from parloom.search import extraction
from parloom.search.extraction import Choices, Extraction, Lacking, cheapest
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


@pytest.mark.parametrize("seed", range(6))
def test_what_every_function_needs(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class is known to be needed where nothing makes what is asked for without it, and only
    there.
    """
    monkeypatch.setattr(tensat, "ROUNDS", ROUNDS)
    graph = random_graph(Random(seed))
    costs = FunctionCosts(OneDevice(request_of(graph)), graph.main.name)
    body = Body(graph.main, CALLS)
    tensat.saturate(body, NONE)
    choices = Choices(body, ends_of(graph, graph.main))
    program = Extraction(choices, choices.times(costs))
    needed = {one for one in program.makers if not _is_made(program, without=one)}
    assert program.needed == needed
    assert len(needed) < len(program.makers), "some class is not needed"


def test_rows_of_support_leave_the_cheapest_function(monkeypatch: pytest.MonkeyPatch) -> None:
    """With rows where classes make one another, the cost is that of a program which has places in
    time alone.
    """
    monkeypatch.setattr(tensat, "ROUNDS", ROUNDS)
    monkeypatch.setattr(extraction, "BRANCHES", 100_000)
    asked = []
    add = Extraction._add_support

    def counted(self: Extraction, lacking: Lacking) -> None:
        asked.append(len(lacking))
        add(self, lacking)

    for seed in range(12):
        graph = random_graph(Random(seed))
        costs = FunctionCosts(OneDevice(request_of(graph)), graph.main.name)
        body = Body(graph.main, CALLS)
        tensat.saturate(body, NONE)
        choices = Choices(body, ends_of(graph, graph.main))
        times, found = choices.times(costs), []
        for rounds, support in ((0, lambda *_: None), (extraction.ROUNDS, counted)):
            with monkeypatch.context() as patched:
                patched.setattr(extraction, "ROUNDS", rounds)
                patched.setattr(Extraction, "_add_support", support)
                taken = Extraction(choices, times).solve()
                found.append(sum(times[at] for at in choices.used(taken)))
                verify_graph(with_function(graph, choices.function(taken)))
        assert found[0] == pytest.approx(found[1], rel=3 * extraction.GAP)
    assert asked, "some classes made one another"


def _is_made(program: Extraction, without: Class) -> bool:
    """Whether all that is asked for can be made, and this class is not."""
    asked = {one for own in program.every if own.asked for one in own.reads}
    there, before = set(program.given), -1
    while len(there) > before:
        before = len(there)
        for one, some in program.makers.items():
            if one != without and any(there.issuperset(program.every[at].reads) for at in some):
                there.add(one)
    return there.issuperset({*program.choices.needed, *asked})
