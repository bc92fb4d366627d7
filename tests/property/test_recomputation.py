"""Bounds and answers of the search where calls recompute, against enumeration: calls of one kind
that differ (frozen, the first reads what the others do not), under limits that force a choice.
"""

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from parloom.ir.graph import Graph
from parloom.ir.mesh import Mesh
from parloom.ir.plan import Decisions
from parloom.ir.text import parse_graph
from parloom.search import policies
from parloom.search.auto import search
from parloom.search.closing import close
from parloom.search.layouts import LayoutProblem
from parloom.search.master import Found, MeshSearch, multipliers
from parloom.search.meshes import logical_meshes
from parloom.search.policies import limits, recomputed
from parloom.search.prices import BACKWARD, FORWARD, KEPT
from parloom.search.question import Question
from parloom.search.storage import (
    AFTER,
    AGAIN,
    ALONE,
    CHUNKED,
    GATHERED,
    MOVING,
    REDUCED,
    STORED,
    WEIGHT_PARTS,
)
from parloom.search.sums import Worth
from tests.property.searched import ADAM
from tests.property.test_search import TWO, cost_of, problem_of

BLOCK = """
def block(
    hidden: float32[{rows}, 512],
    weight: float32[512, 512],
):
    made: float32[{rows}, 512] = linear(hidden, weight)  # up
    out: float32[{rows}, 512] = {kind}(made)  # act
    return out
"""


def blocks(rng: Random, depth: int = 3) -> Graph:
    """x -> `depth` calls of a block -> sum; some weights are frozen, some calls checkpointed."""
    rows, kind = rng.choice((1024, 8192)), rng.choice(("relu", "tanh"))
    shape = f"float32[{rows}, 512]"
    frozen = rng.choice(((), (0,), (1,), (0, 1)))
    inputs = "".join(
        f'input w{i}: float32[512, 512] = parameter("{i}.weight", trainable={i not in frozen})\n'
        for i in range(depth)
    )
    calls = "".join(f'    h{i + 1}: {shape} = block["{i}"](h{i}, w{i})\n' for i in range(depth))
    graph = parse_graph(
        f'graph "Blocks" training=True\n\n{inputs}input h0: {shape} = batch("x")\n'
        f"{BLOCK.format(rows=rows, kind=kind)}\nmain main:\n{calls}"
        f"    loss: float32[] = sum(h{depth})\n    return loss\n\nloss loss\n"
    )
    asked = tuple(str(i) for i in range(depth) if rng.random() < 0.2)
    return replace(graph, recompute=asked)


def every_plan(problem: LayoutProblem) -> Iterator[NDArray[np.int64]]:
    """Rows of (step in ps, bytes held) for every layout that is possible, with every storage of
    its weights and every count of calls that recompute.
    """
    factors = problem.factors(multipliers(Worth()))
    for values in product(*map(range, problem.sizes)):
        if np.isfinite(cost_of(factors, values)):
            yield _plans_of(problem, values)


def _plans_of(problem: LayoutProblem, values: tuple[int, ...]) -> NDArray[np.int64]:
    passes = problem.passes(values)[None]
    for block in problem.program.blocks:
        once = problem.passes_of(block, values)
        least, most = limits(problem.program, block)
        counts = np.arange(least, most + 1)[:, None]
        passes = _sums(passes, counts * (recomputed(once) - once))
    weights = np.zeros((1, WEIGHT_PARTS), dtype=np.int64)
    for index, weight in enumerate(problem.program.weights):
        _, parts = problem.storage.options(problem.stored(index, values))
        for _ in range(weight.count):
            weights = np.unique(_sums(weights, parts), axis=0)
    ahead = weights[:, None, GATHERED] - passes[None, :, FORWARD]
    behind = weights[:, [AGAIN, CHUNKED, REDUCED]].sum(axis=1)[:, None] - passes[None, :, BACKWARD]
    steps = weights[:, [ALONE, AFTER]].sum(axis=1)[:, None] + passes[None, :, :KEPT].sum(axis=2)
    steps = steps + np.maximum(ahead, 0) + np.maximum(behind, 0)
    held = weights[:, [STORED, MOVING]].sum(axis=1)[:, None] + passes[None, :, KEPT]
    return np.stack([steps.ravel(), held.ravel()], axis=1)


def _sums(some: NDArray[np.int64], others: NDArray[np.int64]) -> NDArray[np.int64]:
    """Every row of one with every row of the other."""
    return (some[:, None] + others[None]).reshape(-1, some.shape[1])


def least_step_ps(problem: LayoutProblem, share: float) -> tuple[int, float]:
    """The least step within a limit between the least and the most bytes, and that limit."""
    rows = np.concatenate(list(every_plan(problem)))
    low, high = rows[:, 1].min(), rows[:, 1].max()
    limit = float(low + share * (high - low))
    return int(rows[rows[:, 1] <= limit, 0].min()), limit


def found_for(seed: int, share: float) -> tuple[int, Found, Found]:
    """The least step of a random graph, and what the search finds before and after closing."""
    (mesh,) = logical_meshes(TWO)
    problem = problem_of(blocks(Random(seed)), mesh, TWO)
    least, limit = least_step_ps(problem, share)
    searching = MeshSearch(problem, limit)
    found = searching.run(tolerance=1e-9)
    return least, found, close(searching, np.inf, tolerance=1e-9, listed=10**5)


@settings(max_examples=25)
@given(st.integers(0, 10**6), st.floats(0.0, 0.8))
def test_no_plan_is_below_the_bound_whichever_calls_recompute(seed: int, share: float) -> None:
    least, found, closed = found_for(seed, share)
    assert found.bound_ps <= closed.bound_ps <= least * (1 + 1e-9)
    assert closed.candidates[0].sums.step_ps == least
    assert closed.bound_ps >= least * (1 - 1e-6)


@settings(max_examples=8)
@given(st.integers(0, 10**6), st.floats(0.0, 0.8))
def test_calls_that_are_no_variables_are_bounded_too(seed: int, share: float) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(policies, "MOST", seed % 3)
        least, found, closed = found_for(seed, share)
        assert found.bound_ps <= closed.bound_ps <= least * (1 + 1e-9)


def test_where_calls_that_differ_do_the_same_plans_are_below_the_bound() -> None:
    """Negative control: one policy for a whole block kind is a limit that plans do not have."""
    (mesh,) = logical_meshes(TWO)
    above = []
    for seed in (7, 13):
        problem = problem_of(blocks(Random(seed)), mesh, TWO)
        least, limit = least_step_ps(problem, 0.1)
        searching = MeshSearch(problem, limit)
        searching.run(tolerance=1e-9)
        bounds = [_alike(problem, worth) - worth.held * limit for worth in searching.bounds]
        above.append(max(bounds) > least * (1 + 1e-9))
    assert any(above)


def _alike(problem: LayoutProblem, worth: Worth) -> float:
    """The least cost under `worth` where all calls recompute, or none that need not."""
    counts = tuple(policy.extremes for policy in problem.policies)
    factors = problem.factors(multipliers(worth, counts))
    return min(
        cost_of(factors, (*values, *[min(same, len(c) - 1) for c in counts]))
        for values in product(*map(range, problem.sizes))
        for same in (0, 1)
    )


@settings(max_examples=5)
@given(st.integers(0, 10**6), st.floats(0.3, 0.9))
def test_no_proposal_is_below_the_bound_of_the_search(seed: int, share: float) -> None:
    graph = blocks(Random(seed), depth=4)
    (mesh,) = logical_meshes(TWO)
    roomy = MeshSearch(problem_of(graph, mesh, TWO), 1e15).run().candidates[0]
    limit = int(share * roomy.sums.held_bytes)
    question = Question(graph, TWO, ADAM, limit)
    found = search(question, Decisions(Mesh(())), lambda text: None)
    for proposal in found.proposals:
        assert found.estimate_bound_ps <= proposal.estimate_ps * (1 + 1e-9)
