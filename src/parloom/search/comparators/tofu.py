"""Tofu (Wang, Huang, Li; EuroSys 2019): partitions of the whole graph in two, one after another.

Each cut splits the devices into equal groups and chooses for every operator the one factor along
which it is split, so that least is communicated (section 5: dynamic programming on the coarsened
graph, recursively). Every operator and every tensor is split by every cut; a tensor that an
operator does not split along with itself is stored in parts and fetched where it is read. Cuts that
come first communicate least, so they are made across the slowest links.
`docs/comparators.md` says what differs here.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from parloom.cost.walk import Walker
from parloom.ir.factors import factorize
from parloom.ir.mesh import Cluster, Link, Mesh, MeshAxis
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.choices import Menus
from parloom.search.comparators.plans import (
    ALONE,
    communicated,
    joined,
    planned,
    refuse_microbatches,
)
from parloom.search.layouts import LayoutProblem, Solution
from parloom.search.prices import Known
from parloom.search.program import Axes, Operator, Program, program_of
from parloom.search.question import Question, Say
from parloom.search.single import Single
from parloom.search.storage import Level, StoragePrices, Stored

Chosen = Mapping[str, Axes]
# A link on which a byte takes a picosecond, the unit of all prices.
BYTES = Link(1e12, 0.0)


def tofu(question: Question, base: Decisions, say: Say) -> Iterator[Decisions]:
    """One plan: a cut for every prime axis of the cluster.

    Raises `InputError` for more than one microbatch, which Tofu does not have.
    """
    refuse_microbatches(question, "tofu")
    if question.cluster.num_devices == 1:
        yield replace(base, mesh=ALONE)
        return
    program = program_of(question.graph, factorize(question.graph))
    counted = bytes_as_seconds(question.cluster)
    chosen: Sequence[Chosen] = [{} for _ in program.operators]
    axes: tuple[MeshAxis, ...] = ()
    shared = Known()
    for index, prime in enumerate(reversed(question.cluster.prime_axes())):
        axes = (*axes, MeshAxis(f"cut{index}", (prime,)))
        walker = Walker({}, Mesh(axes), counted)
        problem, solution = cut(program, walker, base, question.optimizer, chosen, shared)
        picked = [problem.menus[i].choices[v] for i, v in enumerate(solution.values[: len(chosen)])]
        chosen = [dict(choice.assignment) for choice in picked]
        say(f"tofu: cut {index + 1} in {prime.size}: {solution.bound / 1e6:.4g} MB a device")
    yield joined(planned(problem, solution.values, solution.levels, base))


def bytes_as_seconds(cluster: Cluster) -> Cluster:
    """The same devices behind links on which every collective takes a picosecond a byte that a
    device sends, so that prices count bytes.
    """
    levels = tuple(
        replace(level, link=BYTES, oversubscription=1.0, fabric="switch", reduces=False)
        for level in cluster.levels
    )
    return replace(cluster, levels=levels, backend="nccl")


def cut(
    program: Program,
    walker: Walker,
    base: Decisions,
    optimizer: Optimizer,
    chosen: Sequence[Chosen],
    shared: Known | None = None,
) -> tuple[LayoutProblem, Solution]:
    """The best place of the last axis of a mesh, for operators that lie as `chosen` before.

    Where splitting every operator contradicts itself (weights that several operators read), some
    may stay as they are.
    """
    known = Menus(program, Single(program.graph, program.factored, walker.mesh))
    for always in (True, False):
        menus = [
            known.of(
                index, _assignments(program.operators[index], walker.mesh, before, always=always)
            )
            for index, before in enumerate(chosen)
        ]
        storage = _Parts(walker, base, optimizer)
        problem = LayoutProblem(
            program, walker, base, optimizer, menus=menus, storage=storage, shared=shared
        )
        solution = problem.solve(communicated())
        if np.isfinite(solution.bound):
            break
    return problem, solution


def _assignments(
    operator: Operator, mesh: Mesh, before: Chosen, *, always: bool
) -> Sequence[Chosen]:
    """The factors that the last axis divides after the cuts before; `always`: one of them, if any
    is left.
    """
    rule, axis = operator.rule, mesh.axes[-1]
    found: list[Chosen] = [
        {**before, factor: (*before.get(factor, ()), axis.name)}
        for factor in rule.shardable
        if rule.size(factor) % (mesh.size(before.get(factor, ())) * axis.size) == 0
    ]
    return found if found and always else [*found, before]


class _Parts(StoragePrices):
    """Weights, gradients and optimizer states are all in parts: over whatever axes their operator
    does not split them, they are stored in chunks.
    """

    def _levels(self, weight: Stored) -> Iterator[Level]:
        *_, split = super()._levels(weight)
        yield split
