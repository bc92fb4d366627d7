"""Accuracy from end to end: of chosen variants, the best reachable, and as rows of a program.

Rules: `product`, a result is right where every operator before it is; `profiles`, a variant gives
its best sample whose inputs are reached; `table`, by variants as measured together.
"""

import math
from collections.abc import Mapping, Sequence

from parloom.linear_program import LinearProgram
from parloom.workflow.model import ROUNDING, Rule, Variant, Workflow

IN_NO_ROW = -math.inf
"""The accuracy of variants that a table does not list: below any floor."""
Chosen = Mapping[str, str]
"""Variants by operator."""


def accuracy_of(workflow: Workflow, chosen: Chosen) -> float | None:
    """Of the least accurate result; None where the workflow has no accuracies."""
    return _best(workflow, {name: (variant,) for name, variant in chosen.items()})


def best_accuracy(workflow: Workflow, chosen: Chosen) -> float | None:
    """The most that any variants of the operators that are not chosen yet reach."""
    allowed = {o.name: tuple(v.name for v in o.variants) for o in workflow.operators}
    return _best(workflow, allowed | {name: (variant,) for name, variant in chosen.items()})


def meets(workflow: Workflow, accuracy: float | None) -> bool:
    """Whether an accuracy is at the floor, but for rounding."""
    return accuracy is None or accuracy >= workflow.accuracy.floor * (1 - ROUNDING)


def _best(workflow: Workflow, allowed: Mapping[str, Sequence[str]]) -> float | None:
    rule = workflow.accuracy.rule
    if rule is Rule.NONE:
        return None
    if rule is Rule.TABLE:
        names = workflow.accuracy.operators
        rows = workflow.accuracy.table.items()
        fits = [
            a for row, a in rows if all(v in allowed[n] for n, v in zip(names, row, strict=True))
        ]
        return max(fits, default=IN_NO_ROW)
    variants = {
        operator.name: [v for v in operator.variants if v.name in allowed[operator.name]]
        for operator in workflow.order
    }
    if rule is Rule.PRODUCT:
        own = {name: max(v.accuracy for v in several) for name, several in variants.items()}
        return min(math.prod(own[n] for n in workflow.ancestors(s)) for s in workflow.sinks)
    reached: dict[str, float] = {}  # more of an input never makes less of a result
    for name, several in variants.items():
        reached[name] = max(_from_samples(variant, reached) for variant in several)
    return min(reached[sink] for sink in workflow.sinks)


def _from_samples(variant: Variant, reached: Mapping[str, float]) -> float:
    fits = (
        sample.output
        for sample in variant.samples
        if all(reached[n] >= a * (1 - ROUNDING) for n, a in sample.inputs.items())
    )
    return max(fits, default=0.0)


def add_floor(
    program: LinearProgram, workflow: Workflow, picks: Mapping[tuple[str, str], int]
) -> None:
    """Rows that allow just the variants that reach the floor; `picks` are columns of variants."""
    rule, floor = workflow.accuracy.rule, workflow.accuracy.floor
    if rule is Rule.TABLE:  # with any floor: what is in no row is not allowed
        _add_table(program, workflow, picks)
    elif rule is Rule.NONE or floor <= 0:
        return
    elif rule is Rule.PRODUCT:
        for sink in workflow.sinks:
            terms = {}
            for name in workflow.ancestors(sink):
                for variant in workflow.operator(name).variants:
                    column = picks[name, variant.name]
                    if variant.accuracy > 0:
                        terms[column] = math.log(variant.accuracy)
                    else:
                        program.row({column: 1.0}, high=0.0)
            program.row(terms, low=math.log(floor) - ROUNDING)
    else:
        _add_profiles(program, workflow, picks)


def _add_table(
    program: LinearProgram, workflow: Workflow, picks: Mapping[tuple[str, str], int]
) -> None:
    names = workflow.accuracy.operators
    rows = [row for row, a in workflow.accuracy.table.items() if meets(workflow, a)]
    columns = [program.column(0.0, high=1.0, integer=True) for _ in rows]
    program.row(dict.fromkeys(columns, 1.0), low=1.0, high=1.0)
    for position, name in enumerate(names):
        for variant in workflow.operator(name).variants:
            terms = {
                c: 1.0
                for c, row in zip(columns, rows, strict=True)
                if row[position] == variant.name
            }
            program.row({**terms, picks[name, variant.name]: -1.0}, low=0.0, high=0.0)


def _add_profiles(
    program: LinearProgram, workflow: Workflow, picks: Mapping[tuple[str, str], int]
) -> None:
    """One sample of each chosen variant, whose inputs' samples give as much as it needs."""
    made: dict[str, list[tuple[float, int]]] = {}
    for operator in workflow.order:
        made[operator.name] = []
        is_sink = operator.name in workflow.sinks
        for variant in operator.variants:
            columns = []
            for sample in variant.samples:
                if is_sink and not meets(workflow, sample.output):
                    continue
                column = program.column(0.0, high=1.0, integer=True)
                columns.append(column)
                made[operator.name].append((sample.output, column))
                for name, needed in sample.inputs.items():
                    enough = (c for a, c in made[name] if a >= needed * (1 - ROUNDING))
                    program.row({**dict.fromkeys(enough, -1.0), column: 1.0}, high=0.0)
            pick = picks[operator.name, variant.name]
            program.row({**dict.fromkeys(columns, 1.0), pick: -1.0}, low=0.0, high=0.0)
