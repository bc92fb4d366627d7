"""Pins in the search: what enumeration finds among the plans that hold them, and which of them
contradict each other.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from itertools import combinations, product
from random import Random

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from parloom.candidates import candidates, smallest
from parloom.comparators.baselines import random_plan
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.simulate import simulate
from parloom.cost.walk import Walker
from parloom.errors import InfeasibleError
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster, Mesh
from parloom.ir.plan import Decisions, NodeDecision, one_stage
from parloom.ir.text import parse_graph
from parloom.search.conflicts import broken, smallest_conflict
from parloom.search.contexts import Contexts
from parloom.search.folding import program_of
from parloom.search.least import conflict, least_share, possible, stored_bytes
from parloom.search.meshes import logical_meshes
from parloom.search.optimize import search
from parloom.search.pinned import Pinned, resolve
from parloom.search.pins import Pin, parse_pin
from parloom.search.request import Request, Wanted
from parloom.search.step_rows import ShadowPrices
from parloom.search.storage import STORED, UPDATING
from tests.examples import examples
from tests.property.estimate import estimate
from tests.property.searched import (
    ADAM,
    PLENTY,
    Enumerated,
    context_of,
    every_plan,
    least_step_ps,
    random_graph,
)
from tests.unit.graphs import stack
from tests.unit.test_simulate import model

TWO, FOUR, EIGHT = (load_cluster(spec) for spec in ("2xH100", "2x2xH100", "2x4xH100"))
Split = dict[str, tuple[str, ...]]


def pinned_by(graph: Graph, *texts: str) -> Pinned:
    """Pins as the flags give them: `!` before one that is forbidden."""
    pins = [parse_pin(text.removeprefix("!"), forbidden=text.startswith("!")) for text in texts]
    return resolve(pins, graph, factorize(graph))


def request_of(graph: Graph, cluster: Cluster, *texts: str, limit: int = PLENTY) -> Request:
    """A price of a plan with one microbatch: what is asked for most often here, and fastest."""
    pinned = pinned_by(graph, *texts)
    return Request(graph, DataSheets(cluster), ADAM, limit, 1, pinned=pinned, wanted=Wanted.PRICE)


def found_step_ps(
    graph: Graph, mesh: Mesh, cluster: Cluster, pinned: Pinned
) -> tuple[float, float] | None:
    """The best estimate that is found, and the bound; None where pins leave nothing."""
    context = context_of(graph, cluster, mesh, pinned=pinned)
    context.run(ShadowPrices())
    best = next(context.candidates(), None)
    return (best.sums.step_ps, context.columns.bound_ps(PLENTY)) if best else None


@examples(6)
@given(st.integers(0, 10**6))
def test_a_pinned_search_finds_what_enumeration_finds(seed: int) -> None:
    """The meaning of the pins is written out by hand here. Graphs are left out of which the space
    leaves out plans that a pin may ask for (weights that several operators read,
    `docs/explanation/search.md`).
    """
    rng = Random(seed)
    graph = random_graph(rng)
    assume(not any(o.exposed for o in program_of(graph, factorize(graph)).operators))
    (mesh,) = logical_meshes(TWO)
    names = [flat.key for flat in graph.flat()]
    key = rng.choice(names[:-1])
    factors = factorize(graph).rules["main", key].shardable
    factor, forbidden = rng.choice(factors), rng.random() < 0.5
    first = ("!" if forbidden else "") + f"{key}={factor}:x"
    role, way = rng.choice(("weights", "optimizer")), rng.choice(("replicated", "sharded"))

    def holds(plan: Enumerated) -> bool:
        ((weight, level),) = (w for w in plan.stored if w[0].input.target == "w0")
        chunked = level.weight if role == "weights" else level.optimizer
        split = "x" in (*weight.layout.axes, *chunked)
        asked = (plan.split(key).get(factor) == ("x",)) != forbidden
        return asked and split == (way == "sharded")

    plans = [plan for plan in every_plan(graph, mesh, TWO) if holds(plan)]
    found = found_step_ps(graph, mesh, TWO, pinned_by(graph, first, f"w0={role}:{way}"))
    assert bool(plans) == bool(found)
    if not plans or not found:
        return
    (best, bound), least = found, least_step_ps(plans)
    assert bound <= least * (1 + 1e-6)
    assert least * (1 - 1e-9) <= best <= least * 1.05


@cache
def on_two_axes() -> tuple[Graph, Mesh, list[Enumerated]]:
    """A graph with all of its plans."""
    graph = random_graph(Random(2), num_operators=2)
    mesh = next(m for m in logical_meshes(FOUR) if len(m.axes) == 2)
    return graph, mesh, list(every_plan(graph, mesh, FOUR))


@pytest.mark.sample(1)
@pytest.mark.parametrize("text", ["m0=n:y", "!m0=n:x", "w0=dim1:x"])
def test_a_pinned_search_finds_what_enumeration_finds_on_two_axes(text: str) -> None:
    graph, mesh, plans = on_two_axes()
    meanings: dict[str, Callable[[Split], bool]] = {
        "m0=n:y": lambda split: "y" in split.get("n", ()),
        "m0=k:4": lambda split: len(split.get("k", ())) == 2,
        "!m0=n:x": lambda split: "x" not in split.get("n", ()),
        "m0=replicated": lambda split: not split,
        "w0=dim1:x": lambda split: "x" in split.get("k", ()),
    }
    least = least_step_ps([plan for plan in plans if meanings[text](plan.split("m0:linear#0"))])
    found = found_step_ps(graph, mesh, FOUR, pinned_by(graph, text))
    unpinned = found_step_ps(graph, mesh, FOUR, Pinned())
    assert found
    assert unpinned
    best, bound = found
    free, _ = unpinned
    assert bound <= least * (1 + 1e-6)
    assert best == pytest.approx(least, rel=1e-9)
    assert free < least or (text == "m0=n:y" and free == pytest.approx(least))


@pytest.mark.parametrize(
    "texts",
    [
        ("*up*=n:x",),
        ("!*=d0:x", "!*=d0:y"),
        ("*.up=weights:replicated", "*.down=weights:sharded"),
        ("2.up=optimizer:replicated", "3.up=optimizer:2"),
        ("2=recompute", "4=recompute"),
        ("*=recompute", "mesh=2x4"),
        ("mesh=8", "0:*=replicated"),
        ("!mesh=8", "!*=sharded"),
    ],
)
def test_what_is_pinned_is_in_every_plan(texts: tuple[str, ...]) -> None:
    graph = model()
    if texts[0] == "mesh=8":
        texts = ("mesh=8", "0=replicated")
    asked = request_of(graph, EIGHT, *texts)
    found = candidates(replace(asked, method="auto"), lambda text: None).found
    searched = [candidate for candidate in found if candidate.method == "auto"]
    assert searched
    for candidate in found:
        assert broken(asked.pinned, graph, candidate.decisions) is None
        # Every pin alone is what would be seen to be broken, were its opposite asked for.
        for pin in asked.pinned.pins:
            other = parse_pin(pin.text.partition(" ")[2], forbidden=not pin.forbidden)
            opposite = resolve([other], graph, factorize(graph))
            assert broken(opposite, graph, candidate.decisions) is not None


def test_a_plan_that_breaks_a_pin_is_seen() -> None:
    """Negative control of the test above: plans without pins break them."""
    graph = model()
    free = candidates(replace(request_of(graph, EIGHT), method="auto"), lambda text: None).found
    for text in ("0.up=k:x", "2=recompute", "0.up=weights:replicated", "mesh=2x2"):
        pinned = pinned_by(graph, text)
        assert any(broken(pinned, graph, candidate.decisions) for candidate in free), text


def test_calls_that_may_not_recompute_do_not() -> None:
    """Where memory is short, others do."""
    graph = stack(4, batch=256, seq=32)
    peak = search(request_of(graph, TWO), Decisions(), lambda text: None).proposals[0].peak_bytes
    again: set[str] = set()
    for share in (0.95, 0.9, 0.8):
        tight = request_of(graph, TWO, "blocks.0=keep", limit=int(share * peak))
        for proposal in search(tight, Decisions(), lambda text: None).proposals:
            again |= {a.prefix for a in proposal.decisions.activations}
    assert "blocks.0" not in again
    assert again


@pytest.mark.parametrize(
    "texts",
    [
        ("0.up=n:x", "0.down=d0:x", "1.up=k:x"),
        ("0.up=replicated", "0.act=d0:x", "5.up=d0"),
        ("0=keep", "0.up=n:x", "*=recompute"),
        ("0.up=n:4", "mesh=8", "0.down=k:8"),
        ("0.up=weights:sharded", "3.down=d0:x", "0.up=weights:replicated"),
        ("!*.up=n", "!*.up=k", "!*.up=d0", "*.up=sharded", "0.act=d0"),
    ],
)
def test_the_conflicting_pins_are_as_few_as_can_be(texts: tuple[str, ...]) -> None:
    graph = model()
    asked = request_of(graph, EIGHT, *texts)
    base = Decisions()

    def feasible(pins: tuple[Pin, ...]) -> bool:
        return possible(question_with(asked, pins), base)

    pins = asked.pinned.pins
    assert not feasible(pins)
    named = [pin for pin in pins if pin.text in str(conflict(asked, base))]
    assert not feasible(tuple(named))
    for few in combinations(named, len(named) - 1):
        assert feasible(few)
    assert len(named) < len(pins)


def question_with(asked: Request, pins: tuple[Pin, ...]) -> Request:
    return Request(asked.graph, DataSheets(asked.cluster), ADAM, asked.limit_bytes,
                    pinned=asked.pinned.only(pins))  # fmt: skip


@given(st.sets(st.frozensets(st.integers(0, 5), min_size=1, max_size=3), min_size=1, max_size=4))
def test_deletion_filter(cores: set[frozenset[int]]) -> None:
    """Any pins that contain one of `cores` contradict each other."""
    pins = [parse_pin(f"m{i}=n:x") for i in range(6)]

    def feasible(some: object) -> bool:
        numbers = {pins.index(pin) for pin in some}  # type: ignore[attr-defined]
        return not any(core <= numbers for core in cores)

    found = smallest_conflict(pins, feasible)
    assert not feasible(found)
    for few in combinations(found, len(found) - 1):
        assert feasible(few)


def test_pins_that_no_mesh_can_hold_are_an_error_of_candidates() -> None:
    graph = model()
    asked = request_of(graph, EIGHT, "0.up=n:x", "1.up=k:x")
    assert not candidates(replace(asked, method="auto"), lambda text: None).found
    with pytest.raises(InfeasibleError, match="holds these 2 together; calls of one block kind"):
        smallest(asked)


def test_pins_that_only_a_finer_mesh_holds_are_refused_in_so_many_words() -> None:
    square = "float32[512, 512]"
    graph = parse_graph(
        f'graph "One" training=True\n\ninput w: {square} = parameter("w", trainable=True)\n'
        f'input x: {square} = batch("x")\n\nmain main:\n    y: {square} = linear(x, w)  # fc\n'
        "    loss: float32[] = sum(y)\n    return loss\n\nloss loss\n"
    )
    asked = request_of(graph, EIGHT, "fc=n:2", "fc=k:2", "fc=d0:2")
    finer = next(mesh for mesh in logical_meshes(EIGHT, 3) if len(mesh.axes) == 3)
    x, y, z = finer.names
    split = ("d0", (x,)), ("k", (y,)), ("n", (z,))
    plan = Decisions(one_stage(finer), (NodeDecision("fc:linear#0", split),))
    assert broken(asked.pinned, graph, plan) is None
    with pytest.raises(InfeasibleError, match="no plan on a mesh of one or two axes holds these"):
        smallest(asked)


def every_bound(asked: Request) -> Iterator[int]:
    """What plans of each context hold at least."""
    contexts = Contexts(asked, Decisions())
    for mesh, count in product(contexts.meshes, contexts.counts):
        program = contexts.program(count)
        if program is not None:
            yield stored_bytes(contexts.search(program, mesh, count))


def test_no_plan_holds_less_than_the_least() -> None:
    graph = model()
    asked = request_of(graph, EIGHT, limit=10**6)
    found, bound = smallest(asked)
    least = min(every_bound(asked))
    assert bound == least
    peaks = []
    for candidate in (found, *candidates(replace(asked, method="auto"), lambda text: None).found):
        played = simulate(lower(graph, candidate.decisions), EIGHT, candidate.decisions, ADAM)
        peaks.append(played.peak_bytes)
    assert least <= min(peaks) <= 1.5 * least


@examples(10)
@given(st.integers(0, 10**6), st.booleans())
def test_no_random_plan_holds_less_than_the_least(seed: int, blocks: bool) -> None:
    """Neither at its peak, nor of what it stores and the batch, which are there all along."""
    graph = stack(2, batch=64, width=64) if blocks else random_graph(Random(seed))
    factored = factorize(graph)
    mesh = Random(seed).choice(list(logical_meshes(FOUR)))
    plan = random_plan(graph, factored, mesh, seed)
    pcg = lower(graph, plan, factored=factored)
    batch = sum(entry.value.spec.num_bytes for entry in graph.of_kind("batch"))
    weights = estimate(pcg, Walker({}, mesh, FOUR), ADAM).weights
    stored = int(weights[[STORED, UPDATING]].sum()) + batch
    least = min(every_bound(request_of(graph, FOUR)))
    share = least_share(graph, Decisions(), ADAM, FOUR.num_devices)
    assert 0 < share <= least - batch
    assert 0 < least <= stored <= simulate(pcg, FOUR, plan, ADAM).peak_bytes


def test_a_mesh_that_only_auto_makes_can_be_pinned() -> None:
    """With pins that its axes have names for: what `auto` chose there is found again, no worse."""
    graph, base = model(), Decisions()
    free = Request(graph, DataSheets(EIGHT), ADAM, PLENTY, 1, wanted=Wanted.PLAN)
    proposals = search(free, base, lambda text: None).proposals
    split = {
        plan: {axis for node in plan.decisions.nodes for _, axes in node.factors for axis in axes}
        for plan in proposals
    }
    chosen = next(plan for plan, axes in split.items() if "z" in axes)
    texts = [
        f"{node.key}={factor}:{axis}"
        for node in chosen.decisions.nodes
        for factor, axes in node.factors
        for axis in axes
    ]
    assert any(text.endswith(":z") for text in texts)
    for pins in ((), texts):
        asked = request_of(graph, EIGHT, "mesh=2x2x2", *pins)
        found = search(asked, base, lambda text: None)
        best = min(proposal.estimate_ps for proposal in found.proposals)
        assert best <= chosen.estimate_ps * 1.01
        for proposal in found.proposals:
            assert broken(asked.pinned, graph, proposal.decisions) is None
        assert possible(asked, base)


def test_on_a_pinned_mesh_of_three_axes_pins_may_clash() -> None:
    graph = model()
    asked = request_of(graph, EIGHT, "mesh=2x2x2", "0.up=n:z", "0.up=k:z")
    assert not search(asked, Decisions(), lambda text: None).proposals
    with pytest.raises(InfeasibleError, match="no plan on the mesh that is asked for"):
        raise conflict(asked, Decisions())
