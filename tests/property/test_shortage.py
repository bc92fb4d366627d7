"""Where memory is short: what is not searched as nothing fits, and what is found all the same."""

from dataclasses import replace
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions
from parloom.search.auto import search
from parloom.search.candidates import smallest
from parloom.search.least import least_share
from parloom.search.question import Question, Wanted
from tests.property.searched import ADAM, random_graph
from tests.unit.test_simulate import model

CLUSTER = load_cluster("2x4xH100")
BASE = Decisions(Mesh(()))
ROOMY = Question(model(), CLUSTER, ADAM, int(1e15))


def said(question: Question) -> list[str]:
    lines: list[str] = []
    assert not search(question, BASE, lines.append).proposals
    return lines


def test_weights_that_all_devices_cannot_hold_are_not_searched() -> None:
    share = least_share(ROOMY.graph, BASE, ADAM, CLUSTER.num_devices)
    parameters = [entry.value.spec.num_elements for entry in ROOMY.graph.of_kind("parameter")]
    assert share == sum(parameters) * 4 * 4 // CLUSTER.num_devices  # weight, gradient, two states
    assert said(replace(ROOMY, limit_bytes=share - 1))[0].startswith("nothing fits: weights")
    assert not said(replace(ROOMY, limit_bytes=share))[0].startswith("nothing fits: weights")


def test_where_nothing_fits_every_mesh_is_looked_at_once() -> None:
    share = least_share(ROOMY.graph, BASE, ADAM, CLUSTER.num_devices)
    lines = said(replace(ROOMY, limit_bytes=share))
    assert len(lines) == len(set(lines)) == 3
    assert all(line.endswith(": nothing fits") for line in lines)


@settings(max_examples=12)
@given(st.integers(0, 10**6), st.booleans())
def test_what_fits_by_simulation_is_found_whatever_the_search_counts(
    seed: int, blocks: bool
) -> None:
    """The limit is the peak of the smallest plan, and one byte less."""
    graph = model() if blocks else random_graph(Random(seed), num_operators=4)
    question = replace(ROOMY, graph=graph)
    few, _ = smallest(question)
    played = [(simulate(lower(graph, c.decisions), CLUSTER, c.decisions, ADAM)) for c in few]
    peak = min(timeline.peak_bytes for timeline in played)
    for limit in (peak, peak - 1):
        found = search(replace(question, limit_bytes=limit), BASE, lambda text: None).proposals
        assert found or limit < peak
        for proposal in found:
            plan = proposal.decisions
            assert simulate(lower(graph, plan), CLUSTER, plan, ADAM).peak_bytes <= limit


def test_without_proof_the_plan_is_the_same_and_a_price_looks_at_no_finer_mesh() -> None:
    question = replace(ROOMY, graph=random_graph(Random(4), num_operators=4))
    lines: list[str] = []
    proved = search(question, BASE, lines.append)
    assert any("z=" in line for line in lines)
    plan = search(replace(question, wanted=Wanted.PLAN), BASE, lambda text: None)
    assert plan.proposals == proved.proposals
    assert 0 < plan.bound_ps <= proved.bound_ps
    lines.clear()
    price = search(replace(question, wanted=Wanted.PRICE), BASE, lines.append)
    assert not any("z=" in line for line in lines)
    assert price.proposals[0].prediction.step_s >= proved.proposals[0].prediction.step_s
