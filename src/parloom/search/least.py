"""The least memory: what no plan of the space goes below, and what is counted least on a mesh."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import ceil

import numpy as np

from parloom.cost.walk import Walker
from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.graph import DTYPE_BYTES, Graph
from parloom.ir.plan import Decisions, Optimizer
from parloom.search.conflicts import meshes_of, smallest_conflict
from parloom.search.layouts import LayoutProblem, Multipliers
from parloom.search.pinned import Pinned, clashes
from parloom.search.pins import Pin
from parloom.search.polish import Candidate, least_bytes, polish
from parloom.search.prices import KEPT, LINKS, PARTS, Known
from parloom.search.program import program_of
from parloom.search.question import Question
from parloom.search.storage import MEASURES, MOVING, STORED, WEIGHT_PARTS, StoragePrices

# What a picosecond counts against a byte, so that of equally small plans a fast one is found.
SPEED = 1e-9
# How near the smallest plan is looked for.
NEAR = 1e-3


def least_share(graph: Graph, base: Decisions, optimizer: Optimizer, num_devices: int) -> int:
    """What no plan holds less than, searched or not: its devices hold every weight, gradient and
    optimizer state at least once.
    """
    total = 0
    for entry in graph.of_kind("parameter"):
        spec = entry.value.spec
        each = width = DTYPE_BYTES[spec.dtype]
        if entry.trainable:
            master = DTYPE_BYTES[base.master_dtype or spec.dtype]
            each += DTYPE_BYTES[base.reduce_dtype or spec.dtype]
            each += master * (optimizer.num_states + (master != width))
        total += spec.num_elements * each
    return ceil(total / num_devices)


def problems(
    question: Question,
    base: Decisions,
    *,
    part: range | None = None,
    in_flight: int = 1,
    storage: type[StoragePrices] = StoragePrices,
) -> Iterator[LayoutProblem]:
    """The layout problem of a part of the graph (see `program_of`) on every mesh that pins allow,
    with `in_flight` microbatches at once.
    """
    graph, pinned = question.graph, question.pinned
    factored, shared = factorize(graph), Known()
    program = program_of(graph, factored, pinned, part=part)
    for mesh in meshes_of(question.cluster, pinned, factored):
        walker = Walker({}, mesh, question.cluster, question.kernels)
        yield LayoutProblem(
            program,
            walker,
            base,
            question.optimizer,
            storage=storage(walker, base, question.optimizer),
            shared=shared,
            in_flight=in_flight,
        )


def conflict(question: Question, base: Decisions) -> InputError:
    """The error for pins that no plan holds together: the fewest of them that none holds."""
    pinned = question.pinned

    def feasible(pins: Sequence[Pin]) -> bool:
        return possible(replace(question, pinned=pinned.only(pins)), base)

    found = smallest_conflict(pinned.pins, feasible)
    mesh = "the mesh that is asked for" if pinned.names_mesh else "a mesh of one or two axes"
    if len(found) == 1:
        return InputError(f"{found[0].text}: no plan on {mesh} can hold this")
    shared = "; calls of one block kind are laid out alike" if _shares(pinned) else ""
    lines = "".join(f"\n  {pin.text}" for pin in found)
    return InputError(
        f"no plan on {mesh} holds these {len(found)} together{shared}; give up one:{lines}"
    )


def _shares(pinned: Pinned) -> bool:
    """Whether some pin names some calls of a block kind and not others."""
    return any(found.others for found in pinned.subjects)


def possible(question: Question, base: Decisions) -> bool:
    """Whether some plan on the meshes that are searched whole, or on the one that pins name, holds
    all pins, whatever memory it takes.
    """
    if clashes(question.pinned):
        return False
    return any(
        np.isfinite(problem.solve(bytes_first(problem, SPEED)).bound)
        for problem in problems(question, base)
    )


def bound_bytes(problem: LayoutProblem) -> int:
    """What plans on a mesh hold at least all along: weights and their states, and the batch.

    Activations are no part of it: what the search counts of them is too much where an operator
    keeps what another keeps, too.
    """
    batch = sum(e.value.spec.num_bytes for e in problem.program.graph.of_kind("batch"))
    return int(problem.solve(_stored()).bound + batch)


def smallest(problem: LayoutProblem) -> Candidate | None:
    """A plan on a mesh that holds little, as the search counts it; None where there is none."""
    found = problem.solve(bytes_first(problem, SPEED), NEAR)
    if not found.values:
        return None
    values = problem.layouts(found.values)
    # What is no more than a bound may be below what these layouts can do.
    return polish(problem, values, max(found.bound, least_bytes(problem, values)) * (1 + 1e-6))


def _stored() -> Multipliers:
    """A byte that is stored counts one, and nothing else."""
    weights = np.zeros(WEIGHT_PARTS)
    weights[STORED] = 1.0
    return Multipliers(np.zeros(PARTS), weights)


def bytes_first(problem: LayoutProblem, speed: float) -> Multipliers:
    """A byte counts one, whether it is kept or stored."""
    passes, weights = np.full(PARTS, speed), np.full(WEIGHT_PARTS, speed)
    passes[LINKS], passes[KEPT] = 0.0, 1.0
    weights[[STORED, MOVING]] = 1.0
    weights[MEASURES] = 0.0
    return Multipliers(passes, weights, tuple(p.extremes for p in problem.policies))
