"""What comparators share: what counts is what is sent; and from chosen layouts to a plan."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from parloom.errors import InputError
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision, Storage
from parloom.search.layouts import LayoutProblem, Multipliers
from parloom.search.meshes import NAMES
from parloom.search.prices import BACKWARD_SENT, FORWARD_SENT, PARTS
from parloom.search.program import Axes
from parloom.search.question import Question
from parloom.search.storage import (
    AFTER,
    MEASURES,
    STORED,
    WEIGHT_PARTS,
    Level,
    StoragePrices,
    Stored,
)

ALONE = Mesh((MeshAxis(NAMES[0], (PrimeAxis(1, 1, 0),)),))
"""The mesh of one device."""


def communicated() -> Multipliers:
    """What is sent counts, and nothing else."""
    passes, weights = np.zeros(PARTS), np.ones(WEIGHT_PARTS)
    passes[[FORWARD_SENT, BACKWARD_SENT]] = 1.0
    weights[[AFTER, STORED]] = weights[MEASURES] = 0.0
    return Multipliers(passes, weights)


def refuse_microbatches(question: Question, method: str) -> None:
    """Raise `InputError` where more than one is asked of a method that does not have them."""
    if (question.num_microbatches or 1) > 1:
        raise InputError(f"{method} has no microbatches; leave out --microbatches")


class Whole(StoragePrices):
    """Every device stores its weights whole; what is partial of gradients is all-reduced."""

    def _levels(self, weight: Stored) -> Iterator[Level]:
        yield Level()


def planned(
    problem: LayoutProblem, values: Sequence[int], levels: Sequence[Level], base: Decisions
) -> Decisions:
    """The layouts of `values` with a level for each kind of weight, as a plan says them."""
    parameters = tuple(
        level.decision(target)
        for weight, level in zip(problem.program.weights, levels, strict=True)
        for target in weight.targets
        if level.axes
    )
    return replace(problem.decisions(values, base), parameters=parameters)


def joined(plan: Decisions) -> Decisions:
    """The same plan with neighbouring mesh axes that always go together as one."""
    lists = [axes for node in plan.nodes for _, axes in node.factors]
    lists += [
        storage.axes
        for parameter in plan.parameters
        for storage in (parameter.weight, parameter.gradient, parameter.optimizer)
    ]
    runs: list[list[MeshAxis]] = []
    for axis in plan.mesh.axes:
        if runs and _together(runs[-1][-1].name, axis.name, lists):
            runs[-1].append(axis)
        else:
            runs.append([axis])
    names = NAMES if len(runs) <= len(NAMES) else tuple(f"x{i}" for i in range(len(runs)))
    known = {run[0].name: name for run, name in zip(runs, names, strict=False)}

    def renamed(axes: Axes) -> Axes:
        return tuple(known[a] for a in axes if a in known)

    def chunks(storage: Storage) -> Storage:
        return replace(storage, axes=renamed(storage.axes))

    return replace(
        plan,
        mesh=Mesh(
            tuple(
                MeshAxis(known[run[0].name], tuple(p for axis in run for p in axis.primes))
                for run in runs
            )
        ),
        nodes=tuple(
            NodeDecision(n.key, tuple((f, renamed(axes)) for f, axes in n.factors))
            for n in plan.nodes
        ),
        parameters=tuple(
            ParameterDecision(p.name, chunks(p.weight), chunks(p.gradient), chunks(p.optimizer))
            for p in plan.parameters
        ),
    )


def _together(first: str, second: str, lists: Sequence[Axes]) -> bool:
    """Whether `second` follows `first` wherever either is."""
    return all(
        (first, second) in pairwise(axes) for axes in lists if first in axes or second in axes
    )
