"""What comparators share: what counts is what is sent; and from chosen layouts to a plan."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from math import gcd

import numpy as np

from parloom.errors import InputError
from parloom.ir.factors import factorize
from parloom.ir.mesh import Mesh, MeshAxis, PrimeAxis
from parloom.ir.plan import GLOBAL, Decisions, NodeDecision, Storage, one_stage
from parloom.ir.samples import sample_dims
from parloom.search.folding import program_of
from parloom.search.layout_model import LayoutModel
from parloom.search.meshes import NAMES
from parloom.search.microbatch import microbatch_of, sample_factors
from parloom.search.model import Floats
from parloom.search.prices import BACKWARD_SENT, FORWARD_SENT, PARTS
from parloom.search.program import Axes, Program
from parloom.search.request import Request
from parloom.search.step_rows import NUM_ROWS
from parloom.search.storage import (
    AFTER,
    AGAIN,
    ALONE,
    CHUNKED,
    GATHERED,
    REDUCED,
    UPDATED,
    Level,
    StoragePrices,
    StoredWeight,
)


def on_one_device(base: Decisions) -> Decisions:
    """The plan of a cluster of one device, which leaves nothing to choose."""
    return replace(base, stages=one_stage(Mesh((MeshAxis(NAMES[0], (PrimeAxis(1, 1, 0),)),))))


def asked_program(request: Request, base: Decisions, *, apart: bool = False) -> Program:
    """The program of one of as many microbatches as `base` has; `apart` as in `program_of`.

    Raises `InputError` where samples cannot be cut so.
    """
    program = program_of(request.graph, factorize(request.graph), apart=apart)
    count = base.num_microbatches
    # By microbatch, the graph is that of one.
    found = microbatch_of(program, count) if base.batch_semantics == GLOBAL else program
    if found is None:
        raise InputError(f"no plan of {count} microbatches: the samples do not divide into them")
    return found


def samples_of(program: Program) -> Mapping[int, str]:
    """The factor of each operator (by index) that the samples of the batch make, if one does."""
    dims = sample_dims(program.factored)
    batch = [e for e in program.graph.of_kind("batch") if e.target in dims]
    if not batch:
        return {}
    size = gcd(*(entry.value.spec.shape[dims[entry.target]] for entry in batch))
    return sample_factors(program, size) or {}


def communicated(num_microbatches: int) -> Floats:
    """Prices of rows under which a step costs what it sends."""
    found = np.zeros(NUM_ROWS)
    found[[FORWARD_SENT, BACKWARD_SENT]] = num_microbatches
    found[[PARTS + part for part in (GATHERED, AGAIN, CHUNKED, ALONE)]] = num_microbatches
    found[[PARTS + REDUCED, PARTS + AFTER]] = 1.0
    found[PARTS + UPDATED] = -1.0  # which is what else comes after the passes
    return found


class Whole(StoragePrices):
    """Every device stores its weights whole; what is partial of gradients is all-reduced."""

    def _levels(self, weight: StoredWeight) -> Iterator[Level]:
        yield Level()


def planned(
    layouts: LayoutModel, values: Sequence[int], levels: Sequence[Level], base: Decisions
) -> Decisions:
    """The layouts of `values` with a level for each kind of weight, as a plan says them."""
    choices = [
        options.menu.choices[options.option(value)[0]]
        for options, value in zip(layouts.options, values, strict=False)
    ]
    program = layouts.program
    return replace(
        base,
        stages=one_stage(layouts.mesh),
        nodes=tuple(NodeDecision(k, choices[at].assignment) for k, at in program.index.items()),
        parameters=tuple(
            level.decision(target)
            for weight, level in zip(program.weights, levels, strict=True)
            for target in weight.targets
            if level.says
        ),
    )


def joined(plan: Decisions) -> Decisions:
    """The same plan with neighboring mesh axes that always go together as one."""
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

    axes = (MeshAxis(known[run[0].name], tuple(p for a in run for p in a.primes)) for run in runs)
    return replace(
        plan,
        stages=one_stage(Mesh(tuple(axes))),
        nodes=tuple(
            NodeDecision(n.key, tuple((f, renamed(axes)) for f, axes in n.factors))
            for n in plan.nodes
        ),
        parameters=tuple(
            replace(
                p,
                weight=chunks(p.weight),
                gradient=chunks(p.gradient),
                optimizer=chunks(p.optimizer),
            )
            for p in plan.parameters
        ),
    )


def _together(first: str, second: str, lists: Sequence[Axes]) -> bool:
    """Whether `second` follows `first` wherever either is."""
    return all(
        (first, second) in pairwise(axes) for axes in lists if first in axes or second in axes
    )
