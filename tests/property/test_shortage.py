"""Where memory is short: what is not searched as nothing fits, and what is found all the same."""

from dataclasses import replace
from itertools import pairwise
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from parloom.cost.clusters import load_cluster
from parloom.cost.simulate import simulate
from parloom.cost.units import bytes_up, parse_bytes
from parloom.ir.lower import lower
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions, Prediction
from parloom.search.auto import search
from parloom.search.candidates import smallest
from parloom.search.least import least_share
from parloom.search.on_mesh import Fit, OnMesh, _crossing
from parloom.search.polish import Candidate
from parloom.search.question import Question, Wanted
from parloom.search.sums import Sums
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


@settings(max_examples=4)
@given(st.integers(0, 10**6), st.booleans())
def test_the_smallest_plan_that_is_named_is_the_smallest(seed: int, blocks: bool) -> None:
    """No search finds less than the smallest plan, under whatever limit; the figure that is printed
    is enough, and what is named does not depend on what was asked.
    """
    graph = model() if blocks else random_graph(Random(seed), num_operators=4)
    question = replace(ROOMY, graph=graph, cluster=load_cluster(("2x2xcpu", "2x4xH100")[seed % 2]))
    least, _ = smallest(question)
    assert least.prediction is not None
    peak = least.prediction.peak_bytes
    played = simulate(lower(graph, least.decisions), question.cluster, least.decisions, ADAM)
    assert played.peak_bytes == peak
    for limit in (2 * peak // 3, peak - 1, parse_bytes(bytes_up(peak), down=True)):
        asked = replace(question, limit_bytes=limit)
        if limit % 2:
            assert smallest(asked)[0] == least
        found = search(replace(asked, wanted=Wanted.PRICE), BASE, lambda text: None)
        small = found.smallest
        assert small is None or small.prediction.peak_bytes >= peak
        assert limit >= peak or not found.proposals


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


CASES = (
    (7, 8_059_964), (7, 8_178_895), (7, 11_324_624),
    (9, 2_892_730), (301, 20_002_445),
)  # fmt: skip
# Plans that fit and were missed: only what holds least of the best layouts fits; or the limit was
# kept from going up, and a finer mesh from being searched.
FASTER = {(9, 2_892_730): 121e-6, (7, 11_324_624): 300e-6}


@pytest.mark.parametrize(("seed", "limit"), CASES)
def test_no_bound_is_above_the_plan_that_it_stands_beside(seed: int, limit: int) -> None:
    """Steps need from next to nothing to the most of the limit beyond what the search counts."""
    rng = Random(seed)
    cluster = load_cluster(rng.choice(("2x4xH100", "4x2xRTX4090", "4xcpu")))
    blocks = rng.random() < 0.5
    graph = model(rng.choice((3, 6))) if blocks else random_graph(rng, rng.choice((4, 6)))
    found = search(Question(graph, cluster, ADAM, limit), BASE, lambda text: None)
    assert found.solver_gap is not None
    assert found.solver_gap >= 0
    if (seed, limit) in FASTER:
        assert found.proposals[0].prediction.step_s < FASTER[seed, limit]


def test_more_memory_makes_no_plan_much_slower() -> None:
    """Which of the plans that are simulated is the fastest, estimates say to a few percent."""
    graph = model()
    sizes = [p.prediction.peak_bytes for p in search(ROOMY, BASE, lambda text: None).proposals]
    steps: list[float] = []
    for share in (0.5, 0.6, 0.7, 0.8, 0.9, 1.0):
        asked = replace(ROOMY, graph=graph, limit_bytes=int(share * max(sizes)))
        found = search(asked, BASE, lambda text: None).proposals
        steps += [found[0].prediction.step_s] if found else []
    assert len(set(steps)) > 2, "memory does not matter here"
    assert all(later < 1.03 * before for before, later in pairwise(steps))
    assert steps[-1] < steps[0]


def test_whatever_ends_a_search_its_answer_is_the_best_that_was_simulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget; and Ctrl-C as something is simulated."""
    fits: list[float] = []
    simulated, left = OnMesh._simulated, inf

    def watched(on_mesh: OnMesh, candidate: Candidate) -> Fit:
        nonlocal left
        left -= 1
        if not left:
            raise KeyboardInterrupt
        fit = simulated(on_mesh, candidate)
        if fit.excess_bytes <= 0:
            fits.append(fit.prediction.step_s)
        return fit

    monkeypatch.setattr(OnMesh, "_simulated", watched)
    peaks = [p.prediction.peak_bytes for p in search(ROOMY, BASE, lambda text: None).proposals]
    tight = replace(ROOMY, limit_bytes=int(0.7 * max(peaks)))
    stopped = 0
    for budget in range(1, 60, 10):
        for ends in (replace(tight, budget=budget), tight):
            fits.clear()
            left = inf if ends.budget else budget
            found = search(ends, BASE, lambda text: None)
            stopped += found.interrupted or found.exhausted
            assert [p.prediction.step_s for p in found.proposals[:1]] == sorted(fits)[:1]
    assert stopped > 5


@given(
    st.integers(1, 10**12), st.integers(1, 10**12), st.integers(0, 10**12), st.integers(1, 10**12)
)
def test_between_what_fits_and_what_does_not_the_next_limit_closes_in(
    low: int, more: int, spare: int, excess: int
) -> None:
    under, over = fit(low, -spare), fit(low + more, excess)
    limit = _crossing(under, over, None)
    assert low + 0.09 * more <= limit <= low + 0.91 * more
    # Where what is needed grows evenly, the plan at the crossing has next to nothing to spare.
    grown = -spare + (spare + excess) * (limit - low) / more
    assert grown <= 0 or limit <= low + 0.11 * more
    last = fit(max(low - more, 0), -2 * spare)
    assert low + 0.09 * more <= _crossing(under, over, last) <= low + 0.91 * more


def fit(held: int, excess: int) -> Fit:
    return Fit(Candidate((), (), (), Sums(0, 0, 0, held)), BASE, Prediction(0.0, 0), excess)
