"""The least compute: what no plan's operators take less than, each with the best of its choices."""

from collections.abc import Iterator, Sequence

import numpy as np

from parloom.ir.mesh import part_of
from parloom.ir.stages import stage_items
from parloom.rewrite.forms import Form
from parloom.search.contexts import Contexts
from parloom.search.meshes import logical_meshes
from parloom.search.model import Model, Row, Term, Variable, View
from parloom.search.prices import BACKWARD, FORWARD, Prices
from parloom.search.program import Program
from parloom.search.solve.elimination import Elimination

ONE = slice(0, 1)


def least_compute_ps(contexts: Contexts) -> float:
    """What the compute stream does at least on any mesh; more microbatches compute no less."""
    count = contexts.counts[0]
    program = contexts.program(count)
    assert program is not None, "the whole batch is always one microbatch"
    return min(
        count * least_passes_ps(program, Prices(program, contexts.walker(mesh), contexts.shared))
        for mesh in contexts.meshes
    )


def least_work_ps(contexts: Contexts) -> float:
    """What one device computes that does all the work."""
    return least_on_one_device(contexts)[0]


def least_on_one_device(contexts: Contexts) -> tuple[float, Form]:
    """What one device computes that does all the work, and the form with which that is least."""
    count, program, times = times_on_one_device(contexts)
    least_ps, form = least_form(program, times)
    return count * least_ps, form


def times_on_one_device(contexts: Contexts) -> tuple[int, Program, list[int]]:
    """The least number of microbatches, the program of one, and what one device computes in each of
    its operators.
    """
    count, program, prices = _on_one_device(contexts)
    return count, program, list(least_times_ps(program, prices))


def longest_item_ps(contexts: Contexts) -> float:
    """What one device computes at least that does all the work of an item: the most of any, of what
    is there in every form.
    """
    count, program, prices = _on_one_device(contexts)
    times = _least_calls_ps(program, prices, [FORWARD, BACKWARD])
    items = dict.fromkeys(stage_items(program.graph), 0.0)
    for flat in program.graph.flat():
        item, index = flat.prefix or flat.node.key, program.index.get(flat.key)
        if item in items and index is not None:
            items[item] += times[index]
    return count * max(items.values(), default=0.0)


def _on_one_device(contexts: Contexts) -> tuple[int, Program, Prices]:
    """The least number of microbatches, the program of one, and its prices."""
    count = contexts.counts[0]
    program, alone = contexts.program(count), part_of(contexts.request.cluster, 1)
    assert program is not None, "the whole batch is always one microbatch"
    (mesh,) = logical_meshes(alone)
    return count, program, Prices(program, contexts.walker(mesh), contexts.shared)


def least_passes_ps(program: Program, prices: Prices) -> float:
    """What the operators of a program compute at least, each with the best of its choices, and of
    several forms in the best.
    """
    return least_form(program, list(least_times_ps(program, prices)))[0]


def least_form(program: Program, times: Sequence[float]) -> tuple[float, Form]:
    """The least sum of `times` over operators that are there together, and the form that has it;
    one that takes one of several values needs what makes that.
    """
    if program.forms is None:
        return float(sum(times)), program.form({})
    model, places = _model_of_forms(program, times)
    found, values = Elimination(model).minimum(np.ones(1))
    chosen = {
        index: places[index][value]
        for index, value in enumerate(values)
        if program.operators[index].takes and places[index][value] >= 0
    }
    return found, program.form(chosen)


def _model_of_forms(
    program: Program, times: Sequence[float]
) -> tuple[Model, Sequence[tuple[int, ...]]]:
    """A variable for each operator, and the operands that its options take: 0 of one that takes
    none of several, -1 where it is left out.
    """
    variables, terms = list[Variable](), list[Term]()
    every = list[tuple[int, ...]]()
    for operator, ps in zip(program.operators, times, strict=True):
        options = range(len(operator.operands) if operator.takes else 1)
        places = (*options, *((-1,) if operator.optional else ()))
        every.append(places)
        variables.append(Variable(":".join(operator.place), places))
        costs = np.array([float(ps) * (place >= 0) for place in places])
        terms.append(Term((_all(len(terms), places),), ((costs[None, :, None], None),), ONE))
    for reader, (source, _) in program.sources.items():
        made, read = (variables[i].options for i in (source, reader.operator))
        takes = program.operators[reader.operator].takes
        legal = np.array(
            [
                [at != -1 or to == -1 or (takes and to != reader.operand) for to in read]
                for at in made
            ]
        )
        views = _all(source, made), _all(reader.operator, read)
        terms.append(Term(views, ((np.zeros((1, 1, 1, 1)), legal[None]),), ONE))
    return Model((Row("time", "ps"),), tuple(variables), tuple(terms)), every


def _all(variable: int, options: Sequence[object]) -> View:
    return View(variable, np.arange(len(options)), len(options))


def least_times_ps(program: Program, prices: Prices) -> Iterator[int]:
    """The same of each operator."""
    menus = prices.menus.all()
    for index, operator in enumerate(program.operators):
        choices = [choice for choice in menus[index].choices if not choice.absent]
        times = (
            sum(
                count * int(prices.operator(index, choice, flags)[[FORWARD, BACKWARD]].sum())
                for flags, count in operator.flows
            )
            for choice in choices
        )
        yield min(times, default=0)  # where pins leave none


def least_way_ps(program: Program, prices: Prices) -> float:
    """What the forward pass computes at least on its longest way through the operators that are
    there in every form, each with the best of its choices: other ways, and gradients of weights,
    may run at the same time.
    """
    times = _least_calls_ps(program, prices, [FORWARD])
    ways: dict[str, float] = {}
    longest = 0.0
    for flat in program.graph.flat():
        index = program.index.get(flat.key)
        own = 0.0 if index is None else times[index]
        takes = index is not None and program.operators[index].takes
        read = (ways.get(name, 0.0) for name in flat.operands)
        way = own + (min if takes else max)(read, default=0.0)
        ways.update(dict.fromkeys(flat.results, way))
        if index is None or not program.operators[index].optional:
            longest = max(longest, way)
    return longest


def _least_calls_ps(program: Program, prices: Prices, rows: list[int]) -> list[float]:
    """What one call of each operator computes at least, with the best of its choices; nothing where
    it may be left out.
    """
    menus = prices.menus
    return [
        min(
            (
                float(prices.operator(index, choice, flags)[rows].sum())
                for flags, _ in operator.flows
                for choice in (() if operator.optional else menus.of(index).choices)
            ),
            default=0.0,
        )
        for index, operator in enumerate(program.operators)
    ]
