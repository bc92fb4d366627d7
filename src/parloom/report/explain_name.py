"""One name of a plan explained: how it lies, what it costs, and what else it could have been."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from parloom.cost.ledger import MAIN
from parloom.cost.timeline import Timeline
from parloom.ir.factors import Factored
from parloom.ir.graph import FlatNode, Input, TensorSpec
from parloom.ir.layout import Layout, describe, local_shape
from parloom.ir.pcg import PCG, Compute, PParameter
from parloom.ir.plan import Decisions
from parloom.report.case import Case
from parloom.report.edges import (
    PS,
    Price,
    bound_of,
    flops,
    own_ps,
    own_shares,
    parameter_prices,
    prices,
    runs_of,
    values_of,
    variant_of,
)
from parloom.report.explain import Document, stored_words
from parloom.report.grid import chunks, grid
from parloom.report.names import Below, Named, Tensor
from parloom.report.naming import split_words
from parloom.report.versus import causes, why
from parloom.search.runner_up import MOST, Way, Ways, assignment_of, operator_ways, parameter_ways

Play = Callable[[PCG, Decisions], Timeline]
OPERATOR, PARAMETER, INPUT, MODULE = "operator", "parameter", "input", "module"


def name_explained(case: Case, named: Named, play: Play, most: int = MOST) -> Document:
    """What a name is, as JSON values; `play` simulates another plan of the same graph, of which
    `most` are made for an operator or a parameter.
    """
    factored = case.factored
    if isinstance(named, Below):
        return _module(case, named, factored)
    if isinstance(named, FlatNode):
        return _operator(case, named, factored, play, most)
    if named.maker is not None:
        document = _operator(case, named.maker, factored, play, most)
        made = document["results"][named.result]
        return document | {"tensor": made | {"name": named.name}}
    assert named.input is not None
    if named.input.kind == "parameter":
        return _parameter(case, named.input, factored, play, most)
    return _input(case, named, named.input, factored)


# Operators


def _operator(case: Case, flat: FlatNode, factored: Factored, play: Play, most: int) -> Document:
    rule = factored.rule(flat.function, flat.node)
    assignment = dict(assignment_of(case.decisions, flat.key))
    words = dict(case.assigned.get(flat.key, {}))
    computed = [s for s in own_shares(case, flat) if s.moves is None]
    ways = operator_ways(factored, case.pcg, case.priced.walker, flat, case.fits, play, most)
    runs = runs_of(case, flat)
    terms = [*prices(case, flat)]
    for parameter in _read_parameters(case, flat):
        terms += parameter_prices(case, parameter)
    return {
        "kind": OPERATOR,
        "name": flat.key,
        "op": flat.node.op,
        "source": flat.node.source,
        "place": MAIN if variant_of(case, flat) is case.pcg.main else flat.function,
        "alike": list(ways.keys),
        "runs_a_step": runs.forward,
        "recomputed_a_step": max(map(runs.again_of, computed), default=runs.again),
        "alike_s": own_ps(case, ways.keys) / PS,
        "factors": [
            {
                "factor": factor,
                "size": rule.size(factor) or None,
                "kind": rule.kind(factor),
                "axes": list(assignment.get(factor, ())),
            }
            for factor in dict.fromkeys((*dict(rule.sizes), *assignment))
        ],
        "splits": words,
        "operands": list(_operands(case, flat, factored)),
        "weights": [
            {"name": parameter.input.target, "stored": _storage(case, parameter)}
            for parameter in _read_parameters(case, flat)
        ],
        "results": list(_results(case, flat)),
        "flops": flops(case, computed),
        "bound_by": bound_of(case, flat),
        "terms": [_term(term) for term in terms],
        **_ways(case, ways, flat),
    }


def _operands(case: Case, flat: FlatNode, factored: Factored) -> Iterator[Document]:
    names = {entry.value.name: entry for entry in case.pcg.graph.inputs}
    specs = case.pcg.graph.by_name.get(flat.function, case.pcg.graph.main).specs()
    layouts = _wanted(case, flat, factored)
    for name, flat_id, layout in zip(flat.node.refs, flat.operands, layouts, strict=True):
        entry = names.get(flat_id)
        origin = f"{entry.kind} {entry.target}" if entry else case.makers[flat_id]
        yield {"from": origin} | _lies(case, name, specs[name], layout)


def _wanted(case: Case, flat: FlatNode, factored: Factored) -> list[Layout]:
    """The layouts that an operator reads its operands in."""
    whole = (s.item for s in own_shares(case, flat) if isinstance(s.item, Compute))
    item = next((item for item in whole if item.node.key == flat.node.key), None)
    if item is not None:  # and no program of several operators in its place
        return [value.layout for value in item.operands]
    rule = factored.rule(flat.function, flat.node)
    assignment = dict(assignment_of(case.decisions, flat.key))
    return [rule.operand_layout(i, assignment, case.mesh) for i in range(len(flat.operands))]


def _results(case: Case, flat: FlatNode) -> Iterator[Document]:
    values = values_of(case, flat)
    for value in flat.node.results:
        found = values[value.name]
        yield _lies(case, value.name, value.spec, found.layout)


def _lies(case: Case, name: str, spec: TensorSpec, layout: Layout) -> Document:
    """A tensor and its layout, with the grid of devices."""
    return {
        "name": name,
        "dtype": spec.dtype,
        "shape": list(spec.shape),
        "layout": describe(layout, spec.shape, case.pcg.mesh),
        "local_shape": list(local_shape(layout, spec.shape, case.pcg.mesh)),
        "partial": [list(pair) for pair in layout.partial],
        "grid": grid(layout, spec.shape, case.pcg.mesh).document(),
    }


def _splits(case: Case, decisions: Decisions, flat: FlatNode) -> Document:
    """Per axis what it splits of one operator, in words, under other decisions."""
    rule, names = case.factored.rule(flat.function, flat.node), case.names[flat.key]
    return dict(split_words(rule, decisions.node(flat.key), names))


def _read_parameters(case: Case, flat: FlatNode) -> list[PParameter]:
    read = dict.fromkeys(flat.operands)
    return [p for p in case.pcg.parameters if p.input.value.name in read]


def _term(price: Price) -> Document:
    return {
        "what": price.what,
        "of": price.of,
        "axes": list(price.axes),
        "level": price.level,
        "bytes": price.num_bytes,
        "forward_s": price.forward_s,
        "backward_s": price.backward_s,
        "step_s": price.step_s,
    }


# Other ways


def _ways(case: Case, ways: Ways, flat: FlatNode | None = None) -> Document:
    """The next best ways, the fastest first, with what they would cost and why."""
    best = [_way(case, way, flat) for way in ways.best]
    fitting = None
    if ways.fitting is not None and ways.fitting not in ways.best:
        fitting = _way(case, ways.fitting, flat)
    return {
        "ways": ways.total,
        "ways_tried": ways.tried,
        "ways_left_out": max(0, ways.total - MOST),
        "runners_up": best,
        "first_that_fits": fitting,
    }


def _way(case: Case, way: Way, flat: FlatNode | None) -> Document:
    read = case.read(way.timeline, way.pcg)
    difference = read.step_ps - case.ledger.step_ps
    rows = causes(case.ledger.by_cause(), read.by_cause())
    held = case.ledger.peak.num_bytes
    document: dict[str, Any] = {
        "step_s": way.timeline.step_s,
        "difference_ps": difference,
        "causes": [row for row in rows if row["difference_ps"]],
        "why": why(rows, difference) if difference else None,
        "peak_bytes": read.peak.num_bytes,
        "difference_bytes": read.peak.num_bytes - held,
        "fits": case.fits(way.timeline),
    }
    if isinstance(way.chosen, tuple):
        assert flat is not None, "factors are of an operator"
        factors = {factor: list(axes) for factor, axes in way.chosen}
        words = _splits(case, way.decisions, flat)
        return document | {"factors": factors, "splits": words}
    return document | stored_words(way.chosen.decision(""))


# Parameters and other inputs


def _parameter(case: Case, entry: Input, factored: Factored, play: Play, most: int) -> Document:
    parameter = next(p for p in case.pcg.parameters if p.input.target == entry.target)
    alike = _alike(case, parameter)
    fits, walker = case.fits, case.priced.walker
    optimizer = case.plan.optimizer
    ways = parameter_ways(factored, case.pcg, walker, optimizer, parameter, alike, fits, play, most)
    spec = entry.value.spec
    return {
        "kind": PARAMETER,
        "name": entry.target,
        "trainable": entry.trainable,
        "place": case.place_of(entry.target),
        "alike": list(alike),
        "partial_gradient": list(parameter.reduce),
        **_lies(case, entry.value.name, spec, parameter.layout),
        "stored": _storage(case, parameter),
        "readers": list(_readers(case, entry.value.name, factored)),
        "terms": [_term(term) for term in parameter_prices(case, parameter)],
        **_ways(case, ways),
    } | {"name": entry.target}


ROLES = ("weight", "gradient", "optimizer")


def _storage(case: Case, parameter: PParameter) -> Document:
    """How weight, gradient and optimizer state are stored, and bytes of them on each device."""
    entry, decision = parameter.input, parameter.decision
    stored = {"weight": decision.weight, "gradient": decision.gradient,
              "optimizer": decision.optimizer}  # fmt: skip
    shape = local_shape(parameter.layout, entry.value.spec.shape, case.pcg.mesh)
    found, mesh = case.priced.parameters, case.pcg.mesh
    words = stored_words(decision)
    sizes = {
        "weight": parameter.elements(mesh, decision.weight) * found.width(parameter),
        "gradient": parameter.elements(mesh, decision.gradient) * found.gradient_width(parameter),
        "optimizer": found.state_bytes(parameter, "device"),
    }
    return {
        role: {
            "words": words[role],
            "bytes": sizes[role] if entry.trainable or role == "weight" else 0,
            "grid": chunks(storage, shape[storage.dim], case.mesh).document()
            if storage.axes
            else None,
        }
        for role, storage in stored.items()
    }


def _alike(case: Case, parameter: PParameter) -> tuple[str, ...]:
    """Parameters of the same name in other calls of a block kind that are decided alike."""
    place = case.place_of(parameter.input.target)
    if place == MAIN:
        return (parameter.input.target,)
    suffix = _suffix(case, parameter.input.target)
    return tuple(
        other.input.target
        for other in case.pcg.parameters
        if case.place_of(other.input.target) == place
        and _suffix(case, other.input.target) == suffix
        and other.layout == parameter.layout
        and _stored(other) == _stored(parameter)
    )


def _stored(parameter: PParameter) -> object:
    return replace(parameter.decision, name="")


def _suffix(case: Case, target: str) -> str:
    """The name below the call that it belongs to."""
    prefix = next((p for p in case.calls if target.startswith(f"{p}.")), "")
    return target.removeprefix(prefix)


def _input(case: Case, named: Tensor, entry: Input, factored: Factored) -> Document:
    """A batch tensor, a buffer or a constant: it lies as the first reader wants it."""
    value = next(v for v in case.pcg.main.inputs if v.name == entry.value.name)
    lies = _lies(case, entry.value.name, entry.value.spec, value.layout)
    return lies | {
        "kind": INPUT,
        "name": named.name,
        "is": entry.kind,
        "readers": list(_readers(case, entry.value.name, factored)),
    }


def _readers(case: Case, flat_id: str, factored: Factored) -> Iterator[Document]:
    """The operators that read a value, and the layout that each wants."""
    for flat in case.pcg.graph.flat():
        if flat_id in flat.operands:
            index = flat.operands.index(flat_id)
            specs = case.pcg.graph.by_name.get(flat.function, case.pcg.graph.main).specs()
            layout = _wanted(case, flat, factored)[index]
            shape = specs[flat.node.refs[index]].shape
            yield {"name": flat.key, "layout": describe(layout, shape, case.pcg.mesh)}


# Modules


def _module(case: Case, below: Below, factored: Factored) -> Document:
    """All operators and inputs below a path, with their layouts."""
    by_name = {p.input.target: p for p in case.pcg.parameters}
    operators = []
    for flat in below.operators:
        made = next(_results(case, flat), None)
        operators.append(
            {
                "name": flat.key,
                "splits": dict(case.assigned.get(flat.key, {})),
                "layout": made["layout"] if made else "",
                "shape": made["shape"] if made else [],
                "step_s": sum(map(runs_of(case, flat).ps, own_shares(case, flat))) / PS,
            }
        )
    inputs = []
    for entry in below.inputs:
        found = by_name.get(entry.target)
        layout = found.layout if found else Layout()
        inputs.append(
            {
                "name": entry.target,
                "is": entry.kind,
                "shape": list(entry.value.spec.shape),
                "layout": describe(layout, entry.value.spec.shape, case.mesh),
                **(stored_words(found.decision) if found else dict.fromkeys(ROLES, "")),
            }
        )
    return {"kind": MODULE, "name": below.path, "operators": operators, "inputs": inputs}
