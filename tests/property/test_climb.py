"""Hill climbing: what it finds is a plan of the space that fits, holds pins, and is faster."""

from dataclasses import replace

import pytest

from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.errors import LayoutError
from parloom.ir.factors import factorize
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh, MeshAxis
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from parloom.ir.verify import verify_decisions, verify_pcg
from parloom.search import climb
from parloom.search.climb import Climb, climbed
from parloom.search.conflicts import broken
from parloom.search.contexts import SimulatedPlan
from parloom.search.folding import program_of
from parloom.search.pinned import resolve
from parloom.search.pins import parse_pin
from parloom.search.request import Request
from parloom.search.work import Work
from tests.property.searched import ADAM, PLENTY
from tests.unit.test_simulate import model

EIGHT = load_cluster("2x4xH100")
GRAPH = model()


def data_parallel(cluster: Cluster) -> Decisions:
    mesh = Mesh((MeshAxis("x", tuple(reversed(cluster.prime_axes()))),))
    nodes = (
        NodeDecision(flat.key, (("d0", ("x",)),))
        for flat in GRAPH.flat()
        if flat.function != GRAPH.main.name
    )
    return Decisions(one_stage(mesh), tuple(nodes))


def start_of(asked: Request) -> SimulatedPlan:
    decisions = data_parallel(asked.cluster)
    return SimulatedPlan(decisions, asked.predict(decisions))


def found_from(asked: Request) -> tuple[SimulatedPlan, list[SimulatedPlan]]:
    start = start_of(asked)
    program = program_of(GRAPH, factorize(GRAPH), asked.pinned)
    return start, list(climbed(asked, program, start, Work()))


@pytest.mark.parametrize("share", [None, 1.0])
def test_each_plan_is_faster_and_fits(share: float | None) -> None:
    asked = Request(GRAPH, DataSheets(EIGHT), ADAM, PLENTY)
    if share is not None:
        asked = replace(asked, limit_bytes=int(share * start_of(asked).peak_bytes))
    start, found = found_from(asked)
    steps = [start.step_ps, *(plan.step_ps for plan in found)]
    assert len(steps) > 1
    assert steps == sorted(steps, reverse=True)
    for plan in found:
        assert plan.peak_bytes <= asked.limit_bytes
        verify_decisions(GRAPH, plan.decisions)
        verify_pcg(lower(GRAPH, plan.decisions))
        assert asked.predict(plan.decisions) == plan.prediction
    assert [p.decisions for p in found_from(asked)[1]] == [p.decisions for p in found]


def test_pins_hold() -> None:
    free = Request(GRAPH, DataSheets(EIGHT), ADAM, PLENTY)
    pins = (parse_pin("mesh=x:8"), parse_pin("*up=optimizer:replicated"))
    pinned = resolve(pins, GRAPH, factorize(GRAPH))
    _, found = found_from(replace(free, pinned=pinned))
    assert found
    assert all(broken(pinned, GRAPH, plan.decisions) is None for plan in found)
    _, others = found_from(free)
    assert any(broken(pinned, GRAPH, plan.decisions) is not None for plan in others)


def test_a_large_graph_is_left_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    operators = sum(1 for _ in GRAPH.flat())
    monkeypatch.setattr(climb, "OPERATORS", operators * climb.FEWEST - 1)
    assert not found_from(Request(GRAPH, DataSheets(EIGHT), ADAM, PLENTY))[1]


def test_all_changes_that_are_lowered_are_plans_of_the_space() -> None:
    asked = Request(GRAPH, DataSheets(EIGHT), ADAM, PLENTY)
    program = program_of(GRAPH, factorize(GRAPH))
    climber = Climb(asked, program, start_of(asked), Work())
    draft = climber.draft(climber.best.decisions)
    meshes, kinds, legal = set[tuple[int, ...]](), set[str](), 0
    for _ in range(80):
        changed = climber.changes.any(draft)
        try:
            decisions, pcg = climber.lowered(changed)
        except LayoutError:
            continue
        draft, legal = changed, legal + 1
        verify_pcg(pcg)
        verify_decisions(GRAPH, decisions)
        meshes.add(tuple(axis.size for axis in decisions.mesh.axes))
        kinds |= {"stored"} if decisions.parameters else set()
        kinds |= {"remade"} if decisions.activations else set()
        kinds |= {"cut"} if decisions.num_microbatches > 1 else set()
        for node in decisions.nodes:
            for _, axes in node.factors:
                assert axes == tuple(a for a in decisions.mesh.names if a in axes)
    assert legal > 40
    assert len(meshes) > 2
    assert kinds == {"stored", "remade", "cut"}
