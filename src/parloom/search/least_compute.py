"""The least compute: what no plan's operators take less than, each with the best of its choices."""

from collections.abc import Iterator, Sequence

import numpy as np

from parloom.ir.mesh import part_of
from parloom.ir.stages import stage_items
from parloom.search.choices import Menus
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
    count, program, prices = _on_one_device(contexts)
    return count * least_passes_ps(program, prices)


def longest_item_ps(contexts: Contexts) -> float:
    """What one device computes at least that does all the work of an item: the most of any."""
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
    times = list(least_times_ps(program, prices))
    return float(sum(times)) if program.forms is None else _least_form_ps(program, times)


def _least_form_ps(program: Program, times: Sequence[int]) -> float:
    """The least sum over operators that are there together; one that takes one of several values
    needs what makes that.
    """
    variables, terms = list[Variable](), list[Term]()
    for operator, ps in zip(program.operators, times, strict=True):
        # The operand that is taken, 0 of others; -1: left out.
        options = range(len(operator.operands) if operator.takes else 1)
        places = (*options, *((-1,) if operator.optional else ()))
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
    model = Model((Row("time", "ps"),), tuple(variables), tuple(terms))
    return Elimination(model).minimum(np.ones(1))[0]


def _all(variable: int, options: Sequence[object]) -> View:
    return View(variable, np.arange(len(options)), len(options))


def least_times_ps(program: Program, prices: Prices) -> Iterator[int]:
    """The same of each operator."""
    menus = Menus(program, prices.single).all()
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
    """What the forward pass computes at least on its longest way through the operators, each with
    the best of its choices: other ways, and gradients of weights, may run at the same time.
    """
    times = _least_calls_ps(program, prices, [FORWARD])
    ways: dict[str, float] = {}
    for flat in program.graph.flat():
        index = program.index.get(flat.key)
        own = 0.0 if index is None else times[index]
        way = own + max((ways.get(name, 0.0) for name in flat.operands), default=0.0)
        ways.update(dict.fromkeys(flat.results, way))
    return max(ways.values(), default=0.0)


def _least_calls_ps(program: Program, prices: Prices, rows: list[int]) -> list[float]:
    """What one call of each operator computes at least, with the best of its choices."""
    assert program.forms is None, "of several forms each value is made once"
    menus = Menus(program, prices.single)
    return [
        min(
            (
                float(prices.operator(index, choice, flags)[rows].sum())
                for flags, _ in operator.flows
                for choice in menus.of(index).choices
            ),
            default=0.0,
        )
        for index, operator in enumerate(program.operators)
    ]
