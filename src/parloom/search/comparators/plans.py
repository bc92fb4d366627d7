"""What comparators share: what counts is what is sent; and from chosen layouts to a plan."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from parloom.errors import InputError
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.plan import Decisions, NodeDecision, ParameterDecision, Storage
from parloom.search.choices import Menu, menu_of
from parloom.search.layouts import LayoutProblem, Multipliers
from parloom.search.meshes import NAMES
from parloom.search.prices import BACKWARD_SENT, FORWARD_SENT, PARTS, places
from parloom.search.program import Axes, Program
from parloom.search.question import Question
from parloom.search.single import Single
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
    if question.num_microbatches > 1:
        raise InputError(f"{method} has no microbatches; leave out --microbatches")


class Menus:
    """Choices of operators with given assignments; those of operators made alike are made once."""

    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program, self.places = program, places(program)
        self.single = Single(program.graph, program.factored, mesh)
        self.known: dict[object, Menu] = {}

    def of(self, index: int, among: Iterable[Mapping[str, Axes]]) -> Menu:
        """The choices of operator `index`."""
        operator = self.program.operators[index]
        flags = tuple(some for some, _ in operator.flows)
        given = tuple(tuple(sorted(one.items())) for one in among)
        key = self.places[index], flags, given
        if key not in self.known:
            self.known[key] = menu_of(operator, self.single, map(dict, given))
        return self.known[key]


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
