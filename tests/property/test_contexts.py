"""The layout model against lowered programs and an enumerator that shares no table with it."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from parloom.candidates import candidates, distinct
from parloom.cost.clusters import load_cluster
from parloom.cost.hardware import DataSheets
from parloom.cost.simulate import simulate
from parloom.cost.walk import Walker
from parloom.ir.expected import Prediction
from parloom.ir.factors import factorize
from parloom.ir.graph import Graph
from parloom.ir.layout import Layout
from parloom.ir.lower import lower
from parloom.ir.mesh import Cluster
from parloom.ir.plan import Decisions, one_stage
from parloom.ir.text import parse_graph
from parloom.search import finer
from parloom.search.choices import Menus
from parloom.search.compose import Candidate
from parloom.search.contexts import SimulatedCandidate
from parloom.search.folding import program_of
from parloom.search.meshes import logical_meshes
from parloom.search.microbatch import microbatch_of, sample_factors
from parloom.search.optimize import search
from parloom.search.request import Request
from parloom.search.single import Single
from parloom.search.step_rows import NUM_ROWS, ShadowPrices, StepSums
from parloom.search.storage import AFTER, stored_of
from tests.examples import examples
from tests.property.estimate import estimate
from tests.property.searched import (
    ADAM,
    PLENTY,
    context_of,
    every_plan,
    least_step_ps,
    random_graph,
)
from tests.unit.test_simulate import model

TIMES = AFTER + 1
TWO, FOUR, EIGHT = (load_cluster(spec) for spec in ("2xH100", "2x2xH100", "2x4xH100"))


@pytest.mark.parametrize("count", [1, 2])
@examples(4)
@given(seed=st.integers(0, 10_000))
def test_a_context_finds_what_enumeration_finds(count: int, seed: int) -> None:
    graph = random_graph(Random(seed), 3)
    (mesh,) = logical_meshes(TWO)
    context = context_of(graph, TWO, mesh, count)
    context.duals = context.columns.run(PLENTY, ShadowPrices(), 1e-6)
    least = least_step_ps(list(every_plan(graph, mesh, TWO, count)))
    best = min(candidate.sums.step_ps for candidate in context.candidates())
    bound = context.columns.bound_ps(PLENTY)
    assert bound <= least * (1 + 1e-6)
    assert best >= least * (1 - 1e-9)
    # Mixtures of solutions bound a little lower than the best of them.
    assert best <= least * 1.05


@pytest.mark.parametrize(("count", "cluster"), [(1, FOUR), (2, FOUR), (4, EIGHT)])
@examples(4)
@given(byte_ps=st.sampled_from([0.0, 0.3, 3.0, 50.0]), which=st.integers(0, 2))
def test_rows_are_those_of_the_lowered_plan(
    count: int, cluster: Cluster, byte_ps: float, which: int
) -> None:
    """With microbatches, values that are made again, and storage."""
    graph = model()
    meshes = list(logical_meshes(cluster))
    mesh = meshes[which % len(meshes)]
    context = context_of(graph, cluster, mesh, count)
    context.duals = ShadowPrices(0.3, 0.2, 0.4, byte_ps)
    column = context.columns.prove(context.duals)
    assert column is not None
    candidate = context.composer.compose([column.values], context.duals, PLENTY)
    assert candidate is not None
    judged = context.judge(candidate)
    pcg = lower(graph, judged.decisions)
    found = estimate(pcg, Walker(pcg.by_name, pcg.mesh, cluster), ADAM)
    assert list(found.passes[:4]) == pytest.approx(list(candidate.rows[:4]), rel=1e-9)


@pytest.mark.parametrize("which", range(3))
def test_what_is_composed_costs_no_less_than_the_model_says(which: int) -> None:
    """A block's weights in chunks over the same axes, gradients partial over others, too."""
    mesh = list(logical_meshes(EIGHT))[which]
    context = context_of(model(), EIGHT, mesh, 1)
    program, composer = context.layouts.program, context.composer
    weights = [
        stored_of(program, weight, Layout(), mesh.names)
        for weight in program.weights
        if any(name.startswith("1.") for name in weight.targets)
    ]
    assert {weight.unit_elements for weight in weights} == {
        sum(weight.spec.num_elements for weight in weights)
    }
    levels, _ = context.layouts.storage.options(weights[0])
    gathered = [level for level in levels if level.weight]
    assert gathered
    for level in gathered:
        counted, composed = (
            sum(prices.price(weight, level)[:TIMES].sum() for weight in weights)
            for prices in (context.layouts.storage, composer.apart)
        )
        call = composer.apart.messages.of_call(level, program.units, reduces=True)
        composed += call[:TIMES].sum()
        assert composed >= counted * (1 - 1e-6)


def test_what_is_counted_holds_less_where_memory_is_dear() -> None:
    mesh = next(iter(logical_meshes(FOUR)))
    context = context_of(model(), FOUR, mesh, 1)
    free = context.columns.prove(ShadowPrices(pass_byte_ps=0.0))
    dear = context.columns.prove(ShadowPrices(pass_byte_ps=1e4))
    assert free is not None
    assert dear is not None
    assert dear.sums.pass_bytes < free.sums.pass_bytes
    assert dear.sums.step_ps > free.sums.step_ps


def test_a_batch_that_does_not_divide_has_no_microbatches() -> None:
    program = program_of(model(), factorize(model()))
    assert microbatch_of(program, 7) is None
    assert microbatch_of(program, 1) is program


@pytest.mark.slow
def test_what_finer_meshes_leave_out_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    request = Request(random_graph(Random(4), num_operators=4), DataSheets(EIGHT), ADAM, PLENTY)
    found = []
    for most in (10**4, 3):
        monkeypatch.setattr(finer, "CHOICES", most)
        found.append(candidates(replace(request, method="auto"), lambda text: None).refused)
    everything, few = found
    assert not everything
    assert few[0].startswith("auto: on meshes of three axes and more, an operator had its 3 most")


def stack(blocks: int = 6) -> Graph:
    """Calls of one block kind, each of a norm and two products."""
    weights = {"n": "[512]", "a": "[2048, 512]", "b": "[512, 2048]"}
    inputs = "".join(
        f'input m{i}_{w}: float32{shape} = parameter("m.{i}.{w}", trainable=True)\n'
        for i in range(blocks)
        for w, shape in weights.items()
    )
    parameters = "".join(f"    {w}: float32{shape},\n" for w, shape in weights.items())
    calls = "".join(
        f'    y{i + 1}: float32[4096, 512] = block["m.{i}"](y{i}, m{i}_n, m{i}_a, m{i}_b)\n'
        for i in range(blocks)
    ).replace("(y0,", "(x,")
    return parse_graph(
        f'graph "Stack" training=True\n\n{inputs}input x: float32[4096, 512] = batch("x")\n\n'
        f"def block(\n    x: float32[4096, 512],\n{parameters}):\n"
        "    s: float32[4096, 512] = mul(x, n)  # s\n"
        "    up: float32[4096, 2048] = linear(s, a)  # a\n"
        "    act: float32[4096, 2048] = relu(up)\n"
        "    down: float32[4096, 512] = linear(act, b)  # b\n"
        "    return down\n\n"
        f"main main:\n{calls}    loss: float32[] = sum(y{blocks})\n    return loss\n\nloss loss\n"
    )


def test_weights_of_all_calls_of_a_block_may_be_in_chunks() -> None:
    """Also where the first weight of a block is reduced apart in its last call: it counts one."""
    (mesh,) = (m for m in logical_meshes(EIGHT) if len(m.axes) == 1)
    graph = stack()
    program = program_of(graph, factorize(graph))
    factors = sample_factors(program, mesh.num_ranks)
    assert factors is not None
    menus = Menus(program, Single(graph, program.factored, mesh))
    split = tuple(
        menus.of(i, [{factors[i]: mesh.names}] if i in factors else [{}])
        for i in range(len(program.operators))
    )
    # A weight, its gradient and two states, of which half are whole where one call is in chunks.
    stored = 4 * sum(entry.value.spec.num_bytes for entry in graph.of_kind("parameter"))
    tight = context_of(graph, EIGHT, mesh, limit=stored // 2, menus=split)
    tight.run(ShadowPrices())
    assert list(tight.candidates())


def test_of_proposals_that_are_nearly_alike_the_fastest_stands() -> None:
    one, two = (Decisions(one_stage(mesh)) for mesh in list(logical_meshes(EIGHT))[:2])
    sums = StepSums(1000.0, 0.0, 0.0, 0.0, 0.0)
    candidate = Candidate((), (), (), np.zeros(NUM_ROWS), sums)
    fastest, near, lean, slower, other = (
        SimulatedCandidate(mesh, Prediction(step_s, peak_bytes), candidate)
        for mesh, step_s, peak_bytes in (
            (one, 1.000, 1000),
            (one, 1.005, 1020),
            (one, 1.006, 900),
            (one, 1.020, 1000),
            (two, 1.030, 1000),
        )
    )
    assert distinct([fastest, near, lean, slower, other]) == [fastest, lean, slower, other]


@pytest.mark.sample(1)
@pytest.mark.parametrize("share", [1.0, 0.9, 0.8])
def test_plans_fit_and_none_is_below_the_bound(share: float) -> None:
    """Under a limit on memory, with microbatches and values that are made again."""
    free = search(Request(model(), DataSheets(EIGHT), ADAM, PLENTY), Decisions(), lambda _: None)
    limit = int(share * free.proposals[0].peak_bytes)
    found = search(Request(model(), DataSheets(EIGHT), ADAM, limit), Decisions(), lambda _: None)
    assert found.proposals
    for plan in found.proposals:
        assert plan.peak_bytes <= limit
        assert plan.step_ps >= found.bound_ps
        pcg = lower(model(), plan.decisions)
        assert simulate(pcg, EIGHT, plan.decisions, ADAM).prediction() == plan.prediction
    assert found.proposals[0].step_ps >= free.proposals[0].step_ps * (1 - 1e-3)
    assert found.bound_ps > 0
