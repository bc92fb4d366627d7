"""Where memory is short: what is not searched as nothing fits, and what is found all the same."""

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.candidates import smallest
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.simulate import simulate
from parloom.cost.units import bytes_up, parse_bytes
from parloom.ir.expected import Status
from parloom.ir.lower import lower
from parloom.ir.plan import Decisions
from parloom.search.compose import Candidate
from parloom.search.contexts import ContextSearch, SimulatedCandidate
from parloom.search.least import least_share
from parloom.search.meshes import logical_meshes
from parloom.search.optimize import search
from parloom.search.request import Request, Wanted
from tests.examples import examples
from tests.property.searched import ADAM, PLENTY, every_plan, random_graph
from tests.unit.test_simulate import model

CLUSTER = load_cluster("2x4xH100")
BASE = Decisions()
ROOMY = Request(model(), DataSheets(CLUSTER), ADAM, PLENTY)


def said(request: Request) -> list[str]:
    lines: list[str] = []
    assert not search(request, BASE, lines.append).proposals
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
    assert len(lines) == len(set(lines)) > 3
    assert all(line.endswith("; nothing fits yet") for line in lines)


@pytest.mark.slow
@examples(3)
@given(st.integers(0, 10**6), st.booleans())
def test_the_smallest_plan_that_is_named_is_the_smallest(seed: int, blocks: bool) -> None:
    """No search finds less than the smallest plan, under whatever limit; the figure that is printed
    is enough, and what is named does not depend on what was asked.
    """
    graph = model(2) if blocks else random_graph(Random(seed), num_operators=3, rows=(64,))
    cluster = load_cluster(("2x2xcpu", "2x2xH100")[seed % 2])
    count = (1, None)[seed // 2 % 2]
    request = replace(ROOMY, graph=graph, machine=DataSheets(cluster), num_microbatches=count)
    least, _ = smallest(request)
    assert least.prediction is not None
    peak = least.prediction.peak_bytes
    played = simulate(lower(graph, least.decisions), request.cluster, least.decisions, ADAM)
    assert played.peak_bytes == peak
    for limit in (2 * peak // 3, peak - 1, parse_bytes(bytes_up(peak), down=True)):
        asked = replace(request, limit_bytes=limit)
        if limit % 2:
            assert smallest(asked)[0] == least
        found = search(replace(asked, wanted=Wanted.PRICE), BASE, lambda text: None)
        small = found.smallest
        assert small is None or small.prediction.peak_bytes >= peak
        assert limit >= peak or not found.proposals


def test_without_proof_the_plan_is_the_same_and_a_price_looks_at_no_finer_mesh() -> None:
    request = replace(ROOMY, graph=random_graph(Random(4), num_operators=4))
    lines: list[str] = []
    proved = search(request, BASE, lines.append)
    assert any("z=" in line for line in lines)
    plan = search(replace(request, wanted=Wanted.PLAN), BASE, lambda text: None)
    assert [p.decisions for p in plan.proposals] == [p.decisions for p in proved.proposals]
    assert plan.bound_ps < proved.bound_ps
    lines.clear()
    price = search(replace(request, wanted=Wanted.PRICE), BASE, lines.append)
    assert not any("z=" in line for line in lines)
    assert price.proposals[0].prediction.step_s >= proved.proposals[0].prediction.step_s


@pytest.mark.slow
@examples(3)
@given(st.integers(0, 10**6))
def test_no_plan_is_smaller_than_the_smallest(seed: int) -> None:
    """Of all layouts with all storage, by simulated peak."""
    graph, cluster = (
        random_graph(Random(seed), 2, rows=(64,), columns=(64,)),
        load_cluster("2xH100"),
    )
    (mesh,) = logical_meshes(cluster)
    least, bound = smallest(Request(graph, DataSheets(cluster), ADAM, PLENTY, 1))
    peaks = [plan.simulated(graph, cluster).peak_bytes for plan in every_plan(graph, mesh, cluster)]
    assert least.prediction is not None
    assert bound <= min(peaks) <= least.prediction.peak_bytes <= 1.05 * min(peaks)


@pytest.mark.sample(2)
@pytest.mark.parametrize("share", [0.35, 0.5, 0.8])
@pytest.mark.parametrize("cluster", ["2x4xH100", "4x2xRTX4090", "4xcpu"])
def test_no_bound_is_above_the_plan_that_it_stands_beside(cluster: str, share: float) -> None:
    """Steps need from next to nothing to the most of the limit beyond what the search counts."""
    graph = random_graph(Random(9), 4)
    free = Request(graph, DataSheets(load_cluster(cluster)), ADAM, PLENTY, 1, wanted=Wanted.PLAN)
    peak = search(free, BASE, lambda text: None).proposals[0].peak_bytes
    found = search(replace(free, limit_bytes=int(share * peak)), BASE, lambda text: None)
    assert found.solver_gap is None or found.solver_gap >= 0


def test_whatever_ends_a_search_its_answer_is_the_best_that_was_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget; and Ctrl-C as something is simulated."""
    fits: list[float] = []
    judge, left = ContextSearch.judge, inf
    asked = replace(
        ROOMY, graph=random_graph(Random(4), 4), machine=DataSheets(load_cluster("2x2xH100"))
    )

    def watched(context: ContextSearch, candidate: Candidate) -> SimulatedCandidate:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        found = judge(context, candidate)
        if found.peak_bytes <= tight.limit_bytes:
            fits.append(found.step_ps)
        return found

    fastest = search(asked, BASE, lambda text: None).proposals[0]
    tight = replace(asked, limit_bytes=fastest.peak_bytes)
    monkeypatch.setattr(ContextSearch, "judge", watched)
    some_fit = 0
    for work, calls in ((1, 1), (8, 3), (16, 6)):
        for ends, most in ((replace(tight, budget=work), inf), (tight, calls)):
            left = most
            fits.clear()
            found = search(ends, BASE, lambda text: None)
            assert found.status is not Status.COMPLETE
            assert [p.step_ps for p in found.proposals[:1]] == sorted(fits)[:1]
            some_fit += bool(fits)
    assert some_fit > 2
